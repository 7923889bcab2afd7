"""Muon (Jordan et al. 2024): momentum, made orthogonal, for the matrices of a model's blocks.

torch.optim.Muon takes a matrix at a time, whole, on every process. Here those of one shape go
together, and each process makes its share of them orthogonal, also where they are sharded.
"""

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024: steepest at 0
STEPS = 5


def orthogonal(x: Tensor) -> Tensor:
    """Matrices near the orthogonal ones nearest to x (N, rows, columns), no more rows than columns,
    by Newton-Schulz steps: singular values become about 0.7 to 1.2."""
    a, b, c = COEFFICIENTS
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(STEPS):
        square = x @ x.mT
        square = torch.baddbmm(square, square, square, beta=b, alpha=c)
        x = torch.baddbmm(x, square, x, beta=a)
    return x


def orthogonal_parts(stacks: list[Tensor], parts: list[tuple[int, ...]]) -> list[Tensor]:
    """Each of the stacks (N, rows, columns) with its parts, of so many rows, made orthogonal and
    scaled by the square root of rows over columns if that is above 1 (Jordan et al. 2024)."""
    alike = defaultdict(list)  # parts of one shape, lying down: few large products are faster
    for i, (stack, rows) in enumerate(zip(stacks, parts, strict=True)):
        for j, part in enumerate(stack.split(rows, dim=1)):
            upright = part.size(1) > part.size(2)
            wide = part.mT if upright else part
            alike[wide.shape[1:]].append((i, j, upright, wide))
    made = [[stack] * len(rows) for stack, rows in zip(stacks, parts, strict=True)]
    for some in alike.values():
        *places, wides = zip(*some, strict=True)
        done = orthogonal(torch.cat(wides)).split([len(wide) for wide in wides])
        for i, j, upright, x in zip(*places, done, strict=True):
            made[i][j] = x.mT * (x.size(2) / x.size(1)) ** 0.5 if upright else x
    return [torch.cat(own, dim=1) for own in made]


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay; the caller sets the learning rate.

    A group holds matrices of one shape; its "parts" say into how many rows each falls that are
    matrices of their own, as queries, keys and values are. `cautious` decays only weights that the
    update makes smaller. Products are of `dtype`.
    """

    def __init__(
        self, groups: list[dict], *, weight_decay: float, cautious: bool, dtype: torch.dtype
    ) -> None:
        super().__init__(groups, {"lr": 0.0, "momentum": 0.95, "weight_decay": weight_decay})
        self.cautious, self.dtype = cautious, dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        divided, before = [], 0
        for group in self.param_groups:
            divided.append(Divided(group["params"][0], len(group["params"]), before))
            before += len(group["params"])
        work = zip(divided, self.param_groups, strict=True)
        made = orthogonal_parts(
            [part.collect(self.directions(group)) for part, group in work],
            [group["parts"] for group in self.param_groups],
        )
        for part, group, matrices in zip(divided, self.param_groups, made, strict=True):
            shrink = group["lr"] * group["weight_decay"]
            for p, update in zip(group["params"], part.spread(matrices), strict=True):
                weight = local(p)
                decays = weight * update > 0 if self.cautious else 1
                weight.mul_(1 - shrink * decays).add_(update, alpha=-group["lr"])

    def directions(self, group: dict) -> Tensor:
        """The gradients after Nesterov momentum, (N, rows, columns) in the dtype of the products:
        this process's rows."""
        made = []
        for p in group["params"]:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            gradient, average = local(p.grad), local(self.state[p]["momentum_buffer"])
            average.lerp_(gradient, 1 - group["momentum"])
            made.append(gradient.lerp(average, group["momentum"]).to(self.dtype))
        return torch.stack(made)


class Divided:
    """`count` matrices in the shape of a parameter, of which each process takes a share, whole.
    Those left over go to the processes whose turn it is after `before` others."""

    def __init__(self, like: Tensor, count: int, before: int) -> None:
        self.rows, self.columns = like.shape
        self.sharded = isinstance(like, DTensor)
        self.group = group_of(like)
        self.world = dist.get_world_size(self.group) if self.group else 1
        self.rank = dist.get_rank(self.group) if self.group else 0
        turns = [(i - before) % self.world for i in range(self.world)]
        self.shares = [(count - turn + self.world - 1) // self.world for turn in turns]
        each = -(-self.rows // self.world)  # rows that a process has of each, fewer at the end
        self.heights = [max(0, min(each, self.rows - i * each)) for i in range(self.world)]

    def collect(self, stack: Tensor) -> Tensor:
        """This process's share (share, rows, columns) of the matrices, of which it has `stack`: its
        rows of each, or all of them."""
        if self.group is None:
            return stack
        pieces = stack.split(self.shares)
        if not self.sharded:
            return pieces[self.rank]
        shapes = [(self.shares[self.rank], height, self.columns) for height in self.heights]
        return torch.cat(exchange(pieces, shapes, self.group), dim=1)

    def spread(self, mine: Tensor) -> Tensor:
        """The opposite: (N, rows, columns) from the share that each process has made."""
        if self.group is None:
            return mine
        if not self.sharded:
            shapes = [(share, self.rows, self.columns) for share in self.shares]
            return torch.cat(exchange([mine] * self.world, shapes, self.group))
        shapes = [(share, self.heights[self.rank], self.columns) for share in self.shares]
        return torch.cat(exchange(mine.split(self.heights, dim=1), shapes, self.group))


def local(x: Tensor) -> Tensor:
    """This process's part of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def group_of(parameter: Tensor) -> dist.ProcessGroup | None:
    """The processes that share the work on a parameter: those that it is sharded over, else all."""
    if isinstance(parameter, DTensor):
        return parameter.device_mesh.get_group(parameter.device_mesh.ndim - 1)
    return dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None


def exchange(
    pieces: list[Tensor], shapes: list[tuple[int, ...]], group: dist.ProcessGroup
) -> list[Tensor]:
    """Sends piece i to process i; returns what comes from each, of these shapes."""
    flat = torch.cat([piece.reshape(-1) for piece in pieces])
    sizes = [torch.Size(shape).numel() for shape in shapes]
    came = flat.new_empty(sum(sizes))
    dist.all_to_all_single(came, flat, sizes, [p.numel() for p in pieces], group=group)
    return [x.view(shape) for x, shape in zip(came.split(sizes), shapes, strict=True)]
