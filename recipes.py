"""Recipes: how a model is built and trained, by name. docs/RECIPES.md has what each part gives.

`gpt2` is that of GPT-2 and GPT-3, `modern` what has been found since, `llama` the shape of a LLaMA.
NAME,FIELD=VALUE,... changes one: of Recipe below, or of GPTConfig where its default is GPT-2's.
"""

import ast
import sys
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches

from model.config import SIZED, GPTConfig, ModelError

CHOICES = {"optimizer": ("adamw", "muon"), "schedule": ("cosine", "linear", "wsd")}


@dataclass(frozen=True)
class Recipe:
    """What a recipe settles; flags given on the command line count before it."""

    model: dict = field(default_factory=dict)
    """Fields of GPTConfig that are not GPT-2's."""
    optimizer: str = "adamw"
    """Or muon, for the blocks' matrices."""
    max_lr: float = 6e-4
    """Learning rate after warmup; muon's, where the blocks' matrices have it."""
    embedding_rate: float = 1.0
    """Learning rate of embeddings, as a multiple."""
    head_rate: float = 1.0
    """Learning rate of an untied head, as a multiple."""
    vector_rate: float = 1.0
    """Learning rate of norms and biases, as a multiple."""
    weight_decay: float = 0.1
    cautious: bool = False
    """Muon decays only weights that its update makes smaller."""
    momentum_warmup: int = 0
    """Steps in which Muon's momentum rises from 0.85 to 0.95."""
    schedule: str = "cosine"
    """Or linear, or wsd: constant, then linear."""
    decay: float = 0.2
    """Share of the steps in which wsd decays."""
    to_zero: bool = False
    """The learning rate ends at 0, not at a tenth of the highest."""

    def __post_init__(self) -> None:
        """Raises ModelError for what cannot be."""
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                found = getattr(self, name)
                raise ModelError(f"{name}={found} in a recipe must be one of {', '.join(choices)}")
        for f in fields(self):
            value = getattr(self, f.name)
            most = {"decay": 1.0}.get(f.name, sys.float_info.max)
            if type(value) in (int, float) and not 0 <= value <= most:
                raise ModelError(f"{f.name}={value} in a recipe must be between 0 and {most:g}")


RECIPES = {
    "gpt2": Recipe(),
    "modern": Recipe(
        model={
            "position": "rotary",
            "norm": "rms",
            "qk_norm": True,
            "activation": "relu2",
            "bias": False,
            "tied": False,
        },
        optimizer="muon",
        max_lr=0.012,
        weight_decay=0.1,
        cautious=True,
        momentum_warmup=300,
        schedule="linear",
        to_zero=True,
    ),
    "llama": Recipe(
        model={
            "position": "rotary",
            "norm": "rms",
            "activation": "swiglu",
            "bias": False,
            "tied": False,
        },
    ),
}


def recipe_of(text: str) -> Recipe:
    """The recipe that NAME,FIELD=VALUE,... describes. Raises ModelError, naming what is wrong."""
    name, *changes = (part.strip() for part in text.split(","))
    if name not in RECIPES:
        raise ModelError(f"there is no recipe {name!r}; there are {', '.join(RECIPES)}")
    recipe = RECIPES[name]
    of_model = [f.name for f in fields(GPTConfig) if f.name not in SIZED]
    of_recipe = [f.name for f in fields(Recipe) if f.name != "model"]
    for change in changes:
        key, _, value = (part.strip() for part in change.partition("="))
        if key not in of_model + of_recipe:
            near = get_close_matches(key, of_model + of_recipe, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ModelError(f"a recipe has no {key!r}{hint}")
        try:
            parsed = ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            parsed = value
        if key in of_model:
            recipe = replace(recipe, model={**recipe.model, key: parsed})
        else:
            kind = type(getattr(recipe, key))
            if kind is float and type(parsed) is int and abs(parsed) < 2**53:
                parsed = float(parsed)
            if type(parsed) is not kind:
                raise ModelError(f"{key}={value} in a recipe must be of type {kind.__name__}")
            recipe = replace(recipe, **{key: parsed})
    return recipe
