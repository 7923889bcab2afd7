"""Muon, the optimizer of the blocks' weight matrices (Jordan et al. 2024).

Muon replaces the momentum of a matrix by the nearest orthogonal matrix, so that the update has
about the same size in every direction. The orthogonal matrix is found by five Newton-Schulz
iterations, which are matmuls. Embeddings, heads and vectors are AdamW's: training/optim.py divides
them.

An iteration needs a whole matrix, and there are many. Every process therefore orthogonalizes only a
part of the matrices: it collects these whole (from all processes, where parameters are sharded by
rows), and then spreads the result. Matrices of one shape travel and are multiplied together.

Shapes: N matrices of one group, R rows and C columns each, W processes; n = N / W and S = R / W,
both rounded up. A process holds r rows: R without sharding, else at most S.
"""

import math
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from model.gpt import GPT
from model.recipes import Recipe

# Jordan et al. 2024: the polynomial a s + b s^3 + c s^5 of a singular value s, chosen steep at 0
# so that small singular values grow to about 1 in five iterations.
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_ITERATIONS = 5


def shape_groups(model: GPT) -> list[dict]:
    """Return the blocks' matrices in groups of one shape.

    "split_sizes" of a group are the row counts of the matrices that a weight stacks: queries, keys
    and values in c_attn, gate and value of SwiGLU in c_fc.
    """
    config = model.config
    kv_rows = config.kv_heads * config.head_size
    stacked = {"c_attn": (config.n_embd, kv_rows, kv_rows)}
    if config.is_gated:
        stacked["c_fc"] = (config.inner, config.inner)

    parameters_by_layout = defaultdict(list)
    for name, p in model.transformer.h.named_parameters():
        if p.dim() >= 2:
            layer_name = name.split(".")[-2]  # "c_attn" of "0.attn.c_attn.weight"
            split_sizes = stacked.get(layer_name, (p.size(0),))
            parameters_by_layout[p.shape, split_sizes].append(p)
    return [
        {"params": parameters, "lr_scale": 1.0, "split_sizes": split_sizes}
        for (_, split_sizes), parameters in parameters_by_layout.items()
    ]


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay.

    All parameters of a group must have one shape. "split_sizes" of a group are the row counts of
    the matrices that one parameter stacks, as queries, keys and values do: each of these is
    orthogonalized alone. The caller sets the "lr" of every group before a step. The recipe gives
    the momentum, cautious weight decay and NorMuon. Newton-Schulz runs in `dtype`.
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

        Every process must call it: it exchanges matrices where there are several.
        """
        for group in self.param_groups:
            parameters = group["params"]

            # Momentum first, in float32 and on each process's rows alone.
            momenta = [self.nesterov_momentum(p).to(self.dtype) for p in parameters]

            # Orthogonalize this process's part of the matrices.
            sharding = MatrixSharding(parameters)
            matrices = sharding.collect(torch.stack(momenta))  # (N, r, C) -> (n, R, C)
            matrices = orthogonalize(matrices, group["split_sizes"])
            updates = sharding.spread(matrices)  # (n, R, C) -> (N, r, C)

            # Decay and update each weight.
            for p, update in zip(parameters, updates, strict=True):
                if self.recipe.normuon > 0:
                    update = self.normalize_rows(p, update)
                self.update_weight(p, update, group["lr"], group["weight_decay"])

    def nesterov_momentum(self, parameter: Tensor) -> Tensor:
        """Add the gradient to the momentum; return Nesterov's momentum (r, C).

        The result overwrites the gradient, whose memory would be needed a second time otherwise.
        """
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            # a DTensor where the parameter is one, as checkpoints gather it like the parameter
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = local_shard(state["momentum_buffer"])
        gradient = local_shard(parameter.grad)
        buffer.lerp_(gradient, 1 - self.recipe.momentum)
        return gradient.lerp_(buffer, self.recipe.momentum)

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


def orthogonalize(matrices: Tensor, split_sizes: tuple[int, ...]) -> Tensor:
    """Orthogonalize matrices (n, R, C), each split into matrices of `split_sizes` rows.

    Tall ones are scaled by sqrt(rows / columns), so that an update changes the output of a layer by
    about as much for any shape (Jordan et al. 2024).
    """
    orthogonalized = []
    for matrix in matrices.split(split_sizes, dim=1):  # (n, rows, C)
        num_rows, num_columns = matrix.shape[1:]
        if num_rows > num_columns:
            # X X^T of the transpose is the smaller of the two Gram matrices
            tall = newton_schulz(matrix.mT).mT
            orthogonalized.append(tall * math.sqrt(num_rows / num_columns))
        else:
            orthogonalized.append(newton_schulz(matrix))
    return torch.cat(orthogonalized, dim=1)


def newton_schulz(x: Tensor) -> Tensor:
    """Return matrices (n, rows <= columns) made nearly orthogonal.

    With x = U S V^T the result is U S' V^T, where all of S' lies between about 0.7 and 1.2.
    """
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    # The iteration converges for singular values up to 1; none is larger than the Frobenius norm.
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_ITERATIONS):
        gram = x @ x.mT  # A = X X^T, (n, rows, rows)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # B = b A + c A A
        x = torch.baddbmm(x, polynomial, x, beta=a)  # X = a X + B X
    return x


class MatrixSharding:
    """Two ways to divide N matrices (R, C) of one shape among W processes.

    By rows: FSDP2 gives each process S rows of every matrix (the last ones fewer, or none). Without
    FSDP2 every process holds all rows. By matrices: each process has n whole ones, for
    Newton-Schulz. `collect` goes from the first to the second, `spread` back. Both fill up with
    zeros, so that all processes exchange equally much; a matrix of zeros stays one.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        parameter = parameters[0]  # all of a group have one shape and one sharding
        self.num_matrices = len(parameters)
        self.num_rows = parameter.size(0)  # of the whole matrix, also of a DTensor
        self.is_sharded = isinstance(parameter, DTensor)
        self.group: dist.ProcessGroup | None = None  # None: a process alone
        self.world_size = 1
        self.rank = 0
        if self.is_sharded:
            mesh = parameter.device_mesh
            # Several machines have a mesh ("replicate", "shard"): each machine does all matrices.
            self.group = mesh.get_group(mesh.ndim - 1)
        elif dist.is_initialized():
            self.group = dist.group.WORLD
        if self.group is not None:
            self.world_size = dist.get_world_size(self.group)
            self.rank = dist.get_rank(self.group)
        self.matrices_per_process = math.ceil(self.num_matrices / self.world_size)
        self.rows_per_process = math.ceil(self.num_rows / self.world_size)

    def collect(self, x: Tensor) -> Tensor:
        """Return this process's whole matrices (n, R, C) from its rows (N, r, C) of all."""
        if self.group is None:
            return x
        padded_matrices = self.world_size * self.matrices_per_process
        if not self.is_sharded:
            x = pad(x, padded_matrices, self.num_rows)
            return x.chunk(self.world_size)[self.rank]

        # Part i of the N matrices goes to process i; part i of what arrives are the rows of process
        # i.
        x = pad(x, padded_matrices, self.rows_per_process)  # (W n, S, C)
        pieces = torch.empty_like(x)
        dist.all_to_all_single(pieces, x, group=self.group)
        pieces = pieces.unflatten(0, (self.world_size, -1))  # (W, n, S, C)
        matrices = pieces.transpose(0, 1).flatten(1, 2)  # (n, W S, C)
        return matrices[:, : self.num_rows]

    def spread(self, matrices: Tensor) -> Tensor:
        """Return this process's rows (N, r, C) of all matrices from the whole ones (n, R, C)."""
        if self.group is None:
            return matrices
        if not self.is_sharded:
            shape = (self.world_size * len(matrices), *matrices.shape[1:])
            gathered = matrices.new_empty(shape)  # (W n, R, C)
            dist.all_gather_into_tensor(gathered, matrices.contiguous(), self.group)
            return gathered[: self.num_matrices]

        padded_rows = self.world_size * self.rows_per_process
        x = pad(matrices, len(matrices), padded_rows)  # (n, W S, C)
        pieces = x.unflatten(1, (self.world_size, -1)).transpose(0, 1)  # (W, n, S, C)
        pieces = pieces.flatten(0, 1).contiguous()  # (W n, S, C)
        x = torch.empty_like(pieces)
        dist.all_to_all_single(x, pieces, group=self.group)
        first_row = self.rank * self.rows_per_process
        num_local_rows = min(self.rows_per_process, max(0, self.num_rows - first_row))
        return x[: self.num_matrices, :num_local_rows]


def pad(x: Tensor, num_matrices: int, num_rows: int) -> Tensor:
    """Return x (N, R, C) filled up with zeros to (num_matrices, num_rows, C)."""
    missing_matrices = num_matrices - x.size(0)
    missing_rows = num_rows - x.size(1)
    return F.pad(x, (0, 0, 0, missing_rows, 0, missing_matrices))  # pairs, last dimension first


def local_shard(x: Tensor) -> Tensor:
    """Return this process's rows of a sharded tensor; a plain tensor itself."""
    return x.to_local() if isinstance(x, DTensor) else x
