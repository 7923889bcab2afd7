"""Trial of the micro-batch that --micro_batch_size auto took from a forecast of memory.

The forecast (training/forecast/memory.py) counts what PyTorch allocates. It cannot know about
fragmentation, libraries, or other programs on a GPU. This file is not about the first choice
(training/forecast/advice.py).
"""

from dataclasses import replace

import torch
from torch import nn

from config import ResolvedTrainOptions
from training.optimizers import ADAMW_MOMENTS
from training.parallel.data_parallel import sync_gradients
from training.run import Run
from utils.errors import UserError, is_out_of_memory

TRIED_DEVICES = ("cuda",)  # elsewhere up to 16 sequences are taken, without a forecast


def halve_until_it_fits(run: Run[ResolvedTrainOptions], wrapped: nn.Module) -> ResolvedTrainOptions:
    """Return the options of a run with --micro_batch_size, if it is automatic, halved until a
    micro-batch fits the memory of every process: on GPUs, without sharding. `wrapped` is the module
    to train, from Run.distribute. Every process must call it. Raises UserError if not even one
    sequence fits."""
    options = run.options
    process = run.process
    if "micro_batch_size" not in run.entries["derived"]:  # the user gave a number
        return options
    if process.device.type not in TRIED_DEVICES:
        return options
    # Sharded processes wait for each other within a forward pass. If one ran out of memory, the
    # others would wait forever, so with sharding the forecast is not tried out.
    if options.sharding != "none" and process.world_size > 1:
        return options
    micro_batch_size = options.sequences_per_pass
    while not process.all_agree(has_memory(run, wrapped, micro_batch_size)):
        if micro_batch_size == 1:
            raise UserError(
                "out of memory with a micro-batch of one sequence: recompute activations, divide "
                "the state among more processes, or train a smaller model"
            )
        smaller = micro_batch_size // 2
        # a divisor of the old size also divides the sequences of a process in a step
        while micro_batch_size % smaller:
            smaller -= 1
        process.print(
            f"out of memory with a micro-batch of {micro_batch_size}: {smaller} from here on"
        )
        micro_batch_size = smaller
    return replace(options, micro_batch_size=micro_batch_size)


def has_memory(run: Run[ResolvedTrainOptions], wrapped: nn.Module, micro_batch_size: int) -> bool:
    """Return whether this process has the memory for the forward and backward passes of a step with
    micro-batches of `micro_batch_size` sequences. No process waits for another one in it, and it
    leaves no gradients."""
    device = run.process.device
    shape = (micro_batch_size, run.options.block_size)  # (B, T)
    idx = torch.zeros(shape, dtype=torch.long, device=device)  # any ids take the same memory
    try:
        if run.progress.step == 0:
            # The first step allocates the optimizer state. Until this function returns, `state`
            # takes its place, with two numbers a weight as AdamW has; Muon has one.
            num_weights = sum(p.numel() for p in wrapped.parameters())
            state = torch.empty(ADAMW_MOMENTS, num_weights, device=device)  # noqa: F841
        for _ in range(2):  # gradients of the first micro-batch are in memory during the second
            # is_last=False: DDP does not average the gradients yet
            with sync_gradients(wrapped, run.options.sharding, is_last=False):
                with run.process.autocast(keep_weights=False):  # as in train_step
                    loss = wrapped(idx, idx)  # the second one as targets
                loss.backward()
        return True
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        wrapped.zero_grad(set_to_none=True)
