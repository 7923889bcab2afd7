"""Parameter groups and optimizers.

An optimizer of the blocks' matrices is an entry of MOMENTS, a branch here and a file of its own.
"""

from collections import defaultdict

import torch
import torch.nn as nn

from config.options import OptimizerOptions
from config.recipes import Recipe
from model.gpt import GPT
from training.muon import Muon
from utils.errors import UserError

MOMENTS = {"adamw": 2, "muon": 1}  # float32 numbers of state for each weight of a matrix


def make_optimizers(
    model: GPT, options: OptimizerOptions, recipe: Recipe, dtype: torch.dtype = torch.float32
) -> list[torch.optim.Optimizer]:
    """Return AdamW (Loshchilov and Hutter 2019), with the recipe's optimizer for the blocks'
    matrices if that is another.

    The caller sets the "lr" of every group before each step: the learning rate times the group's
    "lr_scale". AdamW alone decays matrices and embeddings, as in nanoGPT and llm.c; beside Muon,
    which decays its matrices, nothing. Muon's matmuls run in `dtype`, and on a GPU the rest of its
    step is compiled as the model is.
    """
    if recipe.optimizer not in MOMENTS:
        raise UserError(f"a recipe's optimizer is one of {', '.join(MOMENTS)}")
    alone, decay = recipe.optimizer == "adamw", options.weight_decay
    adamw_decay = decay if alone else 0.0
    matrices = [p for p in model.transformer.h.parameters() if p.dim() >= 2]
    embeddings = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    known = {id(p) for p in [*matrices, *embeddings]}
    heads = [p for p in model.parameters() if p.dim() >= 2 and id(p) not in known]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices if alone else [], "lr_scale": 1.0, "weight_decay": adamw_decay},
        {"params": embeddings, "lr_scale": recipe.embedding_rate, "weight_decay": adamw_decay},
        {"params": heads, "lr_scale": recipe.head_rate, "weight_decay": adamw_decay},
        {"params": vectors, "lr_scale": 1.0, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    adamw = torch.optim.AdamW(groups, betas=(options.beta1, options.beta2), fused=True)
    if alone:
        return [adamw]
    compiled = options.use_torch_compile and matrices[0].is_cuda and options.sharding == "none"
    return [adamw, Muon(stacked_matrices(model), recipe, decay, dtype, compiled)]


def stacked_matrices(model: GPT) -> list[dict]:
    """Return the blocks' matrices, grouped by shape and by the rows of the matrices that a weight
    stacks: queries, keys and values; both halves of SwiGLU."""
    config = model.config
    kv_rows = config.kv_heads * config.head_size
    split_sizes = {"c_attn": (config.n_embd, kv_rows, kv_rows)}
    if config.activation == "swiglu":
        split_sizes["c_fc"] = (config.inner, config.inner)
    groups = defaultdict(list)
    for name, p in model.transformer.h.named_parameters():
        if p.dim() >= 2:
            rows = split_sizes.get(name.split(".")[-2], (p.size(0),))  # "0.attn.c_attn.weight"
            groups[p.shape, rows].append(p)
    return [{"params": p, "lr_scale": 1.0, "split_sizes": rows} for (_, rows), p in groups.items()]
