"""Recipes: named ways to build and train a model.

A recipe sets what --model_type and the options of sizes do not set: the rest of the architecture,
the optimizer, the learning rates and their schedule. docs/RECIPES.md says what each part gains.
This file is not about options: config.py lets the user choose a recipe and override it.
"""

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np

from model.config import NOT_IN_RECIPES, GPTConfig
from utils.errors import UserError
from utils.ranges import BelowOne, NonNegative, check_ranges

ScheduleName = Literal["cosine", "linear", "wsd"]

# By the channels of a model: AdamW's learning rate, and the tokens of a step. From 768 channels on
# they are those of GPT-3's sizes (Brown et al. 2020, table 2.1). gpt2-large (1,280 channels) and
# gpt2-xl (1,600) have the values of the GPT-3 sizes nearest in parameters. Those of 128 and 384
# channels were measured (docs/RECIPES.md). Narrower models have the values of 128: at 64 channels a
# higher rate was worse (docs/BENCHMARKS.md, --minutes).
RATE_AND_BATCH = {
    128: (4e-3, 2_048),
    384: (2e-3, 65_536),
    768: (6e-4, 524_288),
    1024: (3e-4, 524_288),
    1280: (2.5e-4, 524_288),
    1536: (2.5e-4, 524_288),
    1600: (2e-4, 1_048_576),
    2048: (2e-4, 1_048_576),
    2560: (1.6e-4, 1_048_576),
    4096: (1.2e-4, 2_097_152),
    5120: (1e-4, 2_097_152),
    12288: (6e-5, 3_145_728),
}


def rate_and_batch(n_embd: int) -> tuple[float, int]:
    """Return AdamW's learning rate and the tokens of a step for a model of `n_embd` channels: those
    of RATE_AND_BATCH. Between two of its widths they are a power of the width, outside of them
    those of the nearest width; then tokens are rounded to a power of two."""
    if n_embd in RATE_AND_BATCH:
        return RATE_AND_BATCH[n_embd]  # (6e-4, 524_288) for 768
    log_width = math.log(n_embd)
    log_widths = np.log(list(RATE_AND_BATCH))  # rising, as np.interp needs
    log_rates, log_tokens = np.log(list(RATE_AND_BATCH.values())).T  # (widths,) each
    rate = math.exp(np.interp(log_width, log_widths, log_rates))
    # a power of two divides among 2, 4, 8, ... processes
    exponent = np.interp(log_width, log_widths, log_tokens) / math.log(2)
    return float(f"{rate:.3g}"), 2 ** round(exponent)  # the rate has three digits


@dataclass(frozen=True)
class Recipe:
    """A way to build and train a model: architecture, optimizer, learning rates, schedule."""

    model: dict[str, Any] = field(default_factory=dict)
    """Fields of GPTConfig by name; those that are left out have GPT-2's values. Without n_inner,
    mlp_ratio gives it."""
    mlp_ratio: NonNegative = 4.0
    """Width of the MLP divided by n_embd. Unless the ratio is 4, the width is rounded up to a
    multiple of 64."""
    optimizer: str = "adamw"
    """Optimizer of the blocks' matrices, adamw or muon: a name in MATRIX_OPTIMIZERS of
    training/optimizers.py. AdamW trains all the rest."""
    max_lr: NonNegative | None = None
    """Learning rate after warmup; None: AdamW's for the width of the model (rate_and_batch)."""
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

    def model_fields(self, n_embd: int) -> dict[str, Any]:
        """Return the fields of GPTConfig that the recipe sets, by name, for a model of n_embd
        channels. The caller adds the fields of NOT_IN_RECIPES."""
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
    """Return the recipe of a --recipe, NAME or NAME,FIELD=VALUE,... A FIELD is a field of Recipe
    other than `model`, or a field of GPTConfig outside of NOT_IN_RECIPES. Raises UserError for an
    unknown name, a value of another type, or one out of the range of a field of Recipe."""
    recipe_name, *changes = text.split(",")  # "modern", ["qk_norm=False"]
    if recipe_name not in RECIPES:
        raise UserError(f"there is no recipe {recipe_name!r}; there are {', '.join(RECIPES)}")
    recipe = RECIPES[recipe_name]
    # {"mlp_ratio": 4.0, "optimizer": "adamw", ...}: the default of each field that a change may
    # name; parse_value converts to its type
    defaults: dict[str, Any] = {}
    for any_field in fields(Recipe) + fields(GPTConfig):
        # Not "model": a change names fields of GPTConfig one by one. Not those that options or the
        # tokenizer set, such as n_layer.
        if any_field.name not in ("model", *NOT_IN_RECIPES):
            defaults[any_field.name] = any_field.default
    # The default of max_lr is None, which parse_value takes for an int: use gpt2's rate, a float.
    defaults["max_lr"], _ = rate_and_batch(GPTConfig.n_embd)  # 6e-4; _: the tokens of a step
    for change in changes:
        field_name, _, value_text = change.strip().partition("=")  # "qk_norm", "=", "False"
        try:
            value = parse_value(value_text, defaults[field_name])  # the bool False
        except (KeyError, ValueError) as error:
            # "mlp_ratio=4.0, optimizer=adamw, ..."
            of_gpt2 = ", ".join(f"{name}={default}" for name, default in defaults.items())
            raise UserError(
                f"a recipe has no {change.strip()!r}; its fields, as in the recipe gpt2: {of_gpt2}"
            ) from error
        if field_name in vars(recipe):  # a field of Recipe, else of GPTConfig
            recipe = replace(recipe, **{field_name: value})  # type: ignore[arg-type]  # any field
        else:  # GPTConfig checks the value later, when the model is built
            recipe = replace(recipe, model=recipe.model | {field_name: value})
    return recipe


def parse_value(text: str, default: float | str | None) -> float | str:
    """Convert a text to the type of a field's default, or to int if the default is None. Raises
    KeyError or ValueError if the text has another type."""
    if isinstance(default, bool):
        return {"True": True, "False": False}[text]  # bool("False") would be True
    # the fields whose default is None, n_kv_head and n_inner, are integers
    value_type = int if default is None else type(default)
    return value_type(text)
