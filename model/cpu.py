"""Modules that are faster on CPUs, and compute what the plain ones do; see model/replace.py."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from model.layers import RMSNorm, ScaledDotProduct
from model.loss import HeadCrossEntropy, rows_within
from utils.devices import has_onednn, is_faster, onednn

SHORT = 256  # tokens up to which a CPU attends faster in float32 than in bfloat16
SOFTMAX_BYTES = 2**22  # of float32 logits: fits the caches


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x (..., in) @ weight (out, in).T + bias by oneDNN where it can. In float32 PyTorch
    would call MKL, which has half the rate on some processors of AMD."""
    if torch.compiler.is_compiling():
        return opaque_linear(x, weight, bias)
    if not has_onednn(x.dtype) or (x.dtype is torch.float32 and not is_faster(x.dtype)):
        return F.linear(x, weight, bias)
    return onednn._linear_pointwise(x, weight, bias, "none", [], "")


@torch.library.custom_op("gpt2::linear", mutates_args=())
def opaque_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Hide oneDNN's operation from the compiler, which would copy transposed operands."""
    return linear(x, weight, bias)


opaque_linear.register_fake(lambda x, weight, bias: x.new_empty(*x.shape[:-1], len(weight)))


class LinearFunction(torch.autograd.Function):
    """Linear layer by oneDNN, forward and backward."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)  # (N, out)
        grad_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return linear(grad, weight.T), linear(rows.T, x.flatten(0, -2).T), grad_bias


class CPULinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is not torch.float32 or torch.is_autocast_enabled("cpu"):
            return super().forward(x)
        return LinearFunction.apply(x, self.weight, self.bias)


class CPULayerNorm(nn.LayerNorm):
    """LayerNorm that takes float32 input with bfloat16 weights, as FSDP2 gathers them."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        weight, bias = (None if p is None else p.to(dtype) for p in (self.weight, self.bias))
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class RMSNormFunction(torch.autograd.Function):
    """RMSNorm without gain in few operations; F.rms_norm runs many if not compiled."""

    @staticmethod
    def forward(ctx, x: Tensor, eps: float) -> Tensor:
        squares = torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True).square_()
        scale = squares.div_(x.size(-1)).add_(eps).rsqrt_()
        y = (x * scale).to(x.dtype)
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        y, scale = ctx.saved_tensors
        along = (grad * y).mean(-1, keepdim=True)
        return torch.addcmul(grad, y, along, value=-1).mul(scale).to(grad.dtype), None


class CPURMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            with torch.autocast("cpu", enabled=False):
                return super().forward(x)
        y = RMSNormFunction.apply(x, self.eps)
        return y if self.weight is None else y * self.weight


class CPUScaledDotProduct(ScaledDotProduct):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        if q.size(2) <= SHORT:
            q, k, v = q.float(), k.float(), v.float()
        with torch.autocast("cpu", enabled=False):
            return super().forward(q, k, v, mask)


def cross_entropy_in_parts_(
    logits: Tensor, targets: Tensor, scale: Tensor | None, vocab_size: int
) -> Tensor:
    """Compute cross_entropy_ in parts of SOFTMAX_BYTES of logits, with a scatter for the target."""
    rows = rows_within(SOFTMAX_BYTES, 4 * logits.size(1))
    nats = []
    for start in range(0, len(logits), rows):
        part = logits[start : start + rows]
        target = targets[start : start + rows].clamp(min=0).unsqueeze(-1)
        upcast = part.float()
        upcast[:, vocab_size:] = -torch.inf
        p = upcast.softmax(-1)
        logsumexp = upcast.amax(-1) - p.amax(-1).log()
        nats.append(logsumexp - upcast.gather(-1, target).squeeze(-1))
        if scale is not None:
            p.scatter_add_(-1, target, torch.full_like(target, -1, dtype=p.dtype))
            part.copy_(p.mul_(scale[start : start + rows].unsqueeze(-1)))
    return torch.cat(nats)


class CPUHeadCrossEntropy(HeadCrossEntropy):
    logits_bytes = 2**26
    matmul_bytes = 2**23
    cross_entropy_ = staticmethod(cross_entropy_in_parts_)

    @staticmethod
    def matmul(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        product = linear(a, b.T)
        return product if out is None else out.copy_(product)
