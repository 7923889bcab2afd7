"""Measure the training steps of several programs on one machine.

Each measurement is a process of its own, which takes some steps to warm up and then counts for some
seconds. The programs take turns, and medians count: so a machine that gets slower for a while slows
all of them. scripts/bench.py and scripts/ladder.py say which programs they are.
"""

import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn as nn

from data.named_tokenizer import GPT2Tokenizer
from utils.devices import autocast
from utils.ranges import Count, NonNegative

WARMUP_STEPS = 3  # the first one compiles


class ModelSize:
    """Size that every script has an option for, beside its others of the model. It is declared here
    for start_training alone: a field of MeasureOptions would be a second flag of the same name."""

    block_size: int
    """Tokens per sequence."""


@dataclass(frozen=True)
class MeasureOptions(ModelSize):
    """How to measure; a script adds the options of the model."""

    repeats: Count = 5
    """Measurements of each program; the median counts."""
    seconds: NonNegative = 5.0
    """Length of a measurement; it has one step at least."""
    micro_batch_size: Count = 4
    """Sequences in a training step."""


# A model on its device that returns the loss for token ids and targets (B, T), its optimizers, and
# the dtype of matmuls.
Program = tuple[nn.Module, list[torch.optim.Optimizer], torch.dtype]
Result = TypeVar("Result")


class Measurement(NamedTuple):
    """Training steps of a program in one process, or medians over several processes."""

    step_seconds: float
    """Mean time of a step."""
    peak_bytes: float
    """Peak memory: of tensors on a CUDA GPU, elsewhere of the whole process."""
    loss: float
    """Loss of the last warmup step: mean nats per token of a random batch."""


def measure_in_turn(
    programs: dict[str, Callable[..., Program]], options: MeasureOptions
) -> dict[str, Measurement]:
    """Measure programs in turn, each time in a new process, and print each measurement.

    `programs` are functions that return a Program for the options, by name. Return the medians of
    `options.repeats` measurements of each, by name.
    """
    measurements_of: dict[str, list[Measurement]] = {name: [] for name in programs}
    for _ in range(options.repeats):
        for name, build in programs.items():
            # measure(build, options) in a new process: peak memory counts from a process's start
            measurement = in_new_process(measure, build, options)
            print_measurement(name, measurement)
            measurements_of[name].append(measurement)
    # The median of each field by itself: NumPy sees a table (repeats, fields).
    return {name: Measurement(*np.median(measurements_of[name], axis=0)) for name in programs}


def print_measurement(name: str, measurement: Measurement) -> None:
    """Print the time of a step and the peak memory of the program `name`."""
    step_ms, peak_gb = 1000 * measurement.step_seconds, measurement.peak_bytes / 1e9
    print(f"{name}: {step_ms:.1f} ms a step, at most {peak_gb:.2f} GB", flush=True)


def in_new_process(function: Callable[..., Result], *args: object) -> Result:
    """Return what a function returns for its arguments in a new process, or raise its error."""
    # "spawn" starts a new Python; a fork would begin with the memory of this process.
    context = multiprocessing.get_context("spawn")
    # a pool of one process, which ends with the with statement
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(function, *args).result()


def start_training(
    build: Callable[..., Program], options: MeasureOptions
) -> tuple[Callable[[], float], torch.device]:
    """Build a program; return a function that takes a training step, and the device of the model.
    All steps train on one random batch."""
    # Programs that draw the same numbers get the same weights and the same batch.
    torch.manual_seed(0)
    model, optimizers, dtype = build(options)  # dtype of matmuls
    device = next(model.parameters()).device
    shape = (2, options.micro_batch_size, options.block_size)  # 2: inputs and targets
    idx, targets = torch.randint(GPT2Tokenizer.vocab_size, shape, device=device)  # (B, T) each

    def train_step() -> float:
        """Take one optimizer step on the batch; return the loss before it."""
        # keep_weights=False as in train.py: a forward pass uses each weight once.
        with autocast(device, dtype, keep_weights=False):
            loss = model(idx, targets)  # (), mean nats per token
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # as in train.py and nanoGPT
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.item()  # waits for a GPU, so that a clock around it counts whole steps

    return train_step, device


def measure(build: Callable[..., Program], options: MeasureOptions) -> Measurement:
    """Build a program and measure its training steps. Call it in a new process."""
    train_step, device = start_training(build, options)
    return measure_steps(train_step, device, options)


def measure_steps(
    train_step: Callable[[], float], device: torch.device, options: MeasureOptions
) -> Measurement:
    """Call `train_step` to warm up, then measure it. start_training returns it and `device`.

    The peak memory is that of the process so far, which therefore has to be a new one.
    """
    for _ in range(WARMUP_STEPS):
        loss = train_step()
    num_steps = 0
    start_seconds = time.perf_counter()
    while num_steps == 0 or time.perf_counter() < start_seconds + options.seconds:
        train_step()  # waits for a GPU
        num_steps += 1
    step_seconds = (time.perf_counter() - start_seconds) / num_steps

    if device.type == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated(device)
    else:
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if sys.platform == "linux":  # KiB on Linux, bytes on macOS
            peak_bytes *= 1024
    # `loss` is of the last warmup step: the number of these steps does not depend on the speed
    return Measurement(step_seconds, peak_bytes, loss)
