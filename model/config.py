"""GPTConfig: the architecture of a model, and the named GPT-2 sizes."""

from dataclasses import dataclass
from reprlib import repr as brief

# Radford et al. 2019, table 2: the four sizes OpenAI released.
SIZES = {
    "gpt2": {"n_layer": 12, "n_head": 12, "n_embd": 768},  # 124M parameters
    "gpt2-medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024},  # 350M
    "gpt2-large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},  # 774M
    "gpt2-xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},  # 1558M
}
NICKNAMES = {"124M": "gpt2", "350M": "gpt2-medium", "774M": "gpt2-large", "1558M": "gpt2-xl"}


class ModelError(ValueError):
    """An architecture that cannot be built, or input that a model cannot take."""


@dataclass(frozen=True)
class GPTConfig:
    """Everything needed to build a GPT. Raises ModelError for a shape that cannot be built."""

    block_size: int = 1024
    """Longest sequence in tokens: the number of learned positions."""
    vocab_size: int = 50257
    """Token ids the tokenizer knows."""
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ModelError(
                    f"{name} is {brief(value)}; it must be a whole number of at least 1"
                )
        if self.n_embd % self.n_head:
            raise ModelError(
                f"n_embd {self.n_embd} does not divide by n_head {self.n_head}; "
                "every head needs the same width"
            )
        if type(self.dropout) not in (int, float) or not 0 <= self.dropout < 1:
            raise ModelError(f"dropout is {brief(self.dropout)}; it must be at least 0 and below 1")

    @property
    def size(self) -> str | None:
        """The name in SIZES of this shape, None if it has none."""
        shape = {key: getattr(self, key) for key in SIZES["gpt2"]}
        return next((name for name, size in SIZES.items() if size == shape), None)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: a multiple of 64 (50257 -> 50304), which matrix units prefer."""
        return -(-self.vocab_size // 64) * 64
