"""The part of each tensor that a process holds, and how it is filled in and gathered.

Files and initial weights have whole tensors, with rows in the order of the model. A process holds a
whole tensor, or as a DTensor some of its rows. With tensor parallelism it holds some columns of
each c_proj. It reads and writes only its part, so no process needs memory for a whole model.

Optimizer state is divided like the parameters: each state tensor must be 0-dim or have the rows of
its parameter.

training/parallel/data_parallel.py and training/parallel/tensor_parallel.py divide the tensors.
model/formats/checkpoint.py has the format of a file.
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
    """Return how a tensor is divided along each dimension of its device mesh, by the name of the
    dimension: "replicate", "shard" or "tensor" (training/parallel/data_parallel.py)."""
    names = x.device_mesh.mesh_dim_names
    assert names is not None  # divide_model of data_parallel.py names them
    return dict(zip(names, x.placements, strict=True))


def held_rows(model: GPT, name: str, x: Tensor) -> Tensor:
    """Return the indices, int64 (r,), of the rows of `x` that this process holds, in the order in
    which it holds them. `x` is the parameter `name` or a tensor of its optimizer state."""
    # all rows, in the order of tensor parallelism for c_attn and SwiGLU's c_fc
    rows = model_rows(model, name, x.size(0))
    if not isinstance(x, DTensor):
        return rows
    # Tensor parallelism divided the rows first. Then FSDP2 divided the part of each process.
    placements = placements_of(x)
    for dimension in ("tensor", "shard"):
        placement = placements.get(dimension, Replicate())
        if placement.is_replicate() or placement.is_shard(1):  # not divided by rows
            continue
        # DTensor also divides rows by `chunk`, which may return fewer chunks than it is asked for:
        # if a tensor has few rows, the last processes hold none.
        chunks = rows.chunk(x.device_mesh[dimension].size())
        rank = x.device_mesh.get_local_rank(dimension)
        rows = chunks[rank] if rank < len(chunks) else rows[:0]
    return rows


@torch.no_grad()
def fill(model: GPT, name: str, x: Tensor, whole: Rows) -> None:
    """Copy into `x`, in place, the part of the tensor `whole` that this process holds. `x` is the
    parameter `name` or a tensor of its optimizer state. If `whole` has more rows, the last rows
    are left out."""
    if x.dim() == 0:  # AdamW's "step"
        assert isinstance(whole, Tensor)  # for mypy: optimizer state in files is Tensors
        x.copy_(whole)
        return
    content = whole[held_rows(model, name, x)]  # (r, columns) or (r,); only these are read
    if not isinstance(x, DTensor):
        x.copy_(content)
        return
    placement = placements_of(x).get("tensor", Replicate())
    if placement.is_shard(1):  # the process holds some columns of a c_proj
        mesh = x.device_mesh
        content = content.chunk(mesh["tensor"].size(), dim=1)[mesh.get_local_rank("tensor")]
    x.to_local().copy_(content)  # in the memory of x


def fill_model(model: GPT, weights: Mapping[str, Rows], device: torch.device) -> None:
    """Allocate a model that is on the device "meta" on `device`, and fill in the part of `weights`
    that this process holds."""
    model.to_empty(device=device)  # uninitialized memory
    state = model.state_dict()  # the tensors themselves, not copies
    # the model has the architecture of the weights: agreed_model_config of training/summary.py,
    # or build_model of finetune.py
    assert weights.keys() == state.keys()
    for name, x in state.items():
        # a shorter context drops the last rows of the position embedding, "wpe"
        assert weights[name].shape == x.shape or "wpe" in name
        fill(model, name, x, weights[name])


def optimizer_state(
    model: GPT, optimizers: list[torch.optim.Optimizer]
) -> dict[str, dict[str, Tensor]]:
    """Return the state of optimizers by the name of the parameter, then by its own name, such as
    "exp_avg". The tensors are not copies. If an optimizer is new, PyTorch creates its state here by
    a step with gradients and learning rate of 0."""
    # PyTorch declares more types of values than optimizer state has.
    return get_optimizer_state_dict(model, optimizers)["state"]  # type: ignore[return-value]


def fill_optimizers(
    model: GPT, optimizers: list[torch.optim.Optimizer], saved: dict[str, dict[str, Tensor]]
) -> None:
    """Resume optimizers: fill in, in place, the part of the state in a checkpoint that this process
    holds. `saved` maps the name of a parameter to its state by name; it is empty before the first
    step."""
    if not saved:
        return
    for name, state in optimizer_state(model, optimizers).items():
        for state_name, x in state.items():
            fill(model, name, x, saved[name][state_name])


@dataclass
class OwnRows:
    """Copy of the rows of a tensor that this process writes to a file; no rows if another process
    writes them."""

    shape: torch.Size
    """Shape of the whole tensor."""
    rows: Tensor
    """Indices of the rows, int64 (r,); a vector is written as one row, of index 0."""
    content: Tensor
    """Numbers in the rows, (r, columns), on the CPU."""


@torch.no_grad()
def copy_own_rows(model: GPT, name: str, x: Tensor, process: Process) -> OwnRows:
    """Return a copy of the rows of `x` that this process writes to a checkpoint. `x` is the
    parameter `name` or a tensor of its optimizer state. If it is divided, every process must call
    this function."""
    if isinstance(x, DTensor):
        rows, content = rows_to_write(model, name, x, process)
    else:
        # Every process has all rows of a plain tensor, and the main process writes them. A vector
        # is one row, and so is a single number, such as AdamW's "step".
        content = x.view(1, -1) if is_vector(x.shape) else x
        if not process.is_main:
            content = content[:0]
        rows = torch.arange(len(content))
    # copy=True: also on a CPU, training changes x while a thread writes the copy
    # x.shape is the shape of the whole tensor, also for a DTensor
    return OwnRows(x.shape, rows, content.to("cpu", copy=True))


def rows_to_write(model: GPT, name: str, x: DTensor, process: Process) -> tuple[Tensor, Tensor]:
    """Return the indices, int64 (r,), and the content, (r, columns), of the rows of a divided
    tensor `x` that this process writes. If several processes hold the same rows, one of them
    writes. `x` is the parameter `name` or a tensor of its optimizer state. Every process must call
    it."""
    vector = is_vector(x.shape)
    # Gather columns, so that rows are whole, and vectors, which are small. Rows stay divided.
    placements: list[Placement] = []
    for placement in x.placements:
        placements.append(Replicate() if vector or placement.is_shard(1) else placement)
    gathered = x.redistribute(placements=placements)  # calls collectives
    rows = held_rows(model, name, gathered)
    content = gathered.to_local()
    if vector:
        # one row (1, n); argsort undoes the row order of tensor parallelism
        content = content.view(1, -1)[:, rows.argsort().to(content.device)]
        rows = torch.zeros(1, dtype=torch.int64)

    # If several processes hold the same rows, the first one writes: rank 0 along each dimension
    # that replicates. Parameters outside the four linear layers of a block have a mesh without
    # "tensor": all processes of a tensor-parallel group hold the same rows of them.
    is_writer = "tensor" in placements_of(gathered) or process.tensor_rank == 0
    for dimension, placement in placements_of(gathered).items():
        if placement.is_replicate() and gathered.device_mesh.get_local_rank(dimension) > 0:
            is_writer = False
    if is_writer:
        return rows, content
    return rows[:0], content[:0]


def copy_state(
    model: GPT, optimizers: list[torch.optim.Optimizer], process: Process
) -> tuple[dict[str, OwnRows], dict[str, dict[str, OwnRows]]]:
    """Return copies, in host memory, of the rows of weights and optimizer state that this process
    writes: weights by parameter name, state by parameter name and then by its own. If tensors are
    divided, every process must call it."""
    weights: dict[str, OwnRows] = {}
    for name, x in model.state_dict().items():
        weights[name] = copy_own_rows(model, name, x, process)
    own_state: dict[str, dict[str, OwnRows]] = {}
    # Before the first step there is no state, and optimizer_state would create it.
    if optimizers and optimizers[0].state:
        for name, state in optimizer_state(model, optimizers).items():
            own_state[name] = {}
            for state_name, x in state.items():
                own_state[name][state_name] = copy_own_rows(model, name, x, process)
    return weights, own_state
