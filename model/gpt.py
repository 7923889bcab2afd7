"""GPT-2 (Radford et al. 2019) in plain PyTorch, under the parameter names of OpenAI and nanoGPT.

B batch, T time, C channels, V vocabulary, L layers, H heads, D = C / H.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from model.config import GPTConfig, ModelError
from model.loss import HeadCrossEntropy

FEW_QUERIES = 256  # up to so many a CPU attends sooner in float32 than in bfloat16


class KVCache:
    """Keys and values of the tokens seen so far, so that each new token costs one forward of one.

    Holds at most `capacity` tokens; memory is taken at the first append, in the dtype in which
    `attend` wants them.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.place: Tensor | None = None  # (T,): where the next T go, in shapes that stay the same
        self.length = 0  # tokens every layer has seen; GPT.hidden advances it without a place
        self.layers: dict[int, Tensor] = {}  # layer -> (2, B, H, capacity, D)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Adds k and v (B, H, T, D) of the newest T tokens; returns all of them so far, or with a
        `place` all the capacity, for a mask to choose from."""
        if layer not in self.layers:
            B, H, _, D = k.shape
            dtype = torch.float32 if k.device.type == "cpu" else k.dtype
            # zeros: what a mask hides is multiplied by 0, which makes no number of NaN
            self.layers[layer] = k.new_zeros(2, B, H, self.capacity, D, dtype=dtype)
        if self.place is not None:
            keys, values = self.layers[layer]
            keys.index_copy_(2, self.place, k.to(keys.dtype))
            values.index_copy_(2, self.place, v.to(values.dtype))
            return keys, values
        end = self.length + k.size(2)
        self.layers[layer][0, :, :, self.length : end] = k
        self.layers[layer][1, :, :, self.length : end] = v
        keys, values = self.layers[layer][:, :, :, :end]
        return keys, values


def attend(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """scaled_dot_product_attention of queries (B, H, T, D), keys and values (B, H, S, D). A CPU
    takes up to five times as long for few queries in bfloat16: these run in float32."""
    if q.device.type == "cpu" and (q.size(2) <= FEW_QUERIES or k.dtype is torch.float32):
        q, k, v = q.float(), k.float(), v.float()
        with torch.autocast("cpu", enabled=False):
            return F.scaled_dot_product_attention(q, k, v, **options)
    return F.scaled_dot_product_attention(q, k, v, **options)


class Attention(nn.Module):
    """Causal self-attention over H heads."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.layer = layer

    def forward(
        self,
        x: Tensor,
        norm: nn.LayerNorm,
        cache: KVCache | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.enter(x, norm).view(B, T, 3, self.n_head, C // self.n_head).unbind(2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, D)
        causal = cache is None and mask is None
        if cache is not None:
            k, v = cache.append(self.layer, k, v)  # (B, H, S, D), S = tokens seen so far
            if T > 1 and mask is None:
                S = k.size(2)
                mask = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        dropout = self.dropout if self.training else 0.0
        y = attend(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)
        y = y.transpose(1, 2).reshape(B, T, C)
        return F.dropout(self.c_proj(y), self.dropout, self.training)

    def enter(self, x: Tensor, norm: nn.LayerNorm) -> Tensor:
        """Queries, keys and values (B, T, 3C) of the residual stream x (B, T, C)."""
        return self.c_attn(norm(x))


class MLP(nn.Module):
    """Two linear layers, four times as wide in between, with the tanh GELU of OpenAI's weights."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)
        self.dropout = config.dropout

    def forward(self, x: Tensor, norm: nn.LayerNorm) -> Tensor:
        return F.dropout(self.leave(self.enter(x, norm)), self.dropout, self.training)

    def enter(self, x: Tensor, norm: nn.LayerNorm) -> Tensor:
        """The first layer's output (B, T, 4C) for the residual stream x (B, T, C)."""
        return self.c_fc(norm(x))

    def leave(self, x: Tensor) -> Tensor:
        """From there back to (B, T, C)."""
        return self.c_proj(F.gelu(x, approximate="tanh"))


class Block(nn.Module):
    """Pre-LayerNorm transformer block."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = Attention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, cache: KVCache | None = None, mask: Tensor | None = None
    ) -> Tensor:
        x = x + self.attn(x, self.ln_1, cache, mask)
        x = x + self.mlp(x, self.ln_2)
        return x


class GPT(nn.Module):
    """Token and position embeddings, L blocks, a final LayerNorm; the head is the embedding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.padded_vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "h": nn.ModuleList(Block(config, layer) for layer in range(config.n_layer)),
                "ln_f": nn.LayerNorm(config.n_embd),
            }
        )
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        """Normal(0, 0.02), biases 0; GPT-2 scales projections into the residual stream."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
        if isinstance(module, Attention | MLP):
            nn.init.normal_(module.c_proj.weight, std=0.02 * (2 * self.config.n_layer) ** -0.5)

    def num_parameters(self) -> int:
        """Trainable numbers, the tied head once and the padding of the vocabulary not at all."""
        padding = self.config.padded_vocab_size - self.config.vocab_size
        return sum(p.numel() for p in self.parameters()) - padding * self.config.n_embd

    def hidden(
        self,
        idx: Tensor,
        cache: KVCache | None = None,
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Final hidden states (B, T, C) of token ids (B, T), which continue `cache` if given.

        For padding, or several continuations in one row: `positions` (B, T), each below the block
        size, and `mask` (B, 1, T, S), true where a token may look at the S tokens so far.
        """
        if positions is None:
            start = cache.length if cache is not None else 0
            end = start + idx.size(1)
            if end > self.config.block_size:
                raise ModelError(f"{end} tokens do not fit the context of {self.config.block_size}")
            positions = torch.arange(start, end, device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(positions)  # (B, T, C)
        x = F.dropout(x, self.config.dropout, self.training)
        for block in self.transformer.h:
            x = block(x, cache, mask)
        if cache is not None and cache.place is None:
            cache.length += idx.size(1)
        return self.transformer.ln_f(x)

    def logits(self, x: Tensor) -> Tensor:
        """Scores (B, T, V) for the next token from hidden states (B, T, C), padding left out."""
        return F.linear(x, self.transformer.wte.weight)[..., : self.config.vocab_size]

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (B, T, V); with targets (B, T), their mean cross-entropy in nats instead.

        Targets of -1 are left out of the mean.
        """
        x = self.hidden(idx)
        if targets is None:
            return self.logits(x)
        weight, V = self.transformer.wte.weight, self.config.vocab_size
        with_grad = torch.is_grad_enabled()
        return HeadCrossEntropy.apply(x.flatten(0, 1), weight, targets.flatten(), V, with_grad)


class WithoutInit(TorchFunctionMode):
    """Modules made under this keep whatever their memory holds."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs or {})


def skeleton(config: GPTConfig) -> GPT:
    """A GPT without memory (device "meta"), for its shapes or for weights from a file."""
    with torch.device("meta"), WithoutInit():
        return GPT(config)
