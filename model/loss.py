"""The head and its cross-entropy, a chunk of tokens at a time, so that the logits of a whole batch
(64 x 1024 x 50304 in float32 are 13 GB) never exist."""

import torch
from torch import Tensor

CHUNK_BYTES = {"cpu": 2**25, "cuda": 2**30}  # of float32 logits; 32 MiB is what malloc reuses


def chunk_rows(device: str, vocab_size: int) -> int:
    """Tokens whose float32 logits are alive at a time on a kind of device: a multiple of 32 where
    there are so many, which matrix products like better."""
    rows = CHUNK_BYTES.get(device, 2**30) // (4 * vocab_size)
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
            rows = chunk_rows(device, len(weight))
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
