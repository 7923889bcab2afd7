"""GPT-2 (Radford et al. 2019) in plain PyTorch, under the parameter names of OpenAI and nanoGPT.

This file has the blocks and the model. Rotary positions and the attention kernel stand in
model/layers.py, the loss in model/loss.py, sampling in model/generate.py, the training in train.py.
GPTConfig turns on later techniques (rotary positions, RMSNorm, SwiGLU, ...) over GPT-2's.

Shapes: B batch, T time, C channels of the residual stream, V vocabulary, L layers, H heads,
K key/value heads (GPT-2 has K = H), D = C / H channels of a head.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from model.config import GPTConfig
from model.execution import Execution, compile_static, configure_compiler, keep_matmuls
from model.layers import Angles, KVCache, ScaledDotProduct, rotary_angles, rotate
from model.loss import HeadCrossEntropy
from model.ngrams import ngram_rows
from model.rows import NormalRows, Rows, constant


class LayerNorm(nn.LayerNorm):
    """LayerNorm (Ba et al. 2016) of the float32 residual stream."""

    def forward(self, x: Tensor) -> Tensor:
        # FSDP2 gathers the weights in bfloat16, and on a CPU F.layer_norm raises an error unless
        # they have the dtype of x. Without FSDP2 type_as returns the weights themselves.
        weight = self.weight.type_as(x)
        bias: Tensor | None = None
        if self.bias is not None:
            bias = self.bias.type_as(x)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


def make_norm(config: GPTConfig) -> nn.Module:
    """Return a norm of the residual stream, which is float32."""
    if config.norm == "layer":
        return LayerNorm(config.n_embd, config.norm_eps, bias=config.bias)
    # RMSNorm scales each token to a root mean square of 1, times a gain (Zhang and Sennrich 2019).
    return nn.RMSNorm(config.n_embd, config.norm_eps)


class Attention(nn.Module):
    """Causal self-attention over H heads."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer  # 0 to L - 1, for the keys of a KVCache
        # Tensor parallelism divides both numbers: each process has some of the heads.
        self.num_heads = config.n_head
        self.num_kv_heads = config.kv_heads
        # queries, keys and values come from one matrix, D channels for each head
        num_projections = config.n_head + 2 * config.kv_heads
        self.c_attn = nn.Linear(config.n_embd, num_projections * config.head_size, bias=config.bias)
        self.qk_norm: nn.RMSNorm | None = None
        if config.qk_norm:
            self.qk_norm = nn.RMSNorm(config.head_size, config.norm_eps, elementwise_affine=False)
        self.attend = ScaledDotProduct(config)  # chooses the kernel; has no weights
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, angles: Angles | None, cache: KVCache | None, mask: Tensor | None
    ) -> Tensor:
        """Return what attention adds to the residual stream, given its norm x; both are (B, T, C).

        `angles` is None without rotary positions. GPT.hidden describes `cache` and `mask`.
        """
        B, T, _ = x.shape
        H, K = self.num_heads, self.num_kv_heads
        qkv = self.c_attn(x).view(B, T, H + 2 * K, -1)  # (B, T, H + 2K, D)

        # The norm and the rotation work on single heads, so queries and keys take them together.
        qk, v = qkv.split([H + K, K], dim=2)
        # QK-norm keeps the products of queries and keys from exploding (Henry et al. 2020). Under
        # autocast it returns float32 on a GPU, and attention needs the dtype of the values.
        if self.qk_norm is not None:
            qk = self.qk_norm(qk).type_as(v)
        if angles is not None:  # rotary positions
            qk = rotate(qk, angles)
        q, k = qk.split([H, K], dim=2)

        q = q.transpose(1, 2)  # (B, H, T, D)
        k = k.transpose(1, 2)  # (B, K, T, D)
        v = v.transpose(1, 2)  # (B, K, T, D)
        if cache is not None:  # sampling: x has the newest T of S tokens
            k = cache.append((self.layer, "k"), k, dim=2)  # (B, K, S, D)
            v = cache.append((self.layer, "v"), v, dim=2)  # (B, K, S, D)
        y = self.attend(q, k, v, mask)  # (B, H, T, D)
        y = y.transpose(1, 2).reshape(B, T, -1)  # (B, T, H D), heads side by side
        return self.dropout(self.c_proj(y))


class MLP(nn.Module):
    """Two linear layers around an activation function."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        # SwiGLU takes two inputs for each output; one matrix computes both.
        num_inputs = 2 if config.is_gated else 1
        self.c_fc = nn.Linear(config.n_embd, num_inputs * config.inner, bias=config.bias)
        self.activation = config.activation
        self.c_proj = nn.Linear(config.inner, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the MLP adds to the residual stream, given its norm x; both are (B, T, C)."""
        x = self.c_fc(x)  # (B, T, num_inputs * inner)
        x = self.activate(x)  # (B, T, inner)
        return self.dropout(self.c_proj(x))  # (B, T, C)

    def activate(self, x: Tensor) -> Tensor:
        """Return the activation function of x (B, T, channels); swiglu halves the channels."""
        if self.activation == "gelu":  # Hendrycks and Gimpel 2016
            return F.gelu(x, approximate="tanh")
        if self.activation == "gelu_exact":  # nanoGPT's
            return F.gelu(x)
        if self.activation == "relu2":  # So et al. 2021
            return F.relu(x).square()
        # swiglu (Shazeer 2020): one half of the channels, gated by the SiLU of the other
        gate, x = x.chunk(2, dim=-1)
        return F.silu(gate) * x


class Block(nn.Module):
    """Transformer block with pre-norm: attention, then the MLP, each added to the residual stream.

    `forward` calls `run`, compiled or not, and `run` calls `compute`, with activation checkpointing
    or without: the model's Execution decides. `compute` is what a block computes.
    """

    def __init__(self, config: GPTConfig, layer: int, execution: Execution) -> None:
        super().__init__()
        self.execution = execution
        self.ln_1 = make_norm(config)
        self.attn = Attention(config, layer)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)
        if execution.compiled:
            # torch.compile caches graphs by the code of a function: the first block compiles `run`,
            # and the other blocks use its graph.
            self.compiled_run = compile_static(self.run)

    def forward(
        self, x: Tensor, angles: Angles | None, cache: KVCache | None, mask: Tensor | None
    ) -> Tensor:
        """Return x (B, T, C) after the block. `angles` is None without rotary positions, `cache`
        has keys and values of past tokens, `mask` is true where a token may attend: see
        GPT.hidden."""
        # FSDP2 gathers the block's weights before `forward` and frees them after it. So graphs and
        # recomputation begin below it.
        if self.execution.compiled:
            return self.compiled_run(x, angles, cache, mask)
        return self.run(x, angles, cache, mask)

    def run(
        self, x: Tensor, angles: Angles | None, cache: KVCache | None, mask: Tensor | None
    ) -> Tensor:
        """Return `compute` of the inputs; autograd keeps its activations for the backward pass, or
        the backward pass computes them again."""
        checkpointing = self.execution.checkpointing  # "none", "cheap" or "block"
        # When compiled, "cheap" is left to the compiler: see configure_compiler.
        if checkpointing == "none" or (checkpointing == "cheap" and self.execution.compiled):
            return self.compute(x, angles, cache, mask)
        # With dropout, "cheap" is the same as "block". If the output of attention were kept, the
        # backward pass would not draw its random numbers again, and every later dropout would get
        # another mask than in the forward pass.
        if checkpointing == "block" or self.attn.attend.dropout > 0:
            # keep the block's inputs alone; PyTorch recommends use_reentrant=False
            return checkpoint(self.compute, x, angles, cache, mask, use_reentrant=False)
        # "cheap": keep the outputs of matmuls and attention, recompute everything else
        return checkpoint(
            self.compute, x, angles, cache, mask, use_reentrant=False, context_fn=keep_matmuls
        )

    def compute(
        self, x: Tensor, angles: Angles | None, cache: KVCache | None, mask: Tensor | None
    ) -> Tensor:
        """Return x (B, T, C), the residual stream, after attention and MLP."""
        x = x + self.attn(self.ln_1(x), angles, cache, mask)
        x = x + self.mlp(self.ln_2(x))
        return x


class Transformer(nn.Module):
    """Modules of a GPT below the head, under GPT-2's names; GPT.hidden calls them."""

    def __init__(self, config: GPTConfig, execution: Execution) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.padded_vocab_size, config.n_embd)
        if config.position == "learned":
            self.wpe = nn.Embedding(config.block_size, config.n_embd)
        if config.ngrams > 1:
            self.ngrams = nn.Embedding(config.ngram_rows, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config, layer, execution) for layer in range(config.n_layer))
        self.ln_f = make_norm(config)


class GPT(nn.Module):
    """Token and position embeddings, L blocks, a final norm, and a head, which is the
    embedding if it is tied."""

    def __init__(self, config: GPTConfig, execution: Execution | None = None) -> None:
        super().__init__()
        self.config = config
        self.execution = execution or Execution()  # default: plain PyTorch
        if self.execution.compiled:
            configure_compiler(self.execution)  # before the first block is compiled

        self.transformer = Transformer(config, self.execution)
        if not config.tied:
            self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        # The loss has no weights of its own: `forward` passes it the head's.
        self.loss = HeadCrossEntropy(config.vocab_size, self.execution.compiled)
        # a copy of the head, which prepare_for_inference of model/inference.py makes on a CPU
        self.inference_head: nn.Module | None = None

        # a model of build_without_weights has no memory yet: its caller fills it in later
        if not self.transformer.wte.weight.is_meta:
            self.draw_weights()

    def draw_weights(self) -> None:
        """Give a new model its weights, by a seed that follows from torch.manual_seed."""
        seed = int(torch.randint(2**31, ()))
        for name, rows in self.initial_weights(seed).items():
            # rows[:] draws all rows of a parameter, as a Tensor on the CPU
            self.get_parameter(name).data.copy_(rows[:])

    def initial_weights(self, seed: int, *, zero_init: bool = False) -> dict[str, Rows]:
        """Return a new model's weights by name: matrices from Normal(0, 0.02), biases of 0, gains
        of 1. Nothing is drawn before rows are read, and a process reads those that it holds.

        GPT-2 scales the matrices that add to the residual stream, 2 L in number, by 1 / sqrt(2 L).
        With `zero_init` they are 0, so that each block begins as the identity.
        """
        weights: dict[str, Rows] = {}
        for name, p in self.named_parameters():
            adds_to_residual = "c_proj" in name
            # Embeddings of n-grams begin at 0, as if there were none.
            is_zero = name.endswith("bias") or "ngrams" in name or (adds_to_residual and zero_init)
            if is_zero:
                weights[name] = constant(0.0, p.shape)
            elif p.dim() == 1:  # gain of a norm
                weights[name] = constant(1.0, p.shape)
            else:
                std = 0.02
                if adds_to_residual:
                    std *= (2 * self.config.n_layer) ** -0.5
                weights[name] = NormalRows(seed, name, p.shape, std)
        return weights

    @property
    def head_weight(self) -> Tensor:
        """Weight of the head (padded V, C); the rows after V are no tokens."""
        if self.config.tied:
            return self.transformer.wte.weight
        return self.lm_head.weight

    def num_parameters(self) -> int:
        """Return the number of trained values; a tied head counts once, padded rows do not."""
        # tables with a row for each token: the embedding, and an untied head
        num_tables = 1 if self.config.tied else 2
        padded_rows = num_tables * (self.config.padded_vocab_size - self.config.vocab_size)
        return sum(p.numel() for p in self.parameters()) - padded_rows * self.config.n_embd

    def num_matmul_parameters(self) -> int:
        """Return N, the number of parameters that multiply: blocks, final norm and head, without
        the embeddings, which are only looked up."""
        block_parameters = sum(p.numel() for p in self.transformer.h.parameters())
        norm_parameters = sum(p.numel() for p in self.transformer.ln_f.parameters())
        head_parameters = self.config.vocab_size * self.config.n_embd
        return block_parameters + norm_parameters + head_parameters

    def flops_per_token(self) -> int:
        """Return forward and backward FLOPs per token of a full context: 6 N + 12 L C T (Chowdhery
        et al. 2022, appendix B). Attention counts without causal mask, as there and in nanoGPT."""
        attention_flops = 12 * self.config.n_layer * self.config.n_embd * self.config.block_size
        return 6 * self.num_matmul_parameters() + attention_flops

    def hidden(
        self,
        idx: Tensor,
        cache: KVCache | None = None,
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Return the final hidden states (B, T, C) of token ids (B, T).

        With a `cache`, the ids continue the S - T tokens in it, and are added to it. Rows with
        padding, or with several continuations of one prompt, need `positions` (B, T), each below
        the block size, and `mask` (B, 1, T, S), true where a token may attend to one of S tokens.
        Without these, positions follow each other and attention is causal, and a cache that holds
        tokens takes one more at a time.
        """
        if positions is None:
            # number of past tokens, whose keys and values the cache holds
            start = 0 if cache is None else cache.length
            end = start + idx.size(1)
            # Beyond the block size wpe has no rows, and RoPE's angles were never trained.
            assert end <= self.config.block_size, f"{end} tokens are too many"
            positions = torch.arange(start, end, device=idx.device)  # (T,)

        x = self.transformer.wte(idx)  # (B, T, C)
        if self.config.ngrams > 1:
            # indices into the table for the n-grams, n = 2 to N, that end at each token
            rows = ngram_rows(idx, cache, mask, self.config)  # (B, T, N - 1)
            x = x + self.transformer.ngrams(rows).sum(-2)  # (B, T, C)
        angles: Angles | None = None
        if self.config.position == "learned":
            x = x + self.transformer.wpe(positions)
        else:
            # computed once; every block rotates its queries and keys by these angles
            angles = rotary_angles(positions, self.config.head_size, self.config.rope_base)
        x = self.transformer.drop(x)

        for block in self.transformer.h:
            x = block(x, angles, cache, mask)
        if cache is not None:
            cache.advance(idx.size(1))  # after all blocks have appended to it
        return self.transformer.ln_f(x)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits (B, T, V) of hidden states (B, T, C), without the padded vocabulary."""
        if self.inference_head is not None:
            return self.inference_head(x)  # has no padded rows
        return F.linear(x, self.head_weight)[..., : self.config.vocab_size]

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        *,
        reduction: str = "mean",
    ) -> Tensor:
        """Return the logits (B, T, V) of token ids (B, T), or the loss against targets (B, T).

        The loss is the mean cross-entropy in nats, without targets of -1, or with the reduction
        "none" the cross-entropy of each target (B, T).
        """
        # Not self.hidden: FSDP2 makes that method gather the weights, which it did for `forward`.
        x = GPT.hidden(self, idx)  # (B, T, C)
        if targets is None:
            return self.logits(x)
        # The loss applies the head, so that only one chunk of the logits has to be in memory.
        loss = self.loss(x.flatten(0, 1), self.head_weight, targets.flatten(), reduction)
        if reduction == "none":
            return loss.view_as(targets)  # (B T,) -> (B, T)
        return loss


# models whose weights come from a file or from another model


class SkipInit(TorchFunctionMode):
    """Leave new parameters uninitialised: torch.nn.init on the device "meta" would import
    PyTorch's compiler, which takes two seconds."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Do nothing for functions of torch.nn.init, whose results no module here uses, and call
        every other function of PyTorch as usual."""
        if getattr(func, "__module__", None) == "torch.nn.init":
            return None
        return func(*args, **kwargs or {})


def build_without_weights(
    config: GPTConfig, execution: Execution | None = None, model_class: type[GPT] = GPT
) -> GPT:
    """Return a model on the device "meta", with shapes and no memory: to count its parameters, or
    for weights that `load_state_dict(..., assign=True)` or fill_model gives it."""
    with torch.device("meta"), SkipInit():
        return model_class(config, execution)


def rebuild(model: GPT, config: GPTConfig) -> GPT:
    """Return a model of `config`, which has fewer tokens than `model` or less padding, with the
    weights of `model`: embedding and head lose their last rows, and all others are shared."""
    state = model.state_dict()  # the tensors themselves, not copies
    for name in ("transformer.wte.weight", "lm_head.weight"):
        if name in state:  # a tied model has no lm_head
            # cloned, because a view would keep the whole table in memory
            state[name] = state[name][: config.padded_vocab_size].clone()
    new_model = build_without_weights(config)
    new_model.load_state_dict(state, assign=True)
    return new_model
