"""The part of each tensor that a process holds, and how it is filled in and gathered.

Files and initial weights have whole tensors, with rows in the order of the model. A process holds a
whole tensor, or as a DTensor some of its rows. With tensor parallelism it holds some columns of
each c_proj. It reads and writes only its part, so no process needs memory for a whole model.

training/parallel/data_parallel.py and training/parallel/tensor_parallel.py divide the tensors.
training/optimizer_state.py goes through the state of optimizers. model/formats/checkpoint.py has
the format of a file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map_only

from model.gpt import GPT
from model.initial_weights import allocate
from model.rows import Rows, is_vector
from training.parallel.tensor_parallel import placements_of, row_order_of
from utils.distributed import Process


def held_rows(model: GPT, name: str, x: Tensor) -> Tensor:
    """Return the indices, int64 (r,), of the rows of `x` that this process holds, in the order in
    which it holds them: 6 to 11 of 24 rows on the second of four processes. `x` is the parameter
    `name` or a tensor of its optimizer state."""
    if not isinstance(x, DTensor):
        return torch.arange(x.size(0))
    # indices of all rows, in the order of tensor parallelism
    row_indices = row_order_of(model, name, x)
    # Tensor parallelism divided the rows first. Then FSDP2 divided the part of each process.
    placements = placements_of(x)
    for dimension in ("tensor", "shard"):
        placement = placements.get(dimension, Replicate())  # a mesh may lack the dimension
        if placement.is_replicate() or placement.is_shard(1):  # not divided by rows
            continue
        # DTensor also divides rows by `chunk`, which may return fewer chunks than it is asked for:
        # if a tensor has few rows, the last processes hold none.
        chunks = row_indices.chunk(x.device_mesh[dimension].size())
        rank = x.device_mesh.get_local_rank(dimension)
        row_indices = chunks[rank] if rank < len(chunks) else row_indices[:0]
    return row_indices


@torch.no_grad()
def fill(model: GPT, name: str, x: Tensor, whole: Rows) -> None:
    """Copy into `x`, in place, the part of the tensor `whole` that this process holds. `x` is the
    parameter `name` or a tensor of its optimizer state. `whole` is a tensor on the CPU, or numbers
    that are read or drawn by rows. If it has more rows than `x`, the last rows are left out."""
    if x.dim() == 0:  # AdamW's "step", or a parameter that is a single number
        x.copy_(whole[...])
        return
    content = whole[held_rows(model, name, x)]  # (r, ...); only these rows are read
    if not isinstance(x, DTensor):
        x.copy_(content)
        return
    placement = placements_of(x).get("tensor", Replicate())  # a mesh may lack "tensor"
    if placement.is_shard(1):  # the process holds some columns of a c_proj
        mesh = x.device_mesh
        content = content.chunk(mesh["tensor"].size(), dim=1)[mesh.get_local_rank("tensor")]
    x.to_local().copy_(content)  # in the memory of x


def fill_model(model: GPT, weights: Mapping[str, Rows], device: torch.device) -> None:
    """Allocate a model that is on the device "meta" on `device`, and fill in `weights`."""
    allocate(model, device)
    fill_weights(model, weights)


def fill_weights(model: GPT, weights: Mapping[str, Rows]) -> None:
    """Fill in, in place, the part of `weights` that this process holds. An embedding may have fewer
    rows than its weight: a shorter context drops the last rows of the table of positions."""
    state = model.state_dict()  # the tensors themselves, not copies
    # the model has the architecture of the weights: agreed_model_config of training/summary.py,
    # or build_model of finetune.py
    assert weights.keys() == state.keys()
    for name, x in state.items():
        # "transformer.wpe" of "transformer.wpe.weight"
        is_embedding = isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding)
        assert weights[name].shape == x.shape or is_embedding  # wpe of a shorter context differs
        fill(model, name, x, weights[name])  # in place: only this process's part


@dataclass
class OwnRows:
    """Copy of the rows of a tensor that this process writes to a file; no rows if another process
    writes them."""

    shape: torch.Size
    """Shape of the whole tensor."""
    rows: Tensor
    """Indices of the rows, int64 (r,); a vector is written as one row, of index 0."""
    content: Tensor
    """Numbers in the rows, (r, ...), on the CPU."""


@torch.no_grad()
def copy_own_rows(model: GPT, name: str, x: Tensor, process: Process) -> OwnRows:
    """Return a copy of the rows of `x` that this process writes to a checkpoint. `x` is the
    parameter `name` or a tensor of its optimizer state. If it is divided, every process must call
    this function."""
    if isinstance(x, DTensor):
        rows, content = rows_to_write(model, name, x, process)  # (r,), (r, ...), by collectives
    else:
        # Every process has all rows of a plain tensor, and the main process writes them. A vector
        # is one row, and so is a single number, such as AdamW's "step".
        content = x.reshape(1, -1) if is_vector(x.shape) else x
        if not process.is_main:
            content = content[:0]
        rows = torch.arange(len(content))
    # copy=True, also on a CPU, because training changes x while a thread writes the copy. x.shape
    # is the shape of the whole tensor, also for a DTensor.
    return OwnRows(shape=x.shape, rows=rows, content=content.to("cpu", copy=True))


def rows_to_write(model: GPT, name: str, x: DTensor, process: Process) -> tuple[Tensor, Tensor]:
    """Return the indices, int64 (r,), and the content, (r, ...), of the rows of a divided
    tensor `x` that this process writes. If several processes hold the same rows, one of them
    writes. `x` is the parameter `name` or a tensor of its optimizer state. Every process must call
    it."""
    # a vector, a matrix of one column or a number, which a checkpoint has as one row
    x_is_one_row = is_vector(x.shape)
    # Gather columns, so that rows are whole, and vectors, which are small. Rows stay divided.
    placements = [
        Replicate() if x_is_one_row or placement.is_shard(1) else placement
        for placement in x.placements
    ]
    gathered = x.redistribute(placements=placements)  # calls collectives
    rows = held_rows(model, name, gathered)  # (r,), indices in the order of the model
    content = gathered.to_local()
    if x_is_one_row:
        # (1, n), as in a checkpoint; argsort undoes the row order of tensor parallelism
        content = content.view(1, -1)[:, rows.argsort().to(content.device)]
        rows = torch.zeros(1, dtype=torch.int64)  # the index of this row

    if is_first_holder(gathered, process):
        return rows, content
    return rows[:0], content[:0]


def is_first_holder(x: DTensor, process: Process) -> bool:
    """Return whether this process is the first one of those that hold the same rows of `x`: rank 0
    along each dimension of the mesh that replicates."""
    placements = placements_of(x)
    for dimension, placement in placements.items():
        if placement.is_replicate() and x.device_mesh.get_local_rank(dimension) > 0:
            return False
    # Parameters outside the four linear layers of a block have a mesh without "tensor": all
    # processes of a tensor-parallel group hold the same rows of them.
    return "tensor" in placements or process.tensor_rank == 0


def copy_state(
    model: GPT, optimizer_state: Mapping[str, dict], process: Process
) -> tuple[dict[str, OwnRows], dict[str, dict]]:
    """Return copies, in host memory, of the rows of weights and optimizer state that this process
    writes: {"lm_head.weight": OwnRows} and {"lm_head.weight": {"exp_avg": OwnRows}} for each
    parameter. If tensors are divided, every process must call it."""
    state_dict = model.state_dict()
    weights = {name: copy_own_rows(model, name, x, process) for name, x in state_dict.items()}
    own_optimizer_state: dict[str, dict] = {}
    for name, state in optimizer_state.items():
        copy_tensor = partial(copy_own_rows, model, name, process=process)  # Tensor -> OwnRows
        # what is no tensor stays, such as a counter
        own_optimizer_state[name] = tree_map_only(Tensor, copy_tensor, state)
    return weights, own_optimizer_state
