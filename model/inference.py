"""Models for inference (sampling and scoring), where weights are read and never change.

Training runs the modules of model/gpt.py on every device. Inference changes them, because sampling
reads all weights for each new token, and this reading takes most of its time. On a CPU, oneDNN
reads a weight faster in its own layout. On a GPU, casting a weight for each token would take as
long as the matmul.
"""

import torch
import torch.nn as nn
from torch import Tensor

from model.gpt import GPT
from utils.devices import has_onednn

onednn = torch.ops.mkldnn  # PyTorch's oneDNN operations; MKL-DNN is the former name of oneDNN


class OneDNNLinear(nn.Module):
    """Linear layer for inference on a CPU; oneDNN chooses the memory layout of its weight."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, num_tokens: int
    ) -> None:
        """Copy a weight (out, in) and a bias (out,) in `dtype`. oneDNN chooses the layout for
        inputs of about `num_tokens` tokens."""
        super().__init__()
        self.dtype = dtype  # of the matmul; `forward` casts its input
        # not a Parameter: the weight is never trained or saved, and only oneDNN can read its layout
        self.weight = onednn._reorder_linear_weight(weight.detach().to(dtype), num_tokens)
        self.bias: Tensor | None = None
        if bias is not None:
            self.bias = bias.detach().to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + bias (..., out) for x (..., in), in the layer's dtype."""
        # "none", [] and "" mean that no activation is fused into the matmul
        return onednn._linear_pointwise(x.to(self.dtype), self.weight, self.bias, "none", [], "")


class OneDNNHeadGPT(GPT):
    """GPT for inference on a CPU, whose head is a OneDNNLinear without padded rows."""

    inference_head: OneDNNLinear  # prepare_for_inference sets it

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits (B, T, V) of hidden states (B, T, C)."""
        return self.inference_head(x)


def prepare_for_inference(
    model: GPT, device: torch.device, dtype: torch.dtype, num_tokens: int = 1
) -> GPT:
    """Prepare a model on `device` for inference, in place, and return the same model.

    Matmuls have about `num_tokens` tokens: sampling adds one token to each text, scoring reads
    whole batches. They run in `dtype`, as under autocast; embeddings and norms are float32. On a
    CPU whose oneDNN supports `dtype`, linear layers and the head become OneDNNLinear. On a GPU the
    weights of the blocks are cast to `dtype`.
    """
    model.float()  # load_model returns bfloat16 weights by default
    blocks = model.transformer.h
    if device.type == "cpu" and has_onednn(dtype):
        # list(...), because the loop replaces modules
        for name, module in list(blocks.named_modules()):
            if isinstance(module, nn.Linear):
                replacement = OneDNNLinear(module.weight, module.bias, dtype, num_tokens)
                blocks.set_submodule(name, replacement)
        # A copy, because the weight of a tied head is the embedding, which stays float32.
        head_weight = model.head_weight[: model.config.vocab_size]
        model.inference_head = OneDNNLinear(head_weight, None, dtype, num_tokens)
        model.__class__ = OneDNNHeadGPT  # same modules and weights, but its own `logits`
    elif device.type == "cuda":
        # Autocast then casts only the inputs of these layers, and no weights. The head, outside the
        # blocks, stays float32: a tied one is the embedding.
        for module in blocks.modules():
            if isinstance(module, nn.Linear):
                module.to(dtype)
    return model.eval()
