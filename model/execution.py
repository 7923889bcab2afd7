"""How a GPT is executed in training: activation checkpointing and torch.compile.

One trades speed for memory, the other start-up for speed; neither changes more than rounding.
`execute` applies both to a model that is built, before it is divided among processes: model/gpt.py
knows nothing of them.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from model.gpt import GPT, Block
from model.loss import cross_entropy_

# Operations whose outputs "cheap" checkpointing keeps: matmuls without and with bias, and attention
# by each kernel, which take nearly all of the time. The list follows torchtitan's selective
# activation checkpointing.
SAVED_OPS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]
# `context_fn` of `recompute`: keep the outputs of SAVED_OPS, recompute everything else
keep_matmuls = partial(create_selective_checkpoint_contexts, SAVED_OPS)


@dataclass(frozen=True)
class Execution:
    """How to execute a GPT; the default is plain PyTorch."""

    checkpointing: str = "none"
    """Activations that the backward pass computes again: "none", "cheap" (all but the outputs of
    matmuls and attention; with dropout, unless compiled, the same as "block") or "block" (all but
    the input of each block; up to a quarter more compute)."""
    compiled: bool = False
    """Compile the blocks, which share one graph, and on GPUs the loss."""


class RecomputedBlock(Block):
    """Block of which autograd keeps the inputs alone: the backward pass computes it again."""

    plain_forward = Block.forward

    def forward(self, *inputs) -> Tensor:
        """Return what Block.forward returns."""
        # PyTorch recommends use_reentrant=False
        return recompute(self.plain_forward, *inputs, use_reentrant=False)


class CheaplyRecomputedBlock(RecomputedBlock):
    """Block of which autograd also keeps the outputs of matmuls and attention, which take nearly
    all of the time, and the backward pass computes everything else again."""

    def forward(self, *inputs) -> Tensor:
        """Return what Block.forward returns."""
        return recompute(self.plain_forward, *inputs, use_reentrant=False, context_fn=keep_matmuls)


def execute(model: GPT, execution: Execution) -> None:
    """Apply an execution to a model, in place. Names and hooks of its modules stay as they are.

    Call it before training/parallel/ divides the model: FSDP2 gathers the weights of a block before
    its `forward` and frees them after it, so graphs and recomputation have to begin in there.
    """
    block_class = choose_block(execution, model.config.dropout)
    if execution.compiled:
        configure_compiler(execution)  # before the first block is compiled
        # ChunkedCrossEntropy calls it on GPUs alone; on a CPU the compiled one would be slower
        model.loss.cross_entropy_ = compile_static(cross_entropy_)
    for block in model.transformer.h:
        block.__class__ = block_class  # the same modules and weights, with another forward
        if execution.compiled:
            # An attribute of this block, which hides the method of its class. torch.compile caches
            # graphs by the code of a function: the first block compiles it, and the other blocks
            # use its graph.
            block.forward = compile_static(block.forward)


def choose_block(execution: Execution, dropout: float) -> type[Block]:
    """Return the class of a model's blocks, whose dropout probability is `dropout`."""
    checkpointing = execution.checkpointing
    # When compiled, "cheap" is left to the compiler: see configure_compiler.
    if checkpointing == "none" or (checkpointing == "cheap" and execution.compiled):
        return Block
    # With dropout, "cheap" is the same as "block". If the output of attention were kept, the
    # backward pass would not draw its random numbers again, and every later dropout would get
    # another mask than in the forward pass.
    if checkpointing == "block" or dropout > 0:
        return RecomputedBlock
    return CheaplyRecomputedBlock


def compile_static(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function compiled, at its first call, as one graph for each shape of its inputs."""
    # fullgraph=True raises an error if the function cannot be one graph. With dynamic=True one
    # graph would serve all sizes, but it would be slower.
    return torch.compile(function, fullgraph=True, dynamic=False)


def configure_compiler(execution: Execution) -> None:
    """Set the options of the compiler that exist for the whole process alone, for every model in
    it."""
    # Imported here, because it takes a second, which runs that do not compile should not wait for.
    import torch._dynamo.config
    import torch._functorch.config

    # DDP would cut the graph of a block at the borders of its gradient buckets. Blocks are small
    # enough that DDP can send the gradients of one during the backward pass of the next.
    torch._dynamo.config.optimize_ddp = False
    # Batches of fine-tuning have several lengths, each with a graph of its own. Above this number
    # of graphs, 8 by default, the compiler raises an error.
    torch._dynamo.config.recompile_limit = 64
    # The compiler chooses what the backward pass recomputes. By default these three rules forbid
    # (`ban`) what takes long to recompute. "cheap" lifts them, and the compiler recomputes
    # everything that it can fuse.
    may_recompute = execution.checkpointing == "cheap"
    torch._functorch.config.ban_recompute_used_far_apart = not may_recompute
    torch._functorch.config.ban_recompute_long_fusible_chains = not may_recompute
    torch._functorch.config.ban_recompute_materialized_backward = not may_recompute


def uncompiled(compiled: bool) -> AbstractContextManager:
    """Return a context in which compiled functions run as if they were not, for inputs whose shapes
    vary and would be compiled one by one; without effect unless the model is `compiled`."""
    if compiled:
        return torch.compiler.set_stance("force_eager")
    return nullcontext()  # set_stance would import the compiler
