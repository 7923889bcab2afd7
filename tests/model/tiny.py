"""The small model that the tests of model/ share."""

import torch

from model.config import GPTConfig
from model.execution import execute
from model.gpt import GPT
from recipes import parse_recipe

RECIPES = ("gpt2", "modern", "llama,n_kv_head=1")


def tiny_gpt(recipe="gpt2", execution=None, **changes):
    """Return a model of 2 layers and heads, 32 channels, 16 positions and 257 tokens."""
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16, "vocab_size": 257}
    model = GPT(GPTConfig(**sizes | parse_recipe(recipe).model_fields(32) | changes))
    if execution is not None:
        execute(model, execution)
    return model
