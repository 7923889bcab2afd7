"""Models for inference (sampling and scoring), where weights are read and never change.

Training runs the modules of model/gpt.py on every device. Inference changes them, because sampling
reads all weights for each new token, and this reading takes most of its time. On a CPU, oneDNN
reads a weight faster in its own layout. On a GPU, casting a weight for each token would take as
long as the matmul.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from model.gpt import GPT, FusedLinear
from model.proof import agrees, is_proven
from utils.devices import autocast, has_onednn

# Only layers of exactly these classes are replaced: a subclass may compute something else.
LINEAR_CLASSES = (nn.Linear, FusedLinear)
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


def prepare_for_inference(
    model: GPT, device: torch.device, dtype: torch.dtype, num_tokens: int = 1
) -> GPT:
    """Prepare a model on `device` for inference, in place, and return the same model.

    Matmuls have about `num_tokens` tokens: sampling adds one token to each text, scoring reads
    whole batches. They run in `dtype`, as under autocast; embeddings and norms are float32. On a
    CPU whose oneDNN supports `dtype`, linear layers and the head become OneDNNLinear. On a GPU the
    weights of blocks and head are cast to `dtype`. If a narrow copy of the model gives other logits
    then (model/proof.py), all layers stay as they are.
    """
    model.float()  # load_model returns bfloat16 weights by default
    change_layers: Callable[[GPT], None]  # in place
    if device.type == "cpu" and has_onednn(dtype):
        change_layers = partial(replace_linear_layers, dtype=dtype, num_tokens=num_tokens)
    elif device.type == "cuda" and dtype is not torch.float32:
        change_layers = partial(cast_linear_layers, dtype=dtype)
    else:
        return model.eval()  # the layers stay as they are

    @torch.no_grad()
    def logits_agree(narrow_copy: GPT) -> bool:
        """Compare the logits of a narrow copy before and after the change of its layers."""
        T = min(16, narrow_copy.config.block_size)
        idx = torch.randint(narrow_copy.config.vocab_size, (2, T))
        with autocast(torch.device("cpu"), dtype):
            plain = narrow_copy(idx)
            change_layers(narrow_copy)
            # True if they are equal up to the rounding of `dtype` (model/proof.py)
            return agrees(narrow_copy(idx), plain, dtype)

    if is_proven("the model with faster linear layers", logits_agree, model):
        change_layers(model)
    return model.eval()


def replace_linear_layers(model: GPT, dtype: torch.dtype, num_tokens: int) -> None:
    """Replace the linear layers of the blocks, and the head, by OneDNNLinear, in place. Their
    matmuls run in `dtype`, in a layout for inputs of about `num_tokens` tokens."""
    blocks = model.transformer.h
    # list(...), because the loop replaces modules
    for name, module in list(blocks.named_modules()):
        if type(module) in LINEAR_CLASSES:  # not a subclass of them
            replacement = OneDNNLinear(module.weight, module.bias, dtype, num_tokens)
            blocks.set_submodule(name, replacement)  # name: "0.attn.c_attn"
    # OneDNNLinear copies the weight: that of a tied head is the embedding, which stays float32.
    head_weight = model.head_weight[: model.config.vocab_size]  # (V, C), without padding
    replace_head(model, OneDNNLinear(head_weight, None, dtype, num_tokens), dtype)


def cast_linear_layers(model: GPT, dtype: torch.dtype) -> None:
    """Cast the weights of the blocks' linear layers to `dtype`, in place, and use a copy of the
    head's weight that is cast, too. Autocast then casts only inputs."""
    for module in model.transformer.h.modules():
        if type(module) in LINEAR_CLASSES:
            module.to(dtype)
    head_weight = model.head_weight.detach().to(dtype)  # (padded V, C), faster than V rows
    V = model.config.vocab_size
    replace_head(model, lambda x: F.linear(x.to(dtype), head_weight)[..., :V], dtype)


def replace_head(model: GPT, fast_head: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """Let the model compute `head` by `fast_head` where matmuls run in `dtype`. The head of scoring
    (evaluation/scoring.py), without autocast, still gives float32 logits."""
    plain_head = model.head

    def head(x: Tensor) -> Tensor:
        """Return the logits (..., V) of hidden states (..., C), as GPT.head does."""
        matmul_dtype = x.dtype  # float32 where scoring has turned autocast off
        if torch.is_autocast_enabled(x.device.type):
            matmul_dtype = torch.get_autocast_dtype(x.device.type)
        if matmul_dtype is dtype:
            return fast_head(x)
        return plain_head(x)

    # This attribute of the model hides the method `head` of its class.
    model.head = head  # type: ignore[method-assign]
