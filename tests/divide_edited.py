"""Divide models among the processes that torchrun has started, and print which are refused:
test_tensor_parallel.py runs it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import edited
from torch.distributed.device_mesh import init_device_mesh

from model.config import GPTConfig
from model.gpt import GPT
from model.initial_weights import build_without_weights
from recipes import parse_recipe
from training.parallel.data_parallel import refuse_wrong_division
from utils import distributed
from utils.errors import UserError

process = distributed.start("cpu", "float32", tensor_parallel=2)
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
for model_class in (GPT, edited.SoftCapped, edited.WithQueryScale):
    for recipe in ("gpt2", "modern", "llama,n_kv_head=2"):
        fields = parse_recipe(recipe).model_fields(64)
        config = GPTConfig(64, 257, n_layer=2, n_head=4, n_embd=64, **fields)
        try:
            refuse_wrong_division(build_without_weights(model_class, config), mesh, process)
            process.print(f"{model_class.__name__}: divided")
        except UserError as error:
            process.print(f"{model_class.__name__}: {error}")
