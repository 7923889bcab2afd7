"""Head and cross-entropy, one chunk of tokens at a time.

The logits of a whole batch never exist: 64 x 1024 x 50304 of them take 13 GB in float32.
"""

from typing import NamedTuple

import torch
import torch.nn as nn
from torch import Tensor


class ChunkSizes(NamedTuple):
    """Largest temporary tensors of the chunk loop, in bytes of float32."""

    logits: int
    """Logits of one matmul."""
    softmax: int
    """Logits of one softmax."""
    weight_grad: int
    """Rows of the head's gradient that are added at a time, in the compute dtype."""


CHUNKS = ChunkSizes(2**30, 2**30, 2**29)


def rows_within(limit: int, row_bytes: int) -> int:
    """Return how many rows fit into `limit` bytes: at least 1, a multiple of 32 if possible."""
    rows = limit // row_bytes
    return rows // 32 * 32 or max(1, rows)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy in nats of logits x @ weight.T against targets.

    x (N, C), weight (padded V, C), targets (N,) with -1 for tokens that do not count; rows of the
    weight from `vocab_size` on are padding. The forward pass computes the gradients as well, while
    a chunk's logits are in memory; the backward pass scales them in place, so it can run once.
    Matmuls run in the autocast dtype, the rest in float32, as in F.linear and F.cross_entropy.
    """

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_size: int,
        chunks: ChunkSizes,
        needs_grad: bool,
    ) -> Tensor:
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        with torch.autocast(x.device.type, enabled=False):
            counted = targets >= 0  # (N,)
            count = counted.sum()
            total = torch.zeros((), device=x.device)
            if needs_grad:
                grad_x = torch.empty_like(x)
                grad_weight = torch.zeros_like(weight, dtype=torch.float32)
            low_x, low_weight = x.to(dtype), weight.to(dtype)
            target_ids = targets.clamp(min=0).unsqueeze(-1)  # (N, 1)
            rows = min(len(x), rows_within(chunks.logits, 4 * len(weight)))
            part_rows = rows_within(chunks.softmax, 4 * len(weight))
            columns = rows_within(chunks.weight_grad, dtype.itemsize * x.size(1))
            buffer = low_x.new_empty(rows, len(weight))  # one allocation for all chunks
            for chunk in (slice(start, start + rows) for start in range(0, len(x), rows)):
                inputs = low_x[chunk]  # (rows, C)
                logits = torch.mm(inputs, low_weight.T, out=buffer[: len(inputs)])  # (rows, V)
                parts = (t.split(part_rows) for t in (logits, target_ids[chunk], counted[chunk]))
                for part, target, counts in zip(*parts, strict=True):
                    upcast = part.float()
                    upcast[:, vocab_size:] = -torch.inf
                    p = upcast.softmax(-1)
                    logsumexp = upcast.amax(-1) - p.amax(-1).log()
                    nats = logsumexp - upcast.gather(-1, target).squeeze(-1)
                    total += (nats * counts).sum()
                    if needs_grad:  # of the mean: (p - onehot(target)) / count
                        p.scatter_add_(-1, target, torch.full_like(target, -1, dtype=p.dtype))
                        part.copy_(p.mul_((counts / count).unsqueeze(-1)))
                if needs_grad:
                    grad_logits = logits  # overwritten in place
                    grad_x[chunk] = grad_logits @ low_weight
                    slices = zip(
                        grad_weight.split(columns), grad_logits.split(columns, dim=1), strict=True
                    )
                    for grad, some in slices:
                        grad += some.T @ inputs
        if needs_grad:
            ctx.save_for_backward(grad_x, grad_weight.to(weight.dtype))
        return total / count

    @staticmethod
    def backward(ctx, grad_loss: Tensor) -> tuple:
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x.mul_(grad_loss), grad_weight.mul_(grad_loss), None, None, None, None


class HeadCrossEntropy(nn.Module):
    """Mean cross-entropy of the head's logits, chunk by chunk."""

    chunks = CHUNKS

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Return the mean in nats for x (N, C), weight (padded V, C), targets (N,)."""
        return ChunkedCrossEntropy.apply(
            x, weight, targets, self.vocab_size, self.chunks, torch.is_grad_enabled()
        )
