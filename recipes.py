"""Recipes: named ways to build and train a model.

A recipe sets what --model_type and the options of sizes do not set: the rest of the architecture,
the optimizer, the learning rates and their schedule. docs/RECIPES.md says what each part gains.
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
    """Fields of GPTConfig by name, with values that differ from GPT-2's. n_inner, which depends on
    n_embd, is not here: mlp_ratio gives it."""
    mlp_ratio: NonNegative = 4.0
    """Width of the MLP divided by n_embd. Unless the ratio is 4, the width is rounded up to a
    multiple of 64."""
    optimizer: str = "adamw"
    """Optimizer of the blocks' matrices, adamw or muon: a name in MATRIX_OPTIMIZERS of
    training/optimizers.py. AdamW trains all the rest."""
    max_lr: NonNegative = 6e-4
    """Learning rate after warmup."""
    embedding_rate: NonNegative = 1.0
    """Embeddings have this factor times the learning rate."""
    head_rate: NonNegative = 1.0
    """An untied head has this factor times the learning rate."""
    weight_decay: NonNegative = 0.1
    """Decoupled weight decay."""
    normuon: BelowOne = 0.0
    """NorMuon divides each row of an update by the root of a running mean of its squares. This is
    the decay of that mean; 0: plain Muon."""
    momentum: BelowOne = 0.95
    """Muon's momentum."""
    schedule: ScheduleName = "cosine"
    """Decay of the learning rate after warmup (training/schedule.py)."""
    to_zero: bool = False
    """Decay the learning rate to 0, instead of to a tenth of max_lr."""

    def __post_init__(self) -> None:
        check_ranges(self)  # raises UserError for a value out of its field's range

    def model_fields(self, n_embd: int) -> dict:
        """Return the fields of GPTConfig that the recipe sets, by name, for a model of n_embd
        channels. The caller adds the fields of SIZED."""
        # GPTConfig's default width is 4 x n_embd. Other widths are rounded up to a multiple of 64,
        # because matmuls of odd widths are slow.
        model_fields = {}
        if self.mlp_ratio != 4:
            model_fields["n_inner"] = 64 * math.ceil(self.mlp_ratio * n_embd / 64)
        return model_fields | self.model  # an n_inner that the recipe names wins


LLAMA = {"position": "rotary", "norm": "rms", "activation": "swiglu", "bias": False, "tied": False}
# These values won the searches of docs/RECIPES.md.
MODERN = Recipe(
    model=LLAMA | {"qk_norm": True},
    # SwiGLU has three matrices, GPT-2's MLP has two: this ratio gives both equally many weights
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
    "llama": Recipe(model=LLAMA),
}


def parse_recipe(text: str) -> Recipe:
    """Return the recipe of a --recipe, NAME or NAME,FIELD=VALUE,... A FIELD is a field of Recipe or
    a field of GPTConfig outside of SIZED. Raises UserError for an unknown name or wrong value."""
    name, *changes = text.split(",")  # "modern,qk_norm=False"
    if name not in RECIPES:
        raise UserError(f"there is no recipe {name!r}; there are {', '.join(RECIPES)}")
    recipe = RECIPES[name]
    recipe_names = [f.name for f in fields(Recipe) if f.name != "model"]
    # SIZED: the fields of GPTConfig that options or the tokenizer set, such as n_layer
    model_names = [f.name for f in fields(GPTConfig) if f.name not in SIZED]
    for change in changes:
        field_name, _, value_text = change.strip().partition("=")  # "qk_norm", "=", "False"
        if field_name in recipe_names:
            # the class attribute is the default of the field, which tells the type of the value
            value = parse_value(field_name, value_text, getattr(Recipe, field_name))
            recipe = replace(recipe, **{field_name: value})  # type: ignore[arg-type]  # any field
        elif field_name in model_names:
            value = parse_value(field_name, value_text, getattr(GPTConfig, field_name))
            # GPTConfig checks the value later, when the model is built
            recipe = replace(recipe, model=recipe.model | {field_name: value})
        else:
            names = ", ".join(recipe_names + model_names)
            raise UserError(f"a recipe has no {field_name!r}, but {names}")
    return recipe


def parse_value(name: str, text: str, default: float | str | None) -> float | str:
    """Convert a text to the type of the field's default, or to int if the default is None. Raises
    UserError, which gives the `name` of the field, if the text has another type."""
    # the fields whose default is None, n_kv_head and n_inner, are integers
    value_type = int if default is None else type(default)
    try:
        if value_type is bool:
            return {"True": True, "False": False}[text]  # bool("False") would be True
        return value_type(text)
    except (ValueError, KeyError) as error:
        expected = "True or False" if value_type is bool else value_type.__name__
        raise UserError(f"{name}={text} in a recipe must be {expected}") from error
