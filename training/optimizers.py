"""Which optimizer trains which parameter.

AdamW trains everything, or a recipe's other optimizer trains the blocks' weight matrices and AdamW
the rest. Another optimizer is a file of its own, as training/muon.py, an entry of MOMENTS and a
branch in make_optimizers. The learning rate is set by training/schedule.py, step by step.
"""

import torch

from config import OptimizerOptions
from model.gpt import GPT
from recipes import Recipe
from training.muon import Muon, matrix_groups
from training.parallel.tensor_parallel import by_mesh

# Float32 numbers of state that an optimizer keeps for each entry of a matrix: two moments of AdamW,
# the momentum of Muon. training/forecast/memory.py forecasts memory by them.
MOMENTS = {"adamw": 2, "muon": 1}


def make_optimizers(
    model: GPT, options: OptimizerOptions, recipe: Recipe, dtype: torch.dtype = torch.float32
) -> list[torch.optim.Optimizer]:
    """Return AdamW (Loshchilov and Hutter 2019), one for each kind of parameters, and Muon if the
    recipe asks for it. Together they train each parameter once.

    Before each step the caller sets the "lr" of every group to the learning rate times the group's
    "lr_scale" (training/schedule.py). Muon's matmuls run in `dtype`.
    """
    matrices = []  # attention and MLP
    embeddings = []
    heads = []  # an untied head, or a reward model's
    vectors = []  # biases and gains
    for name, p in model.named_parameters():  # a tied head is named once, as the embedding
        if p.dim() < 2:
            vectors.append(p)
        elif name.startswith("transformer.h."):
            matrices.append(p)
        elif name.startswith("transformer."):
            embeddings.append(p)
        else:
            heads.append(p)

    # Without Muon, AdamW decays matrices, embeddings and an untied head, as in nanoGPT and llm.c.
    # Beside Muon, which decays its matrices, AdamW decays nothing, as in nanochat. Vectors never
    # decay.
    assert options.weight_decay is not None  # resolved from the recipe already
    has_muon = recipe.optimizer == "muon"
    adamw_decay = 0.0 if has_muon else options.weight_decay
    adamw_groups = [
        {"params": embeddings, "lr_scale": recipe.embedding_rate, "weight_decay": adamw_decay},
        {"params": heads, "lr_scale": recipe.head_rate, "weight_decay": adamw_decay},
    ]
    # With tensor parallelism, biases of linear layers lie on another mesh than vectors of norms.
    for parameters in by_mesh(vectors):
        adamw_groups.append({"params": parameters, "lr_scale": 1.0, "weight_decay": 0.0})
    if not has_muon:
        adamw_groups.append({"params": matrices, "lr_scale": 1.0, "weight_decay": adamw_decay})

    # Each group gets its own optimizer: float16's GradScaler unscales all gradients of an optimizer
    # in one operation, which needs them on one mesh. It reduces found_inf over that mesh, and
    # scaler.update adds it up over optimizers: so processes that share a block keep one scale.
    betas = (options.beta1, options.beta2)
    optimizers: list[torch.optim.Optimizer] = []
    for group in adamw_groups:
        if group["params"]:  # a tied head leaves its group empty
            optimizers.append(torch.optim.AdamW([group], betas=betas, fused=True))
    if has_muon:
        optimizers.append(Muon(matrix_groups(model), recipe, options.weight_decay, dtype))
    return optimizers
