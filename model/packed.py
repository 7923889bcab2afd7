"""A GPT for generation on a CPU: a token costs reading all weights once, so they are kept in the
dtype of the products and in the order in which oneDNN reads them, at twice the rate of rows."""

import copy

import torch
import torch.nn as nn
from torch import Tensor

from model.gpt import GPT


class PackedLinear(nn.Module):
    """A linear layer whose weight (out, in) was put in order for products of few rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(dtype), 1)
        self.bias = None if bias is None else bias.detach().to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype)
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


class PackedGPT(GPT):
    """A GPT with the weights of another, for inference: its layers' outputs are of `dtype`, as the
    other's are under autocast."""

    def __init__(self, model: GPT, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.config = model.config
        shared = {id(p): p for p in model.parameters()}  # not copied
        self.transformer = copy.deepcopy(model.transformer, shared)
        for module in list(self.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.Linear):
                    setattr(module, name, PackedLinear(child.weight, child.bias, dtype))
        wte = self.transformer.wte.weight
        self.head = PackedLinear(wte[: self.config.vocab_size], None, dtype)
        self.eval()

    def logits(self, x: Tensor) -> Tensor:
        return self.head(x)


def packed(model: GPT, dtype: torch.dtype) -> GPT:
    """The model to generate with: PackedGPT where oneDNN has products of `dtype`, else `model`."""
    device = model.transformer.wte.weight.device.type
    here = device == "cpu" and torch.backends.mkldnn.is_available()
    if here and dtype is torch.bfloat16:
        here = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return PackedGPT(model, dtype) if here else model
