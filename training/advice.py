"""The micro-batch that fits."""

from dataclasses import replace

from config import ResolvedTrainConfig
from model.config import GPTConfig
from model.recipes import Recipe
from training.plan import USABLE, Hardware, forecast_memory
from utils.errors import UserError


def choose_micro_batch(
    options: ResolvedTrainConfig,
    recipe: Recipe,
    shape: GPTConfig,
    hardware: Hardware,
) -> tuple[int, str]:
    """Return the sequences of a micro-batch for --micro_batch_size auto, and a sentence about it.
    Raises UserError if not even one sequence fits."""
    size, needed_bytes = largest_micro_batch(options, recipe, shape, hardware)
    free_text = f"{hardware.free / 1e9:.2f} GB free"
    if size == 0:
        raise UserError(
            f"one sequence needs {needed_bytes / 1e9:.2f} GB, but a process has {free_text}: "
            "see --activation_checkpointing and --sharding"
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
