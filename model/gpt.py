"""GPT-2 (Radford et al. 2019) in plain PyTorch, under the parameter names of OpenAI and nanoGPT,
and what has been found since: docs/RECIPES.md says what each field of GPTConfig does and gives.

B batch, T time, C channels, V vocabulary, L layers, H heads, K of keys and values, D = C / H.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from model.cache import KVCache
from model.config import GPTConfig, ModelError
from model.functional import FEW_QUERIES, TiedEmbedding, apply, attend, gelu
from model.loss import HeadCrossEntropy
from model.norm import RMSNorm, rms_norm
from model.rotary import rotate, rotations


def make_norm(config: GPTConfig) -> nn.Module:
    if config.norm == "layer":
        return nn.LayerNorm(config.n_embd, bias=config.bias)
    return RMSNorm(config.n_embd)


class Attention(nn.Module):
    """Causal self-attention over H heads."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.heads = [config.n_head, config.kv_heads, config.kv_heads]
        width = sum(self.heads) * config.head_size
        self.c_attn = nn.Linear(config.n_embd, width, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.qk_norm = config.qk_norm
        self.dropout = config.dropout
        self.layer = layer

    def forward(
        self,
        x: Tensor,
        norm: nn.Module,
        rotary: tuple[Tensor, Tensor] | None = None,
        cache: KVCache | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """What x (B, T, C) takes from the tokens before."""
        B, T, C = x.shape
        qkv = self.enter(x, norm).view(B, T, sum(self.heads), -1)
        few = x.device.type == "cpu" and (T <= FEW_QUERIES or cache is not None)
        turned = self.qk_norm or rotary is not None
        if few and (turned or cache is None or not cache.compiled):
            qkv = qkv.float()
        if turned:
            qk, v = qkv.split([sum(self.heads[:2]), self.heads[2]], dim=2)
            if self.qk_norm:  # Henry et al. 2020
                qk = rms_norm(qk)
            if rotary is not None:
                qk = rotate(qk, rotary)
            q, k = qk.split(self.heads[:2], dim=2)
        else:
            q, k, v = qkv.split(self.heads, dim=2)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # (B, H, T, D), (B, K, T, D) twice
        causal = cache is None and mask is None
        if cache is not None:
            k, v = cache.append(self.layer, k, v)  # (B, K, S, D), S = tokens seen so far
            if T > 1 and mask is None:
                S = k.size(2)
                mask = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        if few:
            q, k, v = q.float(), k.float(), v.float()
        dropout = self.dropout if self.training else 0.0
        y = attend(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)
        y = y.transpose(1, 2).reshape(B, T, C)
        return F.dropout(self.c_proj(y), self.dropout, self.training)

    def enter(self, x: Tensor, norm: nn.Module) -> Tensor:
        """Queries, keys and values (B, T, (H + 2K) D) of the residual stream x (B, T, C)."""
        return self.c_attn(norm(x))


class MLP(nn.Module):
    """Two linear layers, four times as wide in between; GPT-2's GELU is the tanh approximation."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        gates = 2 if config.activation == "swiglu" else 1
        self.c_fc = nn.Linear(config.n_embd, gates * config.inner, bias=config.bias)
        self.c_proj = nn.Linear(config.inner, config.n_embd, bias=config.bias)
        self.activation = config.activation
        self.dropout = config.dropout

    def forward(self, x: Tensor, norm: nn.Module) -> Tensor:
        return F.dropout(self.leave(self.enter(x, norm)), self.dropout, self.training)

    def enter(self, x: Tensor, norm: nn.Module) -> Tensor:
        """The first layer's output (B, T, 4C) for the residual stream x (B, T, C)."""
        return self.c_fc(norm(x))

    def leave(self, x: Tensor) -> Tensor:
        """From there back to (B, T, C)."""
        if self.activation == "relu2":  # So et al. 2021
            x = F.relu(x).square()
        elif self.activation == "swiglu":  # Shazeer 2020
            gate, x = x.chunk(2, dim=-1)
            x = F.silu(gate) * x
        else:
            x = gelu(x)
        return self.c_proj(x)


class Block(nn.Module):
    """Transformer block with its norms first."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = Attention(config, layer)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None = None,
        cache: KVCache | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        x = x + self.attn(x, self.ln_1, rotary, cache, mask)
        return x + self.mlp(x, self.ln_2)


class GPT(nn.Module):
    """Token and position embeddings, L blocks, a final norm; GPT-2's head is the embedding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        parts: dict[str, nn.Module] = {
            "wte": nn.Embedding(config.padded_vocab_size, config.n_embd),
        }
        if config.position == "learned":
            parts["wpe"] = nn.Embedding(config.block_size, config.n_embd)
        parts["h"] = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        parts["ln_f"] = make_norm(config)
        self.transformer = nn.ModuleDict(parts)
        if not config.tied:
            self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        """Normal(0, 0.02), biases 0; GPT-2 scales projections into the residual stream."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Attention | MLP):
            nn.init.normal_(module.c_proj.weight, std=0.02 * (2 * self.config.n_layer) ** -0.5)

    @property
    def head_weight(self) -> Tensor:
        """Weight (padded V, C) of the head."""
        return self.transformer.wte.weight if self.config.tied else self.lm_head.weight

    def num_parameters(self) -> int:
        """Trainable numbers, a tied head once and the padding of the vocabulary not at all."""
        tables = 1 if self.config.tied else 2
        padding = tables * (self.config.padded_vocab_size - self.config.vocab_size)
        return sum(p.numel() for p in self.parameters()) - padding * self.config.n_embd

    def num_multiplying(self) -> int:
        """Of these, the ones that multiply: not those of tables that are looked up alone."""
        looked_up = 0
        if self.config.position == "learned":
            looked_up += self.config.block_size
        if not self.config.tied:
            looked_up += self.config.vocab_size
        return self.num_parameters() - looked_up * self.config.n_embd

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
        return self.read(self.transformer.wte(idx), cache, positions, mask)

    def read(
        self,
        x: Tensor,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """The same for embedded tokens (B, T, C)."""
        T, rotary = x.size(1), None
        if positions is None:
            start = cache.length if cache is not None else 0
            if start + T > self.config.block_size:
                raise ModelError(
                    f"{start + T} tokens do not fit the context of {self.config.block_size}"
                )
            positions = torch.arange(start, start + T, device=x.device)
        if self.config.position == "learned":
            x = x + self.transformer.wpe(positions)
        else:
            rotary = rotations(positions, self.config.head_size, self.config.rope_base)
        x = F.dropout(x, self.config.dropout, self.training)
        for block in self.transformer.h:
            x = block(x, rotary, cache, mask)
        if cache is not None and cache.place is None:
            cache.length += T
        return self.transformer.ln_f(x)

    def logits(self, x: Tensor) -> Tensor:
        """Scores (B, T, V) for the next token from hidden states (B, T, C), padding left out."""
        return F.linear(x, self.head_weight)[..., : self.config.vocab_size]

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (B, T, V); with targets (B, T), their mean cross-entropy in nats instead.

        Targets of -1 are left out of the mean.
        """
        if targets is None:
            return self.logits(self.hidden(idx))
        weight = self.head_weight
        if self.config.tied and idx.device.type == "cpu":
            x, weight = apply(TiedEmbedding, idx, weight)
        else:
            x = self.transformer.wte(idx)
        x = self.read(x).flatten(0, 1)
        args = weight, targets.flatten(), self.config.vocab_size, torch.is_grad_enabled()
        return apply(HeadCrossEntropy, x, *args)


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
