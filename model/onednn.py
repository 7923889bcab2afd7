"""Linear layers through oneDNN itself: on a CPU PyTorch sends float32 to another library, and puts
a weight in order at each use. For inference: these have no gradient."""

import torch
import torch.nn as nn
from torch import Tensor

ops = torch.ops.mkldnn  # oneDNN's old name


def has(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN is here for products of `dtype` on the device."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype is torch.float32 or ops._is_mkldnn_bf16_supported()


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (N, in) @ weight (out, in).T; where `has` says so, float32 is faster than F.linear."""
    if has(x.device, x.dtype):
        return ops._linear_pointwise(x, weight, None, "none", [], "")
    return x @ weight.T


class PackedLinear(nn.Module):
    """A linear layer in `dtype` whose weight (out, in) is kept in order for about `rows` rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, rows: int) -> None:
        super().__init__()
        self.dtype = dtype
        self.weight = ops._reorder_linear_weight(weight.detach().to(dtype), rows)
        self.bias = None if bias is None else bias.detach().to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return ops._linear_pointwise(x.to(self.dtype), self.weight, self.bias, "none", [], "")
