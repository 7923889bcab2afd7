"""Parallelism, applied to a plain model from outside.

    none    DistributedDataParallel: every process holds everything
    zero1   shards optimizer state and float32 weights; reduces gradients once a step
    zero2   shards gradients as well: reduce-scatter at every micro-step
    zero3   shards the weights for compute as well: all-gather per block, forward and backward

zero1 to zero3 are FSDP2 (torch.distributed.fsdp.fully_shard), named as in Rajbhandari et al. 2020,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
"""

import warnings
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
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
from utils.distributed import Process
from utils.errors import UserError


def wrap(model: GPT, process: Process, sharding: str, dtype: torch.dtype) -> nn.Module:
    """Return the module to train, on the process's device: the model itself without process group.
    Sharding turns the parameters into shards, in place; weights are gathered in `dtype`, gradients
    reduced in float32. Several machines shard within each and replicate across them."""
    if not dist.is_initialized():
        return model.to(process.device)
    if sharding == "none":
        device_ids = [process.device.index] if process.device.type == "cuda" else None
        model.to(process.device)
        return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
    shape, names = (process.nodes, process.world_size // process.nodes), ("replicate", "shard")
    first = 0 if process.nodes > 1 else 1  # one machine shards alone
    mesh = init_device_mesh(process.device.type, shape[first:], mesh_dim_names=names[first:])
    # embeddings and the residual stream stay float32, as under autocast
    low = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, mp_policy=low, reshard_after_forward=sharding == "zero3")
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    register_fsdp_forward_method(model, "hidden")  # the entry of evaluation and sampling
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module.*returned a view tensor")
    return model


def sync_gradients(module: nn.Module, sharding: str, *, last: bool) -> AbstractContextManager:
    """Return the context of a micro-step; zero2 and zero3 reduce always, others in the `last`."""
    if isinstance(module, DistributedDataParallel):
        return nullcontext() if last else module.no_sync()
    if isinstance(module, FSDPModule):
        module.set_is_last_backward(last)
        if sharding == "zero1":
            module.set_requires_gradient_sync(last)
        else:
            module.set_requires_all_reduce(last)  # across machines, which replicate
        # embeddings are kept between micro-steps, and blocks where memory has room for all
        module.set_reshard_after_backward(last, recurse=sharding != "zero3")
    return nullcontext()


def clip_grad_norm(model: nn.Module, max_norm: float) -> Tensor:
    """Scale gradients to a norm of at most `max_norm`, unless it is 0; return the norm before."""
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if max_norm and (whole.device.type != "cpu" or whole > max_norm):  # no host sync on a GPU
        nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return whole


def gather_state(
    model: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Return copies of weights and optimizer state of the whole model by parameter name, on the CPU
    of the main process; empty on others where state is sharded. Every process must call it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    moments = {}
    if optimizers[0].state:  # else PyTorch would create it by a step
        state = get_optimizer_state_dict(model, optimizers, options=options)
        moments = state.get("state", {})
    if next(model.parameters()).device.type == "cpu":  # these are the model's own tensors
        weights = {name: weight.clone() for name, weight in weights.items()}
        moments = {n: {k: v.clone() for k, v in values.items()} for n, values in moments.items()}
    return weights, moments


def load_optimizer_state(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    state: dict[str, dict[str, Tensor]],
) -> None:
    """Load what gather_state returned, under any sharding; names and shapes must be the model's.
    Raises UserError for the state of another optimizer."""
    if not state:  # of a converted checkpoint
        return
    new = get_optimizer_state_dict(model, optimizers)
    groups, keys = new["param_groups"], {name: set(x) for name, x in new["state"].items()}
    del new  # frees the moments that the loaded ones replace
    if {name: set(x) for name, x in state.items()} != keys:
        raise UserError(
            "the optimizer state is of another optimizer: resume without --recipe, or start from "
            "the weights alone with --init_from"
        )
    loaded, options = {"state": state, "param_groups": groups}, {"full_state_dict": True}
    set_optimizer_state_dict(model, optimizers, loaded, options=StateDictOptions(**options))
    for optimizer in optimizers:  # a copy, so that the mapped file can be closed
        for values in optimizer.state.values():
            values.update({key: value.clone() for key, value in values.items()})
