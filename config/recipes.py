"""Recipes: named ways to build and train a model."""

import ast
import math
from dataclasses import asdict, dataclass, field, fields, replace

from model.config import SIZED, GPTConfig
from utils.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Recipe:
    """A way to build and train a model: architecture, optimizer, learning rates, schedule."""

    model: dict = field(default_factory=dict)
    """Fields of GPTConfig that differ from GPT-2's."""
    mlp_ratio: float = 4.0
    """Width of the MLP over that of the residual stream, rounded up to 64 unless it is 4."""
    ngram_bits: float = 0.0
    """Longest n-gram with an embedding, in bits: log2(V) for each token of a vocabulary of V."""
    zero_init: bool = False
    """Initialize the projections into the residual stream to zero."""
    optimizer: str = "adamw"
    """Optimizer of the blocks' matrices, in training/optim.py. AdamW trains the rest."""
    max_lr: float = 6e-4
    """Learning rate after warmup."""
    embedding_rate: float = 1.0
    """Factor on the learning rate of embeddings."""
    head_rate: float = 1.0
    """Factor on the learning rate of an untied head."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""
    cautious: bool = False
    """Muon: decay only weights that the update makes smaller."""
    normuon: float = 0.0
    """NorMuon: decay of each row's mean squared update, by which it is divided; 0: Muon."""
    momentum: float = 0.95
    """Muon: momentum."""
    schedule: str = "cosine"
    """Decay after warmup, in training/schedule.py."""
    to_zero: bool = False
    """Decay to 0 instead of a tenth of max_lr."""

    def shape(self, n_embd: int, block_size: int, vocab_size: int) -> dict:
        """Return the fields of GPTConfig that differ from GPT-2's, for a model of these sizes."""
        shape = {"block_size": block_size, "vocab_size": vocab_size, "n_embd": n_embd}
        inner = 64 * math.ceil(self.mlp_ratio * n_embd / 64)
        if self.mlp_ratio != 4 and inner != 4 * n_embd:  # the default
            shape["n_inner"] = inner
        if (ngrams := int(self.ngram_bits / math.log2(vocab_size + 1))) > 1:
            shape["ngrams"] = ngrams
        return shape | self.model

    def __str__(self) -> str:
        """Return it as text that parse_recipe reads, which later changes of RECIPES leave alone."""
        default, own = asdict(Recipe()), asdict(self)
        changed = {name: x for name, x in own.items() if x != default[name]} | self.model
        return ",".join(["gpt2", *(f"{k}={x}" for k, x in changed.items() if k != "model")])


LLAMA = {"position": "rotary", "norm": "rms", "activation": "swiglu", "bias": False, "tied": False}
MODERN = Recipe(
    model=LLAMA | {"qk_norm": True},
    mlp_ratio=8 / 3,
    zero_init=True,
    optimizer="muon",
    max_lr=0.012,
    embedding_rate=0.5,
    head_rate=0.5,
    cautious=True,
    normuon=0.95,
    momentum=0.9,
    schedule="linear",
    to_zero=True,
)
RECIPES = {
    "gpt2": Recipe(),
    "modern": MODERN,
    # n-grams of up to 5 bytes, or 2 of GPT-2's tokens
    "speedrun": replace(MODERN, model=MODERN.model | {"ngram_rows": 65_000}, ngram_bits=42.0),
    "llama": Recipe(model=LLAMA),
}


def parse_recipe(text: str) -> Recipe:
    """Return the recipe of NAME,FIELD=VALUE,...; raise UserError for an unknown name or value."""
    name, *changes = (part.strip() for part in text.split(","))
    if name not in RECIPES:
        raise UserError(f"there is no recipe {name!r}; there are {', '.join(RECIPES)}")
    recipe = RECIPES[name]
    kinds = {f.name: type(getattr(recipe, f.name)) for f in fields(Recipe) if f.name != "model"}
    of_model = [f.name for f in fields(GPTConfig) if f.name not in SIZED]
    for key, _, value in (change.partition("=") for change in changes):
        try:
            parsed = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            parsed = value
        if key in of_model:
            recipe = replace(recipe, model={**recipe.model, key: parsed})
        elif key in kinds:
            parsed = float(parsed) if kinds[key] is float and type(parsed) is int else parsed
            if type(parsed) is not kinds[key]:
                raise UserError(f"{key}={value} in a recipe must be a {kinds[key].__name__}")
            recipe = replace(recipe, **{key: parsed})
        else:
            raise UserError(f"a recipe has no {key!r}{did_you_mean(key, [*kinds, *of_model])}")
    return recipe
