"""Data parallelism, applied to a plain model from outside: DDP, or FSDP2 for sharded state.

Every process trains on its own part of the batch, and gradients are averaged. What a process holds:

    none    DistributedDataParallel: everything
    zero1   a shard of optimizer state and float32 weights; gradients are reduced once a step
    zero2   a shard of the gradients, too: they are reduced in every micro-step
    zero3   a shard of the weights for compute, too: each block is gathered before it runs, in the
            forward and in the backward pass, and freed after it

zero1 to zero3 are FSDP2 (torch.distributed.fsdp.fully_shard), named as in Rajbhandari et al. 2020,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models". FSDP2 keeps each parameter
as a DTensor, of which a process holds some rows. Tensor parallelism, which divides the blocks
before, is training/parallel/tensor_parallel.py; pipeline parallelism is not here.
"""

import functools
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from model.gpt import GPT
from model.rows import Rows
from training.parallel.own_rows import fill_model
from training.parallel.tensor_parallel import by_mesh, parallelize
from utils.distributed import Process


def wrap(model: GPT, weights: Mapping[str, Rows], process: Process, sharding: str) -> nn.Module:
    """Make a model on the device "meta" data-parallel, fill in its weights on its device, and
    return the module to train.

    A process alone gets the model itself. DDP returns a module around it; FSDP2 turns its
    parameters into DTensors in place. `sharding` is --sharding.
    """
    if sharding != "none" and dist.is_initialized():  # False for a single process
        # On "meta", before weights take memory: no process ever holds more than its part.
        shard(model, process, sharding)
    fill_model(model, weights, process.device)
    if sharding != "none" or not dist.is_initialized():
        return model
    device_ids = [process.device.index] if process.device.type == "cuda" else None
    # Gradients become views of the buckets that DDP reduces, so that they take their memory once.
    # Sums of earlier micro-steps, which are not reduced, lie apart from the buckets.
    return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)


def shard(model: GPT, process: Process, sharding: str) -> None:
    """Divide a model on the device "meta" among processes, in place.

    Blocks are gathered in the dtype of matmuls, and gradients are reduced in float32. Each replica
    is one copy of the state, weights and optimizer state; by default a machine has one.
    """
    # On a mesh of two dimensions FSDP2 shards along the second one, reduce-scatters gradients
    # there, and all-reduces the shards along the first one (HSDP): with a copy in each machine,
    # only the all-reduce goes between machines. Along a third dimension, processes with consecutive
    # numbers share each block.
    all_mesh = init_device_mesh(
        process.device.type,
        (process.replicas, process.data_parallel // process.replicas, process.tensor_parallel),
        mesh_dim_names=("replicate", "shard", "tensor"),
    )
    mesh = all_mesh["replicate", "shard"] if process.replicas > 1 else all_mesh["shard"]
    # Tensor parallelism comes first: FSDP2 then divides what a process holds.
    if process.tensor_parallel > 1:
        parallelize(model, all_mesh["tensor"])

    # FSDP2 casts the weights of a block when it gathers them, which sends half of the bytes. It
    # leaves the inputs alone: the residual stream stays float32, as under autocast.
    mixed_precision = MixedPrecisionPolicy(
        process.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    # The parameters of a block are gathered together just before its forward. zero3 frees them
    # after it and gathers them again for the backward; zero1 and zero2 keep them.
    for block in model.transformer.h:
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=mixed_precision,
            reshard_after_forward=sharding == "zero3",
        )
    # The root unit has the rest: embeddings, final norm and head, in float32. The backward pass
    # begins with the head, so that they are not freed after the forward.
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    # Only `forward` gathers the root's parameters by itself; evaluation and sampling call `hidden`.
    register_fsdp_forward_method(model, "hidden")
    # FSDP2 warns if a module returns a view, as an in-place operation on it would lose a hook. The
    # loss is a view, but nothing changes it in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module.*returned a view tensor")


def sync_gradients(wrapped: nn.Module, sharding: str, *, is_last: bool) -> AbstractContextManager:
    """Return the context in which forward and backward of a micro-step run; `wrapped` is what
    `wrap` returned.

    Without it, gradients would be reduced in every micro-step. Only zero2 and zero3 need that, to
    hold no whole gradients; the others reduce in the last micro-step of a step (`is_last`).
    """
    if isinstance(wrapped, DistributedDataParallel):
        return nullcontext() if is_last else wrapped.no_sync()
    if isinstance(wrapped, FSDPModule):  # fully_shard has changed the model's class
        if sharding == "zero1":
            wrapped.set_requires_gradient_sync(is_last)
        else:
            # Reduce-scatter in each micro-step; all-reduce between replicas in the last.
            wrapped.set_requires_all_reduce(is_last)
        # Gathered weights stay valid until the optimizer's step, so that they are kept until then;
        # under zero3 only the root's (recurse=False), as it frees its blocks.
        wrapped.set_reshard_after_backward(is_last, recurse=sharding != "zero3")
    return nullcontext()  # FSDP2 keeps these settings in the module


def clip_grad_norm(wrapped: nn.Module, max_norm: float) -> Tensor:
    """Scale gradients in place to an L2 norm, of all together, of at most `max_norm`, unless it is
    0. Return the norm before, the same on every process, as a tensor on the device: reading it
    makes the host wait. Every process must call it."""
    # One list for each mesh: a norm cannot mix DTensors of several. Without sharding, one list.
    parameter_lists = by_mesh(wrapped.parameters())
    norms: list[Tensor] = []
    for parameters in parameter_lists:
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        # The norm of DTensors is a DTensor: full_tensor reduces over the processes.
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    full_norm = functools.reduce(torch.hypot, norms)  # root of the sum of squares
    if max_norm > 0:
        for parameters in parameter_lists:
            # The factor is at most 1: an `if` on the norm would make the host wait.
            nn.utils.clip_grads_with_norm_(parameters, max_norm, full_norm)
    return full_norm
