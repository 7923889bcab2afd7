"""Tensor parallelism (Shoeybi et al. 2019, "Megatron-LM"): several processes share each block.

Each process of a tensor group computes some of the heads and some of the MLP's channels: it holds
these rows of c_attn and c_fc and these columns of the two c_proj, and the group adds up what they
return. Everything outside of these four layers is computed alike by all processes of the group,
which therefore read the same sequences, and drop the same of what all of them have. Sharding
(training/parallel/data_parallel.py) then divides what a process holds among those of the other
groups. Parameters of the four layers are DTensors on a mesh with a dimension "tensor", all others
on a mesh without.

c_attn fuses queries, keys and values, and c_fc of SwiGLU gate and value. A process needs its part
of each, so that the rows of such a layer are reordered: [Q; K; V] becomes [Q0; K0; V0; Q1; K1; V1].
Checkpoints have the order of the model: training/parallel/own_rows.py fills in and gathers by
model_rows.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import broadcast
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from model.config import GPTConfig
from model.gpt import GPT, Block
from utils.errors import UserError


def fused_layers(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Return the linear layers of a block whose weight fuses several matrices, by name, with the
    row counts of these: queries, keys and values in c_attn, gate and value of SwiGLU in c_fc."""
    kv_rows = config.kv_heads * config.head_size  # keys; values have as many
    fused: dict[str, tuple[int, ...]] = {"attn.c_attn": (config.n_embd, kv_rows, kv_rows)}
    if config.is_gated:
        fused["mlp.c_fc"] = (config.inner, config.inner)
    return fused


def tensor_parallel_of(model: GPT) -> int:
    """Return the number of processes that share each block of a model, 1 without parallelize."""
    block = model.transformer.h[0]
    assert isinstance(block, Block)  # for mypy, to which ModuleList holds Modules
    return model.config.n_head // block.attn.num_heads  # all heads / those of this process


def row_order(fused_rows: tuple[int, ...], tensor_parallel: int) -> Tensor:
    """Return the indices, int64 (rows,), of the rows of fused matrices in the order in which
    `tensor_parallel` processes take equal parts of each matrix, one process after another.
    `fused_rows` are the row counts of the matrices."""
    by_process: list[Tensor] = []  # row indices (tensor_parallel, rows of a process) by matrix
    for rows in torch.arange(sum(fused_rows)).split(fused_rows):
        by_process.append(rows.view(tensor_parallel, -1))
    # A row of the concatenation is what one process takes: its queries, keys and values.
    return torch.cat(by_process, dim=1).flatten()


def model_rows(model: GPT, name: str, num_rows: int) -> Tensor:
    """Return the indices, int64 (num_rows,), that bring the rows of the parameter `name` from the
    order of the model, which checkpoints have, into that in which the processes hold them, one
    after another."""
    for linear_name, fused_rows in fused_layers(model.config).items():
        if linear_name in name:  # weight and bias
            return row_order(fused_rows, tensor_parallel_of(model))
    return torch.arange(num_rows)  # other layers keep the order of the model


def check_divides(config: GPTConfig, tensor_parallel: int) -> None:
    """Raise UserError unless `tensor_parallel` processes can share the blocks of a model: each
    takes whole heads, and as many channels of the MLP as the others."""
    # Query heads are a multiple of the key/value heads, so that they divide, too.
    if config.kv_heads % tensor_parallel or config.inner % tensor_parallel:
        raise UserError(
            f"{tensor_parallel} processes cannot share each block: their number has to divide the "
            f"{config.kv_heads} key/value heads of the model and the {config.inner} channels of "
            "its MLP"
        )


class SharedDropout(nn.Dropout):
    """Dropout of a tensor that all processes of a tensor group have, by the mask of the first one.

    Each process draws random numbers of its own: with common ones, attention would have one dropout
    mask for the first heads of all processes, one for their second heads, and so on.
    """

    def __init__(self, p: float, mesh: DeviceMesh) -> None:
        super().__init__(p)
        self.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        """Return x with the same numbers dropped on every process, the others divided by 1 - p."""
        if not self.training or self.p == 0:
            return x
        is_kept = torch.empty_like(x, dtype=torch.uint8).bernoulli_(1 - self.p)
        # 0 is the first process of the group. This broadcast can be compiled.
        is_kept = broadcast(is_kept, 0, self.mesh)
        return x * is_kept / (1 - self.p)


def parallelize(model: GPT, mesh: DeviceMesh) -> None:
    """Divide the blocks of a model on the device "meta" among the processes of a mesh of one
    dimension, in place. Raises UserError if the heads or the MLP's width do not divide."""
    tensor_parallel = mesh.size()
    check_divides(model.config, tensor_parallel)
    # Colwise divides the rows of a weight (out, in), and each process computes its own outputs.
    # Rowwise divides the columns and all-reduces the outputs. So attention and MLP take one
    # all-reduce each.
    plan = {
        "attn.c_attn": ColwiseParallel(),
        "attn.c_proj": RowwiseParallel(),
        "mlp.c_fc": ColwiseParallel(),
        "mlp.c_proj": RowwiseParallel(),
    }
    # PyTorch warns that gathering state along two dimensions of a mesh takes two steps.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    # ScaledDotProduct keeps its own dropout, as each process has other heads.
    dropout = SharedDropout(model.config.dropout, mesh)
    model.transformer.drop = dropout
    for block in model.transformer.h:
        assert isinstance(block, Block)  # for mypy
        # src_data_rank=None: nothing is sent; training/parallel/own_rows.py fills in each process's
        # part.
        parallelize_module(block, mesh, plan, src_data_rank=None)
        block.attn.dropout = dropout
        block.mlp.dropout = dropout
        # Attention.forward splits the output of c_attn by these numbers, of heads of this process.
        block.attn.num_heads //= tensor_parallel
        block.attn.num_kv_heads //= tensor_parallel


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Divide tensors into lists of one mesh each, as an operation on a list of DTensors raises an
    error if they lie on several. Plain tensors are one list."""
    lists: dict[DeviceMesh | None, list[Tensor]] = defaultdict(list)
    for x in tensors:
        # None: a plain tensor
        lists[getattr(x, "device_mesh", None)].append(x)
    return list(lists.values())
