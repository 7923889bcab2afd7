"""Data parallelism, applied to a plain model from outside: DDP, or FSDP2 for sharded state.

Every process trains on its own part of the batch, and gradients are averaged. --sharding decides
what a process holds:

    none    DistributedDataParallel: everything
    zero1   a shard of optimizer state and float32 weights; gradients are reduced once a step
    zero2   also only a shard of the gradients, which are reduced in every micro-step
    zero3   also only a shard of the weights for compute: each block is gathered before its forward
            and backward pass, and freed after it

zero1 to zero3 are FSDP2 (torch.distributed.fsdp.fully_shard), named as in Rajbhandari et al. 2020,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models". FSDP2 keeps each parameter
as a DTensor, and a process holds some of its rows; only a parameter that is a single number stays
whole. Before FSDP2, tensor parallelism divides the blocks (training/parallel/tensor_parallel.py).
There is no pipeline parallelism.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, reduce

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from model.gpt import GPT
from model.initial_weights import build_without_weights
from model.proof import agrees, on_narrow_copy
from model.rows import Rows
from training.parallel.own_rows import fill_model
from training.parallel.tensor_parallel import check_divides, group_by_mesh, parallelize
from utils.distributed import Process
from utils.errors import UserError


def wrap(model: GPT, weights: Mapping[str, Rows], process: Process, sharding: str) -> nn.Module:
    """Make a model data-parallel, move it from the device "meta" to the device of the process, fill
    in `weights` by name, and return the module to train. Rows (model/rows.py) are tensors on the
    CPU, or numbers that are read from a file, or drawn, when their rows are asked for.

    The module for the `sharding` "none" is DDP's around the model. For "zero1", "zero2" and "zero3"
    it is the model, with DTensors as parameters, and for a single process the unchanged model.
    """
    if sharding != "none" and dist.is_initialized():  # False for a single process
        # In place, on "meta", before weights take memory: no process ever holds more than its part.
        divide_model(model, process, sharding)
    fill_model(model, weights, process.device)  # allocates, and reads only this process's part
    if sharding != "none" or not dist.is_initialized():
        return model
    device_ids = [process.device.index] if process.device.type == "cuda" else None
    # gradient_as_bucket_view: gradients share the memory of the buckets that DDP reduces. Gradients
    # that accumulate over micro-steps without a reduction have memory of their own.
    return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)


def divide_model(model: GPT, process: Process, sharding: str) -> None:
    """Divide a model on the device "meta" among processes, in place: first by tensor parallelism,
    then by FSDP2.

    A replica is a set of processes that together hold one copy of the weights and optimizer state.
    By default it is a machine. Raises UserError for a parameter that several modules share, and for
    a model that tensor parallelism changes.
    """
    # FSDP2 shards along "shard" and reduce-scatters gradients there. It all-reduces the shards of
    # gradients along "replicate" (HSDP): with a copy in each machine, only this goes between
    # machines. Along "tensor", processes with consecutive ranks share each block (tensor
    # parallelism). The shape is (2, 8, 1) for two machines with eight processes each.
    all_mesh = init_device_mesh(
        process.device.type,
        (process.replicas, process.data_parallel // process.replicas, process.tensor_parallel),
        mesh_dim_names=("replicate", "shard", "tensor"),
    )
    # (replicas, shards), or (shards,) if there is one replica: the processes with the same place in
    # their tensor-parallel groups
    data_mesh = all_mesh["replicate", "shard"] if process.replicas > 1 else all_mesh["shard"]
    # Tensor parallelism comes first. FSDP2 then divides the part that each process holds.
    if process.tensor_parallel > 1:
        # UserError if a narrow copy, divided, has another loss or other gradients
        refuse_wrong_division(model, all_mesh["tensor"], process)
        # in place: some of the heads, and some channels of each MLP, on each process
        parallelize(model, all_mesh["tensor"])

    first_name_of = {p: name for name, p in model.named_parameters()}  # the first of several
    for name, p in model.named_parameters(remove_duplicate=False):
        if first_name_of[p] != name:  # FSDP2 would divide it in each of these modules
            raise UserError(
                f"{name} is shared by modules and cannot be divided: train without sharding"
            )
    shard_model(model, data_mesh, process.dtype, sharding)  # in place


def shard_model(model: GPT, mesh: DeviceMesh, dtype: torch.dtype, sharding: str) -> None:
    """Divide a model by FSDP2, in place: each block, and a root unit with the rest. Blocks are
    gathered in `dtype`, and gradients are reduced in float32. The mesh is (replicas, shards), or
    (shards,) for one replica."""
    # FSDP2 casts the weights of a block before it gathers them, which halves the bytes to send in
    # 16 bits. It does not cast inputs: the residual stream stays float32, as under autocast.
    mixed_precision = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    # FSDP2 divides no single numbers, such as a learned temperature of an edited model: every
    # process holds them (ignored_params), and average_scalars below averages their gradients.
    scalars = {p for p in model.parameters() if p.dim() == 0}
    # FSDP2 gathers the parameters of a block together just before its forward. zero3 frees them
    # after the forward and gathers them again for the backward. zero1 and zero2 keep them.
    for block in model.transformer.h:
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=mixed_precision,
            reshard_after_forward=sharding == "zero3",
            ignored_params=scalars,
        )
    # The root unit has the rest: embeddings, final norm and head, in float32. It is not freed after
    # the forward, because the backward begins with the head.
    fully_shard(model, mesh=mesh, reshard_after_forward=False, ignored_params=scalars)
    # By default only `forward` gathers the parameters of the root. Evaluation and sampling call
    # `hidden`.
    register_fsdp_forward_method(model, "hidden")
    # FSDP2 warns if a module returns a view, because an in-place operation on it would lose a hook.
    # The loss is a view, but nothing changes it in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module.*returned a view tensor")


def refuse_wrong_division(model: GPT, mesh: DeviceMesh, process: Process) -> None:
    """Raise UserError on all processes if tensor parallelism over the mesh computes another loss or
    other gradients than the undivided model. A narrow copy of the model shows it."""
    check_divides(model.config, mesh.size())  # UserError unless heads and MLP divide evenly
    compare = partial(division_agrees, mesh, process.device)  # called with the narrow copy
    try:
        # the copy has few channels, but a key/value head for each process
        agree = on_narrow_copy(compare, type(model), model.config, max_kv_heads=mesh.size())
    except Exception:  # an edited model may raise anything
        agree = False
    # A process without agreement ends at once: the others may still compare, and wait for it.
    if not (agree and process.all_agree(agree)):
        raise UserError(
            f"{mesh.size()} processes cannot share the blocks of this model: divided by the four "
            "linear layers of model/gpt.py, it has another loss or other gradients"
        )


def division_agrees(mesh: DeviceMesh, device: torch.device, plain: GPT) -> bool:
    """Compare a narrow copy of the model with the same weights divided among the processes of the
    mesh. Every process of the mesh must call it."""
    divided = build_without_weights(type(plain), plain.config)  # on "meta"
    parallelize(divided, mesh)
    fill_model(divided, plain.state_dict(), device)  # each process its part of plain's weights
    divided.eval()  # the dropout of parallelize, too
    plain.to(device)

    # ids that do not repeat each other, without random numbers: 0, 1, 4, 9, ...
    idx = torch.arange(min(32, plain.config.block_size), device=device).square()
    idx = (idx % plain.config.vocab_size).unsqueeze(0)  # (1, T)
    # Parameters that are not divided get the same gradients on every process.
    names = [
        name
        for name, p in divided.named_parameters()
        if p.requires_grad and not isinstance(p, DTensor)
    ]
    divided_loss, divided_gradient = loss_and_gradient(divided, names, idx)
    plain_loss, plain_gradient = loss_and_gradient(plain, names, idx)
    # up to rounding
    return agrees(divided_loss, plain_loss) and agrees(divided_gradient, plain_gradient)


def loss_and_gradient(model: GPT, names: list[str], idx: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss for token ids (1, T), and its gradient for the parameters `names` as one
    vector: the rounding of small gradients is that of large ones."""
    loss = model(idx, idx)  # any targets do
    parameters = [model.get_parameter(name) for name in names]
    gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
    return loss, torch.cat([gradient.flatten() for gradient in gradients])


def sync_gradients(wrapped: nn.Module, sharding: str, *, is_last: bool) -> AbstractContextManager:
    """Return the context in which forward and backward of a micro-step run, so that gradients are
    not reduced more often than needed. `wrapped` is the module from `wrap`.

    DDP and zero1 reduce gradients only in the last micro-step of a step (`is_last`). zero2 and
    zero3 reduce them in each, so that no process holds whole gradients.
    """
    if isinstance(wrapped, DistributedDataParallel):
        return nullcontext() if is_last else wrapped.no_sync()
    if isinstance(wrapped, FSDPModule):  # fully_shard changes the model's class
        if sharding == "zero1":
            wrapped.set_requires_gradient_sync(is_last)
        else:
            # Reduce-scatter in each micro-step, all-reduce between replicas in the last one.
            wrapped.set_requires_all_reduce(is_last)
        # Keep gathered weights until the last micro-step: they do not change before the optimizer
        # step. zero3 keeps only the root's weights (recurse=False) and frees blocks.
        wrapped.set_reshard_after_backward(is_last, recurse=sharding != "zero3")
        if is_last:
            return average_scalars(wrapped)
    return nullcontext()  # FSDP2 keeps these settings in the module


def free_gathered_weights(model: nn.Module) -> None:
    """Let a model that FSDP2 divides hold only its shards again. After an evaluation some weights
    are whole, with zero3 those of the root, and model.parameters() are then not those that the
    optimizers train."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def average_scalars(wrapped: nn.Module) -> Iterator[None]:
    """Context of the last micro-step: at its end, average over the processes the gradients of
    parameters that FSDP2 does not divide, which are single numbers."""
    yield
    for p in wrapped.parameters():
        if not isinstance(p, DTensor) and p.grad is not None:
            dist.all_reduce(p.grad)  # gloo has no average
            p.grad /= dist.get_world_size()


def clip_grad_norm(wrapped: nn.Module, max_norm: float) -> Tensor:
    """Scale gradients in place so that their total L2 norm is at most `max_norm`; 0 means no limit.
    Return the norm before scaling, the same on every process, as a tensor on the device, because
    reading it would make the host wait. Every process must call it. `wrapped` is the module from
    `wrap`: DDP's around the model, or the model."""
    # One list for each device mesh: a norm cannot mix DTensors of several meshes.
    parameter_lists = group_by_mesh(wrapped.parameters())
    norms: list[Tensor] = []  # () each, of the gradients of one list
    for parameters in parameter_lists:
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        # The norm of DTensors is a DTensor: full_tensor reduces it over the processes.
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    full_norm = reduce(torch.hypot, norms)  # root of the sum of squares
    if max_norm > 0:
        for parameters in parameter_lists:
            # This multiplies by at most 1. An `if` on the norm would make the host wait.
            nn.utils.clip_grads_with_norm_(parameters, max_norm, full_norm)
    return full_norm
