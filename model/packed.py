"""Linear layers packed for inference on a CPU, where memory traffic is what counts."""

from functools import cached_property

import torch
import torch.nn as nn
from torch import Tensor

from model.gpt import GPT
from model.replace import swap_classes
from utils.devices import has_onednn, onednn


class PackedLinear(nn.Module):
    """Linear layer for inference; oneDNN lays out its weight (out, in) for about `rows` rows."""

    upcast = False  # to float32, after the matmul

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, rows: int) -> None:
        super().__init__()
        self.dtype = dtype
        self.weight = onednn._reorder_linear_weight(weight.detach().to(dtype), rows)
        self.bias = None if bias is None else bias.detach().to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        y = onednn._linear_pointwise(x.to(self.dtype), self.weight, self.bias, "none", [], "")
        return y.float() if self.upcast else y


class CPUInferenceGPT(GPT):
    """GPT whose head is a PackedLinear, made at its first use."""

    packing: tuple[torch.dtype, int]  # dtype and rows

    @cached_property
    def packed_head(self) -> PackedLinear:
        return PackedLinear(self.head_weight[: self.config.vocab_size], None, *self.packing)

    def logits(self, x: Tensor) -> Tensor:
        return self.packed_head(x)


def for_inference(model: GPT, device: torch.device, dtype: torch.dtype, rows: int = 1) -> GPT:
    """Replace what runs faster without gradients on `device`, for about `rows` tokens at a time.
    Matmuls run in `dtype`, as under autocast; embeddings and norms are float32, on a CPU also
    queries, keys and values, so the cache. A CPU without oneDNN for that dtype changes nothing."""
    model.float()
    if device.type == "cpu":
        swap_classes(model)
        if has_onednn(dtype):
            model.__class__, model.packing = CPUInferenceGPT, (dtype, rows)
            blocks = model.transformer.h
            for name, layer in list(blocks.named_modules()):
                if isinstance(layer, nn.Linear):
                    packed = PackedLinear(layer.weight, layer.bias, dtype, rows)
                    packed.upcast = name.endswith("c_attn")
                    blocks.set_submodule(name, packed)
    elif device.type == "cuda":
        for block in model.transformer.h:
            for layer in filter(lambda m: isinstance(m, nn.Linear), block.modules()):
                layer.to(dtype)
    return model.eval()
