"""Layers of a transformer block: norms, rotary positions, activation functions, scaled dot-product
attention and short convolutions.

B batch, T time, C channels, H heads, K key/value heads, D = C / H, S tokens so far.
"""

from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from model.cache import KVCache
from model.config import GPTConfig
from model.ngrams import previous_columns

RMS_EPS = 1e-5


class RMSNorm(nn.Module):
    """Scale x (..., width) to a root mean square of 1, times a gain (Zhang and Sennrich 2019)."""

    def __init__(self, width: int, gain: bool = True) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.ones(width)) if gain else None

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.width,), self.weight, RMS_EPS).type_as(x)


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


class ReLUSquared(nn.Module):
    """Square the positive part (So et al. 2021)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


class SwiGLU(nn.Module):
    """Gate one half of the channels by the SiLU of the other (Shazeer 2020)."""

    def forward(self, x: Tensor) -> Tensor:
        gate, x = x.chunk(2, dim=-1)
        return F.silu(gate) * x


ACTIVATIONS = {
    "gelu": partial(nn.GELU, approximate="tanh"),  # OpenAI's GPT-2 has the tanh approximation
    "relu2": ReLUSquared,
    "swiglu": SwiGLU,
}


def make_norm(config: GPTConfig) -> nn.Module:
    """Return the norm of the residual stream."""
    if config.norm == "layer":
        return nn.LayerNorm(config.n_embd, bias=config.bias)
    return RMSNorm(config.n_embd)


def last_attended(mask: Tensor, count: int) -> Tensor:
    """Return the mask (..., S) with only the last `count` tokens of each row that it attends to."""
    return mask & (mask.flip(-1).cumsum(-1).flip(-1) <= count)


def local_chunks(
    q: Tensor, k: Tensor, v: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split q (B, T, H, D), k and v (B, T, K, D) for causal attention to the newest W = `window`
    tokens into N = T / W chunks (rounded up) of W queries with the 2 W keys they may attend to.

    Returns q (B N, W, H, D), k and v (B N, 2 W, K, D), and their mask (B N, 1, W, 2 W). The time of
    attention then grows with T W, not T^2.
    """
    B, T = q.shape[:2]
    padding = -T % window
    q = F.pad(q, (0, 0, 0, 0, 0, padding)).unflatten(1, (-1, window))  # (B, N, W, H, D)
    k, v = (F.pad(x, (0, 0, 0, 0, window, padding)).unflatten(1, (-1, window)) for x in (k, v))
    k, v = (torch.cat((x[:, :-1], x[:, 1:]), dim=2) for x in (k, v))  # (B, N, 2 W, K, D)
    columns = torch.arange(2 * window, device=q.device)
    back = columns[window:, None] - columns  # (W, 2 W): how far a key is before a query
    starts = torch.arange(q.size(1), device=q.device)[:, None, None] * window
    exists = starts + columns >= window  # (N, 1, 2 W): false before the first token
    mask = ((back >= 0) & (back < window) & exists).expand(B, -1, -1, -1)  # (B, N, W, 2 W)
    mask = mask.flatten(0, 1).unsqueeze(1)
    return q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), mask


class ScaledDotProduct(nn.Module):
    """softmax(q k^T / sqrt(D)) v, by the kernel that PyTorch chooses."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """Return (B, H, T, D) for q (B, H, T, D), k and v (B, K, S, D)."""
        if k.size(1) < q.size(1):  # grouped queries: H / K heads share keys and values
            k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)


class ShortConv(nn.Module):
    """Add to each token a causal depthwise convolution of it and those before it; it begins at
    zero. `index` counts the convolutions of a model."""

    def __init__(self, config: GPTConfig, index: int) -> None:
        super().__init__()
        self.index, self.width = index, config.conv
        shape = config.conv * config.n_embd if config.conv > 1 else 0
        self.weight = nn.Parameter(torch.zeros(shape)) if shape else None  # a vector: no Muon

    def forward(
        self, x: Tensor, cache: KVCache | None = None, mask: Tensor | None = None
    ) -> Tensor:
        if self.weight is None:
            return x
        taps = self.weight.view(self.width, -1)  # (width, C): of the token, of the one before, ...
        if cache is None and mask is None:
            return self.convolve(x, taps)
        inputs = x if cache is None else cache.append_inputs(self.index, x)  # (B, S, C)
        columns = previous_columns(x, inputs.size(1), cache, mask, self.width - 1)
        inputs = F.pad(inputs, (0, 0, self.width - 1, 0))
        y = x * (1 + taps[0])
        for tap, column in zip(taps[1:], columns.unbind(-1), strict=True):
            y = y + tap * inputs.gather(1, column[..., None].expand_as(x))
        return y

    def convolve(self, x: Tensor, taps: Tensor) -> Tensor:
        """Return x (B, T, C) plus its convolution; each token follows the one in the row before."""
        y = x * (1 + taps[0])
        for n, tap in enumerate(taps[1:], 1):
            y = y + tap * F.pad(x, (0, 0, n, 0))[:, : x.size(1)]
        return y
