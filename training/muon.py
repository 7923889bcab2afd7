"""Muon (Jordan et al. 2024): momentum, orthogonalized by Newton-Schulz, for the blocks' matrices.

N matrices of one shape (R, C) are stacked. Each of W processes collects whole matrices, about N / W
of them, orthogonalizes these, and spreads the result, also where parameters are sharded by rows.
"""

from collections import defaultdict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from config.recipes import Recipe

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024: steepest at 0
STEPS = 5


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay; the caller sets the learning rate,
    which is that of the first group for all.

    The parameters of a group have one shape. "split_sizes" of a group are the row counts of the
    matrices that one parameter stacks, as queries, keys and values: each is orthogonalized alone.
    The recipe says momentum, cautious decay and NorMuon. Matmuls run in `dtype`. A step takes few
    kernels for any number of layers: torch._foreach_* work on all matrices at once.
    """

    def __init__(
        self,
        groups: list[dict],
        recipe: Recipe,
        weight_decay: float,
        dtype: torch.dtype,
        compiled: bool = False,
    ) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": weight_decay})
        self.momentum, self.cautious = recipe.momentum, recipe.cautious
        self.normuon = recipe.normuon
        self.dtype = torch.float32 if dtype is torch.float16 else dtype  # keeps small gradients
        for name in ("add_momentum", "normalize_rows") if compiled else ():
            setattr(self, name, torch.compile(getattr(self, name)))  # apply: anew for each rate

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters; their gradients are overwritten. Every process must call it."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        gradients = [local_shard(p.grad) for p in parameters]  # (R / W, C) each
        self.add_momentum(parameters, gradients)

        shardings, stacks, num_matrices = [], [], 0
        remaining = iter(gradients)
        for group in self.param_groups:
            sharding = MatrixSharding(group["params"], num_matrices)
            rows = torch.stack([next(remaining) for _ in group["params"]])  # (N, R / W, C)
            stacks.append(sharding.collect(rows.to(self.dtype)))  # (N / W, R, C)
            shardings.append(sharding)
            num_matrices += len(group["params"])

        stacks = orthogonalize(stacks, [group["split_sizes"] for group in self.param_groups])

        pairs = zip(shardings, stacks, strict=True)
        updates = [sharding.spread(stack) for sharding, stack in pairs]  # (N, R / W, C)
        if self.normuon:
            updates = self.normalize_rows(updates)
        torch._foreach_copy_(gradients, [x for stack in updates for x in stack])
        self.apply([local_shard(p) for p in parameters], gradients)

    def add_momentum(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Update the momentum buffers; overwrite the gradients with Nesterov momentum."""
        for p in parameters:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [local_shard(self.state[p]["momentum_buffer"]) for p in parameters]
        torch._foreach_lerp_(buffers, gradients, 1 - self.momentum)
        torch._foreach_lerp_(gradients, buffers, self.momentum)

    def normalize_rows(self, updates: list[Tensor]) -> list[Tensor]:
        """Divide each row of the updates (N, R / W, C) by the root of its running mean square norm,
        which is about 1 (NorMuon: Li et al. 2025, without its rescaling of the whole matrix)."""
        normalized = []
        for group, x in zip(self.param_groups, updates, strict=True):
            for p in group["params"]:
                if "row_squares" not in self.state[p]:
                    self.state[p]["row_squares"] = torch.ones_like(p.sum(1, keepdim=True))
            squares = [local_shard(self.state[p]["row_squares"]) for p in group["params"]]
            torch._foreach_lerp_(
                squares, list(x.float().square().sum(-1, keepdim=True)), 1 - self.normuon
            )
            normalized.append(x * torch.stack(squares).rsqrt())
        return normalized

    def apply(self, weights: list[Tensor], updates: list[Tensor]) -> None:
        """Decay the weights, then subtract the updates."""
        lr, decay = self.param_groups[0]["lr"], self.param_groups[0]["weight_decay"]
        if self.cautious:
            decaying = torch._foreach_mul(weights, updates)
            torch._foreach_sign_(decaying)
            torch._foreach_clamp_min_(decaying, 0.0)  # 1 where the update shrinks the weight
            torch._foreach_mul_(decaying, weights)
            torch._foreach_add_(weights, decaying, alpha=-lr * decay)
        else:
            torch._foreach_mul_(weights, 1 - lr * decay)
        torch._foreach_add_(weights, updates, alpha=-lr)


def orthogonalize(stacks: list[Tensor], split_sizes: list[tuple[int, ...]]) -> list[Tensor]:
    """Return the stacks (N, R, C) with each matrix of split_sizes rows orthogonalized, scaled by
    sqrt(rows / columns) where that is above 1 (Jordan et al. 2024)."""
    matrices = [m for x, rows in zip(stacks, split_sizes, strict=True) for m in x.split(rows, 1)]
    wide = [m.mT if m.size(1) > m.size(2) else m for m in matrices]  # (N, short, long side)
    indices_by_shape = defaultdict(list)
    for i, m in enumerate(wide):
        indices_by_shape[m.shape[1:]].append(i)
    for indices in indices_by_shape.values():  # one batch for a shape: few large matmuls are faster
        batch = newton_schulz(torch.cat([wide[i] for i in indices]))  # (sum of N, short, long side)
        for i, m in zip(indices, batch.split([len(wide[i]) for i in indices]), strict=True):
            _, rows, columns = matrices[i].shape
            matrices[i] = m.mT * (rows / columns) ** 0.5 if rows > columns else m
    remaining = iter(matrices)
    parts = [[next(remaining) for _ in rows] for rows in split_sizes]
    return [torch.cat(x, dim=1) if len(x) > 1 else x[0].contiguous() for x in parts]


def newton_schulz(x: Tensor) -> Tensor:
    """Return x (N, rows <= columns) about orthogonalized: its singular values become 0.7 to 1.2."""
    a, b, c = COEFFICIENTS
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT  # (N, rows, rows)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # (N, rows, rows)
        x = torch.baddbmm(x, polynomial, x, beta=a)  # (N, rows, columns)
    return x


class MatrixSharding:
    """Distribution of N matrices (R, C) over W processes: by rows in a sharded parameter, by whole
    matrices for Newton-Schulz. Round-robin after `num_before` matrices of other groups."""

    def __init__(self, parameters: list[Tensor], num_before: int) -> None:
        first = parameters[0]
        self.sharded = isinstance(first, DTensor)
        self.group = process_group(first)
        self.world = dist.get_world_size(self.group) if self.group else 1
        self.rank = dist.get_rank(self.group) if self.group else 0
        turns = [(rank - num_before) % self.world for rank in range(self.world)]
        self.matrices = [len(range(turn, len(parameters), self.world)) for turn in turns]
        self.num_rows, self.columns = first.shape
        chunk = -(-self.num_rows // self.world)  # as torch.chunk: the last ones may be smaller
        self.rows = [max(0, min(chunk, self.num_rows - i * chunk)) for i in range(self.world)]

    def collect(self, x: Tensor) -> Tensor:
        """Return this process's matrices (N / W, R, C) from x, which has its rows (N, R / W, C) of
        all matrices, or all rows where parameters are not sharded."""
        if self.group is None:
            return x
        pieces = x.split(self.matrices)
        if not self.sharded:
            return pieces[self.rank]
        shapes = [(self.matrices[self.rank], rows, self.columns) for rows in self.rows]
        return torch.cat(all_to_all(pieces, shapes, self.group), dim=1)

    def spread(self, x: Tensor) -> Tensor:
        """Return this process's rows (N, R / W, C) of all matrices, or all rows where parameters
        are not sharded, from the matrices x (N / W, R, C) of each process."""
        if self.group is None:
            return x
        if self.sharded:
            shapes = [(n, self.rows[self.rank], self.columns) for n in self.matrices]
            return torch.cat(all_to_all(x.split(self.rows, dim=1), shapes, self.group))
        most = max(self.matrices)  # all-gather takes equal sizes
        padded = F.pad(x, (0, 0, 0, 0, 0, most - len(x)))
        gathered = x.new_empty(self.world * most, self.num_rows, self.columns)
        dist.all_gather_into_tensor(gathered, padded, self.group)
        parts = zip(gathered.split(most), self.matrices, strict=True)
        return torch.cat([part[:n] for part, n in parts])


def local_shard(x: Tensor) -> Tensor:
    """Return this process's rows of a sharded tensor, or the tensor itself."""
    return x.to_local() if isinstance(x, DTensor) else x


def process_group(parameter: Tensor) -> dist.ProcessGroup | None:
    """Return the processes that a parameter is sharded over, else all; None if there is one."""
    if isinstance(parameter, DTensor):
        return parameter.device_mesh.get_group(parameter.device_mesh.ndim - 1)
    return dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None


def all_to_all(
    pieces: list[Tensor], shapes: list[tuple[int, ...]], group: dist.ProcessGroup
) -> list[Tensor]:
    """Send piece i to process i; return the piece from each process, in the given shapes."""
    flat = torch.cat([piece.reshape(-1) for piece in pieces])
    sizes = [torch.Size(shape).numel() for shape in shapes]
    received = flat.new_empty(sum(sizes))
    dist.all_to_all_single(received, flat, sizes, [p.numel() for p in pieces], group=group)
    return [x.view(shape) for x, shape in zip(received.split(sizes), shapes, strict=True)]
