"""The part of each tensor that a process holds, and how it is filled in and gathered.

Files, and the weights that a model begins with, have whole tensors, with rows in the order of the
model. A process holds all of a tensor, or as a DTensor some of its rows, and of the c_proj of
tensor parallelism some of its columns. It reads no more than that from a file and writes no more
than that to it, so that no process needs memory for a whole model.

How tensors are divided stands in training/parallel/data_parallel.py and
training/parallel/tensor_parallel.py, the format of a file in model/formats/checkpoint.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from model.gpt import GPT
from model.rows import Rows, is_vector
from training.parallel.tensor_parallel import model_rows
from utils.distributed import Process


def placements_of(x: DTensor) -> dict[str, Placement]:
    """Return how a tensor is divided along each dimension of its mesh, by the dimension's name:
    "replicate", "shard" or "tensor" (training/parallel/data_parallel.py)."""
    names = x.device_mesh.mesh_dim_names
    assert names is not None  # `shard` of data_parallel.py gives its meshes names
    return dict(zip(names, x.placements, strict=True))


def held_rows(model: GPT, name: str, x: Tensor) -> Tensor:
    """Return the indices, int64 (r,), of the rows that this process holds of the parameter `name`,
    or of `x` of its optimizer state, in the order in which it holds them."""
    # all rows; tensor parallelism reorders the rows of c_attn and of SwiGLU's c_fc
    rows = model_rows(model, name, x.size(0))
    if not isinstance(x, DTensor):
        return rows
    # Tensor parallelism divided the rows first, and FSDP2 then divided each process's part.
    placements = placements_of(x)
    for dimension in ("tensor", "shard"):
        placement = placements.get(dimension, Replicate())
        if placement.is_replicate() or placement.is_shard(1):  # not divided by rows
            continue
        # DTensor divides rows by `chunk`, too, which may return fewer chunks than it is asked for:
        # of a tensor of few rows the last processes hold none.
        chunks = rows.chunk(x.device_mesh[dimension].size())
        rank = x.device_mesh.get_local_rank(dimension)
        rows = chunks[rank] if rank < len(chunks) else rows[:0]
    return rows


@torch.no_grad()
def fill(model: GPT, name: str, x: Tensor, whole: Rows) -> None:
    """Fill in, in place, what this process holds of `x`: the parameter `name`, or a tensor of its
    optimizer state. `whole` may have more rows than `x`: the last ones are left out."""
    if x.dim() == 0:  # AdamW's "step"
        assert isinstance(whole, Tensor)  # as all optimizer state in a file is
        x.copy_(whole)
        return
    content = whole[held_rows(model, name, x)]  # (r, columns) or (r,)
    if not isinstance(x, DTensor):
        x.copy_(content)
        return
    placement = placements_of(x).get("tensor", Replicate())
    if placement.is_shard(1):  # the process holds some columns of a c_proj
        mesh = x.device_mesh
        content = content.chunk(mesh["tensor"].size(), dim=1)[mesh.get_local_rank("tensor")]
    x.to_local().copy_(content)


def fill_model(model: GPT, weights: Mapping[str, Rows], device: torch.device) -> None:
    """Give a model on the device "meta" memory on a device, and fill in what this process holds of
    its weights."""
    model.to_empty(device=device)  # uninitialized memory
    state = model.state_dict()  # the tensors themselves, not copies
    # agreed_model_config (training/summary.py) has given the model the architecture of the weights
    assert weights.keys() == state.keys()
    for name, x in state.items():
        # a shorter context drops the last rows of the table of positions, "wpe"
        assert weights[name].shape == x.shape or "wpe" in name
        fill(model, name, x, weights[name])


def optimizer_state(
    model: GPT, optimizers: list[torch.optim.Optimizer]
) -> dict[str, dict[str, Tensor]]:
    """Return the state of optimizers by the names of the parameter and of the state, such as
    "exp_avg": the tensors themselves, not copies. For new optimizers PyTorch creates the state
    here, by a step with a learning rate of 0."""
    # PyTorch declares more kinds of values than an optimizer's state has.
    return get_optimizer_state_dict(model, optimizers)["state"]  # type: ignore[return-value]


def fill_optimizers(
    model: GPT, optimizers: list[torch.optim.Optimizer], saved: dict[str, dict[str, Tensor]]
) -> None:
    """Fill in, in place, what this process holds of the optimizer state in a checkpoint, `saved`.
    It is empty before the first step: then there is nothing to do."""
    if not saved:
        return
    for name, state in optimizer_state(model, optimizers).items():
        for state_name, x in state.items():
            fill(model, name, x, saved[name][state_name])


@dataclass
class OwnRows:
    """Rows of a whole tensor that this process writes to a file; no rows if another one writes
    them."""

    shape: torch.Size
    """Shape of the whole tensor."""
    rows: Tensor
    """Indices of the rows, int64 (r,); a vector is one row."""
    content: Tensor
    """A copy of the rows (r, columns), on the CPU."""


@torch.no_grad()
def copy_own_rows(model: GPT, name: str, x: Tensor, process: Process) -> OwnRows:
    """Return a copy of what this process writes of the parameter `name`, or of `x` of its optimizer
    state. Every process must call it where tensors are divided."""
    if isinstance(x, DTensor):
        rows, content = rows_to_write(model, name, x, process)
    else:
        # Every process has all rows of a plain tensor, and the main one writes them. A vector is
        # one row, and so is a number, such as AdamW's "step".
        content = x.view(1, -1) if is_vector(x.shape) else x
        if not process.is_main:
            content = content[:0]
        rows = torch.arange(len(content))
    # copy=True: on a CPU, too, training goes on while a thread writes
    return OwnRows(x.shape, rows, content.to("cpu", copy=True))  # a DTensor has the whole shape


def rows_to_write(model: GPT, name: str, x: DTensor, process: Process) -> tuple[Tensor, Tensor]:
    """Return the indices, int64 (r,), and the values (r, columns) of the rows that this process
    writes of a divided tensor: of several processes that hold the same rows, one writes them. The
    arguments are those of copy_own_rows. Every process must call it."""
    vector = is_vector(x.shape)
    # Gather columns, so that rows are whole, and vectors, which are small. Rows stay divided.
    placements: list[Placement] = []
    for placement in x.placements:
        placements.append(Replicate() if vector or placement.is_shard(1) else placement)
    x = x.redistribute(placements=placements)
    rows = held_rows(model, name, x)
    content = x.to_local()
    if vector:
        # one row (1, n); argsort inverts the order of tensor parallelism
        content = content.view(1, -1)[:, rows.argsort().to(content.device)]
        rows = torch.zeros(1, dtype=torch.int64)

    # If several processes hold the same rows, the first one writes: rank 0 along each dimension
    # that replicates. Parameters outside the four linear layers of a block have a mesh without
    # "tensor": all processes that share the block hold the same rows.
    is_writer = "tensor" in placements_of(x) or process.tensor_rank == 0
    for dimension, placement in placements_of(x).items():
        if placement.is_replicate() and x.device_mesh.get_local_rank(dimension) > 0:
            is_writer = False
    if is_writer:
        return rows, content
    return rows[:0], content[:0]


def copy_state(
    model: GPT, optimizers: list[torch.optim.Optimizer], process: Process
) -> tuple[dict[str, OwnRows], dict[str, dict[str, OwnRows]]]:
    """Return copies of what this process writes of the weights and of the optimizer state, by the
    name of the parameter. They take as much memory again, on the host. Every process must call it
    where tensors are divided."""
    weights: dict[str, OwnRows] = {}
    for name, x in model.state_dict().items():
        weights[name] = copy_own_rows(model, name, x, process)
    own_state: dict[str, dict[str, OwnRows]] = {}
    # Before the first step there is no state, and PyTorch would create it by a step of its own.
    if optimizers and optimizers[0].state:
        for name, state in optimizer_state(model, optimizers).items():
            own_state[name] = {}
            for state_name, x in state.items():
                own_state[name][state_name] = copy_own_rows(model, name, x, process)
    return weights, own_state
