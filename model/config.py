"""GPTConfig: the architecture of a model, and the named sizes of GPT-2 and GPT-3.

It does not say how a model is trained: config.py and recipes.py do.
"""

from dataclasses import dataclass
from typing import Literal

from utils.errors import UserError
from utils.ranges import BelowOne, Count, NonNegative, check_ranges

# Layers, heads and channels of the four sizes that OpenAI released. Radford et al. 2019, table 2,
# has all but the heads.
GPT2_SIZES = {
    "gpt2": (12, 12, 768),  # 124M parameters
    "gpt2-medium": (24, 16, 1024),  # 355M
    "gpt2-large": (36, 20, 1280),  # 774M
    "gpt2-xl": (48, 25, 1600),  # 1558M
}
# Layers, heads and channels of GPT-3 (Brown et al. 2020, table 2.1), except for two rows, whose
# channels are no multiple of their heads. XL has 24 heads of 128 channels there but 2,048 channels,
# and 16 heads here; 13B has 40 heads and 5,140 channels there, 5,120 here. Attention is dense in
# every layer here; in GPT-3 it is sparse in every other one.
GPT3_SIZES = {
    "gpt3-small": (12, 12, 768),  # 125M
    "gpt3-medium": (24, 16, 1024),  # 350M
    "gpt3-large": (24, 16, 1536),  # 760M
    "gpt3-xl": (24, 16, 2048),  # 1.3B
    "gpt3-2.7b": (32, 32, 2560),
    "gpt3-6.7b": (32, 32, 4096),
    "gpt3-13b": (40, 40, 5120),
    "gpt3-175b": (96, 96, 12288),
}
SIZES = GPT2_SIZES | GPT3_SIZES  # the choices of --model_type
# Fields of GPTConfig that no recipe sets. Options, the tokenizer and --model_type set them.
NOT_IN_RECIPES = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "dropout")


@dataclass(frozen=True)
class GPTConfig:
    """Architecture of a GPT; the defaults are GPT-2's. Raises UserError for values that are out of
    range or do not fit together."""

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
    """Dropout probability of embeddings, attention weights, and outputs of attention and MLP."""
    n_kv_head: Count | None = None
    """Key/value heads, each shared by n_head / n_kv_head query heads; None: n_head."""
    n_inner: Count | None = None
    """Width of the MLP's hidden layer; None: 4 x n_embd."""
    position: Literal["learned", "rotary"] = "learned"
    """learned (a table of positions) or rotary (RoPE)."""
    rope_base: NonNegative = 10_000.0
    """RoPE: about the ratio of the fastest rotation of two channels to the slowest."""
    norm: Literal["layer", "rms"] = "layer"
    """Norm of the residual stream: layer (LayerNorm) or rms (RMSNorm)."""
    norm_eps: NonNegative = 1e-5
    """Epsilon, added to the variance in LayerNorm, or to the mean square in RMSNorm."""
    qk_norm: bool = False
    """Normalize queries and keys to a root mean square of 1."""
    activation: Literal["gelu", "gelu_exact", "relu2", "swiglu"] = "gelu"
    """Activation of the MLP: gelu (OpenAI's tanh approximation), gelu_exact (nanoGPT's), relu2
    (squared ReLU) or swiglu (gated SiLU)."""
    bias: bool = True
    """Biases in linear layers and LayerNorms."""
    tied: bool = True
    """Share one table between the token embedding and the head."""

    def __post_init__(self) -> None:
        check_ranges(self)  # UserError for a value out of its field's range
        if self.n_embd % self.n_head:
            raise UserError(
                f"n_embd {self.n_embd} is no multiple of n_head {self.n_head}; give another n_head"
            )
        if self.n_head % self.num_kv_heads:  # n_kv_head, or n_head if that is None
            raise UserError(f"n_head {self.n_head} is no multiple of n_kv_head {self.n_kv_head}")
        # RoPE rotates pairs of channels
        if self.position == "rotary" and self.head_size % 2:
            raise UserError(f"a head is {self.head_size} wide; rotary positions need an even width")

        # An explicit value that equals the default becomes None, because configs of the same
        # architecture have to compare equal, for example when a run resumes. object.__setattr__
        # gets around frozen=True.
        if self.n_kv_head == self.n_head:
            object.__setattr__(self, "n_kv_head", None)
        if self.n_inner == 4 * self.n_embd:
            object.__setattr__(self, "n_inner", None)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: vocab_size rounded up to a multiple of 64 (50257 -> 50304), for
        fast matmuls."""
        return -(-self.vocab_size // 64) * 64

    @property
    def is_gated(self) -> bool:
        """True if the activation function takes two inputs for each of its outputs."""
        return self.activation == "swiglu"

    @property
    def num_kv_heads(self) -> int:
        """Number of key/value heads, K: n_kv_head, or n_head if n_kv_head is None."""
        return self.n_kv_head or self.n_head

    @property
    def head_size(self) -> int:
        """Channels of a head, D."""
        return self.n_embd // self.n_head

    @property
    def inner(self) -> int:
        """Width of the MLP's hidden layer, the input of c_proj: n_inner, or 4 n_embd if it is
        None."""
        return self.n_inner or 4 * self.n_embd
