"""Head and cross-entropy, one chunk of tokens at a time.

The logits of a whole batch never exist: 64 x 1024 x 50304 of them take 13 GB in float32.

Three functions here compute the loss of a chunk, and a change of the loss goes into each of them:
`of_chunk` by F.cross_entropy, where the logits are few, and for larger ones, together with their
gradient, `cross_entropy_` on GPUs and `cross_entropy_on_cpu_` on CPUs.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

PLAIN_BYTES = 2**22  # of float32 logits, up to which few operations are faster than little memory
LOGITS_BYTES = 2**30  # of a chunk of float32 logits
LOGITS_BYTES_ON_CPU = 2**26
SOFTMAX_BYTES_ON_CPU = 2**22  # of the float32 logits in a part of a chunk: it fits the caches
MATMUL_BYTES = 2**29  # largest matmul that is added to the weight's gradient
MATMUL_BYTES_ON_CPU = 2**23


def chunk_bytes(device: torch.device) -> int:
    """Return the size in bytes of the largest chunk of float32 logits on a device."""
    return LOGITS_BYTES_ON_CPU if device.type == "cpu" else LOGITS_BYTES


def rows_within(limit: int, row_bytes: int) -> int:
    """Return how many rows fit into `limit` bytes: at least 1, a multiple of 32 if possible."""
    rows = limit // row_bytes
    return rows // 32 * 32 or max(1, rows)


def chunk_rows(rows: int, most: int) -> int:
    """Return the size of the chunks to cut `rows` into: equal ones of at most `most` rows, or of
    `most` with a smaller last one where the largest equal ones have less than half of that."""
    fewest = -(-rows // most)
    return next((rows // n for n in range(fewest, 2 * fewest + 1) if rows % n == 0), most)


def cross_entropy_(
    logits: Tensor, targets: Tensor, scale: Tensor | None, vocab_size: int
) -> Tensor:
    """Return the cross-entropy (N,) in nats of logits (N, padded V) against targets (N,), undefined
    for targets of -1. With `scale` (N,), overwrite the logits with its gradient times `scale`.

    The target is found by comparison with the column's index: a scatter would end the fused loop of
    a compiler, and torch 2.11's gathers the target's logit after it has been overwritten.
    """
    column = torch.arange(logits.size(1), device=logits.device)
    is_target = column == targets.unsqueeze(-1)
    x = logits.float().masked_fill(column >= vocab_size, -torch.inf)
    logsumexp = x.logsumexp(-1, keepdim=True)
    nats = logsumexp.squeeze(-1) - torch.where(is_target, x, 0.0).sum(-1)
    if scale is not None:
        grad = (x - logsumexp).exp_().add_(is_target, alpha=-1)
        logits.copy_(grad.mul_(scale.unsqueeze(-1)))
    return nats


def cross_entropy_on_cpu_(
    logits: Tensor, targets: Tensor, scale: Tensor | None, vocab_size: int
) -> Tensor:
    """Compute what cross_entropy_ does, faster on a CPU: in parts that stay in its caches, and by
    gather and scatter instead of a comparison of each target with every column."""
    rows = rows_within(SOFTMAX_BYTES_ON_CPU, 4 * logits.size(1))
    nats = []
    for start in range(0, len(logits), rows):
        part = logits[start : start + rows]
        target = targets[start : start + rows].clamp(min=0).unsqueeze(-1)
        x = part.float()
        x[:, vocab_size:] = -torch.inf
        p = x.softmax(-1)
        logsumexp = x.amax(-1) - p.amax(-1).log()
        nats.append(logsumexp - x.gather(-1, target).squeeze(-1))
        if scale is not None:
            p.scatter_add_(-1, target, torch.full_like(target, -1, dtype=p.dtype))
            part.copy_(p.mul_(scale[start : start + rows].unsqueeze(-1)))
    return torch.cat(nats)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy in nats of logits x @ weight.T, x (N, C), weight (padded V, C), against
    targets (N,), -1 where none counts. Matmuls run in the autocast dtype, the rest in float32.

    The forward pass computes the gradients as well, while a chunk's logits are in memory; the
    backward pass scales them in place, so it can run once.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, targets: Tensor, head: "HeadCrossEntropy", needs_grad: bool
    ) -> Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        with torch.autocast(device, enabled=False):
            counted = targets >= 0  # (N,)
            # unscaled gradients of a mean are too small for float16: divide in the backward pass
            ctx.divisor = counted.sum() if dtype is torch.float16 else 1
            scale = counted * ctx.divisor / counted.sum()
            total = torch.zeros((), device=x.device)
            low_x, low_weight = x.to(dtype), weight.to(dtype)
            if needs_grad:
                grad_x = torch.empty_like(low_x)
                grad_weight = torch.zeros_like(weight, dtype=torch.float32)
            rows = chunk_rows(len(x), rows_within(chunk_bytes(x.device), 4 * len(weight)))
            buffer = low_x.new_empty(rows, len(weight))  # one allocation for all chunks
            for chunk in (slice(start, start + rows) for start in range(0, len(x), rows)):
                inputs = low_x[chunk]  # (rows, C)
                logits = torch.mm(inputs, low_weight.T, out=buffer[: len(inputs)])  # (rows, V)
                grad_scale = scale[chunk] if needs_grad else None
                if x.device.type == "cpu":
                    loss_of_logits = cross_entropy_on_cpu_
                else:
                    loss_of_logits = head.cross_entropy_  # compiled in training
                nats = loss_of_logits(logits, targets[chunk], grad_scale, head.vocab_size)
                total += (nats * scale[chunk]).sum()
                if needs_grad:
                    # logits now hold their gradient
                    torch.mm(logits, low_weight, out=grad_x[chunk])
                    add_matmul_(grad_weight, logits.T, inputs)
        if needs_grad:
            ctx.save_for_backward(grad_x.to(x.dtype), grad_weight.to(weight.dtype))
        return total / ctx.divisor

    @staticmethod
    def backward(ctx, grad_loss: Tensor) -> tuple:
        grad_x, grad_weight = ctx.saved_tensors
        grad_loss = grad_loss / ctx.divisor
        return grad_x.mul_(grad_loss), grad_weight.mul_(grad_loss), None, None, None


def add_matmul_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to float32 `total`: on CUDA in one addmm, else in parts of few rows."""
    if a.is_cuda and a.dtype is not total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
        return
    limit = MATMUL_BYTES_ON_CPU if a.device.type == "cpu" else MATMUL_BYTES
    rows = rows_within(limit, a.dtype.itemsize * b.size(1))
    for part, a_rows in zip(total.split(rows), a.split(rows), strict=True):
        part += a_rows @ b


class HeadCrossEntropy(nn.Module):
    """Mean cross-entropy of the head's logits, chunk by chunk."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.cross_entropy_ = cross_entropy_  # model/compile.py compiles it on GPUs

    def forward(
        self, x: Tensor, weight: Tensor, targets: Tensor, reduction: str = "mean"
    ) -> Tensor:
        """Return the mean in nats for x (N, C), weight (padded V, C), targets (N,); with the
        reduction "none" that of each target (N,), 0 for -1."""
        num_bytes = 4 * len(x) * len(weight)
        limit = chunk_bytes(x.device)
        if reduction == "mean" and num_bytes > min(PLAIN_BYTES, limit):
            return ChunkedCrossEntropy.apply(x, weight, targets, self, torch.is_grad_enabled())
        if num_bytes <= limit:
            return self.of_chunk(x, weight, targets, reduction)
        rows = rows_within(limit, 4 * len(weight))
        chunks = zip(x.split(rows), targets.split(rows), strict=True)
        # the backward pass recomputes the logits of each chunk
        parts = [checkpoint(self.of_chunk, a, weight, b, use_reentrant=False) for a, b in chunks]
        return torch.cat(parts)

    def of_chunk(
        self, x: Tensor, weight: Tensor, targets: Tensor, reduction: str = "none"
    ) -> Tensor:
        """Return the cross-entropy (n,) of each target in a chunk of n tokens, or their mean."""
        logits = F.linear(x, weight[: self.vocab_size]).float()
        return F.cross_entropy(logits, targets, ignore_index=-1, reduction=reduction)
