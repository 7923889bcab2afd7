"""The head and what is made of its logits, a chunk at a time, so that the logits of a whole batch
(64 x 1024 x 50304 in float32 are 13 GB) never exist."""

import torch
from torch import Tensor

from model.onednn import linear

# Of the logits that one matrix product makes, as float32: on a CPU in bfloat16 the most that fits
# malloc's heap, where there is room once the last backward pass has ended.
CHUNK_BYTES = {"cpu": 2**26, "cuda": 2**30}
# Of those, as float32 too: on a CPU what stays in its caches.
PART_BYTES = {"cpu": 2**22, "cuda": 2**30}
# Of the product that is added to the embedding's gradient at a time, in its dtype: on a CPU what
# stays in its caches.
SUM_BYTES = {"cpu": 2**23, "cuda": 2**29}

# Of a slice of the vocabulary's logits when scoring: on a CPU what malloc keeps for the next slice.
SLICE_BYTES = {"cpu": 2**24, "cuda": 2**29}


def rows_within(limits: dict[str, int], device: str, row_bytes: int) -> int:
    """Rows within a limit on a kind of device: a multiple of 32 where there are so many, which
    matrix products like better."""
    rows = limits.get(device, limits["cuda"]) // row_bytes
    return rows // 32 * 32 or max(1, rows)


class HeadCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of x @ weight.T against targets, in nats.

    x (N, C), weight (padded V, C), targets (N,) with -1 for tokens that do not count; rows of the
    weight from `vocab_size` on are padding. If `with_grad`, the gradients are made in the forward
    pass, while a chunk's logits are there; the backward pass scales them in place, so there can be
    one. Products run in the autocast dtype, everything after them in float32, as in plain F.linear
    + F.cross_entropy.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, with_grad: bool
    ) -> Tensor:
        device = x.device.type
        dtype = x.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            counted = targets >= 0
            count = counted.sum()
            total = torch.zeros((), device=x.device)
            if with_grad:
                grad_x = torch.empty_like(x)
                grad_weight = torch.zeros_like(weight, dtype=torch.float32)
            low_x, low_weight = x.to(dtype), weight.to(dtype)
            own = targets.clamp(min=0).unsqueeze(-1)
            rows = min(len(x), rows_within(CHUNK_BYTES, device, 4 * len(weight)))
            few = rows_within(PART_BYTES, device, 4 * len(weight))
            if torch.compiler.is_compiling():  # fuses what the parts are for
                few = rows
            width = rows_within(SUM_BYTES, device, dtype.itemsize * x.size(1))
            memory = low_x.new_empty(rows, len(weight))  # once: new memory is slow
            for chunk in (slice(start, start + rows) for start in range(0, len(x), rows)):
                near = low_x[chunk]
                logits = torch.mm(near, low_weight.T, out=memory[: len(near)])  # (rows, padded V)
                parts = (values.split(few) for values in (logits, own[chunk], counted[chunk]))
                for part, target, counts in zip(*parts, strict=True):
                    whole = part.float()
                    whole[:, vocab_size:] = -torch.inf
                    p = whole.softmax(-1)
                    log_sum = whole.amax(-1) - p.amax(-1).log()  # of the exponentials
                    nats = log_sum - whole.gather(-1, target).squeeze(-1)
                    total += (nats * counts).sum()
                    if with_grad:  # p minus the target's one, over the count
                        p.scatter_add_(-1, target, torch.full_like(target, -1, dtype=p.dtype))
                        part.copy_(p.mul_((counts / count).unsqueeze(-1)))
                if with_grad:
                    grad_x[chunk] = logits @ low_weight  # the logits are their gradients by now
                    sums = zip(grad_weight.split(width), logits.split(width, dim=1), strict=True)
                    for grad, columns in sums:
                        grad += columns.T @ near
        if with_grad:
            ctx.save_for_backward(grad_x, grad_weight.to(weight.dtype))
        return total / count

    @staticmethod
    def backward(ctx, grad_loss: Tensor) -> tuple:
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x.mul_(grad_loss), grad_weight.mul_(grad_loss), None, None, None


class Likeliest:
    """Whether targets (N,) are where their rows of logits are highest, slice by slice of the
    vocabulary; of equal logits the first counts, as in argmax over them all."""

    def __init__(self, targets: Tensor) -> None:
        self.targets = targets
        self.highest = torch.full(targets.shape, -torch.inf, device=targets.device)
        self.hit = torch.zeros_like(targets, dtype=torch.bool)

    def see(self, logits: Tensor, start: int) -> None:
        """Takes the logits (N, width) of the tokens from `start` on."""
        own, top = self.targets - start, logits.amax(-1)
        higher = top > self.highest
        self.hit &= ~higher
        here = higher & (own >= 0) & (own < logits.size(-1))
        value = logits.gather(-1, own.clamp(0, logits.size(-1) - 1)[:, None]).squeeze(-1)
        (rows,) = torch.where(here & (value == top))  # argmax is slow, and of no use elsewhere
        self.hit[rows] = logits[rows].argmax(-1) == own[rows]
        self.highest = torch.maximum(top, self.highest)


def look_up(
    x: Tensor, weight: Tensor, targets: Tensor, banned: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each target (N,) after hidden states x (N, C), for a head of weight (V, C): its
    log-probability in nats, whether it is the likeliest token, and whether it is where the
    `banned` ones cannot be. In float32 whatever the dtype: bfloat16 logits tie."""
    plain, filtered = Likeliest(targets), Likeliest(targets)
    own, logsumexps = torch.zeros(targets.shape, device=x.device), []
    width = rows_within(SLICE_BYTES, x.device.type, 4 * len(x))  # few rows at a time would be slow
    with torch.autocast(x.device.type, enabled=False):
        for start in range(0, len(weight), width):
            logits = linear(x.float(), weight[start : start + width].float())  # (N, width)
            logsumexps.append(logits.logsumexp(-1))
            (here,) = torch.where((targets >= start) & (targets < start + width))
            own[here] = logits[here, targets[here] - start]
            plain.see(logits, start)
            if banned:
                ids = [token - start for token in banned if start <= token < start + width]
                logits[:, ids] = -torch.inf
                filtered.see(logits, start)
    logprob = own - torch.stack(logsumexps).logsumexp(0)
    return logprob, plain.hit, filtered.hit if banned else plain.hit
