"""Which optimizer trains which parameter.

AdamW trains all parameters, or the recipe's optimizer (Muon) trains the weight matrices of the
blocks and AdamW the rest. training/schedule.py sets the learning rate before each step.

To add an optimizer, write a file like training/muon.py, an entry of MOMENTS and a branch in
make_optimizers. training/parallel/own_rows.py saves and resumes its state, and assumes two things:
- Each state tensor is 0-dim or has the rows of its parameter, divided among processes alike.
- A step with a learning rate of 0 creates the whole state, and changes no weight.
"""

import torch

from config import OptimizerOptions
from model.gpt import GPT
from recipes import Recipe
from training.muon import Muon, matrix_groups
from training.parallel.tensor_parallel import by_mesh

# Float32 numbers that an optimizer keeps for each entry of a matrix: the two moments of AdamW, the
# momentum of Muon. Memory and disk space are estimated from them.
MOMENTS = {"adamw": 2, "muon": 1}


def make_optimizers(
    model: GPT, options: OptimizerOptions, recipe: Recipe, dtype: torch.dtype = torch.float32
) -> list[torch.optim.Optimizer]:
    """Return one AdamW (Loshchilov and Hutter 2019) for each group of parameters, and Muon if the
    recipe asks for it. Together they train each parameter exactly once.

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
    # With Muon, only Muon decays its matrices, as in nanochat. Vectors never decay.
    assert options.weight_decay is not None  # resolved from the recipe already
    has_muon = recipe.optimizer == "muon"  # it trains the matrices
    adamw_decay = 0.0 if has_muon else options.weight_decay
    adamw_groups = [
        {"params": embeddings, "lr_scale": recipe.embedding_rate, "weight_decay": adamw_decay},
        {"params": heads, "lr_scale": recipe.head_rate, "weight_decay": adamw_decay},
    ]
    # With tensor parallelism, biases of linear layers are on another mesh than gains of norms.
    for parameters in by_mesh(vectors):
        adamw_groups.append({"params": parameters, "lr_scale": 1.0, "weight_decay": 0.0})
    if not has_muon:
        adamw_groups.append({"params": matrices, "lr_scale": 1.0, "weight_decay": adamw_decay})

    # GradScaler (float16) unscales all gradients of an optimizer in one call, which fails for
    # DTensors on different meshes. So each group gets its own optimizer. GradScaler reduces the
    # found_inf of each optimizer over its mesh, and `update` sums it over optimizers. So processes
    # that share a block (tensor parallelism) keep the same scale.
    betas = (options.beta1, options.beta2)
    optimizers: list[torch.optim.Optimizer] = []
    for group in adamw_groups:
        if group["params"]:  # a tied head leaves its group empty
            optimizers.append(torch.optim.AdamW([group], betas=betas, fused=True))
    if has_muon:
        optimizers.append(Muon(matrix_groups(model), recipe, options.weight_decay, dtype))
    return optimizers
