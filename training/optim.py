"""Parameter groups and optimizers."""

from collections import defaultdict

import torch

from model.gpt import GPT, MLP, Attention
from training.muon import Muon


def make_optimizers(
    model: GPT,
    *,
    weight_decay: float,
    betas: tuple[float, float],
    embedding_rate: float = 1.0,
    head_rate: float = 1.0,
    vector_rate: float = 1.0,
    muon: bool = False,
    cautious: bool = False,
    dtype: torch.dtype = torch.float32,
) -> list[torch.optim.Optimizer]:
    """AdamW (Loshchilov and Hutter 2019), fused; with `muon`, Muon beside it for the matrices of
    the blocks, with products of `dtype`.

    At each step the caller sets the learning rate of every group, to its "rate" times one for all.
    Under AdamW matrices and embeddings decay; biases and norms, which are vectors, do not: the
    choice of nanoGPT and llm.c. Beside Muon only its matrices decay.
    """
    matrices = [p for p in model.transformer.h.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    head = [] if model.config.tied else [model.lm_head.weight]
    chosen = {id(p) for p in (*matrices, *vectors, *head)}
    embeddings = [p for p in model.parameters() if id(p) not in chosen]
    decay = 0.0 if muon else weight_decay
    groups = [
        {"params": [] if muon else matrices, "rate": 1.0, "weight_decay": decay},
        {"params": embeddings, "rate": embedding_rate, "weight_decay": decay},
        {"params": head, "rate": head_rate, "weight_decay": decay},
        {"params": vectors, "rate": vector_rate, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    adamw = torch.optim.AdamW(groups, betas=betas, fused=True)
    if not muon:
        return [adamw]
    alike = defaultdict(list)
    parts = parts_of(model)
    for p in matrices:
        alike[tuple(p.shape), parts.get(id(p), (p.size(0),))].append(p)
    groups = [{"params": ps, "rate": 1.0, "parts": rows} for (_, rows), ps in alike.items()]
    return [adamw, Muon(groups, weight_decay=weight_decay, cautious=cautious, dtype=dtype)]


def parts_of(model: GPT) -> dict[int, tuple[int, ...]]:
    """Rows of the matrices that a weight is made of, by the weight's id, where it is several."""
    parts = {}
    for module in model.modules():
        if isinstance(module, Attention):
            parts[id(module.c_attn.weight)] = tuple(
                heads * model.config.head_size for heads in module.heads
            )
        if isinstance(module, MLP) and module.activation == "swiglu":
            parts[id(module.c_fc.weight)] = (model.config.inner,) * 2
    return parts
