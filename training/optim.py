"""Parameter groups and optimizers."""

from collections import defaultdict

import torch
import torch.nn as nn

from config import TrainConfig
from model.gpt import GPT
from training.muon import Muon


def make_optimizers(
    model: GPT, config: TrainConfig, dtype: torch.dtype = torch.float32
) -> list[torch.optim.Optimizer]:
    """Return AdamW (Loshchilov and Hutter 2019), with Muon for the blocks' matrices if asked for.

    The caller sets the "lr" of every group before each step: the learning rate times the group's
    "lr_scale". AdamW alone decays matrices and embeddings, as in nanoGPT and llm.c; beside Muon,
    which decays its matrices, nothing. Muon's matmuls run in `dtype`.
    """
    recipe, betas = config.resolved_recipe, (config.beta1, config.beta2)
    muon, decay = recipe.optimizer == "muon", recipe.weight_decay
    adamw_decay = 0.0 if muon else decay
    matrices = [p for p in model.transformer.h.parameters() if p.dim() >= 2]
    embeddings = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    head = [model.head_weight] if model.config.has_own_head else []
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": [] if muon else matrices, "lr_scale": 1.0, "weight_decay": adamw_decay},
        {"params": embeddings, "lr_scale": recipe.embedding_rate, "weight_decay": adamw_decay},
        {"params": head, "lr_scale": recipe.head_rate, "weight_decay": adamw_decay},
        {"params": vectors, "lr_scale": recipe.vector_rate, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW([g for g in groups if g["params"]], betas=betas, fused=True)
    options = {"weight_decay": decay, "cautious": recipe.cautious, "normuon": recipe.normuon}
    return [adamw, Muon(muon_groups(model), dtype=dtype, **options)] if muon else [adamw]


def muon_groups(model: GPT) -> list[dict]:
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
