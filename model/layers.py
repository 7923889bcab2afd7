"""Attention of a block: rotary positions, the attention kernel, and the KV cache.

model/gpt.py has the block itself, with its matrices, norms and activation. Shapes: B batch,
T time (tokens of this call), S tokens so far (tokens in the KV cache plus T), H query heads,
K key/value heads, D channels of a head, and C = H D channels of the residual stream.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from model.config import GPTConfig

# rotary positions

Angles = tuple[Tensor, Tensor]  # (cosine, sine) of rotary positions: see rotary_angles


def rotary_angles(positions: Tensor, head_size: int, base: float) -> Angles:
    """Return the cosine and sine of the angle by which `rotate` turns each pair of channels.

    Both are float32 (T, 1, D / 2) for positions (T,), or (B, T, 1, D / 2) for positions (B, T).
    The dimension of 1 broadcasts over the heads, which all use the same angles.
    """
    # (D / 2,): 0, 2 / D, 4 / D, ... below 1. The first pair of channels turns by one radian per
    # token, the last pair by about 1 / base radians.
    exponents = torch.arange(0, head_size, 2, device=positions.device) / head_size
    angles = positions[..., None, None] / base**exponents  # (..., T, 1, D / 2), in radians
    return angles.cos(), angles.sin()


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Rotate queries or keys x (B, T, heads, D) by the angles of their positions (RoPE, Su et al.
    2021). The product of a query and a key then depends on the distance between the two tokens,
    and not on their positions.

    Channels i and i + D / 2 form a pair, as in GPT-NeoX and transformers; the paper and Meta's
    LLaMA pair neighboring channels.
    """
    cos, sin = angles
    a, b = x.chunk(2, dim=-1)  # (B, T, heads, D / 2) each
    # cos and sin are float32, so the products are, too, even if autocast has made x bfloat16. Back
    # in the dtype of x, keys take half the memory in the KV cache.
    rotated_a = a * cos - b * sin
    rotated_b = b * cos + a * sin
    return torch.cat((rotated_a, rotated_b), dim=-1).type_as(x)


# attention

# The kernels that PyTorch chooses from when ScaledDotProduct.forward excludes cuDNN.
WITHOUT_CUDNN = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class ScaledDotProduct(nn.Module):
    """softmax(q k^T / sqrt(D)) v, by the kernel that PyTorch chooses."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.block_size = config.block_size  # only full contexts may use cuDNN
        # choose_recomputation in model/execution.py relies on this dropout: above 0, it turns
        # activation checkpointing "cheap" into "block".
        self.dropout = config.dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the output (B, H, T, D) of attention from the newest T of S tokens, queries q
        (B, H, T, D), to all S tokens, keys k and values v (B, K, S, D).

        A mask broadcasts to (B, H, T, S) and is True where a token may attend. Without a mask
        attention is causal. Several queries after cached keys need a mask.
        """
        T = q.size(2)
        S = k.size(2)
        # SDPA's is_causal aligns the first query with the first key, which is wrong after cached
        # keys. `generate` passes single tokens after the prompts. Without a cache S is T.
        assert mask is not None or T in (1, S)
        is_causal = mask is None and T > 1  # a single query attends to all tokens

        queries_per_key = q.size(1) // k.size(1)
        if queries_per_key > 1:  # GQA (Ainslie et al. 2023)
            k = k.repeat_interleave(queries_per_key, dim=1)  # (B, K, S, D) -> (B, H, S, D)
            v = v.repeat_interleave(queries_per_key, dim=1)

        # F.scaled_dot_product_attention applies any dropout above 0, in eval(), too
        dropout = 0.0
        if self.training:
            dropout = self.dropout
        # cuDNN takes 20 to 400 ms to plan for each new shape, and its backward pass with a mask can
        # give NaN (pytorch #196678). So only full contexts without a mask, as in pre-training, may
        # use it. `with` stands here and not around the model, because a compiled graph of this
        # method has to contain the choice.
        if q.is_cuda and (mask is not None or T < self.block_size):
            with sdpa_kernel(WITHOUT_CUDNN):
                return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)


def attention_kernel(config: GPTConfig, device: torch.device, dtype: torch.dtype) -> str:
    """Return the name of the kernel that PyTorch chooses for the attention of training, such as
    CUDNN_ATTENTION or FLASH_ATTENTION. The choice depends on the GPU and on the wheel of PyTorch.
    """
    shape = (1, config.n_head, config.block_size, config.head_size)
    x = torch.empty(shape, device=device, dtype=dtype, requires_grad=True)  # as q, k and v
    # What F.scaled_dot_product_attention asks itself; PyTorch has no public function for it. The
    # arguments are q, k, v, mask, dropout and is_causal.
    return SDPBackend(torch._fused_sdp_choice(x, x, x, None, config.dropout, True)).name


class KVCache:
    """KV cache: keys and values of past tokens, so that sampling computes only the new token.

    In a forward pass each block calls `append` with its keys and values of the new tokens. Then
    Transformer.forward calls `advance` once. The first `append` under a name allocates memory for
    `capacity` tokens.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity  # in tokens
        self.length = 0  # past tokens, whose keys and values all blocks have appended
        # Tensors of `capacity` tokens by name: (3, "k") for the keys of block 3, (3, "v") for its
        # values
        self.buffers: dict[object, Tensor] = {}

    def append(self, name: object, x: Tensor, dim: int) -> Tensor:
        """Store `x`, which has T new tokens along dimension `dim`, after the past tokens of this
        name, such as (3, "k"), the keys of block 3. Return a view of all S tokens of this name,
        past and new. In model/gpt.py `x` is (B, K, T, D), and `dim` is 2."""
        if name not in self.buffers:
            shape = list(x.shape)
            shape[dim] = self.capacity
            self.buffers[name] = x.new_empty(shape)  # (B, K, capacity, D)
        buffer = self.buffers[name]
        num_new = x.size(dim)  # T
        # narrow(dim, start, length) slices `dim`; beyond the capacity it raises an error. `length`
        # grows in `advance`, so that all blocks write at the same start.
        buffer.narrow(dim, self.length, num_new).copy_(x)
        return buffer.narrow(dim, 0, self.length + num_new)  # (B, K, S, D)

    def advance(self, num_new: int) -> None:
        """Count the new tokens as past tokens, after the last block has appended them."""
        self.length += num_new
