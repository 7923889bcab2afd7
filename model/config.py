"""GPTConfig: the architecture of a model, and the named GPT-2 sizes."""

from dataclasses import dataclass

from utils.errors import UserError

# Radford et al. 2019, table 2: the four sizes OpenAI released.
SIZES = {
    "gpt2": {"n_layer": 12, "n_head": 12, "n_embd": 768},  # 124M parameters
    "gpt2-medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024},  # 350M
    "gpt2-large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},  # 774M
    "gpt2-xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},  # 1558M
}
NICKNAMES = {"124M": "gpt2", "350M": "gpt2-medium", "774M": "gpt2-large", "1558M": "gpt2-xl"}
SIZED = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "dropout")  # flags of their own

COUNTS = "block_size vocab_size n_layer n_head n_embd ngrams ngram_rows"
RULES = (  # fields, a test of their values, and what it asks for
    (COUNTS, lambda x: type(x) is int and x >= 1, "a whole number of at least 1"),
    ("n_kv_head n_inner", lambda x: x is None or type(x) is int and x >= 1, "at least 1, or None"),
    ("dropout", lambda x: 0 <= x < 1, "at least 0 and below 1"),
    ("rope_base norm_eps", lambda x: type(x) in (int, float) and 0 < x < 1e30, "a number above 0"),
    ("qk_norm bias tied", lambda x: type(x) is bool, "True or False"),
    ("position", ("learned", "rotary").__contains__, "learned or rotary"),
    ("norm", ("layer", "rms").__contains__, "layer or rms"),
    ("activation", ("gelu", "relu2", "swiglu").__contains__, "gelu, relu2 or swiglu"),
)


@dataclass(frozen=True)
class GPTConfig:
    """Architecture of a GPT; the defaults are GPT-2's. Raises UserError for one that cannot be."""

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
    """learned (a table of positions) or rotary (RoPE)."""
    rope_base: float = 10_000.0
    norm: str = "layer"
    """Norm of the residual stream: layer (LayerNorm) or rms (RMSNorm)."""
    norm_eps: float = 1e-5
    """Added to the mean square in a norm."""
    qk_norm: bool = False
    """Normalise queries and keys to a root mean square of 1."""
    activation: str = "gelu"
    """Activation of the MLP: gelu, relu2 (squared ReLU) or swiglu (gated SiLU)."""
    bias: bool = True
    tied: bool = True
    """Share one table between the token embedding and the head."""
    ngrams: int = 1
    """Longest n-gram whose embedding is added to the token's; 1: none."""
    ngram_rows: int = 65_536
    """Rows of the table that all n-grams share by their hash."""

    def __post_init__(self) -> None:
        for names, is_valid, rule in RULES:
            for name in names.split():
                if not is_valid(value := getattr(self, name)):
                    raise UserError(f"{name} is {value!r}; it must be {rule}")
        if self.n_embd % self.n_head or self.n_head % self.kv_heads:
            heads = f"n_head {self.n_head}, or that by n_kv_head {self.kv_heads}"
            raise UserError(f"n_embd {self.n_embd} does not divide by {heads}")
        if self.position == "rotary" and self.head_size % 2:
            raise UserError(f"a head is {self.head_size} wide; rotary positions need an even width")
        for name, default in (("n_kv_head", self.n_head), ("n_inner", 4 * self.n_embd)):
            if getattr(self, name) == default:  # equal architectures compare equal
                object.__setattr__(self, name, None)

    @property
    def size(self) -> str | None:
        """Name in SIZES of this shape, None if it has none."""
        shape = {key: getattr(self, key) for key in SIZES["gpt2"]}
        return next((name for name, size in SIZES.items() if size == shape), None)

    @property
    def is_gpt2(self) -> bool:
        return not self.differences(GPTConfig())

    def differences(self, other: "GPTConfig") -> dict:
        """Return the fields, but those of SIZED, that have another value than in `other`."""
        mine = {name: value for name, value in vars(self).items() if name not in SIZED}
        return {name: value for name, value in mine.items() if value != getattr(other, name)}

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: a multiple of 64 (50257 -> 50304), for fast matmuls."""
        return -(-self.vocab_size // 64) * 64

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def head_size(self) -> int:
        return self.n_embd // self.n_head

    @property
    def inner(self) -> int:
        return self.n_inner or 4 * self.n_embd
