"""The mean loss over many logits: one chunk of tokens at a time, with the gradients.

64 x 1024 x 50304 logits take 13 GB in float32, and their gradient as much again. So one chunk of
logits is in memory at a time, in a buffer that the next chunk overwrites. The backward pass has no
logits, so the forward pass computes the gradients too. ChunkedLoss in model/loss.py decides which
losses are computed in this way; GPT.token_losses in model/gpt.py defines the loss.

Two functions compute the cross-entropy of a chunk and overwrite the logits with their gradient:
`cross_entropy_` where it is compiled, on GPUs, and `cross_entropy_by_rows_` elsewhere. A name with
a final underscore stands for a function that changes its argument, as in PyTorch.

Shapes: N tokens of a batch, n of a chunk, C channels, V vocabulary, "padded V" with its padding.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# Sizes in bytes. training/forecast/memory.py forecasts memory from LOGITS_BYTES and SOFTMAX_BYTES.
# Largest size of the float32 logits of a chunk.
LOGITS_BYTES = 2**30
LOGITS_BYTES_ON_CPU = 2**26
# Size of the float32 logits in one round of cross_entropy_by_rows_. On a CPU they fit into caches.
SOFTMAX_BYTES = 2**28
SOFTMAX_BYTES_ON_CPU = 2**22
# Largest size of a product that add_matmul_ holds in memory.
MATMUL_BYTES = 2**29
MATMUL_BYTES_ON_CPU = 2**23


def chunk_bytes(device: torch.device) -> int:
    """Return the size in bytes of the largest chunk of float32 logits on a device."""
    if device.type == "cpu":
        return LOGITS_BYTES_ON_CPU
    return LOGITS_BYTES


def rows_within(max_bytes: int, row_bytes: int) -> int:
    """Return how many rows fit into `max_bytes`: at least 1, and from 32 rows on a multiple of 32,
    because matmuls are faster then."""
    num_rows = max_bytes // row_bytes
    if num_rows >= 32:
        return num_rows // 32 * 32
    return max(1, num_rows)  # a single row may be larger than max_bytes


def tokens_per_chunk(num_tokens: int, padded_vocab_size: int, device: torch.device) -> int:
    """Return the size of a chunk, in tokens, for cutting up `num_tokens` on a device.

    On a GPU 5,312 tokens (a multiple of 32) of GPT-2's padded vocabulary fit into a chunk: 16,384
    tokens are 4 chunks of 4,096.
    """
    # 4 bytes per logit: chunks are counted in float32, though 16-bit logits take half of that
    max_tokens = rows_within(chunk_bytes(device), 4 * padded_vocab_size)
    min_chunks = -(-num_tokens // max_tokens)  # rounded up
    # Chunks of one size share one compiled graph, so all chunks are equal if that needs at most
    # twice the minimal number of chunks; else the last chunk is smaller.
    for num_chunks in range(min_chunks, 2 * min_chunks + 1):
        if num_tokens % num_chunks == 0:
            return num_tokens // num_chunks
    return max_tokens


def cross_entropy_(logits: Tensor, targets: Tensor, vocab_size: int, needs_grad: bool) -> Tensor:
    """Return the cross-entropy (n,) in nats of logits (n, padded V) against targets (n,). If
    `needs_grad`, overwrite the logits with the gradient of the sum of the n cross-entropies.

    The cross-entropy and the gradient of a target of -1 are meaningless; the caller drops them.

    The function is written for the compiler, which turns it into two loops.
    """
    # Comparison with the column index finds the target. A scatter, for the gradient, would end the
    # compiler's fused loop.
    columns = torch.arange(logits.size(1), device=logits.device)  # (padded V,)
    is_target = columns == targets.unsqueeze(-1)  # (n, padded V)
    # -inf removes the padded vocabulary, the columns from V on, from the softmax
    float32_logits = logits.float().masked_fill(columns >= vocab_size, -torch.inf)
    # The compiler fuses these parts of logsumexp into one pass (an online softmax), so the function
    # reads the logits twice. With torch.logsumexp it would read them three times.
    maximum = float32_logits.amax(-1, keepdim=True)  # (n, 1)
    logsumexp = maximum + (float32_logits - maximum).exp().sum(-1, keepdim=True).log()  # (n, 1)
    # no gather: with it, torch 2.11 reads the target's logit after overwriting it
    target_logits = torch.where(is_target, float32_logits, 0.0).sum(-1)  # (n,)
    nats = logsumexp.squeeze(-1) - target_logits  # (n,)
    if needs_grad:  # not in validation
        # overwrite the logits with their gradient, softmax(float32_logits) - one_hot(target)
        logits.copy_((float32_logits - logsumexp).exp_().add_(is_target, alpha=-1))
    return nats


def cross_entropy_by_rows_(
    logits: Tensor, targets: Tensor, vocab_size: int, needs_grad: bool
) -> Tensor:
    """Compute the same as cross_entropy_, but faster on a CPU and without the compiler: some rows
    at a time, in few operations, and with gather and scatter instead of a comparison of each target
    with every column. In float32 it overwrites the padded columns of the logits in any case."""
    round_bytes = SOFTMAX_BYTES_ON_CPU if logits.device.type == "cpu" else SOFTMAX_BYTES
    # 4 bytes per float32 logit: 20 rows of GPT-2 on a CPU
    rows_per_round = rows_within(round_bytes, 4 * logits.size(1))
    nats: list[Tensor] = []  # (rows,) each
    for start in range(0, len(logits), rows_per_round):
        rows = slice(start, start + rows_per_round)
        target = targets[rows].clamp(min=0).unsqueeze(-1)  # (rows, 1); gather takes no -1
        # (rows, padded V), a copy unless the logits are float32
        float32_logits = logits[rows].float()
        float32_logits[:, vocab_size:] = -torch.inf  # takes the padding out of the softmax
        softmax = float32_logits.softmax(-1)
        # The softmax of the largest logit m is exp(m - logsumexp), so no second exp is needed.
        logsumexp = float32_logits.amax(-1) - softmax.amax(-1).log()  # (rows,)
        nats.append(logsumexp - float32_logits.gather(-1, target).squeeze(-1))
        if needs_grad:
            # softmax - one_hot(target), computed in place in `softmax`, overwrites these logits
            minus_one = torch.full_like(target, -1, dtype=softmax.dtype)
            logits[rows] = softmax.scatter_add_(-1, target, minus_one)
    return torch.cat(nats)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy in nats of logits x @ weight.T against targets, for x (N, C), weight
    (padded V, C) and targets (N,). Targets of -1 do not count.

    Matmuls run in the autocast dtype, the rest in float32. The forward pass computes the gradients
    as well, while the logits of a chunk are in memory. The backward pass multiplies them in place
    by the gradient of the loss, divided by the number of targets that count, so it can run only
    once.

    `vocab_size` is V. `chunk_cross_entropy_` computes chunks on GPUs: cross_entropy_, compiled, or
    cross_entropy_by_rows_. Without gradients, as in validation, only the loss is computed.
    """

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_size: int,
        chunk_cross_entropy_: Callable[..., Tensor],
        needs_grad: bool,
    ) -> Tensor:
        device_type = x.device.type
        if device_type == "cpu":  # faster there than a compiled cross_entropy_
            chunk_cross_entropy_ = cross_entropy_by_rows_
        dtype = x.dtype  # of matmuls: bfloat16 or float16 under autocast, else float32
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
        # no autocast: every dtype below is explicit
        with torch.autocast(device_type, enabled=False):
            is_counted = targets >= 0  # (N,), False for a target of -1
            is_ignored = ~is_counted.unsqueeze(-1)  # (N, 1)
            cast_x = x.to(dtype)  # (N, C), x itself if it has this dtype
            cast_weight = weight.to(dtype)  # (padded V, C), cast once for all chunks
            # `total` and the gradients are those of the sum over tokens: in float16, gradients of
            # the mean would round to 0.
            total = torch.zeros((), device=x.device)  # sum of nats
            if needs_grad:
                # computed here, because a backward pass would need all logits again
                grad_x = torch.empty_like(cast_x)  # (N, C); each chunk fills in its rows
                # float32, because every chunk adds to it
                grad_weight = torch.zeros_like(weight, dtype=torch.float32)

            chunk_size = tokens_per_chunk(len(x), len(weight), x.device)  # such as 4,096
            # the logits of a chunk, (chunk_size, padded V), which the next chunk overwrites
            buffer = cast_x.new_empty(chunk_size, len(weight))  # in the dtype of matmuls
            for start in range(0, len(x), chunk_size):
                chunk = slice(start, start + chunk_size)
                # zeros keep ignored tokens out of the gradient of the weight
                inputs = cast_x[chunk].masked_fill(is_ignored[chunk], 0)  # (n, C), a copy
                logits = torch.mm(inputs, cast_weight.T, out=buffer[: len(inputs)])  # (n, padded V)
                nats = chunk_cross_entropy_(logits, targets[chunk], vocab_size, needs_grad)  # (n,)
                total += (nats * is_counted[chunk]).sum()  # without targets of -1
                if needs_grad:
                    grad_logits = logits  # chunk_cross_entropy_ has overwritten them
                    torch.mm(grad_logits, cast_weight, out=grad_x[chunk])  # (n, C)
                    add_matmul_(grad_weight, grad_logits.T, inputs)  # += grad_logits.T @ inputs
            ctx.num_counted = is_counted.sum()  # () int64; `backward` divides by it, too
        if needs_grad:
            grad_x.masked_fill_(is_ignored, 0)  # so far meaningless for ignored tokens
            # float32 in training, because `backward` multiplies them: 16 bits would round again
            ctx.save_for_backward(grad_x.to(x.dtype), grad_weight.to(weight.dtype))
        return total / ctx.num_counted  # (), mean nats of the targets that count

    @staticmethod
    def backward(ctx, grad_loss: Tensor) -> tuple:
        """Return the gradients of x and weight. `grad_loss` () is the factor by which the caller
        multiplies the mean, such as 1 / micro-steps or the scale of a GradScaler."""
        grad_x, grad_weight = ctx.saved_tensors  # of the total: (N, C), (padded V, C)
        grad_total = grad_loss / ctx.num_counted  # `forward` divided the total by num_counted
        # In place, so that no second pair is in memory. The inputs after `weight`, targets to
        # needs_grad, have no gradient.
        return grad_x.mul_(grad_total), grad_weight.mul_(grad_total), None, None, None, None


def add_matmul_(grad_weight: Tensor, grad_logits: Tensor, inputs: Tensor) -> None:
    """Add grad_logits @ inputs to float32 `grad_weight`, in place: a chunk's part of the gradient
    of the head's weight (padded V, C), from the transposed gradient of its logits (padded V, n) and
    its inputs (n, C)."""
    # On CUDA one addmm multiplies in 16 bits and adds in float32, without a product in memory.
    if inputs.is_cuda and inputs.dtype is not grad_weight.dtype:
        torch.addmm(grad_weight, grad_logits, inputs, out_dtype=torch.float32, out=grad_weight)
        return
    # elsewhere, add some rows of the vocabulary at a time: the product in memory is small
    max_bytes = MATMUL_BYTES_ON_CPU if inputs.device.type == "cpu" else MATMUL_BYTES
    row_bytes = inputs.dtype.itemsize * inputs.size(1)  # of a row of the product, C numbers
    num_rows = rows_within(max_bytes, row_bytes)
    for start in range(0, len(grad_logits), num_rows):
        rows = slice(start, start + num_rows)
        grad_weight[rows] += grad_logits[rows] @ inputs  # (rows, n) @ (n, C)
