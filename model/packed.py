"""What must differ on one device: linear layers packed for inference on a CPU.

Training runs the plain modules of model/gpt.py on every device. Sampling and scoring on a CPU read
all weights for few tokens, so memory traffic is what counts, and oneDNN reads a weight faster in a
layout of its own.
"""

import torch
import torch.nn as nn
from torch import Tensor

from model.gpt import GPT
from utils.devices import has_onednn

onednn = torch.ops.mkldnn  # oneDNN's former name


class PackedLinear(nn.Module):
    """Linear layer for inference; oneDNN lays out its weight (out, in) for about `rows` rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, rows: int) -> None:
        super().__init__()
        assert weight.device.type == "cpu", f"oneDNN multiplies on CPUs, not on {weight.device}"
        self.dtype = dtype
        self.weight = onednn._reorder_linear_weight(weight.detach().to(dtype), rows)
        self.bias = None if bias is None else bias.detach().to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        assert x.device.type == "cpu", f"oneDNN multiplies on CPUs, not on {x.device}"
        return onednn._linear_pointwise(x.to(self.dtype), self.weight, self.bias, "none", [], "")


def for_inference(model: GPT, device: torch.device, dtype: torch.dtype, rows: int = 1) -> GPT:
    """Prepare a model on `device` for inference, in place, for about `rows` tokens at a time.

    Matmuls run in `dtype`, as under autocast; embeddings and norms are float32. On a CPU whose
    oneDNN has that dtype, linear layers and the head become PackedLinear. On a GPU the blocks'
    weights are cast once, where autocast would cast them for each token.
    """
    model.float()
    blocks = model.transformer.h
    linear_layers = [(n, m) for n, m in blocks.named_modules() if isinstance(m, nn.Linear)]
    if device.type == "cpu" and has_onednn(dtype):
        for name, layer in linear_layers:
            packed = PackedLinear(layer.weight, layer.bias, dtype, rows)
            blocks.set_submodule(name, packed)
        head_weight = model.head_weight[: model.config.vocab_size]
        model.packed_head = PackedLinear(head_weight, None, dtype, rows)
    elif device.type == "cuda":
        for _, layer in linear_layers:
            layer.to(dtype)
    return model.eval()
