"""Find the largest micro-batch that fits, and the flags with which a run fits and is fastest."""

import itertools
import math
from dataclasses import replace

from config import ResolvedTrainOptions
from model.config import GPTConfig
from recipes import Recipe
from training.forecast.memory import USABLE_SHARE, Hardware, forecast_memory
from training.forecast.step_time import forecast_step
from training.parallel.tensor_parallel import check_divides
from utils.cli import to_flags
from utils.errors import UserError

MOST_ON_CPU = 16  # sequences of a micro-batch; more are not faster on a CPU


def choose_micro_batch(
    options: ResolvedTrainOptions,
    recipe: Recipe,
    model_config: GPTConfig,
    hardware: Hardware,
) -> tuple[int, str]:
    """Return the number for --micro_batch_size auto, in sequences, and a sentence to print or "".
    On CUDA it is the largest that fits. Raises UserError if the sequences of a step do not divide
    among the processes; on CUDA also if not even one sequence fits, and names flags that help, if
    any do."""
    if hardware.device.type != "cuda":
        # with micro-batches of one sequence, the micro-steps of a process count its sequences
        num_sequences = hardware.count_micro_steps(replace(options, micro_batch_size=1))
        divisors = [size for size in range(1, MOST_ON_CPU + 1) if num_sequences % size == 0]
        return divisors[-1], ""
    try:
        micro_batch_size, needed_bytes = largest_micro_batch(  # 0 if not even one sequence fits
            options, recipe, model_config, hardware
        )
    except UserError as error:  # the numbers of the run do not divide
        advice = advise(options, recipe, model_config, hardware)  # "the fastest that fits is ..."
        if not advice:  # no flags make them divide
            raise
        raise UserError(f"{error}; {advice}") from error
    free_text = f"{hardware.free_bytes / 1e9:.2f} GB free"
    if micro_batch_size == 0:
        advice = advise(options, recipe, model_config, hardware)
        raise UserError(
            f"one sequence needs {needed_bytes / 1e9:.2f} GB, but a process has {free_text}, of "
            f"which {USABLE_SHARE:.0%} may be filled: {advice}"
        )
    forecast_text = f"by forecast {needed_bytes / 1e9:.2f} GB of {free_text}"
    return micro_batch_size, f"micro-batch {micro_batch_size}, {forecast_text}"


def largest_micro_batch(
    options: ResolvedTrainOptions, recipe: Recipe, model_config: GPTConfig, hardware: Hardware
) -> tuple[int, int]:
    """Return the largest micro-batch that fits, in sequences, and the forecast of its memory in
    bytes. If not even one sequence fits, return 0 and the bytes of one sequence.

    A micro-batch fits if its forecast is at most USABLE_SHARE of the free memory. Its size divides
    the sequences of a process in a step.
    """
    # With micro-batches of one sequence, the micro-steps of a process count its sequences.
    num_sequences = hardware.count_micro_steps(replace(options, micro_batch_size=1))
    # Try only divisors: any other size would leave a smaller last micro-batch.
    for micro_batch_size in range(num_sequences, 0, -1):
        if num_sequences % micro_batch_size == 0:
            trial = replace(options, micro_batch_size=micro_batch_size)
            # forecast_memory returns the bytes of a process by use, {"weights": ..., ...}
            needed_bytes = sum(forecast_memory(trial, recipe, model_config, hardware).values())
            if needed_bytes <= USABLE_SHARE * hardware.free_bytes:
                return micro_batch_size, needed_bytes
    return 0, needed_bytes  # of the last trial, one sequence


def advise(
    options: ResolvedTrainOptions, recipe: Recipe, model_config: GPTConfig, hardware: Hardware
) -> str:
    """Return a text with the flags to change, so that the run fits these devices and its steps are
    the fastest by forecast.

    Of equally fast flags the first win: the run's own with another micro-batch, then the simplest.
    On devices of unknown speed all are equally fast. If no flags fit, the text says what else
    helps. Return "" if no flags make the numbers of the run divide.
    """
    choices = values_to_try(options, hardware)
    best_seconds = math.inf
    advice = ""
    for combination in itertools.product(*choices.values()):
        flags = dict(zip(choices, combination, strict=True))  # {"sharding": "zero1", ...}
        try:
            check_divides(model_config, flags["tensor_parallel"])
            # its __post_init__ (config.py) raises UserError for flags that exclude each other
            trial = replace(options, **flags)
            micro_batch_size, _ = largest_micro_batch(trial, recipe, model_config, hardware)
        # The numbers do not divide, the flags exclude each other, or tensor parallelism cannot
        # divide an edited block, which may raise anything.
        except Exception:
            continue
        if micro_batch_size == 0:  # not even one sequence fits
            advice = advice or "no flags make it fit; take a smaller model, or more GPUs"
            continue
        trial = replace(trial, micro_batch_size=micro_batch_size)
        forecast = forecast_step(trial, model_config, hardware)  # None if the speed is not known
        # of a step; with 0 the first combination that fits wins, and the run's own is tried first
        seconds = forecast.seconds if forecast is not None else 0.0
        if seconds >= best_seconds:
            continue
        best_seconds = seconds
        changes: dict[str, object] = {}
        for name in ("micro_batch_size", *choices):
            value = getattr(trial, name)
            if value != getattr(options, name):
                changes[name] = value
        flags_text = " ".join(to_flags(changes)) or "this run"  # "--sharding zero1"
        advice = f"what fits is {flags_text}"
        if forecast is not None:
            advice = f"the fastest that fits is {flags_text}, {seconds:.2f} s a step"
    return advice


def values_to_try(options: ResolvedTrainOptions, hardware: Hardware) -> dict[str, tuple]:
    """Return the values that `advise` tries by option: the run's own value first, then the simplest
    one."""
    # Processes that divide a copy of the training state by default, as in count_shards: 4 for 12
    # processes, 8 on one machine and 4 on another.
    per_machine = math.gcd(hardware.processes_per_machine, hardware.world_size)
    # values of --shard_across for a copy over 2, 3, ... machines: 16, 24, 32 for 4 machines of 8
    several_machines = range(2 * per_machine, hardware.world_size + 1, per_machine)
    # --shard_across None means one copy of the state per machine. If the run gives a number, the
    # advice must give per_machine instead of None: it can replace a flag, but not remove it.
    in_a_machine = None if options.shard_across is None else per_machine
    return {
        "activation_checkpointing": (options.activation_checkpointing, "none", "cheap", "block"),
        "tensor_parallel": (options.tensor_parallel, 1, 2, 4, 8),
        "shard_across": (options.shard_across, in_a_machine, *several_machines),
        "sharding": (options.sharding, "none", "zero1", "zero2", "zero3"),
    }
