"""How a GPT is executed in training: activation checkpointing and torch.compile.

Activation checkpointing trades speed for memory, torch.compile trades start-up time for speed.
Neither changes more than rounding. `execute` applies both to a built model, before sharding or
tensor parallelism divides it among processes; model/gpt.py does not know them.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from model.chunked_loss import cross_entropy_, cross_entropy_by_rows_
from model.gpt import GPT
from model.loss import ChunkedLoss
from utils.errors import UserError

# Operations whose outputs "cheap" checkpointing keeps, because they take nearly all of the time:
# matmuls without and with bias, and each attention kernel. The list follows torchtitan's selective
# activation checkpointing.
SAVED_OPS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]
# The argument `context_fn` of `recompute`: keep outputs of SAVED_OPS, recompute everything else.
keep_matmuls = partial(create_selective_checkpoint_contexts, SAVED_OPS)

# Rules of the compiler, fields of torch._functorch.config: they ban recomputation that takes long.
# For "cheap" they are off, and the compiler recomputes everything that it can fuse.
RECOMPUTATION_BANS = (
    "ban_recompute_used_far_apart",
    "ban_recompute_long_fusible_chains",
    "ban_recompute_materialized_backward",
)


@dataclass(frozen=True)
class Execution:
    """How to execute a GPT; the default is plain PyTorch."""

    checkpointing: str = "none"
    """Activation checkpointing: what the backward pass recomputes. "none"; "cheap": all but the
    outputs of matmuls and attention (with dropout, unless compiled, the same as "block"); "block":
    all but the input of each block, a quarter to a third more compute."""
    compiled: bool = False
    """Compile the blocks, which share one graph, and the loss on GPUs, by torch.compile."""


def execute(model: GPT, execution: Execution) -> None:
    """Apply an execution to a model, in place. Names and hooks of its modules do not change.

    Call it before training/parallel/ divides the model. FSDP2 gathers the weights of a block before
    its `forward` and frees them after it, so graphs and recomputation have to begin inside it.
    """
    if execution.compiled:
        configure_compiler(execution)  # process-wide options, which the first forward pass reads
        # ChunkedCrossEntropy calls it only on GPUs: cross_entropy_by_rows_ is faster on a CPU
        model.loss.chunk_cross_entropy_ = compile_static(cross_entropy_)
    # recompute_all or recompute_cheap; None: the blocks keep their forward pass
    recomputed_forward = choose_recomputation(execution, model.config.dropout)
    for block in model.transformer.h:
        # These attributes of a block hide the method `forward` of its class, whatever class it is.
        # `recomputed_forward` calls plain_forward.
        if recomputed_forward is not None:
            block.plain_forward = block.forward  # type: ignore[assignment]
            block.forward = MethodType(recomputed_forward, block)
        if execution.compiled:
            # torch.compile caches graphs by the code of a function: the first block compiles a
            # graph, and the other blocks of its class use it.
            block.forward = compile_static(block.forward)


def recompute_all(block: nn.Module, *inputs) -> Tensor:
    """Return what the block's own forward, which `execute` keeps as plain_forward, returns for
    `inputs` (x, angles, cache, mask of Block.forward). Autograd keeps only these, and the backward
    pass computes the block again."""
    # `recompute` is torch's activation checkpointing; PyTorch recommends use_reentrant=False
    return recompute(block.plain_forward, *inputs, use_reentrant=False)


def recompute_cheap(block: nn.Module, *inputs) -> Tensor:
    """Return what the plain forward of a block returns. Autograd also keeps the outputs of matmuls
    and attention, and the backward pass computes everything else again."""
    return recompute(block.plain_forward, *inputs, use_reentrant=False, context_fn=keep_matmuls)


def choose_recomputation(execution: Execution, dropout: float) -> Callable[..., Tensor] | None:
    """Return the forward pass of the blocks of a model with the dropout probability `dropout`; None
    for their own."""
    checkpointing = execution.checkpointing  # "none", "cheap" or "block"
    # When compiled, the compiler does "cheap": configure_compiler sets its options.
    if checkpointing == "none" or (checkpointing == "cheap" and execution.compiled):
        return None
    # With dropout, "cheap" becomes "block". If autograd kept the output of attention, the backward
    # pass would not draw attention's random numbers again, and every later dropout would get
    # another mask than in the forward pass.
    if checkpointing == "block" or dropout > 0:
        return recompute_all
    return recompute_cheap


def compile_static(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a compiled `function`: the first call with each input shape compiles one graph."""
    # fullgraph=True raises an error if the function needs several graphs. With dynamic=True one
    # graph would serve all sizes, but it would be slower.
    return torch.compile(function, fullgraph=True, dynamic=False)


def check_compiler(device: torch.device) -> None:
    """Compile a tiny function for the device. Raises UserError if that fails: torch.compile needs a
    C++ compiler for CPUs and a C compiler for GPUs, both with Python's headers."""
    double = compile_static(lambda x: 2 * x)
    try:
        double(torch.ones(2, device=device))
    except Exception as error:  # of many classes: Dynamo's, Inductor's, Triton's
        reason = str(error).partition("\n")[0]  # the first line
        # "header.hpp:1:10: fatal error: Python.h: No such file or directory", after the command
        error_line = re.search(r"^.*\berror: .*$", str(error), re.M)
        if error_line is not None:
            reason = error_line[0]
        raise UserError(
            f"{reason:.300}; install a C++ compiler and Python's headers (g++, python3-dev)"
        ) from error


def configure_compiler(execution: Execution) -> None:
    """Set the compiler's options that are global: they apply to every model in this process."""
    # imported here, because the import takes a second, and only runs that compile should wait
    import torch._dynamo.config
    import torch._functorch.config

    # With optimize_ddp the compiler would cut the graph of a block at the borders of DDP's gradient
    # buckets. That is not needed: a block is small enough for DDP to send its gradients while the
    # backward pass computes the next block.
    torch._dynamo.config.optimize_ddp = False
    # Batches of fine-tuning have several lengths, and each length needs a graph. The compiler
    # raises an error above this number of graphs, which is 8 by default.
    torch._dynamo.config.recompile_limit = 64
    # The compiler chooses what the backward pass recomputes, by three rules (bans) against slow
    # recomputation. "cheap" lifts the bans, so that it recomputes all that it can fuse.
    has_bans = execution.checkpointing != "cheap"
    for name in RECOMPUTATION_BANS:
        setattr(torch._functorch.config, name, has_bans)


@contextmanager
def uncompiled(compiled: bool, loss: ChunkedLoss | None = None) -> Iterator[None]:
    """Return a context in which compiled functions run uncompiled, for inputs of many shapes, each
    of which would be compiled. It has no effect unless the model is `compiled`. Give `loss`, the
    model's, if its loss is computed there."""
    if not compiled:  # set_stance would import the compiler
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        if loss is None:
            yield
            return
        # cross_entropy_ is written for the compiler: without it, each of its temporary tensors has
        # the size of a chunk's float32 logits, together 3 GB.
        compiled_cross_entropy_ = loss.chunk_cross_entropy_
        loss.chunk_cross_entropy_ = cross_entropy_by_rows_
        try:
            yield
        finally:
            loss.chunk_cross_entropy_ = compiled_cross_entropy_
