"""--minutes M: the best model that these devices can train on this text in M minutes.

The time of a step is measured for sizes of a ladder, on the processes and devices of the run. It
says how many tokens of each size fit into the time. These give batch and steps, and a scaling law
compares the losses (training/forecast/loss.py). The choice becomes flags, as if the user had typed
them, which a resumed run finds in its checkpoint. This file is not about learning rates, which
follow the size of any model (recipes.py).
"""

import math
import re
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from utils.environment import START_SECONDS

import numpy as np
import torch

from config import ResolvedTrainOptions, TrainOptions
from data.loader import Mixture
from data.shards import MissingShards
from model.config import GPTConfig
from model.execution import Execution, execute
from model.gpt import GPT
from model.initial_weights import build_without_weights, new_model
from recipes import Recipe
from training.forecast.advice import choose_micro_batch
from training.forecast.loss import COUNTED_ROWS, MOST_EPOCHS, compared_loss, token_worth
from training.forecast.memory import Hardware
from training.forecast.step_time import ASSUMED_UTILIZATION
from training.optimizers import make_optimizers
from training.options import expand_flags, fit_micro_batch, read_options, resolve_options
from training.parallel.data_parallel import clip_grad_norm, sync_gradients, wrap
from utils.cli import named_flags, to_flags
from utils.devices import seconds_on_cpu
from utils.distributed import Process, launcher
from utils.errors import UserError
from utils.launch import is_main_process

# Layers and channels, with heads of 64 channels: 64 channels for each layer up to GPT-2's smallest
# size, then GPT-2's other sizes.
LADDER = (
    (1, 64),
    (2, 128),
    (3, 192),
    (4, 256),
    (5, 320),
    (6, 384),
    (8, 512),
    (10, 640),
    (12, 768),
    (24, 1024),
    (36, 1280),
    (48, 1600),
)
# Index in Dial.sizes of the first size to be measured: 2 layers of 128 channels, if the user allows
# all sizes. A larger one could take all of the time of a slow machine.
FIRST_MEASURED = 1
MEASURED_SHARE = 0.1  # of the time, for measuring: no size is begun later
# Share of the time for passes of a size without an update. As many passes with an update follow.
# More seconds give a better mean where other programs change the speed.
PASSES_SHARE = 0.005
MIN_PASSES_SECONDS = 0.5
MAX_PASSES_SECONDS = 10.0
FINISH_SECONDS = 3  # to save the last checkpoint
NUM_VALIDATIONS = 10  # of a run at most, beside that of step 0
VALIDATED_SHARE = 0.05  # of the time, for validations
OTHER_SHARE = 0.07  # of the time, for what measure_step leaves out: batches, log, other programs
EQUAL_LOSS = 0.005  # of sizes whose losses differ by less, the smallest is chosen
COMPILED_MINUTES = 10  # shorter runs are not compiled: that takes a minute


@dataclass(frozen=True)
class StepCost:
    """Seconds that a training step of one size takes, in its parts."""

    flops_per_token: int
    """FLOPs of the forward and backward pass of a token."""
    token_seconds: float
    """Forward and backward pass of a token; all processes work on it together."""
    update_seconds: float
    """Once a step: reduction of the gradients, clipping and the optimizers."""
    compile_seconds: float
    """Seconds by which the first pass, which compiles, is longer; 0 if not compiled."""


@dataclass(frozen=True)
class Size:
    """A size of a model that the run may get."""

    flags: dict[str, Any]
    """Options that make a model of this size, without those that the user gives: {"n_layer": 2,
    "n_head": 2, "n_embd": 128, "block_size": 128}; {} if the user's flags make the only size."""
    model_config: GPTConfig
    num_parameters: int
    counted_parameters: int
    """Parameters that count for the loss: num_parameters without rows of rare tokens."""
    flops_per_token: int
    """FLOPs of the forward and backward pass of a token."""


@dataclass(frozen=True)
class Plan:
    """A run with a model of one size that fits into the time."""

    size: Size
    flags: dict[str, Any]
    """Options of the run, without those that the user gives: those of `size`, total_batch_size,
    max_steps, ..."""
    num_tokens: int
    """Tokens that the run reads: its steps times those of a batch."""
    loss: float
    """compared_loss: only differences between plans mean something."""


# measure_step or forecast_cost, each with its first two arguments bound by `partial`
MeasureStep = Callable[[ResolvedTrainOptions, Size], StepCost]


class Dial:
    """The options, the text and the time for which --minutes chooses a run."""

    def __init__(self, options: ResolvedTrainOptions, recipe: Recipe, data_parallel: int) -> None:
        """`data_parallel` is the number of parts into which the processes divide the data."""
        minutes = options.minutes
        assert minutes is not None  # else there is nothing to choose
        if options.init_from is not None:
            raise UserError("--minutes chooses the size of a new model: leave out --init_from")
        # [("data_dir", "data/own"), ("minutes", "10"), ("no_use_torch_compile", None)]
        given_flags = named_flags(expand_flags(sys.argv[1:]))
        # names of the options that the command line or its --config gives, without "no_":
        # {"data_dir", "minutes", "use_torch_compile"}
        self.given_names = {name.removeprefix("no_") for name, _ in given_flags}
        self.common_flags: dict[str, Any] = {}
        """Options of the run, whatever its size: {"use_torch_compile": False} or {}."""
        # True only on CUDA, where a run compiles unless the user says otherwise
        may_compile = options.use_torch_compile and "use_torch_compile" not in self.given_names
        if may_compile and minutes < COMPILED_MINUTES:
            self.common_flags["use_torch_compile"] = False
        self.options = replace(options, **self.common_flags)
        self.data_parallel = data_parallel
        self.run_seconds = 60 * minutes  # from the start of the processes to the end of the run
        try:
            # a Mixture has the corpora of --data_dir; its `stream` has the tokens of all of them
            train_stream = Mixture(options.data_dir, "train", options.block_size).stream
            val_data = Mixture(options.data_dir, "val", options.block_size)
            self.text_tokens = len(train_stream)  # of all train shards
            self.available_val_tokens = len(val_data.stream)  # --val_tokens may read fewer
            self.num_val_corpora = len(val_data.names)  # a validation reads --val_tokens of each
            vocab_size = train_stream.vocab_size
        except MissingShards:
            if not options.dry_run:
                raise
            # a dry run before the sharding plans for FineWeb-Edu's sample of 10B tokens
            self.text_tokens = 10_000_000_000
            self.available_val_tokens = 100_000_000
            self.num_val_corpora = 1
            vocab_size = GPTConfig.vocab_size
        self.token_worth = token_worth(vocab_size)
        """How many tokens of the scaling law one token is worth: 0.22 for bytes."""
        self.sizes = [self.make_size(recipe, vocab_size, flags) for flags in self.ladder()]

    def ladder(self) -> list[dict[str, Any]]:
        """Return the flags of each size, the smallest first: LADDER, or the size of the user."""
        ladder = []
        for n_layer, n_embd in LADDER:
            # heads of 64 channels
            flags = {"n_layer": n_layer, "n_head": n_embd // 64, "n_embd": n_embd}
            # skip a size unless it has the numbers that the user gives; None: not given
            if any(getattr(self.options, name) not in (None, flags[name]) for name in flags):
                continue
            if flags["n_head"] % self.options.tensor_parallel:  # the processes share the heads
                continue
            # The power of two nearest to the width, up to GPT-2's 1024. In two minutes of one core,
            # a context of 256 costs 0.17 nats at 128 channels (docs/BENCHMARKS.md).
            flags["block_size"] = min(1024, 2 ** round(math.log2(n_embd)))
            ladder.append(self.without_given(flags))  # a given --block_size stays
        if not ladder or "model_type" in self.given_names:
            return [{}]  # one size, that of the user's own flags
        return ladder

    def without_given(self, flags: dict[str, Any]) -> dict[str, Any]:
        """Return the flags that the user does not give."""
        return {name: value for name, value in flags.items() if name not in self.given_names}

    def make_size(self, recipe: Recipe, vocab_size: int, flags: dict[str, Any]) -> Size:
        """Return the size of a model with these flags, {"n_layer": 2, "n_head": 2, ...}."""
        # sizes from `flags`, else from the user's flags or --model_type; the rest from the recipe
        model_config = replace(self.options, **flags).model_config(recipe, vocab_size)
        # On "meta", only for their counts: the model, and one with at most COUNTED_ROWS (18,000)
        # tokens, because rows of rarer tokens learn little.
        model = build_without_weights(GPT, model_config)
        counted_config = replace(model_config, vocab_size=min(vocab_size, COUNTED_ROWS))
        counted_model = build_without_weights(GPT, counted_config)
        return Size(
            flags,
            model_config,
            num_parameters=model.num_parameters(),
            counted_parameters=counted_model.num_parameters(),
            flops_per_token=model.flops_per_token(),
        )

    def choose(
        self, measure_step: MeasureStep, elapsed: Callable[[], float], first_sequences: int
    ) -> Plan:
        """Return the plan of the smallest size whose loss is within EQUAL_LOSS of the lowest.
        `elapsed` returns the seconds since the first of the processes began, 0 in a dry run.
        `measure_step` raises UserError for a size that does not fit into memory; the first time it
        measures a step of `first_sequences` sequences of each process, or a few more."""
        # by FLOPs per token, which identify a size
        cost_by_flops: dict[int, StepCost] = {}
        size = self.sizes[min(FIRST_MEASURED, len(self.sizes) - 1)]  # the second, or the only one
        first_tokens = first_sequences * size.model_config.block_size * self.data_parallel
        smallest_tokens = self.tokens_of_smallest_batch(size)
        batch_tokens = -(-first_tokens // smallest_tokens) * smallest_tokens  # rounded up
        # {"n_layer": 2, "n_head": 2, "n_embd": 128, "block_size": 128, "total_batch_size": 1024},
        # without the options that the user gives
        flags = size.flags | self.without_given({"total_batch_size": batch_tokens})
        measured_flags: list[dict[str, Any]] = []  # a dict for each measurement
        start_seconds = elapsed()
        while True:
            try:
                cost = measure_step(replace(self.options, **flags), size)  # a StepCost
                cost_by_flops[size.flops_per_token] = cost  # replaces that of another batch
            except UserError:
                # Before the first measurement there is nothing to choose by: the flags of the user
                # contradict each other, or nothing fits.
                if not cost_by_flops or size is self.sizes[0]:  # [0]: the smallest
                    raise
                # larger sizes do not fit, either
                self.sizes = self.sizes[: self.sizes.index(size)]
            measured_flags.append(flags)
            # what is left; at least a second, for a time that is over before the run begins
            seconds = max(1.0, self.run_seconds - elapsed() - FINISH_SECONDS)
            costs = list(cost_by_flops.values())
            plans = [self.plan(size, costs, seconds) for size in self.sizes]  # smallest size first
            lowest_loss = min(plan.loss for plan in plans)
            plan = next(plan for plan in plans if plan.loss < lowest_loss + EQUAL_LOSS)
            # Measure this size with its planned batch next, unless that is done or measuring has
            # taken a tenth of the time.
            size = plan.size
            flags = {name: plan.flags[name] for name in flags}  # its sizes, and total_batch_size
            is_late = elapsed() - start_seconds > MEASURED_SHARE * self.run_seconds
            if flags in measured_flags or is_late:
                return plan

    def plan(self, size: Size, costs: list[StepCost], seconds: float) -> Plan:
        """Return the run with a model of this size that takes about `seconds`, by the measured
        costs, or less if more repeats of the text would not help."""
        cost = cost_of(size, costs)  # measured, or interpolated from other sizes
        # Steps and validations get what compiling and OTHER_SHARE (7 % for batches, log and other
        # programs) leave.
        busy_seconds = max(1.0, (1 - OTHER_SHARE) * seconds - cost.compile_seconds)
        val_tokens = self.choose_val_tokens(cost, busy_seconds)  # of each corpus
        tokens_per_validation = min(self.num_val_corpora * val_tokens, self.available_val_tokens)
        # A validation has forward passes only, a third of the FLOPs of training.
        validations_seconds = NUM_VALIDATIONS * tokens_per_validation * cost.token_seconds / 3
        # at least 1 %, because the validations of a size that is too large may take all of the time
        steps_seconds = max(0.01 * busy_seconds, busy_seconds - validations_seconds)

        batch_tokens = self.choose_batch(size, cost, steps_seconds)
        # at most MOST_EPOCHS of the text
        tokens_that_fit = self.tokens_in(steps_seconds, cost, batch_tokens)
        # at least 10, one for each validation, also where not one step fits into the time
        max_steps = max(NUM_VALIDATIONS, int(tokens_that_fit / batch_tokens))
        every = -(-max_steps // NUM_VALIDATIONS)  # steps between validations, rounded up
        step_flags = self.without_given(
            {
                "total_batch_size": batch_tokens,
                "max_steps": max_steps,
                "eval_every": every,
                "save_every": every,
                "sample_every": max_steps,  # one text, at the end
                "val_tokens": val_tokens,
            }
        )
        # By a scaling law, to compare sizes; token_worth is 1 for GPT-2's tokens. It counts the
        # tokens that fit, not those of max_steps, which are more for a size that is too slow.
        loss = compared_loss(
            size.counted_parameters,
            self.token_worth * tokens_that_fit,
            self.token_worth * self.text_tokens,
        )
        flags = size.flags | step_flags | self.common_flags
        return Plan(size, flags, max_steps * batch_tokens, loss)

    def choose_val_tokens(self, cost: StepCost, seconds: float) -> int:
        """Return --val_tokens: the largest power of two with which NUM_VALIDATIONS validations take
        at most VALIDATED_SHARE of `seconds`, but no more than the default; or what the user gives.
        """
        if "val_tokens" in self.given_names:
            return self.options.val_tokens
        # of one corpus in one validation
        validation_seconds = VALIDATED_SHARE * seconds / NUM_VALIDATIONS / self.num_val_corpora
        # a forward pass takes a third of token_seconds, which is forward and backward
        num_tokens = 3 * validation_seconds / cost.token_seconds
        return min(2 ** int(math.log2(max(2, num_tokens))), self.options.val_tokens)  # the default

    def choose_batch(self, size: Size, cost: StepCost, seconds: float) -> int:
        """Return --total_batch_size: a power of two times what the processes read at once, or what
        the user gives. It is the batch that Li et al. 2025 ("Predictable Scale", step law) found
        the best for the tokens that fit into `seconds`."""
        if "total_batch_size" in self.given_names:
            return self.options.total_batch_size
        batch_tokens = self.tokens_of_smallest_batch(size)
        while True:
            # these tokens depend on the batch: an update takes time, too
            num_tokens = self.tokens_in(seconds, cost, batch_tokens)
            best_batch_tokens = 0.58 * num_tokens**0.571  # the step law
            if best_batch_tokens < math.sqrt(2) * batch_tokens:  # nearer to this than to its double
                return batch_tokens
            batch_tokens *= 2

    def tokens_of_smallest_batch(self, size: Size) -> int:
        """Return the tokens of the smallest batch: one sequence, or a given micro-batch, in each
        part of the data."""
        num_sequences = 1
        if self.options.micro_batch_size != "auto":
            num_sequences = self.options.micro_batch_size
        return num_sequences * size.model_config.block_size * self.data_parallel

    def tokens_in(self, seconds: float, cost: StepCost, batch_tokens: int) -> float:
        """Return the number of tokens that a run with steps of `batch_tokens` reads in `seconds`,
        at most as many as repeats of the text make useful."""
        # each token also takes its share of the update that ends a step
        num_tokens = seconds / (cost.token_seconds + cost.update_seconds / batch_tokens)
        return min(num_tokens, MOST_EPOCHS * self.text_tokens)


def cost_of(size: Size, costs: list[StepCost]) -> StepCost:
    """Return the cost of a step of a size from those of the measured sizes: their seconds, divided
    by the FLOPs of a token, are interpolated. compile_seconds are the most of any measured size."""
    costs = sorted(costs, key=lambda cost: cost.flops_per_token)  # np.interp needs them sorted
    flops = [cost.flops_per_token for cost in costs]

    def interpolate(seconds: list[float]) -> float:
        seconds_per_flop = np.divide(seconds, flops)  # (m,) of the m measured sizes
        # below the smallest and above the largest of the measured sizes it stays the same
        log_flops = math.log(size.flops_per_token)
        return size.flops_per_token * float(np.interp(log_flops, np.log(flops), seconds_per_flop))

    return StepCost(
        size.flops_per_token,
        token_seconds=interpolate([cost.token_seconds for cost in costs]),
        update_seconds=interpolate([cost.update_seconds for cost in costs]),
        compile_seconds=max(cost.compile_seconds for cost in costs),
    )


def measure_step(
    process: Process, recipe: Recipe, options: ResolvedTrainOptions, size: Size
) -> StepCost:
    """Return the cost of a step of a new model, measured on the processes of the run. Every process
    must call it. Raises UserError if --micro_batch_size auto finds, by a forecast, that the model
    does not fit into a GPU's memory."""
    model_config = size.model_config
    if options.micro_batch_size == "auto":
        micro_batch_size, _ = fit_micro_batch(options, recipe, model_config, process)  # sequences
        options = replace(options, micro_batch_size=micro_batch_size)
    model, weights = new_model(GPT, model_config, options.seed)  # GPT on "meta", Rows by name
    # activation checkpointing and torch.compile, applied in place
    execute(model, Execution(options.activation_checkpointing, options.use_torch_compile))
    # DDP's module around the model, with its memory allocated and filled; the model itself in a
    # single process or with --sharding
    wrapped = wrap(model, weights, process, options.sharding)
    # One AdamW for each group of parameters, and Muon if the recipe has it; the dtype is for Muon's
    # matmuls. Their learning rates are not set, because only the time of a step matters here.
    optimizers = make_optimizers(model, options, recipe, process.dtype)
    shape = (options.sequences_per_pass, options.block_size)  # (B, T)
    idx = torch.randint(model_config.vocab_size, shape, device=process.device)

    def seconds_of(num_passes: int, *, update: bool) -> float:
        """Return the mean seconds of a forward and backward pass, with `update` also those of what
        ends a step, of the slowest process."""
        start_seconds = time.perf_counter()
        for _ in range(num_passes):
            with sync_gradients(wrapped, options.sharding, is_last=update):
                with process.autocast(keep_weights=False):  # as in train_step
                    loss = wrapped(idx, idx)  # any targets take as long
                loss.backward()
            if update:
                clip_grad_norm(wrapped, options.grad_clip)  # in place, over all processes
                for optimizer in optimizers:
                    optimizer.step()
                wrapped.zero_grad(set_to_none=True)
        loss.item()  # waits for the device
        nanoseconds = int(1e9 * (time.perf_counter() - start_seconds))  # Process.min takes an int
        # -min(-x) is the maximum over processes: the time of the slowest
        return -process.min(-nanoseconds) / 1e9 / num_passes

    first_pass_seconds = seconds_of(1, update=False)  # compiles, and allocates memory
    seconds_of(1, update=True)  # creates the state of the optimizers
    assert options.minutes is not None  # Dial has checked it, and only `choose` measures
    # for the timed passes without an update; as many with an update follow
    budget_seconds = max(MIN_PASSES_SECONDS, PASSES_SHARE * 60 * options.minutes)
    budget_seconds = min(MAX_PASSES_SECONDS, budget_seconds)
    num_passes = max(1, int(budget_seconds / seconds_of(1, update=False)))
    pass_seconds = seconds_of(num_passes, update=False)
    # each of these passes ends with an update; noise can make the difference negative
    update_seconds = max(0.0, seconds_of(num_passes, update=True) - pass_seconds)
    return StepCost(
        size.flops_per_token,
        token_seconds=pass_seconds / (idx.numel() * process.data_parallel),
        update_seconds=update_seconds,
        compile_seconds=first_pass_seconds - pass_seconds if options.use_torch_compile else 0.0,
    )


def forecast_cost(
    hardware: Hardware, recipe: Recipe, options: ResolvedTrainOptions, size: Size
) -> StepCost:
    """Return the cost of a step for a dry run: by the peak of a known GPU, or by a matmul of this
    CPU. Raises UserError for a model that does not fit into the memory of a GPU."""
    choose_micro_batch(options, recipe, size.model_config, hardware)  # only for its UserError
    flops_per_token = size.flops_per_token
    if hardware.gpu is not None:
        # of all GPUs together
        flops_per_second = hardware.world_size * hardware.gpu.peak_flops * ASSUMED_UTILIZATION
        token_seconds = flops_per_token / flops_per_second
    else:
        # seconds_on_cpu times a matmul, and assumes a fixed share of its rate
        token_seconds = seconds_on_cpu(flops_per_token, hardware.dtype)
    # updates and compiling are not forecast
    return StepCost(flops_per_token, token_seconds, update_seconds=0.0, compile_seconds=0.0)


def choose_for_minutes(
    options: ResolvedTrainOptions, recipe: Recipe, process: Process
) -> tuple[ResolvedTrainOptions, list[str]]:
    """Return the options of the run that --minutes chooses on the devices of these processes, and
    the names of the derived options (read_options). Print the choice. Every process must call it.
    """

    def elapsed() -> float:
        """Return the seconds since the first of the processes began."""
        milliseconds = int(1000 * (time.perf_counter() - START_SECONDS))  # of this process
        return -process.min(-milliseconds) / 1000  # the maximum over processes

    dial = Dial(options, recipe, process.data_parallel)
    # --micro_batch_size auto takes a divisor of this number: 8 sequences would not fill a GPU.
    first_sequences = 8 if process.device.type == "cpu" else 256
    plan = dial.choose(partial(measure_step, process, recipe), elapsed, first_sequences)
    return apply_plan(dial, plan)


def plan_for_minutes(options: ResolvedTrainOptions, recipe: Recipe) -> ResolvedTrainOptions:
    """Return the options of the run that --minutes would choose on the devices that --device names,
    by a forecast of their speed, and print the choice. If their speed is not known, print a note
    and return the options as they are."""
    hardware = Hardware.of(options)
    if hardware.gpu is None and hardware.device.type != "cpu":
        print("note: --minutes measures the speed of this device when the run starts")
        return options
    data_parallel, _ = hardware.parallel_degrees(options)  # parts of the data
    dial = Dial(options, recipe, data_parallel)
    # a forecast takes no time that would count: 0.0 s elapsed
    plan = dial.choose(partial(forecast_cost, hardware, recipe), lambda: 0.0, first_sequences=8)
    return apply_plan(dial, plan)[0]


def apply_plan(dial: Dial, plan: Plan) -> tuple[ResolvedTrainOptions, list[str]]:
    """Print the size with its reason, how far the time goes, and the run as plain flags. Return the
    options of these flags in front of the command line, and the names of the derived options.
    `plan` is the run that `dial` chose."""
    command_line = sys.argv[1:]
    chosen_flags = to_flags(plan.flags)  # ["--n_layer", "2", ...]
    if is_main_process():
        model_config = plan.size.model_config
        print(
            f"n_layer {model_config.n_layer}, n_embd {model_config.n_embd} "
            f"({plan.size.num_parameters:,} parameters): the smallest of "
            f"{len(dial.sizes)} sizes that reaches the lowest predicted loss, to {EQUAL_LOSS}, in "
            f"{dial.options.minutes:g} minutes"
        )
        epochs = plan.num_tokens / dial.text_tokens
        # 0.99: whole steps end a little before MOST_EPOCHS, where tokens_in has stopped
        stop_text = " and more repeats would hardly help" if epochs > 0.99 * MOST_EPOCHS else ""
        print(f"{plan.num_tokens:,} tokens fit into that time: {epochs:,.2f} epochs{stop_text}")
        # the command line without --minutes VALUE or --minutes=VALUE
        typed_flags = re.sub("--minutes[ =][^ ]* ?", "", shlex.join(command_line))
        # launcher: such as "python" or "torchrun --standalone --nproc_per_node=8"
        print(f"the same run: {launcher()} train.py {shlex.join(chosen_flags)} {typed_flags}")
    # Parse them as if the user had typed them. No flag stands twice: plan.flags has none that the
    # user gives. `derived` has the names of the options that no flag sets, ["log_dir", ...].
    # `checkpoint` is None: callers choose only for new runs, as a resumed run keeps its options.
    given_options, derived, checkpoint = read_options(
        TrainOptions, "train.py", chosen_flags + command_line
    )
    options, _ = resolve_options(given_options, derived, checkpoint)  # ResolvedTrainOptions, Recipe
    # resolve_options may turn compiling on again where compile_if_all_can has turned it off (a
    # process has no working compiler)
    return replace(options, use_torch_compile=dial.options.use_torch_compile), derived
