"""The head and what is made of its logits, a chunk at a time, so that the logits of a whole batch
(64 x 1024 x 50304 in float32 are 13 GB) never exist."""

import torch
from torch import Tensor

CHUNK_BYTES = {"cpu": 2**25, "cuda": 2**30}  # of float32 logits; 32 MiB is what malloc reuses


def chunk_size(device: str, width: int) -> int:
    """Rows of logits, each `width` float32 long, that are alive at a time on a kind of device: a
    multiple of 32 where there are so many, which matrix products like better."""
    rows = CHUNK_BYTES.get(device, 2**30) // (4 * width)
    return rows // 32 * 32 or max(1, rows)


class HeadCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of x @ weight.T against targets, in nats.

    x (N, C), weight (padded V, C), targets (N,) with -1 for tokens that do not count; rows of the
    weight from `vocab_size` on are padding. If `with_grad`, the gradients are made in the forward
    pass, while a chunk's logits are there; the backward pass scales them. Products run in the
    autocast dtype, everything after them in float32, as in plain F.linear + F.cross_entropy.
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
            low_x, low_weight = x.to(dtype), weight.to(dtype)
            counted = targets >= 0
            count = counted.sum()
            total = torch.zeros((), device=x.device)
            if with_grad:
                grad_x = torch.empty_like(x)
                grad_weight = torch.zeros_like(weight, dtype=torch.float32)
            rows = chunk_size(device, len(weight))
            for part in (slice(start, start + rows) for start in range(0, len(x), rows)):
                logits = (low_x[part] @ low_weight.T).float()  # (rows, padded V)
                logits[:, vocab_size:] = -torch.inf
                log_p = logits.log_softmax(-1)
                own = targets[part].clamp(min=0).unsqueeze(-1)
                total -= (log_p.gather(-1, own).squeeze(-1) * counted[part]).sum()
                if with_grad:  # softmax minus the target's one, over the count
                    grad = log_p.exp_()
                    grad.scatter_add_(-1, own, torch.full_like(own, -1, dtype=grad.dtype))
                    grad = grad.mul_((counted[part] / count).unsqueeze(-1)).to(dtype)
                    grad_x[part] = grad @ low_weight
                    grad_weight += grad.T @ low_x[part]
        if with_grad:
            ctx.save_for_backward(grad_x, grad_weight.to(weight.dtype))
        return total / count

    @staticmethod
    def backward(ctx, grad_loss: Tensor) -> tuple:
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x * grad_loss, grad_weight * grad_loss, None, None, None


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
        (rows,) = torch.where(higher & (own >= 0) & (own < logits.size(-1)))
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
    width = chunk_size(x.device.type, len(x))  # on a CPU, few rows at a time are slow
    with torch.autocast(x.device.type, enabled=False):
        for start in range(0, len(weight), width):
            logits = x.float() @ weight[start : start + width].float().T  # (N, width)
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
