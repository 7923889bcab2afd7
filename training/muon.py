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
    """Return the blocks' matrices as parameter groups of one shape, which Muon updates together.

    "fused_rows" of a group are the row counts of the matrices that a weight stacks. With tensor
    parallelism they are the row counts of one process's parts of these.
    """
    # row counts of the matrices in c_attn, and in c_fc of SwiGLU, by the layer's name
    fused = fused_layers(model.config)
    tensor_parallel = tensor_parallel_of(model)  # processes that share each block
    groups: list[dict] = []
    for linear_name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
        # A sharded weight is a DTensor, whose size is that of the whole matrix.
        weights = [block.get_parameter(f"{linear_name}.weight") for block in model.transformer.h]
        fused_rows = fused.get(linear_name, (weights[0].size(0),))
        # A c_proj is divided by columns, but split here, too: orthogonalize joins the parts again.
        local_fused_rows = tuple(size // tensor_parallel for size in fused_rows)
        num_stacked = max(1, STACK_ENTRIES // weights[0].numel())  # matrices of a group
        for start in range(0, len(weights), num_stacked):
            stack = weights[start : start + num_stacked]
            # set_learning_rates in training/schedule.py multiplies the learning rate by lr_scale.
            groups.append({"params": stack, "lr_scale": 1.0, "local_fused_rows": local_fused_rows})
    return groups


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay.

    The parameters of a group have one shape. Its "fused_rows" are the row counts of the matrices
    that each of them stacks, as queries, keys and values do: each of these is orthogonalized alone.
    The caller sets the "lr" of every group before a step. The recipe gives the momentum, cautious
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
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure
        """Update all parameters, and overwrite their gradients.

        Every process must call it: where parameters are sharded it gathers matrices.
        """
        for group in self.param_groups:
            parameters = group["params"]  # n matrices (R, C) of one shape
            self.add_momentum(parameters)  # p.grad now holds Nesterov's momentum
            momenta = torch.stack([p.grad.to(self.dtype) for p in parameters])  # (n, R, C)
            if isinstance(momenta, DTensor):  # this process holds (n, r, C)
                # full_tensor gathers the rows, and every process orthogonalizes whole matrices.
                update = orthogonalize(momenta.full_tensor(), group["local_fused_rows"])
                # src_data_rank=None: each process keeps its rows, and nothing is sent.
                update = distribute_tensor(
                    update, momenta.device_mesh, momenta.placements, src_data_rank=None
                )
            else:
                update = orthogonalize(momenta, group["local_fused_rows"])
            if self.recipe.normuon > 0:  # 0: plain Muon
                update = self.normalize_rows(parameters, update)
            update = local_shard(update)  # (n, r, C)
            self.update_weights(parameters, update, group["lr"], group["weight_decay"])

    def add_momentum(self, parameters: list[Tensor]) -> None:
        """Add the gradients to the momenta, and overwrite the gradients with Nesterov's momenta:
        tensors of their own would need the memory a second time."""
        # (r, C) each. They share memory with p.grad, so that the lerp below changes it.
        gradients: list[Tensor] = []
        for p in parameters:
            assert p.grad is not None  # every step trains all matrices
            gradients.append(local_shard(p.grad))
            if "momentum_buffer" not in self.state[p]:
                # a DTensor if the parameter is one: checkpoints gather both alike
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [local_shard(self.state[p]["momentum_buffer"]) for p in parameters]
        # In place: m = mu m + (1 - mu) g, then Nesterov's step ahead, g = (1 - mu) g + mu m.
        torch._foreach_lerp_(buffers, gradients, 1 - self.recipe.momentum)
        torch._foreach_lerp_(gradients, buffers, self.recipe.momentum)

    def normalize_rows(self, parameters: list[Tensor], update: Tensor) -> Tensor:
        """Divide each row of the update (n, R, C), which is sharded as the parameters are, by the
        root of the running mean of its square norm.

        This is NorMuon (Li et al. 2025) without its rescaling of the whole matrix. All neurons then
        learn at about the same rate.
        """
        for p in parameters:
            if "row_squares" not in self.state[p]:
                # Rows of an orthogonalized matrix have a square norm of about 1. The slice gives
                # the shape (R, 1), with rows sharded as those of the parameter are.
                self.state[p]["row_squares"] = torch.ones_like(p[:, :1])
        row_squares = [self.state[p]["row_squares"] for p in parameters]  # (R, 1) each
        square_norms = update.float().square().sum(2, keepdim=True)  # (n, R, 1)
        # update the running means in place
        torch._foreach_lerp_(row_squares, square_norms.unbind(), 1 - self.recipe.normuon)
        return update * torch.stack(row_squares).rsqrt()

    def update_weights(
        self, parameters: list[Tensor], update: Tensor, lr: float, weight_decay: float
    ) -> None:
        """Decay weights, then subtract lr times the update (n, r, C), in place. The decay is
        decoupled (Loshchilov and Hutter 2019): lr times weight_decay of each weight."""
        weights = [local_shard(p) for p in parameters]  # (r, C) each
        if self.recipe.cautious:
            # Chen et al. 2025: decay only the entries that the update makes smaller anyway
            stack = torch.stack(weights)  # (n, r, C)
            shrinking = stack * update > 0  # the update moves these towards 0
            torch._foreach_sub_(weights, (stack * shrinking).unbind(), alpha=lr * weight_decay)
        else:
            torch._foreach_mul_(weights, 1 - lr * weight_decay)
        torch._foreach_sub_(weights, update.unbind(), alpha=lr)


def orthogonalize(stack: Tensor, fused_rows: tuple[int, ...]) -> Tensor:
    """Orthogonalize each of the matrices of `fused_rows` rows that the matrices of a stack
    (n, R, C) are made of. Where processes share a block, `fused_rows` are the rows that one of
    them has of each matrix, and its rows of all matrices stand before those of the next process.

    Tall matrices are scaled by sqrt(rows / columns), so that an update changes the output of a
    layer by about as much for any shape (Jordan et al. 2024).
    """
    orthogonalized: list[Tensor] = []
    stack = stack.unflatten(1, (-1, sum(fused_rows)))  # (n, processes, rows of each, C)
    for parts in stack.split(fused_rows, dim=2):  # such as queries, keys, values
        x = parts.flatten(1, 2)  # (n, rows of all processes, C)
        _, num_rows, num_columns = x.shape
        if num_rows > num_columns:
            # Of a tall matrix, X^T X is the smaller Gram matrix, which the transpose gives.
            x = newton_schulz(x.mT).mT * math.sqrt(num_rows / num_columns)
        else:
            x = newton_schulz(x)
        orthogonalized.append(x.unflatten(1, parts.shape[1:3]))
    return torch.cat(orthogonalized, dim=2).flatten(1, 2)  # (n, R, C)


def newton_schulz(x: Tensor) -> Tensor:
    """Return matrices (n, rows, columns), rows <= columns, made nearly orthogonal.

    With a matrix U S V^T the result is U S' V^T. Of singular values in S above a hundredth of the
    norm, those of S' lie between about 0.7 and 1.2; smaller ones grow, too.
    """
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    # The iteration needs singular values up to 1; none is larger than the Frobenius norm. The small
    # constant keeps a momentum of zeros from becoming NaN.
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_ITERATIONS):
        gram = x @ x.mT  # A = X X^T, (n, rows, rows)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # B = b A + c A A
        x = torch.baddbmm(x, polynomial, x, beta=a)  # X = a X + B X
    return x


def local_shard(x: Tensor) -> Tensor:
    """Return this process's rows of a sharded tensor; a plain tensor itself."""
    return x.to_local() if isinstance(x, DTensor) else x
