"""GPT-2 (Radford et al. 2019) in plain PyTorch, under the parameter names of OpenAI and nanoGPT.

This file says what a GPT computes, its loss, and how its weights begin. model/layers.py has rotary
positions, the attention kernel and the KV cache, model/loss.py the module by which GPT.forward
computes the loss in little memory, model/generate.py sampling, train.py the training. From outside,
model/execution.py applies torch.compile and activation checkpointing. GPTConfig turns on techniques
that are newer than GPT-2 (rotary positions, RMSNorm, SwiGLU, ...).

Shapes: B batch, T time (tokens of this call), C channels of the residual stream, V vocabulary,
L layers, H heads, K key/value heads (GPT-2 has K = H), D = C / H channels of a head.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from model.config import GPTConfig
from model.initial_weights import deferred_init, has_default
from model.layers import Angles, KVCache, ScaledDotProduct, rotary_angles, rotate
from model.loss import ChunkedLoss


class LayerNorm(nn.LayerNorm):
    """LayerNorm (Ba et al. 2016) of the float32 residual stream."""

    def forward(self, x: Tensor) -> Tensor:
        # FSDP2 gathers the weights of a block in the dtype of matmuls. On a CPU F.layer_norm raises
        # an error unless weights have the dtype of x. Without FSDP2, type_as leaves them unchanged.
        weight = self.weight.type_as(x)
        bias: Tensor | None = None
        if self.bias is not None:
            bias = self.bias.type_as(x)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


def make_norm(config: GPTConfig) -> nn.Module:
    """Return a LayerNorm or RMSNorm for the residual stream, which is float32."""
    if config.norm == "layer":
        return LayerNorm(config.n_embd, config.norm_eps, bias=config.bias)
    # RMSNorm scales each token to a root mean square of 1, times a gain (Zhang and Sennrich 2019).
    # Unlike F.layer_norm on a CPU, nn.RMSNorm takes weights of another dtype than x.
    return nn.RMSNorm(config.n_embd, config.norm_eps)


class FusedLinear(nn.Linear):
    """Linear layer whose weight is several matrices, one below the other. Tensor parallelism
    divides each of them among the processes, and Muon orthogonalizes each by itself."""

    def __init__(self, in_features: int, fused_rows: tuple[int, ...], bias: bool) -> None:
        super().__init__(in_features, sum(fused_rows), bias)
        self.fused_rows = fused_rows  # rows of each matrix, such as (768, 768, 768) for c_attn


class Attention(nn.Module):
    """Causal self-attention over H heads."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer  # index of the block, 0 to L - 1, for the names in a KVCache
        # Tensor parallelism divides both: each process has some of the heads.
        self.num_heads = config.n_head
        self.num_kv_heads = config.num_kv_heads  # n_kv_head, or n_head if that is None
        # One layer computes queries, keys and values, D channels for each head: 768 + 768 + 768
        # rows for GPT-2. FusedLinear keeps the three numbers, for tensor parallelism and Muon.
        kv_rows = config.num_kv_heads * config.head_size
        self.c_attn = FusedLinear(config.n_embd, (config.n_embd, kv_rows, kv_rows), config.bias)
        self.qk_norm: nn.RMSNorm | None = None  # of queries and keys, each head by itself
        if config.qk_norm:
            self.qk_norm = nn.RMSNorm(config.head_size, config.norm_eps, elementwise_affine=False)
        self.attend = ScaledDotProduct(config)  # chooses the kernel; has no weights
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)  # of the output; `attend` has its own

    def forward(
        self, x: Tensor, angles: Angles | None, cache: KVCache | None, mask: Tensor | None
    ) -> Tensor:
        """Return the output (B, T, C) for the normalized residual stream x (B, T, C). `angles` is
        None with learned positions. The KV cache is None in training. `mask` (B, 1, T, S) is True
        where a token may attend; None means causal attention."""
        B, T, _ = x.shape
        H, K = self.num_heads, self.num_kv_heads
        qkv = self.c_attn(x).view(B, T, H + 2 * K, -1)  # (B, T, H + 2K, D)
        q, k, v = qkv.split([H, K, K], dim=2)
        # QK-norm, an RMSNorm without gains, keeps the products of queries and keys from exploding
        # (Henry et al. 2020). Under autocast it returns float32 on a GPU. In the dtype of the
        # values, keys take half the memory in the KV cache.
        if self.qk_norm is not None:
            q = self.qk_norm(q).type_as(v)
            k = self.qk_norm(k).type_as(v)
        if angles is not None:  # (cos, sin) of rotary positions
            q = rotate(q, angles)
            k = rotate(k, angles)

        q = q.transpose(1, 2)  # (B, H, T, D)
        k = k.transpose(1, 2)  # (B, K, T, D)
        v = v.transpose(1, 2)  # (B, K, T, D)
        if cache is not None:  # sampling: `append` stores T tokens and returns all S so far
            k = cache.append((self.layer, "k"), k, dim=2)  # (B, K, S, D)
            v = cache.append((self.layer, "v"), v, dim=2)  # (B, K, S, D)
        y = self.attend(q, k, v, mask)  # (B, H, T, D); without a mask attention is causal
        y = y.transpose(1, 2).reshape(B, T, -1)  # (B, T, H D), heads side by side
        return self.dropout(self.c_proj(y))


class MLP(nn.Module):
    """Two linear layers around an activation function."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        # SwiGLU takes two inputs for each output; one layer computes both. config.inner is the
        # width of the hidden layer, 4 C by default. The sizes are a tuple, (3072,) of GPT-2 and
        # (3072, 3072) with SwiGLU: Muon and tensor parallelism treat each matrix by itself.
        num_inputs = 2 if config.is_gated else 1
        self.c_fc = FusedLinear(config.n_embd, (config.inner,) * num_inputs, config.bias)
        self.activation = config.activation  # "gelu", ...: `activate` applies it
        self.c_proj = nn.Linear(config.inner, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output (B, T, C) for the normalized residual stream x (B, T, C)."""
        x = self.c_fc(x)  # (B, T, inner), or (B, T, 2 * inner) with SwiGLU
        x = self.activate(x)  # (B, T, inner)
        return self.dropout(self.c_proj(x))  # (B, T, C)

    def activate(self, x: Tensor) -> Tensor:
        """Apply the activation function to x (B, T, channels); swiglu halves the channels."""
        if self.activation == "gelu":  # Hendrycks and Gimpel 2016
            return F.gelu(x, approximate="tanh")
        if self.activation == "gelu_exact":  # nanoGPT's
            return F.gelu(x)
        if self.activation == "relu2":  # So et al. 2021
            return F.relu(x).square()
        assert self.activation == "swiglu"  # Shazeer 2020; GPTConfig refuses any other name
        # the SiLU of one half of the channels gates the other half
        gate, x = x.chunk(2, dim=-1)  # (B, T, inner) each
        return F.silu(gate) * x


class Block(nn.Module):
    """Transformer block (pre-norm): attention, then the MLP, each added to the residual stream."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.ln_1 = make_norm(config)  # a LayerNorm or an RMSNorm
        self.attn = Attention(config, layer)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, angles: Angles | None, cache: KVCache | None, mask: Tensor | None
    ) -> Tensor:
        """Return the residual stream (B, T, C) after this block, given the stream x before it.
        Attention uses the other arguments: Attention.forward describes them."""
        x = x + self.attn(self.ln_1(x), angles, cache, mask)
        x = x + self.mlp(self.ln_2(x))
        return x


class Transformer(nn.Module):
    """Token and position embeddings, L blocks and a final norm: a GPT without its head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config  # `forward` reads how positions are encoded
        self.wte = nn.Embedding(config.padded_vocab_size, config.n_embd)  # (50304, 768) for GPT-2
        if config.position == "learned":
            self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = make_norm(config)

    def forward(
        self,
        idx: Tensor,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Return the final hidden states (B, T, C) of token ids (B, T).

        With a KV cache, as in sampling, the ids continue the S - T tokens in the cache, and are
        added to it. Rows with padding, or with several continuations of one prompt, need
        `positions` (B, T), each below the block size, and `mask` (B, 1, T, S), True where a token
        may attend to one of S tokens. Without both, positions are consecutive, attention is causal,
        and a cache that holds tokens takes one new token at a time.
        """
        if positions is None:
            # number of past tokens, whose keys and values are in the cache
            start = 0 if cache is None else cache.length
            end = start + idx.size(1)
            # Beyond the block size wpe has no rows, and RoPE's angles were never trained. Sampling
            # drops the older half of a full context before (model/generate.py).
            assert end <= self.config.block_size, f"{end} tokens are too many"
            positions = torch.arange(start, end, device=idx.device)  # (T,)

        x = self.wte(idx)  # (B, T, C)
        angles: Angles | None = None
        if self.config.position == "learned":
            x = x + self.wpe(positions)  # (T, C), or (B, T, C) for rows with padding
        else:
            # (cos, sin), computed once: every block rotates its queries and keys by these angles
            angles = rotary_angles(positions, self.config.head_size, self.config.rope_base)
        x = self.drop(x)

        for block in self.h:
            x = block(x, angles, cache, mask)  # (B, T, C); without a mask attention is causal
        if cache is not None:
            cache.advance(idx.size(1))  # counts the T tokens that all blocks have appended
        return self.ln_f(x)


class GPT(nn.Module):
    """Transformer and head. The weight of a tied head is the token embedding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config  # also what checkpoints and exports say of the model
        # Within this context layers have no memory: a process of a large run never holds them all.
        with deferred_init(self):
            self.transformer = Transformer(config)
            if not config.tied:
                self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
            self._init_weights()
        self.loss = ChunkedLoss()  # computes `token_losses` in chunks; has no weights

    def _init_weights(self) -> None:
        """Begin linear layers and embeddings as nanoGPT does, unless the constructor that made one
        has given it other weights. Everything else begins as its constructor says."""
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)) and has_default(module.weight):
                std = 0.02
                # 2 L such layers add their outputs to the residual stream. With this factor the
                # variance of the sum does not grow with L (Radford et al. 2019).
                if name.endswith("c_proj"):
                    std *= (2 * self.config.n_layer) ** -0.5
                # only noted here: model/initial_weights.py draws the numbers later
                nn.init.normal_(module.weight, mean=0.0, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                if has_default(module.bias):
                    nn.init.zeros_(module.bias)

    @classmethod
    def from_pretrained(cls, name: str) -> "GPT":
        """Return OpenAI's model ("gpt2", "gpt2-xl", ...), or another GPT-2, LLaMA or Qwen3 of the
        Hugging Face hub or of a folder, in float32. Raise UserError for another architecture."""
        # imported here, because a new model needs no formats of other projects
        from model.formats.huggingface_weights import read_model

        return read_model(cls, name)

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, *, reduction: str = "mean"
    ) -> Tensor:
        """Return the logits (B, T, V) of token ids (B, T), or the loss if targets (B, T) are given.

        The loss is the mean of `token_losses` in nats, over all targets but -1. With the reduction
        "none" it is the loss of each target (B, T), which is 0 for -1.
        """
        x = self.transformer(idx)  # (B, T, C)
        if targets is None:
            return self.logits(x)
        # Computes self.token_losses(self.logits(x), targets) so that few logits are in memory.
        loss = self.loss(self, x.flatten(0, 1), targets.flatten(), reduction)
        if reduction == "none":
            return loss.view_as(targets)  # (B T,) -> (B, T)
        return loss

    def hidden(
        self,
        idx: Tensor,
        cache: KVCache | None = None,
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Return the final hidden states (B, T, C) of token ids (B, T), so that a caller can pass
        only some of them to `logits`. Transformer.forward describes the arguments."""
        # Callers use this method and not `transformer`, because FSDP2 gathers the embeddings only
        # for registered methods of the whole model (training/parallel/data_parallel.py).
        return self.transformer(idx, cache, positions, mask)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits (..., V) of hidden states (..., C). This is their only definition:
        training, evaluation and sampling follow a change of it."""
        return self.head(x)

    def token_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss (N,) in nats of each token, for float32 logits (N, V) and targets (N,).
        This is its only definition; callers leave out the tokens with a target of -1."""
        return F.cross_entropy(logits, targets, ignore_index=-1, reduction="none")

    def head(self, x: Tensor) -> Tensor:
        """Return the products (..., V) of hidden states (..., C) and the head's weight, without the
        padded vocabulary. prepare_for_inference of model/inference.py replaces it."""
        return F.linear(x, self.head_weight[: self.config.vocab_size])

    @property
    def head_weight(self) -> Tensor:
        """Weight of the head (padded V, C); rows from V on are padding."""
        if self.config.tied:
            return self.transformer.wte.weight
        return self.lm_head.weight

    def num_parameters(self) -> int:
        """Return the number of parameters; a tied head counts once, padded rows do not count."""
        # tables with a row for each token: the embedding, and an untied head
        num_tables = 1 if self.config.tied else 2
        padded_rows = num_tables * (self.config.padded_vocab_size - self.config.vocab_size)
        return sum(p.numel() for p in self.parameters()) - padded_rows * self.config.n_embd

    def num_matmul_parameters(self) -> int:
        """Return N of flops_per_token, the number of parameters in blocks, final norm and head.
        The tables of tokens and positions do not count, because they are only looked up."""
        block_parameters = sum(p.numel() for p in self.transformer.h.parameters())
        norm_parameters = sum(p.numel() for p in self.transformer.ln_f.parameters())
        head_parameters = self.config.vocab_size * self.config.n_embd
        return block_parameters + norm_parameters + head_parameters

    def flops_per_token(self) -> int:
        """Return forward and backward FLOPs per token of a full context, for MFU: 6 N + 12 L C T
        (Chowdhery et al. 2022, appendix B). As there and in nanoGPT, attention counts as if it had
        no causal mask.

        MFU keeps this convention for every model, so that its figures compare. N counts the
        parameters of the model as it is, with all experts of a mixture. Forecasts of time measure
        the FLOPs of the blocks instead (training/forecast/blocks.py)."""
        attention_flops = 12 * self.config.n_layer * self.config.n_embd * self.config.block_size
        return 6 * self.num_matmul_parameters() + attention_flops
