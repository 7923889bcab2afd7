"""Tensor parallelism (Shoeybi et al. 2019, "Megatron-LM"): several processes share each block.

Each process of a tensor-parallel group computes some of the heads and some channels of the MLP. It
holds their rows of c_attn and c_fc and their columns of the two c_proj, and the group sums the
outputs of c_proj. Everything else, but for what lies between c_attn or c_fc and c_proj, is the same
on all processes of a group. So they read the same sequences, and dropout there drops the same
numbers. Sharding then divides the part of a process among the groups
(training/parallel/data_parallel.py). Parameters of the four layers are DTensors on a mesh with a
dimension "tensor", all others on a mesh without it.

c_attn fuses queries, keys and values, and c_fc of SwiGLU fuses gate and input. A process needs its
part of each, so the rows of such a layer are reordered: [Q; K; V] becomes [Q0; K0; V0; Q1; K1; V1].
Checkpoints keep the order of the model. training/parallel/own_rows.py converts it by row_order_of.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import broadcast
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement

from model.config import GPTConfig
from model.gpt import GPT, Block, FusedLinear
from utils.errors import UserError


def placements_of(x: DTensor) -> dict[str, Placement]:
    """Return how a tensor is divided along each dimension of its device mesh, by the name of the
    dimension: {"replicate": Replicate(), "shard": Shard(dim=0)} for some of the rows. A dimension
    is "replicate", "shard" or "tensor" (training/parallel/data_parallel.py)."""
    names = x.device_mesh.mesh_dim_names
    assert names is not None  # divide_model of data_parallel.py names them
    return dict(zip(names, x.placements, strict=True))


def tensor_parallel_of(x: Tensor) -> int:
    """Return how many processes share a parameter by tensor parallelism; 1 without it."""
    if isinstance(x, DTensor) and "tensor" in placements_of(x):
        return x.device_mesh["tensor"].size()
    return 1


def row_order(fused_rows: tuple[int, ...], tensor_parallel: int) -> Tensor:
    """Return the row indices of a fused weight, int64 (rows,), in the order of tensor parallelism:
    the first process's part of each matrix, then the second's, and so on. `fused_rows` are the row
    counts of the matrices: (4, 2, 2) on two processes gives [0, 1, 4, 6, 2, 3, 5, 7]."""
    matrices = torch.arange(sum(fused_rows)).split(fused_rows)  # [0, 1, 2, 3], [4, 5], [6, 7]
    # a line for each process: [[0, 1], [2, 3]], [[4], [5]], [[6], [7]]
    by_process = [rows.view(tensor_parallel, -1) for rows in matrices]
    # the lines of each process joined: [[0, 1, 4, 6], [2, 3, 5, 7]]
    return torch.cat(by_process, dim=1).flatten()


def row_order_of(model: GPT, name: str, x: DTensor) -> Tensor:
    """Return the indices, int64 (rows,), that reorder the rows of `x` from the order of the model
    and its checkpoints to the order of tensor parallelism, process by process. `x` is the parameter
    `name` or a tensor of its optimizer state."""
    layer = model.get_submodule(name.rpartition(".")[0])  # c_attn of "...c_attn.weight"
    if isinstance(layer, FusedLinear):  # weight and bias
        return row_order(layer.fused_rows, tensor_parallel_of(x))  # (768, 768, 768), 2
    return torch.arange(x.size(0))  # other layers keep the order of the model


def check_divides(model_config: GPTConfig, tensor_parallel: int) -> None:
    """Raise UserError unless `tensor_parallel` processes can share the blocks of a model, each with
    equally many whole heads and channels of the MLP."""
    # Query heads are a multiple of the key/value heads, so they divide, too.
    if model_config.num_kv_heads % tensor_parallel or model_config.inner % tensor_parallel:
        raise UserError(
            f"{tensor_parallel} processes cannot share each block: their number must divide the "
            f"{model_config.num_kv_heads} key/value heads of the model and the "
            f"{model_config.inner} channels of its MLP"
        )


class SharedDropout(nn.Dropout):
    """Dropout of a tensor that all processes of a tensor-parallel group hold. All use the mask of
    the first process.

    The processes have different random seeds. With equal seeds, the first heads of all processes
    would have the same dropout mask in attention, and so would the second heads, and so on.
    """

    def __init__(self, p: float, mesh: DeviceMesh) -> None:
        super().__init__(p)
        self.mesh = mesh  # of the group, to all of which `forward` sends one mask

    def forward(self, x: Tensor) -> Tensor:
        """Set the same entries of x to 0 on every process, and divide the others by 1 - p."""
        if not self.training or self.p == 0:
            return x
        is_kept = torch.empty_like(x, dtype=torch.uint8).bernoulli_(1 - self.p)  # 1 or 0
        # 0 is the first process of the group. This broadcast works under torch.compile.
        is_kept = broadcast(is_kept, 0, self.mesh)
        return x * is_kept / (1 - self.p)


def parallelize(model: GPT, mesh: DeviceMesh) -> None:
    """Divide the blocks of a model on the device "meta" among the processes of a one-dimensional
    mesh, in place. check_divides has checked that their number divides the heads and the MLP."""
    tensor_parallel = mesh.size()
    # ColwiseParallel divides the rows of a weight (out, in): each process computes some outputs.
    # own_rows.py fills a fused layer in the order of row_order, so that a process has its part of
    # each fused matrix: of c_attn whole heads.
    # RowwiseParallel divides the columns and all-reduces the outputs. So attention and MLP each
    # need one all-reduce in a forward pass.
    plan = {
        "attn.c_attn": ColwiseParallel(),
        "attn.c_proj": RowwiseParallel(),
        "mlp.c_fc": ColwiseParallel(),
        "mlp.c_proj": RowwiseParallel(),
    }
    # This silences a warning that gathering state along two dimensions of a mesh takes two steps.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    # At each call SharedDropout draws a new mask, the same on all processes of the group.
    # ScaledDotProduct keeps its own dropout, because each process has other heads.
    shared_dropout = SharedDropout(model.config.dropout, mesh)
    model.transformer.drop = shared_dropout
    for block in model.transformer.h:
        assert isinstance(block, Block)  # for mypy
        # Divide the four linear layers by `plan`, c_attn and c_fc by rows, both c_proj by columns.
        # src_data_rank=None: send no weights. training/parallel/own_rows.py fills them in.
        parallelize_module(block, mesh, plan, src_data_rank=None)
        block.attn.dropout = shared_dropout
        block.mlp.dropout = shared_dropout
        # Attention.forward splits the output of c_attn by the number of heads of this process.
        block.attn.num_heads //= tensor_parallel
        block.attn.num_kv_heads //= tensor_parallel


def mesh_of(x: Tensor) -> DeviceMesh | None:
    """Return the device mesh of a DTensor, None for a plain tensor."""
    return x.device_mesh if isinstance(x, DTensor) else None


def group_by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors by device mesh, because PyTorch's operations on a list of DTensors fail if they
    are on several meshes. Plain tensors are one list."""
    tensors_by_mesh: dict[DeviceMesh | None, list[Tensor]] = defaultdict(list)
    for x in tensors:
        tensors_by_mesh[mesh_of(x)].append(x)
    return list(tensors_by_mesh.values())
