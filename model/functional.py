"""Attention, GELU and a tied embedding, each with a way of its own for CPUs: faster there, or in
less memory."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

FEW_QUERIES = 256  # up to so many a CPU attends up to five times as fast in float32


def compiled_for_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu" and torch.compiler.is_compiling()


@torch._disable_dynamo  # torch.compiler.disable would import the compiler, which takes a second
def apply_as_it_is(function: type[torch.autograd.Function], *args) -> Tensor | tuple[Tensor, ...]:
    return function.apply(*args)


def apply(function: type[torch.autograd.Function], x: Tensor, *args) -> Tensor | tuple[Tensor, ...]:
    """function.apply(x, *args). Code compiled for a CPU calls it as it is: compiled, TiedEmbedding
    would add to a copy, and HeadCrossEntropy take longer than in its own parts."""
    if compiled_for_cpu(x):
        return apply_as_it_is(function, x, *args)
    return function.apply(x, *args)


def attend(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """scaled_dot_product_attention of queries (B, H, T, D), keys and values (B, K, S, D) in the
    dtype that they have."""
    if k.size(1) < q.size(1):  # each for H / K heads of queries that stand together
        k, v = (x.repeat_interleave(q.size(1) // k.size(1), dim=1) for x in (k, v))
    with torch.autocast(q.device.type, enabled=False):
        masked = options["attn_mask"] is not None and not options["dropout_p"]
        if masked and q.size(2) == 1 and compiled_for_cpu(q):
            scores = (q * k).sum(-1, keepdim=True) / math.sqrt(q.size(-1))  # (B, H, S, 1)
            scores = scores.masked_fill(~options["attn_mask"].transpose(2, 3), -torch.inf)
            return (scores.softmax(2) * v).sum(2, keepdim=True)  # reads keys and values once
        return F.scaled_dot_product_attention(q, k, v, **options)


class TiedEmbedding(torch.autograd.Function):
    """Rows of a weight (V, C) for token ids (B, T), and that weight for the head it is tied to.
    What they learn is added into the head's gradient, so there is no table as large for it."""

    @staticmethod
    def forward(ctx, idx: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(idx)
        return F.embedding(idx, weight), weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad_x: Tensor, grad_weight: Tensor) -> tuple[None, Tensor]:
        (idx,) = ctx.saved_tensors
        return None, grad_weight.index_add_(0, idx.flatten(), grad_x.flatten(0, 1))


def gelu(x: Tensor) -> Tensor:
    """GPT-2's GELU, the tanh approximation (Hendrycks and Gimpel 2016)."""
    if not compiled_for_cpu(x):
        return F.gelu(x, approximate="tanh")
    y = x.float()  # as 1 + tanh(u) is 2 sigmoid(2u), which takes a third of the time
    y = y * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (y + 0.044715 * y**3))
    return y.to(x.dtype)
