"""Attention of a block: rotary positions, the kernel, and the key/value cache.

The block itself, its matrices, norms and activation stand in model/gpt.py. Shapes are written with
B batch, T tokens of this call, S tokens so far (T and those in the cache), H query heads,
K key/value heads, D channels of a head, and C = H D channels of the residual stream.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from model.config import GPTConfig

# rotary positions

Angles = tuple[Tensor, Tensor]  # cosine and sine, which rotary_angles returns


def rotary_angles(positions: Tensor, head_size: int, base: float) -> Angles:
    """Return cosine and sine of the angle by which `rotate` turns each pair of channels.

    Both are (T, 1, D / 2) for positions (T,), or (B, T, 1, D / 2) for positions (B, T); the 1
    stands for the heads, which all turn alike. They are float32.
    """
    # (D / 2,): 0, 2 / D, 4 / D, ... below 1. So the first pair of channels turns by one radian per
    # token, and the last one by about 1 / base.
    exponents = torch.arange(0, head_size, 2, device=positions.device) / head_size
    angles = positions[..., None, None] / base**exponents  # in radians
    return angles.cos(), angles.sin()


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Rotate the pairs of channels (i, i + D / 2) of x (B, T, heads, D), queries or keys, by the
    angles of their positions (RoPE, Su et al. 2021), so that the product of a query and a key
    depends on the distance of the two tokens alone.

    GPT-NeoX and transformers pair channels in this way; the paper and Meta's LLaMA pair neighbours.
    """
    cos, sin = angles
    a, b = x.chunk(2, dim=-1)  # (B, T, heads, D / 2) each
    # The products are float32, as cos and sin are, also where autocast has made x bfloat16.
    rotated_a = a * cos - b * sin
    rotated_b = b * cos + a * sin
    return torch.cat((rotated_a, rotated_b), dim=-1).type_as(x)


# attention

# kernels that PyTorch may choose from where ScaledDotProduct excludes cuDNN's
WITHOUT_CUDNN = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class ScaledDotProduct(nn.Module):
    """softmax(q k^T / sqrt(D)) v, by the kernel that PyTorch chooses."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.block_size = config.block_size
        # Above 0 it makes "cheap" checkpointing "block": choose_block in model/execution.py.
        self.dropout = config.dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return (B, H, T, D) for queries (B, H, T, D) of the newest T of S tokens, keys and values
        (B, K, S, D). Attention is causal, or by a mask that broadcasts to (B, H, T, S) and is true
        where a token may attend; several queries after cached keys need one."""
        T = q.size(2)
        S = k.size(2)
        # SDPA's is_causal aligns the first query with the first key; cached keys would shift them.
        # `generate` reads single tokens after the prompts, and scoring passes a mask.
        assert mask is not None or T in (1, S)
        is_causal = mask is None and T > 1  # a single query attends to all tokens

        queries_per_key = q.size(1) // k.size(1)
        if queries_per_key > 1:  # GQA (Ainslie et al. 2023)
            k = k.repeat_interleave(queries_per_key, dim=1)  # (B, H, S, D)
            v = v.repeat_interleave(queries_per_key, dim=1)

        # F.scaled_dot_product_attention does not know whether the model is in eval()
        dropout = 0.0
        if self.training:
            dropout = self.dropout
        # cuDNN takes 20 to 400 ms to plan for each new shape, and its backward pass with a mask can
        # give NaN (pytorch #196678). So only full contexts without a mask, as in pre-training, may
        # use it. The choice is made here and not around the model, where a compiled graph would not
        # contain it.
        if q.is_cuda and (mask is not None or T < self.block_size):
            with sdpa_kernel(WITHOUT_CUDNN):
                return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)


class KVCache:
    """Keys and values of past tokens, so that sampling computes each new token alone.

    In a forward pass each layer appends keys and values of the new tokens, after the same `length`
    old ones; then Transformer.forward calls `advance` once. When `append` is first called for a
    layer, it allocates memory for `capacity` tokens.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0  # tokens whose keys and values all layers have appended
        # Tensors of `capacity` tokens, by the name that `append` gets: (layer, "k"), (layer, "v"),
        # and "tokens" for the token ids of n-gram embeddings.
        self.buffers: dict[object, Tensor] = {}

    def append(self, name: object, x: Tensor, dim: int) -> Tensor:
        """Store `x` of T new tokens, which lie along `dim`, under a name, and return what the cache
        holds under it of all S tokens so far, as a view."""
        if name not in self.buffers:
            shape = list(x.shape)
            shape[dim] = self.capacity
            self.buffers[name] = x.new_empty(shape)
        buffer = self.buffers[name]
        num_new = x.size(dim)
        # narrow is a slice along `dim`; beyond the capacity it raises an error
        buffer.narrow(dim, self.length, num_new).copy_(x)
        return buffer.narrow(dim, 0, self.length + num_new)

    def advance(self, num_new: int) -> None:
        """Count the new tokens, after the last layer has appended them."""
        self.length += num_new
