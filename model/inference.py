"""Models for sampling and scoring, where weights are read and never change.

Training runs the modules of model/gpt.py, on every device. Sampling reads all weights for each new
token, so its time is that of reading them: on a CPU oneDNN reads a weight faster in a layout of its
own, on a GPU casting a weight for each token would take as long as the matmul.
"""

import torch
import torch.nn as nn
from torch import Tensor

from model.gpt import GPT
from utils.devices import has_onednn

onednn = torch.ops.mkldnn  # PyTorch's oneDNN operations, under the former name


class OneDNNLinear(nn.Module):
    """Linear layer on a CPU, whose weight lies in the layout that oneDNN chooses."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, num_tokens: int
    ) -> None:
        """Copy a weight (out, in) and a bias (out,); oneDNN chooses the layout for inputs of about
        `num_tokens` tokens."""
        super().__init__()
        self.dtype = dtype
        # not a Parameter: it is never trained or saved, and only oneDNN can read its layout
        self.weight = onednn._reorder_linear_weight(weight.detach().to(dtype), num_tokens)
        self.bias: Tensor | None = None
        if bias is not None:
            self.bias = bias.detach().to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + bias (..., out) for x (..., in), in the layer's dtype."""
        # "none", [] and "": no activation is fused into the matmul
        return onednn._linear_pointwise(x.to(self.dtype), self.weight, self.bias, "none", [], "")


class OneDNNHeadGPT(GPT):
    """GPT whose head is a OneDNNLinear without padded rows."""

    inference_head: OneDNNLinear

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits (B, T, V) of hidden states (B, T, C)."""
        return self.inference_head(x)


def prepare_for_inference(
    model: GPT, device: torch.device, dtype: torch.dtype, num_tokens: int = 1
) -> GPT:
    """Prepare a model on `device` for inference, in place, for matmuls of about `num_tokens`
    tokens: sampling adds one to each text, scoring reads whole batches. Return the same model.

    Matmuls run in `dtype`, as under autocast; embeddings and norms are float32. On a CPU whose
    oneDNN has that dtype, linear layers and the head become OneDNNLinear. On a GPU the weights of
    the blocks are cast.
    """
    model.float()  # load_model returns bfloat16 unless asked for float32
    blocks = model.transformer.h
    if device.type == "cpu" and has_onednn(dtype):
        # a list, as modules are replaced during the loop
        for name, module in list(blocks.named_modules()):
            if isinstance(module, nn.Linear):
                replacement = OneDNNLinear(module.weight, module.bias, dtype, num_tokens)
                blocks.set_submodule(name, replacement)
        # The head's weight may be the embedding, which stays float32: the head becomes a copy.
        head_weight = model.head_weight[: model.config.vocab_size]
        model.inference_head = OneDNNLinear(head_weight, None, dtype, num_tokens)
        model.__class__ = OneDNNHeadGPT  # the same modules and weights, with other logits
    elif device.type == "cuda":
        # Cast in place: autocast then has to cast only the inputs of these layers.
        for module in blocks.modules():
            if isinstance(module, nn.Linear):
                module.to(dtype)
    return model.eval()
