"""Activation checkpointing and compilation of a plain GPT, applied in place before training.

The modules stay those of model/gpt.py, on every device.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from model.gpt import GPT
from model.loss import cross_entropy_

SAVED_OPS = [  # expensive ones, after torchtitan's selective activation checkpointing
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]


def for_training(
    model: GPT, device: torch.device, checkpointing: str = "none", compiled: bool = False
) -> GPT:
    """Prepare a model to train on `device`, before DDP or FSDP2 wraps it.

    `checkpointing` "block" keeps the input of each block alone, for a third more compute. "cheap"
    keeps outputs of matmuls and attention; a compiler recomputes all that it fuses. `compiled`
    compiles the blocks, which share one graph, and the loss of a chunk of logits.
    """
    for block in model.transformer.h:
        if checkpointing == "block" or (checkpointing == "cheap" and not compiled):
            block.forward = checkpointed(block.forward, checkpointing)
        if compiled:
            block.forward = compile_static(block.forward)
    if compiled:
        import torch._dynamo.config  # takes a second
        import torch._functorch.config

        torch._dynamo.config.optimize_ddp = False  # leave blocks whole, DDP overlaps between them
        torch._dynamo.config.recompile_limit = 64  # shapes of fine-tuning
        for name in ("used_far_apart", "long_fusible_chains", "materialized_backward"):
            setattr(torch._functorch.config, f"ban_recompute_{name}", checkpointing != "cheap")
        if device.type != "cpu":  # a CPU computes the loss in parts, faster than compiled
            model.loss.cross_entropy_ = compile_static(cross_entropy_)
    return model


def uncompiled(compiled: bool) -> AbstractContextManager:
    """Return a context for shapes that vary, in which what is compiled runs as if it were not."""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def compile_static(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile a function as one graph for each shape of its inputs."""
    return torch.compile(function, fullgraph=True, dynamic=False)


def checkpointed(forward: Callable[..., Tensor], mode: str) -> Callable[..., Tensor]:
    """Return a forward that is recomputed in the backward pass."""
    options = {"use_reentrant": False}
    if mode == "cheap":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, SAVED_OPS)
    return lambda *args: checkpoint(forward, *args, **options)
