"""GPTConfig: the architecture of a model, and the named GPT-2 sizes.

How a model is trained is no part of it: that stands in config.py and model/recipes.py.
"""

from dataclasses import dataclass
from typing import Literal

from utils.errors import UserError
from utils.ranges import BelowOne, Count, NonNegative, check_ranges

# Radford et al. 2019, table 2: the four sizes OpenAI released.
SIZES = {
    "gpt2": {"n_layer": 12, "n_head": 12, "n_embd": 768},  # 124M parameters
    "gpt2-medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024},  # 355M
    "gpt2-large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},  # 774M
    "gpt2-xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},  # 1558M
}
# fields that train.py has flags of their own for; a recipe may set the others
SIZED = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "dropout")


@dataclass(frozen=True)
class GPTConfig:
    """Architecture of a GPT; the defaults are GPT-2's. Raises UserError for one that cannot be."""

    block_size: Count = 1024
    """Longest sequence in tokens, and the number of learned positions."""
    vocab_size: Count = 50257
    """Token ids of the tokenizer, without padding."""
    n_layer: Count = 12
    """Transformer blocks."""
    n_head: Count = 12
    """Query heads; their width is n_embd / n_head."""
    n_embd: Count = 768
    """Channels of the residual stream."""
    dropout: BelowOne = 0.0
    """Dropout probability of embeddings, attention, and what attention and MLP add."""
    n_kv_head: Count | None = None
    """Key/value heads, each shared by n_head / n_kv_head query heads; None: n_head."""
    n_inner: Count | None = None
    """Width of the MLP's hidden layer; None: 4 x n_embd."""
    position: Literal["learned", "rotary"] = "learned"
    """learned (a table of positions) or rotary (RoPE)."""
    rope_base: NonNegative = 10_000.0
    """RoPE: about the ratio of the fastest to the slowest rotation."""
    norm: Literal["layer", "rms"] = "layer"
    """Norm of the residual stream: layer (LayerNorm) or rms (RMSNorm)."""
    norm_eps: NonNegative = 1e-5
    """Added to the variance of LayerNorm, or the mean square of RMSNorm."""
    qk_norm: bool = False
    """Normalise queries and keys to a root mean square of 1."""
    activation: Literal["gelu", "gelu_exact", "relu2", "swiglu"] = "gelu"
    """Activation of the MLP: gelu (OpenAI's tanh approximation), gelu_exact (nanoGPT's), relu2
    (squared ReLU) or swiglu (gated SiLU)."""
    bias: bool = True
    """Biases in linear layers and LayerNorms."""
    tied: bool = True
    """Share one table between the token embedding and the head."""
    ngrams: Count = 1
    """Longest n-gram whose embedding is added to the token's; 1: none."""
    ngram_rows: Count = 65_536
    """Rows of the table that all n-grams share by their hash."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.n_embd % self.n_head:
            raise UserError(
                f"n_embd {self.n_embd} does not divide by n_head {self.n_head}; give another n_head"
            )
        if self.n_head % self.kv_heads:
            raise UserError(f"n_head {self.n_head} does not divide by n_kv_head {self.n_kv_head}")
        if self.position == "rotary" and self.head_size % 2:
            raise UserError(f"a head is {self.head_size} wide; rotary positions need an even width")

        # "n_kv_head=12" and its default are one architecture and have to compare equal
        if self.n_kv_head == self.n_head:
            object.__setattr__(self, "n_kv_head", None)
        if self.n_inner == 4 * self.n_embd:
            object.__setattr__(self, "n_inner", None)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: a multiple of 64 (50257 -> 50304), for fast matmuls."""
        return -(-self.vocab_size // 64) * 64

    @property
    def is_gated(self) -> bool:
        """True if the activation function takes two inputs for each of its outputs."""
        return self.activation == "swiglu"

    @property
    def kv_heads(self) -> int:
        """Key/value heads, K."""
        return self.n_kv_head or self.n_head

    @property
    def head_size(self) -> int:
        """Channels of a head, D."""
        return self.n_embd // self.n_head

    @property
    def inner(self) -> int:
        """Width of the MLP's hidden layer."""
        return self.n_inner or 4 * self.n_embd
