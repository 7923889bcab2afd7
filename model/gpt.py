"""GPT-2 (Radford et al. 2019) in plain PyTorch, under the parameter names of OpenAI and nanoGPT.

GPTConfig turns on later techniques; docs/RECIPES.md says what each gives.
B batch, T time, C channels, V vocabulary, L layers, H heads, K key/value heads, D = C / H.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from model.cache import KVCache
from model.config import GPTConfig
from model.layers import ACTIVATIONS, RMSNorm, Rotary, ScaledDotProduct, make_norm, rotary_angles
from model.loss import HeadCrossEntropy
from model.ngrams import ngram_rows


class Attention(nn.Module):
    """Causal self-attention over H heads."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads = [config.n_head, config.kv_heads, config.kv_heads]  # of q, k, v
        self.c_attn = nn.Linear(config.n_embd, sum(self.heads) * config.head_size, bias=config.bias)
        self.qk_norm = nn.Identity()
        if config.qk_norm:
            self.qk_norm = RMSNorm(config.head_size, config.norm_eps, gain=False)
        self.rotary = Rotary() if config.position == "rotary" else None
        self.attend = ScaledDotProduct(config.block_size, config.dropout)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, angles: tuple | None, cache: KVCache | None, mask: Tensor | None
    ) -> Tensor:
        B, T, C = x.shape
        H, K, _ = self.heads
        qkv = self.c_attn(x).view(B, T, H + 2 * K, -1)  # (B, T, H + 2K, D)
        qk, v = qkv.split([H + K, K], dim=2)
        qk = self.qk_norm(qk)  # Henry et al. 2020
        if self.rotary is not None:
            qk = self.rotary(qk, *angles)
        q, k = qk.split([H, K], dim=2)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # (B, H, T, D), (B, K, T, D) twice
        if cache is not None:
            k = cache.append((self.layer, "k"), k.type_as(v), dim=2)  # (B, K, S, D)
            v = cache.append((self.layer, "v"), v, dim=2)
        y = self.attend(q, k, v, mask).transpose(1, 2)  # (B, T, H, D)
        return self.dropout(self.c_proj(y.reshape(B, T, C)))


class MLP(nn.Module):
    """Two linear layers around an activation function."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        inputs = 2 if config.activation == "swiglu" else 1
        self.c_fc = nn.Linear(config.n_embd, inputs * config.inner, bias=config.bias)
        self.activation = ACTIVATIONS[config.activation]
        self.c_proj = nn.Linear(config.inner, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.activation(self.c_fc(x))))


class Block(nn.Module):
    """Transformer block with pre-norm."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = Attention(config, layer)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, *where: object) -> Tensor:
        """Return x (B, T, C) after the block; `where` are angles, cache and mask of Attention."""
        x = x + self.attn(self.ln_1(x), *where)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Token and position embeddings, L blocks, a final norm; GPT-2's head is the embedding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        parts: dict[str, nn.Module] = {"wte": nn.Embedding(config.padded_vocab_size, config.n_embd)}
        if config.position == "learned":
            parts["wpe"] = nn.Embedding(config.block_size, config.n_embd)
        if config.ngrams > 1:
            parts["ngrams"] = nn.Embedding(config.ngram_rows, config.n_embd)
        parts["drop"] = nn.Dropout(config.dropout)
        parts["h"] = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        parts["ln_f"] = make_norm(config)
        self.transformer = nn.ModuleDict(parts)
        if not config.tied:
            self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self.packed_head: nn.Module | None = None  # for inference on a CPU: model/packed.py
        self.loss = HeadCrossEntropy(config.vocab_size)
        self.apply(self._init_weights)
        if config.ngrams > 1:
            nn.init.zeros_(self.transformer.ngrams.weight)

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
        """Return the number of trained values; a tied head counts once, padded rows do not."""
        tables = 1 if self.config.tied else 2
        padding = tables * (self.config.padded_vocab_size - self.config.vocab_size)
        return sum(p.numel() for p in self.parameters()) - padding * self.config.n_embd

    def num_matmul_parameters(self) -> int:
        """Return the number of parameters without the tables that are only looked up."""
        layers = (*self.transformer.h.parameters(), *self.transformer.ln_f.parameters())
        head = self.config.vocab_size * self.config.n_embd
        return head + sum(p.numel() for p in layers)

    def flops_per_token(self) -> int:
        """Return forward and backward FLOPs per token of a full context: 6 N + 12 L C T (Chowdhery
        et al. 2022, appendix B). Attention counts without causal mask, as there and in nanoGPT."""
        attention = 12 * self.config.n_layer * self.config.n_embd * self.config.block_size
        return 6 * self.num_matmul_parameters() + attention

    def hidden(
        self,
        idx: Tensor,
        cache: KVCache | None = None,
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Return final hidden states (B, T, C) of token ids (B, T), which continue `cache`. Rows
        with padding or with several continuations need `positions` (B, T), each below the block
        size, and `mask` (B, 1, T, S), true where a token may attend to one of S tokens."""
        x = self.transformer.wte(idx)  # (B, T, C)
        if self.config.ngrams > 1:
            rows = ngram_rows(idx, cache, mask, self.config)  # (B, T, N - 1)
            x = x + self.transformer.ngrams(rows).sum(-2)
        angles = None
        if positions is None:
            start = 0 if cache is None else cache.length
            end = start + idx.size(1)
            assert end <= self.config.block_size, f"{end} tokens are too many"
            positions = torch.arange(start, end, device=x.device)
        if self.config.position == "learned":
            x = x + self.transformer.wpe(positions)
        else:
            angles = rotary_angles(positions, self.config.head_size, self.config.rope_base)
        x = self.transformer.drop(x)
        for block in self.transformer.h:
            x = block(x, angles, cache, mask)
        if cache is not None:
            cache.advance(idx.size(1))
        return self.transformer.ln_f(x)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits (B, T, V) of hidden states (B, T, C), without the padded vocabulary."""
        if self.packed_head is not None:
            return self.packed_head(x)
        return F.linear(x, self.head_weight)[..., : self.config.vocab_size]

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        reduction: str = "mean",
    ) -> Tensor:
        """Return logits (B, T, V); with targets (B, T), their mean cross-entropy in nats without
        targets of -1, or with the reduction "none" that of each (B, T); see `hidden` for the rest.
        """
        # not self.hidden: FSDP2 gathers weights around that one, and has done so for forward
        x = GPT.hidden(self, idx, positions=positions, mask=mask)
        if targets is None:
            return self.logits(x)
        loss = self.loss(x.flatten(0, 1), self.head_weight, targets.flatten(), reduction)
        return loss if reduction == "mean" else loss.view_as(targets)
