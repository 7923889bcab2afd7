"""Training on several processes with PyTorch's own engines: wrap the model, accumulate, clip,
gather and load the whole model's state by parameter name.

    none    DistributedDataParallel: every process holds everything
    zero1   optimizer state and float32 weights are divided; gradients are reduced once a step
    zero2   gradients too: they are reduced and divided at every micro-step
    zero3   the weights for compute too: gathered block by block, forward and backward

The three are FSDP2 (torch.distributed.fsdp.fully_shard) with different settings, named as in
Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
"""

import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch._functorch.config
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
from torch.utils.checkpoint import checkpoint

from model.gpt import GPT
from training.checkpoint import CheckpointError
from utils.distributed import Process


def wrap(model: GPT, process: Process, sharding: str, dtype: torch.dtype) -> nn.Module:
    """The module to train, on the process's device; the model itself where there is one process.

    Sharding changes the model in place: its parameters become the shards of this process. Products
    of `dtype` then take weights that were gathered in it; gradients are reduced in float32. Several
    machines shard within each and replicate across them.
    """
    if process.world_size == 1:
        return model.to(process.device)
    if sharding == "none":
        device_ids = [process.device.index] if process.device.type == "cuda" else None
        model.to(process.device)
        return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
    shape, names = (process.world_size,), ("shard",)
    if process.nodes > 1:
        shape = (process.nodes, process.world_size // process.nodes)
        names = ("replicate", "shard")
    mesh = init_device_mesh(process.device.type, shape, mesh_dim_names=names)
    # LayerNorms and embeddings stay float32, as under autocast; so does the residual stream, which
    # the units of sharding take in
    low = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in model.transformer.h:
        parts, again = [block.attn, block.mlp], sharding == "zero3"
        fully_shard(parts, mesh=mesh, mp_policy=low, reshard_after_forward=again)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    register_fsdp_forward_method(model, "hidden")  # evaluation and sampling enter there
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module.*returned a view tensor")
    return model


def recompute(model: GPT, what: str, *, compiled: bool = False) -> None:
    """Activation checkpointing: the backward pass computes again what forward then does not keep.

    "mlp": each block's GELU (llm.c's -r 1), 4C of about 16C values per token and block for little
    work. "cheap": the LayerNorms too (its -r 2). "block": all but the input of each block, C
    values, for a third more work.

    What is computed again ends with the last tensor that the backward pass lacks, so a function
    that ends in a matrix product costs what is before that. Where the step is compiled, "mlp" and
    "cheap" both let the compiler compute again whatever it can fuse, which no matrix product is.
    """
    if compiled and what in ("mlp", "cheap"):
        for name in ("used_far_apart", "long_fusible_chains", "materialized_backward"):
            setattr(torch._functorch.config, f"ban_recompute_{name}", False)
        return
    for block in model.transformer.h:
        again = {
            "none": [],
            "mlp": [(block.mlp, "leave")],
            "cheap": [(block.attn, "enter"), (block.mlp, "enter"), (block.mlp, "leave")],
            "block": [(block, "forward")],
        }
        for module, name in again[what]:
            function = partial(checkpoint, getattr(module, name), use_reentrant=False)
            setattr(module, name, function)


def accumulating(module: nn.Module, sharding: str, *, last: bool) -> AbstractContextManager:
    """Around forward and backward of a micro-step; `last` is that before the update."""
    if isinstance(module, DistributedDataParallel):
        return nullcontext() if last else module.no_sync()
    if isinstance(module, FSDPModule):
        module.set_is_last_backward(last)
        if sharding == "zero1":
            module.set_requires_gradient_sync(last)
        else:
            module.set_requires_all_reduce(last)  # across machines, which replicate
        if sharding != "zero3":
            module.set_reshard_after_backward(last)
    return nullcontext()


def clip_grad_norm(model: nn.Module, max_norm: float) -> Tensor:
    """Scales gradients down to a norm of `max_norm`, if that is not 0; returns the norm before."""
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if max_norm and (whole.device.type != "cpu" or whole > max_norm):  # a GPU would have to wait
        nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return whole


def gather_state(
    model: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """A copy of weights and optimizer state of the whole model by parameter name, on the CPU of the
    main process, empty on the others where state is sharded. Every process must call it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    moments = {}
    if optimizers[0].state:  # without, it would make one by a step, and leave its count at 1
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
    """The opposite of gather_state, for any sharding. Raises CheckpointError where names or shapes
    do not fit."""
    if not state:  # a converted checkpoint has weights alone
        return
    parameters = dict(model.named_parameters())
    if set(state) != set(parameters):
        raise CheckpointError("the checkpoint's optimizer state is of other parameters")
    now = get_optimizer_state_dict(model, optimizers)
    groups, kinds = now["param_groups"], {name: set(x) for name, x in now["state"].items()}
    del now  # the moments that the loaded ones take the place of
    for name, values in state.items():
        if set(values) != kinds[name]:
            raise CheckpointError(
                f"the checkpoint's optimizer state of {name} is of another optimizer"
            )
        for key, value in values.items():
            if value.dim() and value.shape != parameters[name].shape:
                raise CheckpointError(
                    f"the checkpoint's optimizer state {key} of {name} has shape "
                    f"{tuple(value.shape)}, the parameter {tuple(parameters[name].shape)}"
                )
    set_optimizer_state_dict(
        model,
        optimizers,
        {"state": state, "param_groups": groups},
        options=StateDictOptions(full_state_dict=True),
    )
    for optimizer in optimizers:  # lets go of the file that `state` is mapped from
        for values in optimizer.state.values():
            values.update({key: value.clone() for key, value in values.items()})
