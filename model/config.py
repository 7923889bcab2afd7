"""GPTConfig: the architecture of a model, and the named GPT-2 sizes."""

import math
from dataclasses import asdict, dataclass
from reprlib import repr as brief

from utils.errors import UserError

# Radford et al. 2019, table 2: the four sizes OpenAI released.
SIZES = {
    "gpt2": {"n_layer": 12, "n_head": 12, "n_embd": 768},  # 124M parameters
    "gpt2-medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024},  # 350M
    "gpt2-large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},  # 774M
    "gpt2-xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},  # 1558M
}
NICKNAMES = {"124M": "gpt2", "350M": "gpt2-medium", "774M": "gpt2-large", "1558M": "gpt2-xl"}
CHOICES = {
    "position": ("learned", "rotary"),
    "norm": ("layer", "rms"),
    "activation": ("gelu", "relu2", "swiglu"),
}
SIZED = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "dropout")  # flags of their own
COUNTS = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "ngrams", "ngram_rows")
SWITCHES = ("qk_norm", "bias", "tied")


@dataclass(frozen=True)
class GPTConfig:
    """Architecture of a GPT; the defaults are GPT-2's, docs/RECIPES.md has the sources.

    Raises UserError for an architecture that cannot be built.
    """

    block_size: int = 1024
    """Longest sequence in tokens, and the number of learned positions."""
    vocab_size: int = 50257
    """Token ids of the tokenizer, without padding."""
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    n_kv_head: int | None = None
    """Key/value heads, each shared by n_head / n_kv_head query heads; None: n_head."""
    n_inner: int | None = None
    """Width of the MLP's hidden layer; None: 4 x n_embd."""
    position: str = "learned"
    """Positions: learned (a table) or rotary (RoPE)."""
    rope_base: float = 10_000.0
    """Base of the rotary frequencies."""
    norm: str = "layer"
    """Norm of the residual stream: layer (LayerNorm) or rms (RMSNorm)."""
    qk_norm: bool = False
    """Normalise queries and keys to a root mean square of 1."""
    activation: str = "gelu"
    """Activation of the MLP: gelu, relu2 (squared ReLU) or swiglu (gated SiLU)."""
    bias: bool = True
    """Biases in linear layers and LayerNorms."""
    tied: bool = True
    """Share one table between the token embedding and the head."""
    ngrams: int = 1
    """Longest n-gram whose embedding is added to the token's; 1: none."""
    ngram_rows: int = 65_536
    """Rows of the table that all n-grams share by their hash."""

    def __post_init__(self) -> None:
        for name in COUNTS:
            self.check_count(name)
        for name in ("n_kv_head", "n_inner"):
            if getattr(self, name) is not None:
                self.check_count(name)
        if self.n_embd % self.n_head:
            raise UserError(
                f"n_embd {self.n_embd} does not divide by n_head {self.n_head}; "
                "every head needs the same width"
            )
        if self.n_head % self.kv_heads:
            raise UserError(
                f"n_head {self.n_head} does not divide by n_kv_head {self.n_kv_head}; "
                "each key/value head must serve the same number of query heads"
            )
        if type(self.dropout) not in (int, float) or not 0 <= self.dropout < 1:
            raise UserError(f"dropout is {brief(self.dropout)}; it must be at least 0 and below 1")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                value = brief(getattr(self, name))
                raise UserError(f"{name} is {value}; it must be one of {', '.join(choices)}")
        for name in SWITCHES:
            if type(getattr(self, name)) is not bool:
                raise UserError(f"{name} is {brief(getattr(self, name))}; it must be True or False")
        if type(self.rope_base) not in (int, float) or not 0 < self.rope_base < math.inf:
            raise UserError(f"rope_base is {brief(self.rope_base)}; it must be a number above 0")
        if self.position == "rotary" and self.head_size % 2:
            raise UserError(f"a head is {self.head_size} wide; rotary positions need an even width")

    def check_count(self, name: str) -> None:
        """Raise UserError unless the field is an integer of at least 1."""
        value = getattr(self, name)
        if type(value) is not int or value < 1:
            raise UserError(f"{name} is {brief(value)}; it must be a whole number of at least 1")

    @property
    def size(self) -> str | None:
        """Name in SIZES of this shape, None if it has none."""
        shape = {key: getattr(self, key) for key in SIZES["gpt2"]}
        return next((name for name, size in SIZES.items() if size == shape), None)

    @property
    def is_gpt2(self) -> bool:
        """True for a GPT-2 of any size."""
        return self.differs_from({}) == []

    @property
    def fields(self) -> dict:
        """Values of all fields but those of SIZED."""
        return {name: value for name, value in asdict(self).items() if name not in SIZED}

    def differs_from(self, fields: dict) -> list[str]:
        """Return the fields in which it differs from a GPT-2 of its sizes with `fields` changed."""
        sizes = {name: getattr(self, name) for name in SIZED}
        other = GPTConfig(**sizes, **fields)
        given, theirs = (
            asdict(config) | {"n_kv_head": config.kv_heads, "n_inner": config.inner}
            for config in (self, other)
        )
        return [name for name in given if given[name] != theirs[name]]

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: a multiple of 64 (50257 -> 50304), for fast matmuls."""
        return -(-self.vocab_size // 64) * 64

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.n_kv_head or self.n_head

    @property
    def head_size(self) -> int:
        """Channels of one head."""
        return self.n_embd // self.n_head

    @property
    def inner(self) -> int:
        """Width of the MLP's hidden layer."""
        return self.n_inner or 4 * self.n_embd
