"""Muon, the optimizer of the blocks' weight matrices (Jordan et al. 2024).

Muon replaces the momentum of a matrix by the nearest orthogonal matrix, so that the update has
about the same size in every direction. The orthogonal matrix is found by five Newton-Schulz
iterations, which are matmuls. Embeddings, heads and vectors are AdamW's: training/optimizers.py
divides them.

Matrices of one shape, those of the layers, are stacked and go through each operation together: a
GPU would wait longer for the launches of single ones than it computes. An iteration needs whole
matrices. Where parameters are sharded by rows, every process gathers the momenta of one stack after
another, orthogonalizes them, and keeps the rows of its own parameters.

Shapes: a stack has n matrices of R rows and C columns, and this process holds r rows of each: R
without sharding. With tensor parallelism it holds only some columns of a c_proj, too.
"""

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from model.gpt import GPT
from recipes import Recipe
from training.parallel.tensor_parallel import fused_layers, tensor_parallel_of

# Jordan et al. 2024: a, b and c of the polynomial a s + b s^3 + c s^5 of a singular value s, chosen
# steep at 0 so that small singular values grow to about 1 in five iterations.
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_ITERATIONS = 5

# Largest number of entries of a stack, unless one matrix has more. In GPT-2 124M all matrices of a
# shape fit into one stack. A stack costs temporary copies, in float32 and the dtype of matmuls.
STACK_ENTRIES = 2**26


def matrix_groups(model: GPT) -> list[dict]:
    """Return the blocks' matrices as parameter groups, each of matrices of one shape, which Muon
    updates together.

    A group's "local_fused_rows" are the row counts of the matrices that each of its weights fuses,
    as (768, 768, 768) for the queries, keys and values of c_attn; (768,) for c_proj, which is one
    matrix. With tensor parallelism they are the row counts of one process's parts of these.
    """
    fused = fused_layers(model.config)  # row counts by the name of the linear layer
    tensor_parallel = tensor_parallel_of(model)  # processes that share each block
    groups: list[dict] = []
    for linear_name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
        # the weight of this linear layer in each block, (R, C); also a DTensor has the whole size
        weights = [block.get_parameter(f"{linear_name}.weight") for block in model.transformer.h]
        num_rows = weights[0].size(0)
        fused_rows = fused.get(linear_name, (num_rows,))
        # A c_proj is divided by columns, but split here, too: orthogonalize joins the parts again.
        local_fused_rows = tuple(rows // tensor_parallel for rows in fused_rows)
        num_stacked = max(1, STACK_ENTRIES // weights[0].numel())  # matrices of a group
        for start in range(0, len(weights), num_stacked):
            group = {
                "params": weights[start : start + num_stacked],
                "local_fused_rows": local_fused_rows,  # read by Muon.step
                "lr_scale": 1.0,  # read by set_learning_rates of training/schedule.py
            }
            groups.append(group)
    return groups


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay.

    `groups` are those of matrix_groups: the parameters of a group have one shape, and the matrices
    that each of them fuses are orthogonalized one by one. The caller sets the "lr" of every group
    before a step. The recipe gives the momentum and NorMuon. Newton-Schulz runs in `dtype`.
    """

    def __init__(
        self, groups: list[dict], recipe: Recipe, weight_decay: float, dtype: torch.dtype
    ) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": weight_decay})
        self.recipe = recipe
        # Momenta are cast before they are normalized, and float16 would round small ones to zero.
        self.dtype = torch.float32 if dtype is torch.float16 else dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure
        """Update all parameters, and overwrite their gradients.

        Every process must call it: where parameters are sharded it gathers matrices.
        """
        for group in self.param_groups:
            parameters = group["params"]  # n matrices (R, C)
            self.add_momentum(parameters)  # overwrites p.grad with Nesterov's momentum
            momenta = torch.stack([p.grad.to(self.dtype) for p in parameters])  # (n, R, C)
            update = orthogonalize_sharded(momenta, group["local_fused_rows"])  # (n, R, C)
            if self.recipe.normuon > 0:  # 0: plain Muon
                update = self.normalize_rows(parameters, update)
            local_update = local_shard(update)  # (n, r, C)
            self.update_weights(parameters, local_update, group["lr"], group["weight_decay"])

    def add_momentum(self, parameters: list[Tensor]) -> None:
        """Add the gradients to the momenta, and overwrite the gradients with Nesterov's momenta:
        tensors of their own would need the memory a second time."""
        momentum = self.recipe.momentum  # mu
        gradients: list[Tensor] = []  # (r, C) each; in the memory of p.grad, which the lerp changes
        buffers: list[Tensor] = []  # (r, C) each; in the memory of the state
        for p in parameters:
            state = self.state[p]  # {} before the first step
            if "momentum_buffer" not in state:
                # a DTensor if the parameter is one: checkpoints gather both alike
                state["momentum_buffer"] = torch.zeros_like(p)
            assert p.grad is not None  # the backward pass of a step reaches all matrices
            gradients.append(local_shard(p.grad))
            buffers.append(local_shard(state["momentum_buffer"]))
        # _foreach_lerp_(x, y, w) computes x = (1 - w) x + w y in place, for all tensors of the list
        # in one launch: m = mu m + (1 - mu) g, then Nesterov's step ahead, g = (1 - mu) g + mu m.
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        torch._foreach_lerp_(gradients, buffers, momentum)

    def normalize_rows(self, parameters: list[Tensor], update: Tensor) -> Tensor:
        """Return the update (n, R, C), which is sharded as the parameters are, with each row
        divided by the root of the running mean of its square norm. The means are in the state of
        the parameters, and this changes them.

        This is NorMuon (Li et al. 2025) without its rescaling of the whole matrix. All neurons then
        learn at about the same rate.
        """
        row_squares: list[Tensor] = []  # running means, (R, 1) each
        for p in parameters:
            state = self.state[p]
            if "row_squares" not in state:
                # Rows of an orthogonalized matrix have a square norm of about 1. The slice gives
                # the shape (R, 1), with rows sharded as those of the parameter are.
                state["row_squares"] = torch.ones_like(p[:, :1])
            row_squares.append(state["row_squares"])
        square_norms = update.float().square().sum(2, keepdim=True)  # (n, R, 1)
        # update the running means in place
        torch._foreach_lerp_(row_squares, square_norms.unbind(), 1 - self.recipe.normuon)
        return update * torch.stack(row_squares).rsqrt()  # (n, R, C) * (n, R, 1)

    def update_weights(
        self, parameters: list[Tensor], update: Tensor, lr: float, weight_decay: float
    ) -> None:
        """Decay weights, then subtract lr times the update (n, r, C), in place. The decay is
        decoupled (Loshchilov and Hutter 2019): lr times weight_decay of each weight."""
        weights = [local_shard(p) for p in parameters]  # (r, C) each, in the memory of p
        torch._foreach_mul_(weights, 1 - lr * weight_decay)
        torch._foreach_sub_(weights, update.unbind(), alpha=lr)


def orthogonalize_sharded(stack: Tensor, local_fused_rows: tuple[int, ...]) -> Tensor:
    """Do what orthogonalize does, also for a DTensor, whose matrices every process gathers whole;
    the result is then sharded as the stack is."""
    if not isinstance(stack, DTensor):
        return orthogonalize(stack, local_fused_rows)
    # from the (n, r, C) of each process to the whole (n, R, C) on all of them
    update = orthogonalize(stack.full_tensor(), local_fused_rows)
    # src_data_rank=None: each process keeps its rows, and nothing is sent
    return distribute_tensor(update, stack.device_mesh, stack.placements, src_data_rank=None)


def orthogonalize(stack: Tensor, local_fused_rows: tuple[int, ...]) -> Tensor:
    """Return a stack (n, R, C) with each of its matrices made nearly orthogonal. The rows of a
    weight may fuse several matrices (matrix_groups), which are orthogonalized one by one.

    Where P processes share a block, the rows of a weight have the order of tensor parallelism: Q0,
    K0, V0 of the first process, then Q1, K1, V1 of the next one. `local_fused_rows` are the row
    counts of Q0, K0 and V0.

    Tall matrices are scaled by sqrt(rows / columns), so that an update changes the output of a
    layer by about as much for any shape (Jordan et al. 2024).
    """
    orthogonalized: list[Tensor] = []
    by_process = stack.unflatten(1, (-1, sum(local_fused_rows)))  # (n, P, R / P, C)
    for matrices in by_process.split(local_fused_rows, dim=2):  # such as queries, keys, values
        num_processes, local_rows = matrices.shape[1:3]
        x = matrices.flatten(1, 2)  # (n, rows of the whole matrix, C)
        _, num_rows, num_columns = x.shape
        if num_rows > num_columns:
            # Of a tall matrix, X^T X is the smaller Gram matrix, which the transpose gives.
            x = newton_schulz(x.mT).mT * math.sqrt(num_rows / num_columns)
        else:
            x = newton_schulz(x)
        orthogonalized.append(x.unflatten(1, (num_processes, local_rows)))
    return torch.cat(orthogonalized, dim=2).flatten(1, 2)  # (n, R, C)


def newton_schulz(x: Tensor) -> Tensor:
    """Return matrices (n, rows, columns), rows <= columns, made nearly orthogonal.

    With a matrix U S V^T the result is U S' V^T. Of singular values in S above a hundredth of the
    norm, those of S' lie between about 0.7 and 1.2; smaller ones grow, too.
    """
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    # The iteration needs singular values up to 1; none is larger than the Frobenius norm. The small
    # constant keeps a momentum of zeros from becoming NaN.
    norm = x.norm(dim=(1, 2), keepdim=True)  # (n, 1, 1)
    x = x / (norm + 1e-7)
    for _ in range(NEWTON_SCHULZ_ITERATIONS):
        gram = x @ x.mT  # A = X X^T, (n, rows, rows)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # B = b A + c A A
        x = torch.baddbmm(x, polynomial, x, beta=a)  # X = a X + B X
    return x


def local_shard(x: Tensor) -> Tensor:
    """Return this process's rows of a sharded tensor; a plain tensor itself."""
    return x.to_local() if isinstance(x, DTensor) else x
