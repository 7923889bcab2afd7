"""Measure what a block of the model keeps for the backward pass, and its FLOPs.

No formula says what a block computes: the block itself runs, on fake tensors, which have shapes
but no memory; a block that computes by values, such as a router, on real ones. Fake tensors import
PyTorch's compiler, which takes a second.
"""

import functools
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop

from model.config import GPTConfig
from model.execution import RECOMPUTATION_BANS, SAVED_OPS, Execution
from model.gpt import GPT, Block
from model.initial_weights import build_without_weights
from utils.devices import autocast

CPU = torch.device("cpu")
# What fake tensors raise if a block computes by values, as a router that selects tokens does.
NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)


@dataclass(frozen=True)
class BlockCost:
    """Cost of a block in a forward pass. measure_blocks returns the cost of one sequence."""

    activation_bytes: int
    """Bytes that are kept for the backward pass: from measure_block without weights and copies of
    weights, from run_forward with the copies."""
    flops: int
    """FLOPs of the forward pass. Attention counts without its mask."""
    recomputed_flops: int
    """FLOPs that the backward pass repeats with the activation checkpointing "block"."""


@functools.cache  # `advise` asks hundreds of times
def measure_blocks(
    model_config: GPTConfig,
    execution: Execution,
    device_type: str,
    dtype: torch.dtype,
    tensor_parallel: int = 1,
) -> list[BlockCost]:
    """Return the cost of each block for one sequence, on each of the `tensor_parallel` processes
    that share the block, with matmuls in `dtype` on a device of the type "cpu" or "cuda"."""
    model = build_without_weights(GPT, model_config).to("meta")  # buffers, too
    # of 2 and of 3 sequences: ((x (B, T, C), angles or None, None, None), {}) for Block.forward,
    # without cache and mask
    both_inputs = [first_inputs(model, num_sequences) for num_sequences in (2, 3)]
    cost_by_description: dict[str, BlockCost] = {}
    descriptions: list[str] = []  # of all blocks, in their order
    for block in model.transformer.h:
        # its modules and sizes: blocks that print alike cost alike, and one of them is measured
        description = f"{block} {[p.shape for p in block.parameters()]}"
        descriptions.append(description)
        if description not in cost_by_description:
            divide_block(block, tensor_parallel)
            # Here a block runs on CPU tensors. On a GPU, RMSNorm is one kernel, which keeps little
            # but its input: so does FusedNorms.
            norms_of_device = nullcontext() if device_type == "cpu" else FusedNorms()
            with autocast(CPU, dtype, keep_weights=False), norms_of_device:
                cost_by_description[description] = measure_block(block, both_inputs, execution)
    return [cost_by_description[description] for description in descriptions]


class ReachedFirstBlock(Exception):
    """A forward pass reached the first block; `args` has its arguments, and those with names."""


def first_inputs(model: GPT, num_sequences: int) -> tuple[tuple, dict]:
    """Return the arguments, on the device "meta", that the first block of a model gets in a forward
    pass of full contexts: a tuple, x (B, T, C) first, and a dict of those with names."""

    def stop(block: nn.Module, args: tuple, kwargs: dict) -> None:
        raise ReachedFirstBlock(args, kwargs)

    idx = torch.zeros(num_sequences, model.config.block_size, dtype=torch.long, device="meta")
    with model.transformer.h[0].register_forward_pre_hook(stop, with_kwargs=True):
        try:
            model.transformer(idx)
        except ReachedFirstBlock as reached:
            return reached.args
    raise AssertionError("the model does not call its first block")


def divide_block(block: nn.Module, tensor_parallel: int) -> None:
    """Leave of a block on "meta" what `parallelize` of training/parallel/tensor_parallel.py leaves
    of it on one process, in place."""
    if tensor_parallel == 1:
        return
    assert isinstance(block, Block)  # for mypy, which sees a Module
    attn, mlp = block.attn, block.mlp
    attn.num_heads //= tensor_parallel
    attn.num_kv_heads //= tensor_parallel
    # any rows and columns do, because the cost depends only on their number
    for fused in (attn.c_attn, mlp.c_fc):  # by rows
        for name, p in list(fused.named_parameters()):  # weight and bias
            setattr(fused, name, nn.Parameter(p.chunk(tensor_parallel)[0]))
    for linear in (attn.c_proj, mlp.c_proj):  # by columns
        # (768, 768) -> (768, 384) for two processes
        linear.weight = nn.Parameter(linear.weight.chunk(tensor_parallel, dim=1)[0])


def measure_block(
    block: nn.Module, both_inputs: list[tuple[tuple, dict]], execution: Execution
) -> BlockCost:
    """Return the cost of a block for one sequence. `both_inputs` are those of two and of three
    sequences, from first_inputs."""
    mode = execution.checkpointing  # "none", "cheap" or "block"
    of_two, of_three = (run_forward(block, inputs, mode) for inputs in both_inputs)  # BlockCosts
    # The third sequence alone: weights and their copies are there for all sequences.
    activation_bytes = of_three.activation_bytes - of_two.activation_bytes
    if execution.compiled and mode != "block":
        with suppress(*NEEDS_VALUES):  # such a block cannot be compiled as one graph
            # of 2 sequences together; kept_when_compiled counts no weights
            activation_bytes = kept_when_compiled(block, both_inputs[0], mode) // 2
    recomputed_flops = of_three.recomputed_flops - of_two.recomputed_flops
    return BlockCost(activation_bytes, of_three.flops - of_two.flops, recomputed_flops)


def run_forward(block: nn.Module, inputs: tuple[tuple, dict], mode: str) -> BlockCost:
    """Return the cost of all sequences of the inputs, without the compiler. Activations include
    copies of weights. `inputs` are the arguments of the block on "meta", and those with names.
    `mode` is the activation checkpointing: "none", "cheap" or "block"."""
    try:
        with FakeTensorMode():
            return record(block, draw_like(inputs), mode)
    except NEEDS_VALUES:  # such as a router: again with real tensors
        return record(block, draw_like(inputs), mode)


def record(block: nn.Module, inputs: tuple[tuple, dict], mode: str) -> BlockCost:
    """Run a block on tensors of the CPU, fake ones (without content) within FakeTensorMode, and
    count what autograd keeps and what is computed."""
    kept_tensors: list[Tensor] = []
    recomputed_flops = 0

    def keep(tensor: Tensor) -> Tensor:
        # A recomputation ends as soon as it has the last tensor that the backward pass needs.
        nonlocal recomputed_flops
        recomputed_flops = counter.get_total_flops()
        kept_tensors.append(tensor)
        return tensor

    counter = FlopCounterMode(display=False)
    # It knows the attention kernels of GPUs only. As there, attention counts without its mask.
    cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    counter.flop_registry[cpu_attention] = sdpa_flop
    # autograd calls `keep` with each tensor that it keeps for the backward pass
    with counter, SavedOutputs() as saved, saved_tensors_hooks(keep, lambda tensor: tensor):
        functional_call(block, draw_weights(block), *inputs)  # inputs: (arguments, named ones)
    x = inputs[0][0]  # the first argument, (B, T, C)
    if mode == "cheap":
        kept_tensors = [x] + saved.outputs  # of matmuls and attention
    elif mode == "block":
        kept_tensors = [x]
    # recomputed_flops, set by `keep`, are those up to the last tensor that the backward pass needs
    return BlockCost(count_bytes(kept_tensors), counter.get_total_flops(), recomputed_flops)


class SavedOutputs(TorchDispatchMode):
    """Collect the outputs of SAVED_OPS, which the activation checkpointing "cheap" keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []  # tensors; attention also has ints and None, of no bytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Call an operation of PyTorch as usual, and keep its outputs if it is one of SAVED_OPS."""
        output = func(*args, **(kwargs or {}))
        if func in SAVED_OPS:  # matmuls and attention
            self.outputs += tree_leaves(output)
        return output


def kept_when_compiled(block: nn.Module, inputs: tuple[tuple, dict], mode: str) -> int:
    """Return the bytes of activations that the compiler itself chooses to keep of a block: it
    computes elementwise operations again. `mode` is the activation checkpointing."""
    # imported here, because it imports the compiler
    from functorch.compile import (
        aot_function,
        make_boxed_func,
        min_cut_rematerialization_partition,
    )
    from torch._functorch import config
    from torch._inductor.decomposition import select_decomp_table

    kept_tensors: list[Tensor] = []

    def keep_outputs(module: torch.fx.GraphModule, example_inputs: list) -> Any:
        depend_on_x = set(module.graph.find_nodes(op="placeholder")[:1])  # x is the first input
        for node in module.graph.nodes:
            if depend_on_x.intersection(node.all_input_nodes):
                depend_on_x.add(node)
        # The first output is that of the block. The others are what its backward pass needs:
        # activations, and weights, copies of weights and angles, which do not depend on x.
        # node.meta["val"] is the fake tensor of an output.
        outputs: Any = module.graph.output_node().args[0]
        kept_tensors.extend(node.meta["val"] for node in outputs[1:] if node in depend_on_x)
        return make_boxed_func(module.forward)

    # Options of the compiler, {"ban_recompute_used_far_apart": True, ...}, as configure_compiler
    # sets them for a run. Without the bans, "cheap" recomputes more.
    rules = config.patch(dict.fromkeys(RECOMPUTATION_BANS, mode != "cheap"))
    with FakeTensorMode(), rules:
        # The call traces the block and gives keep_outputs the graph of the forward pass. The
        # backward pass never runs, so its graph is not compiled.
        aot_function(
            lambda inputs, weights: functional_call(block, weights, *inputs),
            fw_compiler=keep_outputs,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )(draw_like(inputs), draw_weights(block))
    return count_bytes(kept_tensors)


def count_bytes(tensors: list) -> int:
    """Return the bytes of the storages of some tensors, each of them once; other values of the list
    do not count."""
    storages = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, Tensor)]
    # by address, because a tensor and its views share a storage
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def draw_like(tree: Any) -> Any:
    """Return a tree with a tensor on the CPU in place of each one on "meta". Within FakeTensorMode
    the new tensors are fake; else they are random, integers 0."""

    def draw(x: Tensor) -> Tensor:
        if not x.is_floating_point():  # such as token ids or a buffer of indices
            return torch.zeros(x.shape, dtype=x.dtype)
        return torch.randn(x.shape, dtype=x.dtype).requires_grad_(x.requires_grad)

    return tree_map_only(Tensor, draw, tree)


def draw_weights(block: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers on the CPU for a block by name, with which functional_call runs
    it: its own are on "meta". They are fake, except for a router, see draw_like."""
    return draw_like({**dict(block.named_parameters()), **dict(block.named_buffers())})


class FusedNorms(TorchFunctionMode):
    """Let CPU tensors keep as much of RMSNorm as on a GPU. The GPU has one kernel for it, in
    float32, which keeps its input and a number per row. LayerNorm keeps two per row."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Call LayerNorm in place of RMSNorm, and other functions of PyTorch as usual."""
        if func is F.rms_norm:
            return F.layer_norm(args[0].float(), args[1])  # input, shape to normalize
        return func(*args, **(kwargs or {}))
