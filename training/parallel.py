"""Parallelism and activation checkpointing, applied to a plain model from outside.

    none    DistributedDataParallel: every process holds everything
    zero1   shards optimizer state and float32 weights; reduces gradients once a step
    zero2   shards gradients as well: reduce-scatter at every micro-step
    zero3   shards the weights for compute as well: all-gather per block, forward and backward

zero1 to zero3 are FSDP2 (torch.distributed.fsdp.fully_shard), named as in Rajbhandari et al. 2020,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch._functorch.config
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
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from config import TrainConfig
from model import cpu
from model.gpt import GPT, Block
from model.loss import cross_entropy_
from utils import distributed
from utils.devices import autocast
from utils.distributed import Process
from utils.errors import UserError


def wrap(model: GPT, process: Process, sharding: str, dtype: torch.dtype) -> nn.Module:
    """Return the module to train, on the process's device: the model itself without process group.

    Sharding turns the parameters into shards, in place; weights are gathered in `dtype`, gradients
    reduced in float32. Several machines shard within each and replicate across them.
    """
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


SAVED_OPS = [  # expensive ones, after torchtitan's selective activation checkpointing
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]


class CheckpointedBlock(Block):
    """Block that is recomputed in the backward pass. It is assigned to `block.__class__`, so that
    parameters keep their names."""

    options: dict
    """Keyword arguments of torch.utils.checkpoint.checkpoint."""

    def forward(self, *args: object) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(*args)
        return checkpoint(super().forward, *args, **self.options)


def apply_activation_checkpointing(model: GPT, mode: str, *, compiled: bool = False) -> None:
    """Recompute activations in the backward pass, in place: "none", "cheap" or "block".

    "block" keeps the input of each block alone, for a third more compute. "cheap" keeps outputs of
    matmuls and attention; where the step is compiled, the compiler recomputes all that it fuses.
    """
    if compiled:
        for name in ("used_far_apart", "long_fusible_chains", "materialized_backward"):
            setattr(torch._functorch.config, f"ban_recompute_{name}", mode != "cheap")
    if mode == "block" or (mode == "cheap" and not compiled):
        options = {"use_reentrant": False}
        if mode == "cheap":
            options["context_fn"] = partial(create_selective_checkpoint_contexts, SAVED_OPS)
        for block in model.transformer.h:
            block.__class__, block.options = CheckpointedBlock, options


def compile_blocks(model: GPT) -> None:
    """Compile the blocks, in place, and the work on a chunk of logits.

    Blocks have the same code, so all run one graph. Hooks of DDP and FSDP2 stay outside of it:
    `forward` is replaced, not the call of the module.
    """
    import torch._dynamo.config  # takes a second

    torch._dynamo.config.optimize_ddp = False  # it would split blocks; DDP overlaps between them
    static = {"fullgraph": True, "dynamic": False}
    for block in model.transformer.h:
        block.forward = torch.compile(block.forward, **static)
    if model.loss.cross_entropy_ is cross_entropy_:  # not the one for CPUs
        model.loss.cross_entropy_ = torch.compile(cross_entropy_, **static)


class ParallelModel:
    """A model made ready to train, in place: fast paths, activation checkpointing, parallelism.

    With --use_torch_compile the blocks are compiled in place; evaluation in varying shapes and
    sampling run them uncompiled, in the context `torch.compiler.set_stance("force_eager")`.
    """

    def __init__(
        self, model: GPT, config: TrainConfig, process: Process, dtype: torch.dtype
    ) -> None:
        self.process, self.dtype, self.sharding = process, dtype, config.sharding
        self.model = model  # shares the weights of `wrapped`
        if process.device.type == "cpu":
            cpu.for_training(model)
        compiled = config.use_torch_compile
        apply_activation_checkpointing(model, config.activation_checkpointing, compiled=compiled)
        self.wrapped = wrap(model, process, config.sharding, dtype)
        if compiled:
            compile_blocks(model)

    def micro_step(self, idx: Tensor, targets: Tensor, of: int = 1, *, last: bool = True) -> Tensor:
        """Run forward and backward on one of `of` micro-batches of a step; return its share of the
        loss. Gradients are reduced over processes in the last one."""
        return self.backward(lambda model: model(idx, targets) / of, last=last)

    def backward(self, loss_of: Callable[[nn.Module], Tensor], *, last: bool = True) -> Tensor:
        """Run forward and backward of the loss that a function returns for the model, one forward
        pass of it; return the loss. Gradients are reduced over processes in the `last` one of a
        step."""
        distributed.count_progress()
        with sync_gradients(self.wrapped, self.sharding, last=last):
            with autocast(self.process.device, self.dtype, keep_weights=False):
                loss = loss_of(self.wrapped)
            distributed.count_progress()
            loss.backward()
        return loss.detach()


def sync_gradients(module: nn.Module, sharding: str, *, last: bool) -> AbstractContextManager:
    """Return the context of a micro-step: zero2 and zero3 reduce gradients in every micro-step, the
    others in the `last` of a step."""
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
    if not state:  # a new run, or a converted checkpoint
        return
    new = get_optimizer_state_dict(model, optimizers)
    groups, keys = new["param_groups"], {name: set(x) for name, x in new["state"].items()}
    del new  # frees the moments that the loaded ones replace
    for name, values in state.items():
        if set(values) != keys[name]:
            raise UserError(
                f"the checkpoint's optimizer state of {name} is of another optimizer: resume "
                "without --recipe, or start from its weights alone with --init_from"
            )
    loaded, options = {"state": state, "param_groups": groups}, {"full_state_dict": True}
    set_optimizer_state_dict(model, optimizers, loaded, options=StateDictOptions(**options))
    for optimizer in optimizers:  # a copy, so that the mapped file can be closed
        for values in optimizer.state.values():
            values.update({key: value.clone() for key, value in values.items()})
