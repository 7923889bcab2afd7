"""Muon, the optimizer of the blocks' weight matrices (Jordan et al. 2024).

Muon replaces the momentum of a matrix by the nearest orthogonal matrix, so that the update has
about the same size in every direction. The orthogonal matrix is found by five Newton-Schulz
iterations, which are matmuls. Embeddings, heads and vectors are AdamW's: training/optim.py divides
them.

An iteration needs a whole matrix. Where parameters are sharded by rows, every process gathers the
momentum of one matrix after another, orthogonalizes it, and keeps the rows of its own parameter.

Shapes: a matrix has R rows and C columns, and this process holds r rows of it: R without sharding.
"""

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from model.gpt import GPT
from model.recipes import Recipe

# Jordan et al. 2024: the polynomial a s + b s^3 + c s^5 of a singular value s, chosen steep at 0
# so that small singular values grow to about 1 in five iterations.
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_ITERATIONS = 5


def matrix_groups(model: GPT) -> list[dict]:
    """Return the blocks' matrices, each a group of its own.

    "split_sizes" of a group are the row counts of the matrices that a weight stacks: queries, keys
    and values in c_attn, gate and value of SwiGLU in c_fc.
    """
    config = model.config
    kv_rows = config.kv_heads * config.head_size
    stacked = {"c_attn": (config.n_embd, kv_rows, kv_rows)}
    if config.is_gated:
        stacked["c_fc"] = (config.inner, config.inner)

    groups: list[dict] = []
    for name, p in model.transformer.h.named_parameters():
        if p.dim() >= 2:
            layer_name = name.split(".")[-2]  # "c_attn" of "0.attn.c_attn.weight"
            split_sizes = stacked.get(layer_name, (p.size(0),))
            groups.append({"params": [p], "lr_scale": 1.0, "split_sizes": split_sizes})
    return groups


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay.

    A group has one parameter. Its "split_sizes" are the row counts of the matrices that the
    parameter stacks, as queries, keys and values do: each of these is orthogonalized alone. The
    caller sets the "lr" of every group before a step. The recipe gives the momentum, cautious
    weight decay and NorMuon. Newton-Schulz runs in `dtype`.
    """

    def __init__(
        self, groups: list[dict], recipe: Recipe, weight_decay: float, dtype: torch.dtype
    ) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": weight_decay})
        self.recipe = recipe
        # Momenta are cast before they are normalized, and float16 would round small ones to zero.
        self.dtype = torch.float32 if dtype is torch.float16 else dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters, and overwrite their gradients.

        Every process must call it: where parameters are sharded it gathers matrices.
        """
        for group in self.param_groups:
            [p] = group["params"]
            self.add_momentum(p)  # in float32, to the rows of this process
            momentum = p.grad.to(self.dtype)
            if isinstance(momentum, DTensor):
                momentum = momentum.full_tensor()  # (R, C) from the rows of all processes
            update = orthogonalize(momentum, group["split_sizes"])  # (R, C)
            if isinstance(p, DTensor):
                # src_data_rank=None: each process takes its rows of the matrix that it has itself
                update = distribute_tensor(
                    update, p.device_mesh, p.placements, src_data_rank=None
                ).to_local()  # (r, C)
            if self.recipe.normuon > 0:
                update = self.normalize_rows(p, update)
            self.update_weight(p, update, group["lr"], group["weight_decay"])

    def add_momentum(self, parameter: Tensor) -> None:
        """Add the gradient to the momentum, and overwrite it with Nesterov's momentum: a tensor of
        its own would need the memory a second time."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            # a DTensor where the parameter is one, as checkpoints gather it like the parameter
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = local_shard(state["momentum_buffer"])
        gradient = local_shard(parameter.grad)
        buffer.lerp_(gradient, 1 - self.recipe.momentum)
        gradient.lerp_(buffer, self.recipe.momentum)

    def normalize_rows(self, parameter: Tensor, update: Tensor) -> Tensor:
        """Divide each row of the update (r, C) by the root of the running mean of its square norm.

        This is NorMuon (Li et al. 2025) without its rescaling of the whole matrix. All neurons then
        learn at about the same rate.
        """
        state = self.state[parameter]
        if "row_squares" not in state:
            # Rows of an orthogonalized matrix have a square norm of about 1. The sum gives the
            # shape (R, 1), sharded as the parameter is.
            state["row_squares"] = torch.ones_like(parameter.sum(1, keepdim=True))
        row_squares = local_shard(state["row_squares"])  # (r, 1)
        square_norms = update.float().square().sum(1, keepdim=True)
        row_squares.lerp_(square_norms, 1 - self.recipe.normuon)
        return update * row_squares.rsqrt()

    def update_weight(
        self, parameter: Tensor, update: Tensor, lr: float, weight_decay: float
    ) -> None:
        """Decay a weight, then subtract lr times the update (r, C)."""
        weight = local_shard(parameter)
        if self.recipe.cautious:
            # Chen et al. 2025: decay only the entries that the update makes smaller anyway
            shrinking = weight * update > 0
            weight.sub_(weight * shrinking, alpha=lr * weight_decay)
        else:
            weight.mul_(1 - lr * weight_decay)
        weight.sub_(update, alpha=lr)


def orthogonalize(matrix: Tensor, split_sizes: tuple[int, ...]) -> Tensor:
    """Orthogonalize each of the matrices of `split_sizes` rows that a matrix (R, C) stacks.

    Tall ones are scaled by sqrt(rows / columns), so that an update changes the output of a layer by
    about as much for any shape (Jordan et al. 2024).
    """
    orthogonalized: list[Tensor] = []
    for x in matrix.split(split_sizes):  # (rows, C)
        num_rows, num_columns = x.shape
        if num_rows > num_columns:
            # X X^T of the transpose is the smaller of the two Gram matrices
            tall = newton_schulz(x.mT).mT
            orthogonalized.append(tall * math.sqrt(num_rows / num_columns))
        else:
            orthogonalized.append(newton_schulz(x))
    return torch.cat(orthogonalized)


def newton_schulz(x: Tensor) -> Tensor:
    """Return a matrix (rows <= columns) made nearly orthogonal.

    With x = U S V^T the result is U S' V^T, where all of S' lies between about 0.7 and 1.2.
    """
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    # The iteration converges for singular values up to 1; none is larger than the Frobenius norm.
    x = x / (x.norm() + 1e-7)
    for _ in range(NEWTON_SCHULZ_ITERATIONS):
        gram = x @ x.mT  # A = X X^T, (rows, rows)
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)  # B = b A + c A A
        x = torch.addmm(x, polynomial, x, beta=a)  # X = a X + B X
    return x


def local_shard(x: Tensor) -> Tensor:
    """Return this process's rows of a sharded tensor; a plain tensor itself."""
    return x.to_local() if isinstance(x, DTensor) else x
