"""Muon (Jordan et al. 2024): momentum, made orthogonal, for the matrices of a model's blocks.

torch.optim.Muon takes a matrix at a time, whole, on every process. Here those of one shape go
together, and each process makes its share of them orthogonal, also where they are sharded.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024: steepest at 0
STEPS = 5


def orthogonal(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Matrices near the orthogonal ones nearest to x (N, rows, columns), by Newton-Schulz steps
    with products of `dtype`: singular values become about 0.7 to 1.2."""
    a, b, c = COEFFICIENTS
    wide = x.size(1) <= x.size(2)
    x = (x if wide else x.mT).to(dtype)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x if wide else x.mT


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
        for group in self.param_groups:
            parameters = group["params"]
            for p in parameters:
                if not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            weights = [local(p) for p in parameters]
            gradients = [local(p.grad) for p in parameters]
            momenta = [local(self.state[p]["momentum_buffer"]) for p in parameters]
            torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            directions = torch._foreach_lerp(gradients, momenta, group["momentum"])
            updates = self.orthogonalized(directions, parameters[0], group["parts"])
            shrink = group["lr"] * group["weight_decay"]
            for weight, update in zip(weights, updates, strict=True):
                kept = weight * update > 0 if self.cautious else 1.0
                weight.sub_(shrink * weight * kept + group["lr"] * update)

    def orthogonalized(
        self, directions: list[Tensor], like: Tensor, parts: list[int]
    ) -> list[Tensor]:
        """The update of each of the matrices that `directions` are, or are this process's rows of;
        `like` is one of the parameters."""
        rows, columns = like.shape

        def whole(x: Tensor) -> Tensor:  # (N, rows, columns)
            made = [orthogonal(part, self.dtype) for part in x.split(parts, dim=1)]
            scales = [max(1, part / columns) ** 0.5 for part in parts]
            return torch.cat([x * scale for x, scale in zip(made, scales, strict=True)], dim=1)

        stack, group = torch.stack(directions), group_of(like)
        if group is None:
            return list(whole(stack).unbind())
        world, rank, count = dist.get_world_size(group), dist.get_rank(group), len(stack)
        share = -(-count // world)  # matrices that a process makes orthogonal
        padding = stack.new_zeros(world * share - count, *stack.shape[1:])
        stack = torch.cat([stack, padding])
        if not isinstance(like, DTensor):  # every process has all of each
            mine = whole(stack[rank * share :][:share]).contiguous()
            made = mine.new_empty(world * share, rows, columns)
            dist.all_gather_into_tensor(made, mine, group=group)
            return list(made[:count].unbind())
        each = -(-rows // world)  # rows that a process has of each, fewer at the end
        heights = [max(0, min(each, rows - i * each)) for i in range(world)]
        mine = exchange(stack.split(share), [(share, h, columns) for h in heights], group)
        pieces = [x.contiguous() for x in whole(torch.cat(mine, dim=1)).split(heights, dim=1)]
        made = exchange(pieces, [(share, heights[rank], columns)] * world, group)
        return list(torch.cat(made)[:count].unbind())


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
