"""Recipes: named ways to build and train a model.

A recipe says what --model_type and the options of sizes do not: the architecture beside its sizes,
the optimizer, the learning rates and their schedule. docs/RECIPES.md says what each part gives.
This file is not about options: config.py lets the user choose a recipe and override it.
"""

import math
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from model.config import SIZED, GPTConfig
from utils.errors import UserError
from utils.ranges import BelowOne, NonNegative, check_ranges

ScheduleName = Literal["cosine", "linear", "wsd"]


@dataclass(frozen=True)
class Recipe:
    """A way to build and train a model: architecture, optimizer, learning rates, schedule."""

    model: dict = field(default_factory=dict)
    """Fields of GPTConfig that differ from GPT-2's, by name; mlp_ratio and ngram_bits give those
    that follow from the sizes."""
    mlp_ratio: NonNegative = 4.0
    """Width of the MLP over that of the residual stream, rounded up to a multiple of 64 unless it
    is 4."""
    ngram_bits: NonNegative = 0.0
    """Longest n-gram with an embedding, in bits: log2(V) for each token of a vocabulary of V."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Optimizer of the blocks' matrices, in training/optimizers.py. AdamW trains the rest."""
    max_lr: NonNegative = 6e-4
    """Learning rate after warmup."""
    embedding_rate: NonNegative = 1.0
    """Factor on the learning rate of embeddings."""
    head_rate: NonNegative = 1.0
    """Factor on the learning rate of an untied head."""
    weight_decay: NonNegative = 0.1
    """Decoupled weight decay."""
    normuon: BelowOne = 0.0
    """NorMuon: decay of each row's mean squared update, by whose root it is divided; 0: Muon."""
    momentum: BelowOne = 0.95
    """Muon: momentum."""
    schedule: ScheduleName = "cosine"
    """Decay after warmup, in training/schedule.py."""
    to_zero: bool = False
    """Decay to 0 instead of a tenth of max_lr."""

    def __post_init__(self) -> None:
        check_ranges(self)  # UserError for a value out of its field's range

    def model_fields(self, n_embd: int, block_size: int, vocab_size: int) -> dict:
        """Return the fields of GPTConfig that the recipe gives a model of these sizes, with the
        sizes; layers, heads and dropout are the caller's."""
        fields = {"block_size": block_size, "vocab_size": vocab_size, "n_embd": n_embd}

        # GPTConfig's own default is 4 x n_embd. Other widths are rounded up to 64, as matmuls are
        # slow at odd ones.
        if self.mlp_ratio != 4:
            fields["n_inner"] = 64 * math.ceil(self.mlp_ratio * n_embd / 64)

        # + 1, because the logarithm of a vocabulary of one token would be 0
        ngrams = int(self.ngram_bits / math.log2(vocab_size + 1))
        fields["ngrams"] = max(1, ngrams)  # 1: no embeddings of n-grams
        return fields | self.model  # the recipe's own fields win


LLAMA = {"position": "rotary", "norm": "rms", "activation": "swiglu", "bias": False, "tied": False}
# These values won the searches of docs/RECIPES.md.
MODERN = Recipe(
    model=LLAMA | {"qk_norm": True},
    # SwiGLU has three matrices and GPT-2's MLP has two: this gives both as many weights
    mlp_ratio=8 / 3,
    optimizer="muon",
    max_lr=0.012,
    embedding_rate=0.5,
    head_rate=0.5,
    normuon=0.95,
    momentum=0.9,
    schedule="linear",
    to_zero=True,
)
RECIPES = {
    "gpt2": Recipe(),
    "modern": MODERN,
    # 42 bits are n-grams of up to 5 bytes (8 bits each), or of 2 of GPT-2's tokens (15.6 each)
    "speedrun": replace(MODERN, model=MODERN.model | {"ngram_rows": 65_000}, ngram_bits=42.0),
    "llama": Recipe(model=LLAMA),
}


def parse_recipe(text: str) -> Recipe:
    """Return the recipe of --recipe, NAME or NAME,FIELD=VALUE,...; a FIELD is one of Recipe or one
    of GPTConfig that is no option of its own. Raises UserError for an unknown name or value."""
    name, *changes = text.split(",")  # "modern,qk_norm=False"
    if name not in RECIPES:
        raise UserError(f"there is no recipe {name!r}; there are {', '.join(RECIPES)}")
    recipe = RECIPES[name]
    training_fields = [field.name for field in fields(Recipe) if field.name != "model"]
    model_fields = [field.name for field in fields(GPTConfig) if field.name not in SIZED]
    for change in changes:
        field_name, _, text = change.strip().partition("=")  # "qk_norm", "=", "False"
        if field_name in training_fields:
            # the class attribute is the field's default, which tells the type of the value
            value = parse_value(field_name, text, getattr(Recipe, field_name))
            recipe = replace(recipe, **{field_name: value})  # type: ignore[arg-type]  # any field
        elif field_name in model_fields:
            value = parse_value(field_name, text, getattr(GPTConfig, field_name))
            # GPTConfig checks the value when the model is built
            recipe = replace(recipe, model=recipe.model | {field_name: value})
        else:
            names = ", ".join(training_fields + model_fields)
            raise UserError(f"a recipe has no {field_name!r}, but {names}")
    return recipe


def parse_value(name: str, text: str, default: float | str | None) -> float | str:
    """Return the value of a field that a text stands for; it has the type of the field's default,
    int where that is None. Raises UserError for other text."""
    # n_kv_head and n_inner, the fields with a default of None, are integers
    value_type = int if default is None else type(default)
    try:
        if value_type is bool:
            return {"True": True, "False": False}[text]  # bool("False") would be True
        return value_type(text)
    except (ValueError, KeyError) as error:
        expected = "True or False" if value_type is bool else value_type.__name__
        raise UserError(f"{name}={text} in a recipe must be {expected}") from error
