"""The small model that the tests of model/ share."""

import torch

from model.config import GPTConfig
from model.execution import execute
from model.gpt import GPT
from recipes import parse_recipe

RECIPES = ("gpt2", "modern", "speedrun", "llama,n_kv_head=1")


def tiny_gpt(recipe="gpt2", execution=None, **changes):
    """Return a model of 2 layers and heads, 32 channels, 16 positions and 257 tokens."""
    torch.manual_seed(0)
    shape = parse_recipe(recipe).model_fields(32, 16, 257)
    model = GPT(GPTConfig(**{"n_layer": 2, "n_head": 2, **shape, **changes}))
    if execution is not None:
        execute(model, execution)
    if model.config.ngrams > 1:
        torch.nn.init.normal_(model.transformer.ngrams.weight, std=0.02)  # 0 would hide mistakes
    return model
