"""Which optimizer trains which parameter.

AdamW trains all parameters, or the recipe's optimizer (Muon) trains the weight matrices of the
blocks and AdamW the rest. training/schedule.py sets the learning rate before each step.

To add an optimizer for the matrices, write a file like training/muon.py, and an entry of
MATRIX_OPTIMIZERS. training/optimizer_state.py saves and resumes what it keeps. A step with
gradients and a learning rate of 0 must create what is divided among processes.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from config import OptimizerOptions
from model.gpt import GPT
from recipes import Recipe
from training.muon import Muon, matrix_groups
from training.optimizer_state import groups_of, remember_groups
from training.parallel.tensor_parallel import group_by_mesh
from utils.errors import UserError


@dataclass(frozen=True)
class MatrixOptimizer:
    """An optimizer for the matrices of the blocks, as `--recipe NAME,optimizer=...` names it."""

    moments: int
    """Float32 numbers that it keeps for each entry of a matrix. Memory and disk space are estimated
    from them."""
    make: Callable[[list[dict], Recipe, float, torch.dtype], Optimizer] | None = None
    """Takes the groups of matrix_groups, the recipe, the weight decay and the dtype of matmuls.
    None for AdamW, which trains the matrices like all other parameters."""


ADAMW_MOMENTS = 2  # mean and mean square of the gradients
MATRIX_OPTIMIZERS = {
    "adamw": MatrixOptimizer(ADAMW_MOMENTS),
    "muon": MatrixOptimizer(moments=1, make=Muon),  # momentum
}


def matrix_optimizer(recipe: Recipe) -> MatrixOptimizer:
    """Return the optimizer of a recipe. Raises UserError for an unknown name."""
    if recipe.optimizer not in MATRIX_OPTIMIZERS:
        names = ", ".join(MATRIX_OPTIMIZERS)
        raise UserError(f"there is no optimizer {recipe.optimizer!r}; there are {names}")
    return MATRIX_OPTIMIZERS[recipe.optimizer]


def make_optimizers(
    model: GPT, options: OptimizerOptions, recipe: Recipe, dtype: torch.dtype = torch.float32
) -> list[Optimizer]:
    """Return one AdamW (Loshchilov and Hutter 2019) for each group of parameters, and the recipe's
    optimizer for the matrices of the blocks. Together they train each parameter exactly once.

    Before each step the caller sets the "lr" of every group to the learning rate times the group's
    "lr_scale" (training/schedule.py). Muon's matmuls run in `dtype`.
    """
    # Without Muon, AdamW decays matrices, embeddings and an untied head, as in nanoGPT and llm.c.
    # With Muon only its matrices decay. Vectors never decay.
    assert options.weight_decay is not None  # resolved from the recipe already
    adamw_decay = options.weight_decay
    make = matrix_optimizer(recipe).make  # Muon; None if AdamW trains the matrices, too
    grouped_matrices: list[dict] = []  # groups of parameters that AdamW does not train
    if make is not None:
        grouped_matrices = matrix_groups(model)
        adamw_decay = 0.0
    # {"embeddings": [(50304, 768), (1024, 768)], "vectors": [(768,), (768,), (2304,), ...], ...}
    parameters_by_role = sort_parameters(model, except_for=grouped_matrices)
    betas = (options.beta1, options.beta2)  # (0.9, 0.95)
    optimizers: list[Optimizer] = []
    # GradScaler (float16) unscales all gradients of an optimizer in one call, which fails for
    # DTensors on different meshes. So each group gets its own optimizer. GradScaler reduces the
    # found_inf of each optimizer over its mesh, and `update` sums it over optimizers. So processes
    # that share a block (tensor parallelism) keep the same scale.
    for role, lr_scale, weight_decay in [
        ("embeddings", recipe.embedding_rate, adamw_decay),
        ("heads", recipe.head_rate, adamw_decay),
        ("vectors", 1.0, 0.0),
        ("others", 1.0, adamw_decay),
    ]:
        # With tensor parallelism, biases of linear layers are on another mesh than gains of norms.
        for parameters in group_by_mesh(parameters_by_role[role]):
            # set_learning_rates sets "lr" to lr_scale times the learning rate in each step
            group = {"params": parameters, "lr_scale": lr_scale, "weight_decay": weight_decay}
            optimizers.append(torch.optim.AdamW([group], betas=betas, fused=True))
    if make is not None:
        # such as Muon, whose matmuls run in `dtype`, but in float32 instead of float16
        optimizers.append(make(grouped_matrices, recipe, options.weight_decay, dtype))
    check_covers(model, optimizers)  # UserError for a parameter in no group, or in two
    remember_groups(optimizers)  # checkpoints save what differs from these first values
    return optimizers


def sort_parameters(model: GPT, except_for: list[dict]) -> dict[str, list[Tensor]]:
    """Return the parameters that AdamW trains, by what they are: embeddings; heads (an untied head,
    or a reward model's); vectors (biases, gains); others (without Muon, the blocks' matrices).
    Parameters in the groups `except_for` are left out."""
    sorted_already = {p for group in except_for for p in group["params"]}  # Muon's, or none
    in_blocks = set(model.transformer.h.parameters())
    parameters_by_role: dict[str, list[Tensor]] = defaultdict(list)
    for module in model.modules():
        for p in module.parameters(recurse=False):
            # a shared parameter is of several modules; a tied head is the embedding
            if p in sorted_already or not p.requires_grad:
                continue
            sorted_already.add(p)
            if p.dim() < 2:
                role = "vectors"
            elif isinstance(module, nn.Embedding):
                role = "embeddings"
            elif p in in_blocks:
                role = "others"
            elif isinstance(module, nn.Linear):
                role = "heads"
            else:  # such as a table of positions
                role = "embeddings"
            parameters_by_role[role].append(p)
    return parameters_by_role


def check_covers(model: GPT, optimizers: list[Optimizer]) -> None:
    """Raise UserError unless each trainable parameter is in exactly one group of all optimizers. A
    parameter in none would never change, one in two groups would change twice in a step."""
    # number of groups by parameter: 1 if exactly one optimizer trains it
    groups_with = Counter(p for group in groups_of(optimizers) for p in group["params"])
    for name, p in model.named_parameters():
        if groups_with[p] != int(p.requires_grad):
            raise UserError(
                f"{name} is in {groups_with[p]} groups of the optimizers (training/optimizers.py), "
                f"not in {int(p.requires_grad)}"
            )
