"""Layers of a block: B batch, T time, S tokens so far, H heads, K key/value heads, D channels."""

from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from model.config import GPTConfig

WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class LayerNorm(nn.LayerNorm):
    """LayerNorm (Ba et al. 2016) of the float32 residual stream."""

    def forward(self, x: Tensor) -> Tensor:
        # FSDP2 gathers the weights in bfloat16; on CPUs F.layer_norm wants the dtype of x
        weight = self.weight.type_as(x)
        bias = None if self.bias is None else self.bias.type_as(x)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class RMSNorm(nn.Module):
    """Scale x (..., width) to a root mean square of 1, times a gain (Zhang and Sennrich 2019)."""

    def __init__(self, width: int, eps: float, gain: bool = True) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        self.weight = nn.Parameter(torch.ones(width)) if gain else None

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.width,), self.weight, self.eps).type_as(x)


class Rotary(nn.Module):
    """Rotate channels i and i + D / 2 of x (B, T, H, D) by an angle that grows with the position
    (Su et al. 2021), in the order of channels of LLaMA."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)  # (B, T, H, D / 2) twice
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def rotary_angles(positions: Tensor, width: int, base: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (T, 1, D / 2) for positions (T,), (B, T, 1, D / 2) for (B, T)."""
    channels = torch.arange(0, width, 2, device=positions.device) / width
    angles = positions[..., None, None] / base**channels
    return angles.cos(), angles.sin()


def swiglu(x: Tensor) -> Tensor:
    """Gate one half of the channels by the SiLU of the other (Shazeer 2020)."""
    gate, x = x.chunk(2, dim=-1)
    return F.silu(gate) * x


ACTIVATIONS = {
    "gelu": partial(F.gelu, approximate="tanh"),  # OpenAI's GPT-2 has the tanh approximation
    "relu2": lambda x: F.relu(x).square(),  # So et al. 2021
    "swiglu": swiglu,
}


def make_norm(config: GPTConfig) -> nn.Module:
    """Return the norm of the residual stream."""
    if config.norm == "layer":
        return LayerNorm(config.n_embd, config.norm_eps, bias=config.bias)
    return RMSNorm(config.n_embd, config.norm_eps)


class ScaledDotProduct(nn.Module):
    """softmax(q k^T / sqrt(D)) v, by the kernel that PyTorch chooses."""

    def __init__(self, block_size: int, dropout: float) -> None:
        super().__init__()
        self.block_size = block_size
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return (B, H, T, D) for q (B, H, T, D), the newest T of S tokens, k and v (B, K, S, D).
        Attention is causal, or by a mask that broadcasts to (B, H, T, S), true where allowed."""
        T, S = q.size(2), k.size(2)
        if mask is None and 1 < T < S:  # is_causal would align the first query with the first key
            mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
        is_causal = mask is None and T > 1  # a single query attends to all tokens
        if k.size(1) < q.size(1):  # grouped queries: H / K heads share keys and values
            k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
        dropout = self.dropout if self.training else 0.0
        # cuDNN plans anew for each shape, in 20 to 400 ms, and its backward pass with a mask can
        # give NaN (pytorch #196678): it is left for full contexts, as in pre-training. The choice
        # stands here, and not around the model, so that a compiled graph holds it
        if q.is_cuda and (mask is not None or T < self.block_size):
            with sdpa_kernel(WITHOUT_CUDNN):
                return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
