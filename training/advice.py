"""The micro-batch that fits, and the flags with which a run fits and its steps are fastest."""

import itertools
import math
from dataclasses import replace

from config import ResolvedTrainConfig
from model.config import GPTConfig
from model.gpt import build_without_weights
from model.recipes import Recipe
from training.communication import forecast_step
from training.plan import USABLE, Hardware, forecast_memory
from training.tensor_parallel import check_divides
from utils.cli import to_flags
from utils.errors import UserError


def choose_micro_batch(
    options: ResolvedTrainConfig,
    recipe: Recipe,
    shape: GPTConfig,
    hardware: Hardware,
) -> tuple[int, str]:
    """Return the sequences of a micro-batch for --micro_batch_size auto, and a sentence about it.
    Raises UserError, which names flags that would do, if not even one sequence fits."""
    size, needed_bytes = largest_micro_batch(options, recipe, shape, hardware)
    free_text = f"{hardware.free / 1e9:.2f} GB free"
    if size == 0:
        raise UserError(
            f"one sequence needs {needed_bytes / 1e9:.2f} GB, but a process has {free_text}: "
            + advise(options, recipe, shape, hardware)
        )
    forecast = f"by forecast {needed_bytes / 1e9:.2f} GB of {free_text}"
    return size, f"--micro_batch_size auto: {size}, {forecast}"


def largest_micro_batch(
    options: ResolvedTrainConfig, recipe: Recipe, shape: GPTConfig, hardware: Hardware
) -> tuple[int, int]:
    """Return the most sequences of a micro-batch whose forecast fits USABLE of the free memory, and
    that forecast in bytes; 0 and that of one sequence if none fits. The sequences divide a
    process's share of a step."""
    num_parts, _ = hardware.count_parts(options)
    num_sequences = replace(options, micro_batch_size=1).sequences_per_step(num_parts) // num_parts
    # the largest first
    for size in range(num_sequences, 0, -1):
        if num_sequences % size == 0:
            trial = replace(options, micro_batch_size=size)
            needed_bytes = sum(forecast_memory(trial, recipe, shape, hardware).values())
            if needed_bytes <= USABLE * hardware.free:
                return size, needed_bytes
    return 0, needed_bytes


def advise(
    options: ResolvedTrainConfig, recipe: Recipe, shape: GPTConfig, hardware: Hardware
) -> str:
    """Return the flags with which a step takes the least time by forecast, of those with which the
    run fits these devices; of equal ones the first below, which are the plainest. Return where to
    look if none fit, or if the devices are not known."""
    model = build_without_weights(shape)
    num_processes = hardware.num_processes
    several_machines = range(2 * hardware.per_machine, num_processes + 1, hardware.per_machine)
    best_seconds = math.inf
    advice = "see --activation_checkpointing and --sharding"
    for checkpointing, tensor_parallel, shard_across, sharding in itertools.product(
        ("none", "cheap", "block"),
        (1, 2, 4, 8),
        (None, *several_machines),
        ("none", "zero1", "zero2", "zero3"),
    ):
        flags: dict[str, object] = {
            "sharding": sharding,
            "tensor_parallel": tensor_parallel,
            "shard_across": shard_across,
            "activation_checkpointing": checkpointing,
        }
        try:
            check_divides(shape, tensor_parallel)
            trial = replace(options, **flags)  # type: ignore[arg-type]
            size, _ = largest_micro_batch(trial, recipe, shape, hardware)
        except UserError:  # they do not divide, or do not go together
            continue
        if size == 0:
            continue
        step = forecast_step(replace(trial, micro_batch_size=size), model, hardware)
        if step is not None and step.seconds < best_seconds:
            best_seconds = step.seconds
            flags["micro_batch_size"] = size
            words = " ".join(to_flags(flags))
            advice = f"the fastest that fits is {words}, {best_seconds:.2f} s a step"
    return advice
