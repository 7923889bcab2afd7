"""Muon, the optimizer of the blocks' weight matrices (Jordan et al. 2024).

Muon replaces the momentum of a matrix by the nearest orthogonal matrix, so that the update has
about the same size in every direction. Five Newton-Schulz iterations, which are matmuls, find the
orthogonal matrix. AdamW trains embeddings, heads and vectors (training/optimizers.py).

Matrices of the same shape, from different layers, are stacked and go through each operation
together. One by one, a GPU would spend more time on kernel launches than on computing. The
iterations need whole matrices. If parameters are sharded by rows, every process gathers the momenta
of one stack after another. Up to as many processes as a stack has matrices divide them: each
orthogonalizes its share and gathers the results of the others.

Shapes: a stack has n matrices of R rows and C columns. This process holds r rows of each, all R of
them without sharding. With tensor parallelism it holds only some columns of each c_proj.
"""

import math
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from model.gpt import GPT, FusedLinear
from recipes import Recipe
from training.parallel.tensor_parallel import mesh_of, tensor_parallel_of

# Jordan et al. 2024: a, b and c of the polynomial a s + b s^3 + c s^5 of a singular value s. It is
# steep at 0, so that small singular values grow to about 1 in five iterations.
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_ITERATIONS = 5

# Largest number of entries of a stack, unless one matrix has more. It limits the memory of copies.
# In GPT-2 124M all matrices of a shape fit into one stack.
STACK_ENTRIES = 2**26


def matrix_groups(model: GPT) -> list[dict]:
    """Return the matrices of the blocks as parameter groups for Muon, which updates a group at
    once. The matrices of a group have the same shape, and are divided among processes alike.

    A group's "local_fused_rows" are what local_fused_rows_of returns for each of its weights.
    """
    # weights (R, C) of all blocks by shape, local_fused_rows and mesh: the twelve c_attn of 124M by
    # ((2304, 768), (768, 768, 768), None); a DTensor has the whole shape
    weights_by_stack: dict[tuple, list[Tensor]] = defaultdict(list)
    for layer in model.transformer.h.modules():
        for p in layer.parameters(recurse=False):
            # AdamW trains the others. Embeddings are no matrices that multiply a vector.
            if p.dim() == 2 and p.requires_grad and not isinstance(layer, nn.Embedding):
                # torch.stack in Muon.step needs one shape and one mesh (None for plain tensors)
                weights_by_stack[p.shape, local_fused_rows_of(layer, p), mesh_of(p)].append(p)
    groups: list[dict] = []
    for (shape, local_fused_rows, _), weights in weights_by_stack.items():
        # Most weights of a group: 37 of (2304, 768), as STACK_ENTRIES is 2**26 numbers. `shape` is
        # of a whole weight, also if this process holds a part of it.
        num_stacked = max(1, STACK_ENTRIES // shape.numel())
        for start in range(0, len(weights), num_stacked):
            group = {
                "params": weights[start : start + num_stacked],
                "local_fused_rows": local_fused_rows,  # read by Muon.step
                "lr_scale": 1.0,  # read by set_learning_rates of training/schedule.py
            }
            groups.append(group)
    return groups


def local_fused_rows_of(layer: nn.Module, weight: Tensor) -> tuple[int, ...]:
    """Return the row counts of the matrices that the weight of a layer fuses: (768, 768, 768) for
    the queries, keys and values of c_attn, (768,) for c_proj, which is one matrix. With tensor
    parallelism they count only the rows of one process."""
    fused_rows = layer.fused_rows if isinstance(layer, FusedLinear) else (weight.size(0),)
    # With tensor parallelism the rows of c_attn are Q0, K0, V0, Q1, K1, V1: count those of one
    # process. For c_proj, which is divided by columns, this changes nothing: orthogonalize joins
    # its parts.
    tensor_parallel = tensor_parallel_of(weight)  # processes that share it; 1 without it
    return tuple(rows // tensor_parallel for rows in fused_rows)


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay.

    `groups` come from matrix_groups. The parameters of a group have the same shape, and the
    matrices that each fuses are orthogonalized one by one. The caller sets the "lr" of every group
    before a step. The recipe gives the momentum and NorMuon. Newton-Schulz runs in
    `matmul_dtype`, but in float32 instead of float16.
    """

    def __init__(
        self, groups: list[dict], recipe: Recipe, weight_decay: float, matmul_dtype: torch.dtype
    ) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": weight_decay})
        self.recipe = recipe  # its momentum and normuon, in each step
        # Momenta are cast to it before they are normalized: float16 would round small ones to 0.
        self.matmul_dtype = torch.float32 if matmul_dtype is torch.float16 else matmul_dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure
        """Update all parameters, and overwrite their gradients. Every process must call it, because
        the processes divide the matrices of a stack among them."""
        for group in self.param_groups:
            parameters = group["params"]  # n matrices (R, C) float32; DTensors if sharded
            self.add_momentum(parameters)  # overwrites p.grad with Nesterov's momentum
            momenta = torch.stack([p.grad.to(self.matmul_dtype) for p in parameters])  # (n, R, C)
            # (n, R, C) bfloat16 or float32: nearly U V^T of each momentum U S V^T. c_attn of 124M
            # fuses three matrices, with the "local_fused_rows" (768, 768, 768).
            update = orthogonalize_sharded(momenta, group["local_fused_rows"])
            if self.recipe.normuon > 0:  # 0: plain Muon
                # each row / root of the running mean of its square norm
                update = self.normalize_rows(parameters, update)
            # In place, for each parameter: p -= lr * (weight_decay * p + update), with decoupled
            # decay (Loshchilov and Hutter 2019).
            weights = [local_shard(p) for p in parameters]  # n times (r, C), in the memory of p
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_sub_(weights, local_shard(update).unbind(), alpha=group["lr"])

    def add_momentum(self, parameters: list[Tensor]) -> None:
        """Add the gradients to the momenta. Overwrite the gradients with Nesterov's momenta, which
        saves the memory of new tensors."""
        momentum = self.recipe.momentum  # mu, such as 0.95
        gradients: list[Tensor] = []
        buffers: list[Tensor] = []
        for p in parameters:
            state = self.state[p]  # {} before the first step
            if "momentum_buffer" not in state:
                # a DTensor if p is one, so that a checkpoint gets its rows from all processes
                state["momentum_buffer"] = torch.zeros_like(p)
            if p.grad is None:  # no token reached it, such as an expert of a mixture
                p.grad = torch.zeros_like(p)
            gradients.append(local_shard(p.grad))  # (r, C) in the memory of p.grad
            buffers.append(local_shard(state["momentum_buffer"]))  # (r, C) in that of the state
        # _foreach_lerp_(x, y, w) computes x = (1 - w) x + w y in place, for all tensors of the list
        # in one launch: m = mu m + (1 - mu) g, then Nesterov's step ahead, g = (1 - mu) g + mu m.
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        torch._foreach_lerp_(gradients, buffers, momentum)

    def normalize_rows(self, parameters: list[Tensor], update: Tensor) -> Tensor:
        """Divide each row of the update by the root of the running mean of its square norm, and
        return the new update. Both are (n, R, C), sharded like the parameters. The running means
        are in the state of the parameters, where this function updates them.

        This is NorMuon (Li et al. 2025) without its rescaling of the whole matrix. It makes all
        neurons learn at about the same rate.
        """
        row_squares: list[Tensor] = []  # running means, (R, 1) each
        for p in parameters:
            state = self.state[p]
            if "row_squares" not in state:
                # Rows of an orthogonalized matrix have a square norm of about 1. The slice has the
                # shape (R, 1), and its rows are sharded like the rows of the parameter.
                state["row_squares"] = torch.ones_like(p[:, :1])
            row_squares.append(state["row_squares"])
        square_norms = update.float().square().sum(2, keepdim=True)  # (n, R, 1)
        # in place: mean = normuon * mean + (1 - normuon) * square norm; normuon is such as 0.95
        torch._foreach_lerp_(row_squares, square_norms.unbind(), 1 - self.recipe.normuon)
        return update * torch.stack(row_squares).rsqrt()  # (n, R, C) * (n, R, 1), float32


def orthogonalize_sharded(stack: Tensor, local_fused_rows: tuple[int, ...]) -> Tensor:
    """Orthogonalize a stack, also a DTensor: every process then gathers the whole matrices. Return
    the result sharded like the stack. `local_fused_rows` is (768, 768, 768) for c_attn of 124M,
    which fuses three matrices."""
    if not isinstance(stack, DTensor):
        return orthogonalize_together(stack, local_fused_rows)
    # from the (n, r, C) of each process to the whole (n, R, C) on all of them
    update = orthogonalize_together(stack.full_tensor(), local_fused_rows)
    # src_data_rank=None: each process keeps its rows of the update, and nothing is sent
    return distribute_tensor(update, stack.device_mesh, stack.placements, src_data_rank=None)


def orthogonalize_together(stack: Tensor, local_fused_rows: tuple[int, ...]) -> Tensor:
    """Return what orthogonalize returns for a stack (n, R, C) that all processes hold. If there are
    as many matrices as processes or more, each process orthogonalizes its share and gets the others
    from the other processes. Every process must call it."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    # More processes than matrices would send more than they save, and mostly padding.
    if world_size == 1 or world_size > len(stack):
        return orthogonalize(stack, local_fused_rows)
    per_process = -(-len(stack) // world_size)  # matrices, rounded up
    start = dist.get_rank() * per_process
    own_matrices = stack[start : start + per_process]  # fewer, or none, on the last processes
    own_updates = torch.zeros_like(stack[:per_process])  # all_gather takes as many from each
    if len(own_matrices) > 0:
        own_updates[: len(own_matrices)] = orthogonalize(own_matrices, local_fused_rows)
    # (world_size * per_process, R, C); the next line fills it in the order of the ranks
    updates = own_updates.repeat(world_size, 1, 1)
    dist.all_gather_into_tensor(updates, own_updates)
    return updates[: len(stack)]


def orthogonalize(stack: Tensor, local_fused_rows: tuple[int, ...]) -> Tensor:
    """Return a stack (n, R, C) with each of its matrices made nearly orthogonal. If the rows of a
    weight fuse several matrices (local_fused_rows_of), each of these is orthogonalized by itself.

    Tall matrices are scaled by sqrt(rows / columns), so that an update changes the output of a
    layer by about as much for any shape (Jordan et al. 2024).

    If P processes share a block (tensor parallelism), the rows of a weight are Q0, K0, V0 of the
    first process, then Q1, K1, V1 of the next one. `local_fused_rows` are the row counts of Q0, K0
    and V0. Without tensor parallelism P is 1.
    """
    orthogonalized: list[Tensor] = []  # one for each fused matrix, such as queries, keys, values
    by_process = stack.unflatten(1, (-1, sum(local_fused_rows)))  # (n, R, C) -> (n, P, R / P, C)
    for matrices in by_process.split(local_fused_rows, dim=2):  # (n, P, rows / P, C) of one matrix
        tensor_parallel, local_rows = matrices.shape[1:3]  # (1, 768) for 124M on one process
        x = matrices.flatten(1, 2)  # (n, rows of the whole matrix, C)
        _, num_rows, num_columns = x.shape
        if num_rows > num_columns:
            # Transpose a tall matrix X: its Gram matrix X^T X is smaller than X X^T.
            x = newton_schulz(x.mT).mT
            x = x * math.sqrt(num_rows / num_columns)
        else:
            x = newton_schulz(x)
        orthogonalized.append(x.unflatten(1, (tensor_parallel, local_rows)))  # (n, P, rows / P, C)
    # (n, P, R / P, C) -> (n, R, C): Q0, K0, V0, then Q1, K1, V1, ...
    return torch.cat(orthogonalized, dim=2).flatten(1, 2)


def newton_schulz(x: Tensor) -> Tensor:
    """Return matrices (n, rows, columns), rows <= columns, made nearly orthogonal.

    A matrix U S V^T becomes U S' V^T. Singular values in S above a hundredth of the norm become
    values between about 0.7 and 1.2 in S'. Smaller ones grow, too.
    """
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS  # of a s + b s^3 + c s^5, s a singular value
    # The iteration needs singular values of at most 1, and none exceeds the Frobenius norm. The
    # small constant keeps a momentum of zeros from becoming NaN.
    norm = x.norm(dim=(1, 2), keepdim=True)  # (n, 1, 1)
    x = x / (norm + 1e-7)
    for _ in range(NEWTON_SCHULZ_ITERATIONS):
        gram = x @ x.mT  # A = X X^T, (n, rows, rows)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # B = b A + c A A
        x = torch.baddbmm(x, polynomial, x, beta=a)  # X = a X + B X
    return x


def local_shard(x: Tensor) -> Tensor:
    """Return the part of a sharded tensor that this process holds, in its memory, or a plain tensor
    unchanged."""
    return x.to_local() if isinstance(x, DTensor) else x
