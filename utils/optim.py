"""Parameter groups and the optimizer."""

import torch
import torch.nn as nn


def make_optimizer(
    model: nn.Module, *, weight_decay: float, betas: tuple[float, float]
) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019), fused. The caller sets the learning rate at each step.

    Matrices and embeddings decay; biases and LayerNorms, which are vectors, do not: the choice of
    nanoGPT and llm.c.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=betas, fused=True)
