"""--minutes M: the best model that these devices can train on this text in M minutes.

A step is timed for some sizes of a ladder, on the processes and devices of the run. That says how
many tokens of each size fit into the time. These give batch and steps, and a scaling law compares
the losses (training/forecast/loss.py). The choice becomes flags, as if the user had typed them,
which a resumed run finds in its checkpoint. This file is not about learning rates, which follow
the size of any model (recipes.py).
"""

import math
import re
import shlex
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

from utils.environment import START_SECONDS

import numpy as np
import torch
from torch import Tensor, nn

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

# Heads by layers of each size, with 64 channels a head: as many heads as layers up to GPT-2's
# smallest size, then GPT-2's other sizes.
LADDER = {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 8: 8, 10: 10, 12: 12, 24: 16, 36: 20, 48: 25}
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
class DataSize:
    """Sizes of the text in --data_dir. The defaults are those of FineWeb-Edu's sample of 10B tokens
    of GPT-2."""

    train_tokens: int = 10_000_000_000
    val_tokens: int = 100_000_000
    """Tokens of the validation split of all corpora; --val_tokens may read fewer."""
    num_corpora: int = 1
    """Number of corpora: a validation reads --val_tokens of each."""
    vocab_size: int = GPTConfig.vocab_size


@dataclass(frozen=True)
class Size:
    """A size of a model that the run may get."""

    flags: dict[str, Any]
    """Options that make a model of this size: {"n_layer": 2, "n_head": 2, "n_embd": 128,
    "block_size": 128}, without a given block_size; {} if the user's flags make the only size."""
    meta_model: GPT
    """The model on "meta", for its counts."""
    counted_parameters: int
    """Parameters that count for the loss: without rows of rare tokens."""
    smallest_batch: int
    """Tokens of one sequence, or of a given micro-batch, in each part of the data."""


@dataclass(frozen=True)
class StepCost:
    """Seconds that a training step of one size takes, in its parts."""

    token_seconds: float
    """Forward and backward pass of a token; all processes work on it together."""
    update_seconds: float
    """Once a step: reduction of the gradients, clipping and the optimizers."""
    compile_seconds: float
    """Seconds by which the first pass, which compiles, is longer; 0 if not compiled."""


@dataclass(frozen=True)
class Plan:
    """A run with a model of one size that fits into the time."""

    size: Size
    batch_tokens: int
    """Tokens of a step."""
    num_tokens: int
    """Tokens that the run reads: its steps times batch_tokens."""
    loss: float
    """compared_loss: only differences between plans mean something."""
    flags: dict[str, Any]
    """Options of the run that the user does not give: those of `size`, total_batch_size,
    max_steps, ..."""


class Dial:
    """The options, the text and the time for which --minutes chooses a run."""

    def __init__(
        self, options: ResolvedTrainOptions, recipe: Recipe, process: Process | None
    ) -> None:
        """Without a process, in a dry run, the time of a step is forecast and not measured."""
        minutes = options.minutes
        assert minutes is not None  # else there is nothing to choose
        if options.init_from is not None:
            raise UserError("--minutes chooses the size of a new model: leave out --init_from")
        self.recipe = recipe
        self.process = process
        self.hardware = Hardware.of(options)  # what --device names, and the processes of a machine
        if process is not None:
            self.data_parallel = process.data_parallel  # parts of the data
        else:
            self.data_parallel, _ = self.hardware.parallel_degrees(options)
        self.micro_batch_size = 1  # sequences; "auto" can choose a single one
        if options.micro_batch_size != "auto":
            self.micro_batch_size = options.micro_batch_size
        self.run_seconds = 60 * minutes  # from the start of the processes to the end of the run
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
        self.data_size = read_data_size(options)
        self.sizes = self.make_sizes()
        self.cost_by_flops: dict[int, StepCost] = {}
        """Costs of the sizes measured so far, by FLOPs per token, which identify a size."""

    def make_sizes(self) -> list[Size]:
        """Return the sizes to choose from, the smallest first: those of LADDER with the numbers
        that the user gives, or else the one size of the user's own flags."""
        if "model_type" in self.given_names:
            return [self.make_size({})]
        num_kv_heads = self.recipe.model.get("n_kv_head") or 1
        sizes: list[Size] = []
        for n_layer, n_head in LADDER.items():
            flags = {"n_layer": n_layer, "n_head": n_head, "n_embd": 64 * n_head}
            # None: not given
            if any(getattr(self.options, name) not in (None, flags[name]) for name in flags):
                continue
            # the processes share the heads, and groups of heads share keys and values
            if n_head % self.options.tensor_parallel or n_head % num_kv_heads:
                continue
            if "block_size" not in self.given_names:
                # The power of two nearest to the width, up to GPT-2's 1024. In two minutes of one
                # core, a context of 256 costs 0.17 nats at 128 channels (docs/BENCHMARKS.md).
                flags["block_size"] = min(1024, 2 ** round(math.log2(64 * n_head)))
            sizes.append(self.make_size(flags))
        if not sizes:
            return [self.make_size({})]
        return sizes

    def make_size(self, flags: dict[str, Any]) -> Size:
        """Return the size of a model with these flags, {"n_layer": 2, "n_head": 2, ...}."""
        vocab_size = self.data_size.vocab_size
        # what is not in `flags` comes from the user's flags, --model_type and the recipe
        model_config = replace(self.options, **flags).model_config(self.recipe, vocab_size)
        # a model with at most COUNTED_ROWS (12,000) tokens: rows of rarer tokens learn little
        counted_config = replace(model_config, vocab_size=min(vocab_size, COUNTED_ROWS))
        return Size(
            flags,
            meta_model=build_without_weights(GPT, model_config),
            counted_parameters=build_without_weights(GPT, counted_config).num_parameters(),
            smallest_batch=self.micro_batch_size * model_config.block_size * self.data_parallel,
        )

    def choose(self) -> Plan:
        """Return the plan of the best size. Measure the second size, plan every size by its cost,
        measure the best one with its batch, plan again, and so on, until the best one is measured
        or a tenth of the time is over. Raises the UserError of step_cost for the size that is
        measured first, and for the smallest one. Every process must call it."""
        last_start = self.elapsed() + MEASURED_SHARE * self.run_seconds  # no measuring after it
        size = self.sizes[min(FIRST_MEASURED, len(self.sizes) - 1)]  # the second, or the only one
        batch_tokens = self.first_batch(size)
        measured: list[tuple[Size, int]] = []  # with the tokens of the batch
        while True:
            try:
                # replaces the cost that was measured with another batch
                cost = self.step_cost(size, batch_tokens)
                self.cost_by_flops[size.meta_model.flops_per_token()] = cost
            except UserError:
                # Before the first measurement there is nothing to choose by: the flags of the user
                # contradict each other, or the model does not fit into memory.
                if not self.cost_by_flops or size is self.sizes[0]:  # [0]: the smallest
                    raise
                # larger sizes do not fit into memory, either
                self.sizes = self.sizes[: self.sizes.index(size)]
            measured.append((size, batch_tokens))
            elapsed = self.elapsed()
            plan = self.best_plan(self.run_seconds - elapsed - FINISH_SECONDS)
            size, batch_tokens = plan.size, plan.batch_tokens
            if elapsed > last_start or (size, batch_tokens) in measured:
                return plan

    def elapsed(self) -> float:
        """Return the seconds since the first of the processes began; 0 in a dry run, whose forecast
        takes no time that would count. Every process must call it."""
        if self.process is None:
            return 0.0
        return slowest(self.process, time.perf_counter() - START_SECONDS)

    def first_batch(self, size: Size) -> int:
        """Return the tokens of the batch with which the first size is measured."""
        if "total_batch_size" in self.given_names:
            return self.options.total_batch_size
        # --micro_batch_size auto takes a divisor of this number: 8 sequences would not fill a GPU.
        num_sequences = 8 if self.hardware.device.type == "cpu" else 256
        return -(-num_sequences // self.micro_batch_size) * size.smallest_batch  # rounded up

    def step_cost(self, size: Size, batch_tokens: int) -> StepCost:
        """Return the cost of a step of this size with this batch: measured, or in a dry run by
        forecast. Raises UserError as these two do. Every process must call it."""
        options = replace(self.options, **size.flags, total_batch_size=batch_tokens)
        if self.process is None:
            return forecast_step_cost(options, self.recipe, size.meta_model, self.hardware)
        return measure_step(options, self.recipe, size.meta_model.config, self.process)

    def best_plan(self, seconds: float) -> Plan:
        """Return the plan of the smallest size whose loss is within EQUAL_LOSS of the lowest, for a
        run of `seconds`."""
        # at least a second, for a time that is over before the run begins
        plans = [self.make_plan(size, max(1.0, seconds)) for size in self.sizes]
        lowest_loss = min(plan.loss for plan in plans)
        return next(plan for plan in plans if plan.loss < lowest_loss + EQUAL_LOSS)

    def make_plan(self, size: Size, seconds: float) -> Plan:
        """Return the run with a model of this size that takes about `seconds`, or less if more
        repeats of the text would not help."""
        cost = self.interpolated_cost(size.meta_model.flops_per_token())
        # Steps and validations get what compiling and OTHER_SHARE (7 % for batches, log and other
        # programs) leave.
        busy_seconds = max(1.0, (1 - OTHER_SHARE) * seconds - cost.compile_seconds)
        val_tokens = self.choose_val_tokens(cost, busy_seconds)  # of each corpus
        tokens_per_validation = min(
            self.data_size.num_corpora * val_tokens, self.data_size.val_tokens
        )
        # A validation has forward passes only, a third of the FLOPs of training.
        validations_seconds = NUM_VALIDATIONS * tokens_per_validation * cost.token_seconds / 3
        # at least 1 %, because the validations of a size that is too large may take all of the time
        steps_seconds = max(0.01 * busy_seconds, busy_seconds - validations_seconds)

        batch_tokens, tokens_that_fit = self.choose_batch(size, cost, steps_seconds)
        # at least 10, one for each validation, also where not one step fits into the time
        max_steps = max(NUM_VALIDATIONS, int(tokens_that_fit / batch_tokens))
        every = -(-max_steps // NUM_VALIDATIONS)  # steps between validations, rounded up
        flags = {
            **size.flags,
            "total_batch_size": batch_tokens,
            "max_steps": max_steps,
            "eval_every": every,
            "save_every": every,
            "sample_every": max_steps,  # one text, at the end
            "val_tokens": val_tokens,
            **self.common_flags,
        }
        flags = {name: value for name, value in flags.items() if name not in self.given_names}
        # By a scaling law, to compare sizes. It counts the tokens that fit, not those of max_steps,
        # which are more for a size that is too slow.
        worth = token_worth(self.data_size.vocab_size)  # 0.22 for bytes, 1 for GPT-2's tokens
        loss = compared_loss(
            num_parameters=size.counted_parameters,
            num_tokens=worth * tokens_that_fit,
            text_tokens=worth * self.data_size.train_tokens,
        )
        num_tokens = max_steps * batch_tokens
        return Plan(size, batch_tokens=batch_tokens, num_tokens=num_tokens, loss=loss, flags=flags)

    def choose_val_tokens(self, cost: StepCost, seconds: float) -> int:
        """Return --val_tokens: the largest power of two with which NUM_VALIDATIONS validations take
        at most VALIDATED_SHARE of `seconds`, but no more than the default; or what the user gives.
        """
        if "val_tokens" in self.given_names:
            return self.options.val_tokens
        # of one corpus in one validation
        validation_seconds = (
            VALIDATED_SHARE * seconds / NUM_VALIDATIONS / self.data_size.num_corpora
        )
        # a forward pass takes a third of token_seconds, which is forward and backward
        num_tokens = 3 * validation_seconds / cost.token_seconds
        return min(2 ** int(math.log2(max(2, num_tokens))), self.options.val_tokens)  # the default

    def choose_batch(self, size: Size, cost: StepCost, seconds: float) -> tuple[int, float]:
        """Return --total_batch_size, and the tokens that steps of this batch read in `seconds`, at
        most MOST_EPOCHS of the text.

        The batch is what the user gives, or a power of two times the smallest one: that which Li et
        al. 2025 ("Predictable Scale", step law) found the best for these tokens."""
        is_given = "total_batch_size" in self.given_names
        batch_tokens = self.options.total_batch_size if is_given else size.smallest_batch
        while True:
            # each token also takes its share of the update that ends a step
            num_tokens = seconds / (cost.token_seconds + cost.update_seconds / batch_tokens)
            num_tokens = min(num_tokens, MOST_EPOCHS * self.data_size.train_tokens)
            best_batch_tokens = 0.58 * num_tokens**0.571  # the step law
            # nearer to this batch than to its double
            if is_given or best_batch_tokens < math.sqrt(2) * batch_tokens:
                return batch_tokens, num_tokens
            batch_tokens *= 2

    def interpolated_cost(self, flops_per_token: int) -> StepCost:
        """Return the cost of a step of any size. Seconds of the measured sizes, divided by their
        FLOPs per token, are interpolated over the logarithm of these FLOPs; compile_seconds are the
        most of any measured size."""
        measured_flops = sorted(self.cost_by_flops)  # np.interp needs them sorted
        costs = [self.cost_by_flops[flops] for flops in measured_flops]

        def interpolate(seconds: list[float]) -> float:
            ratios = np.divide(seconds, measured_flops)
            # below the smallest and above the largest of the measured sizes the ratio stays equal
            ratio = np.interp(math.log(flops_per_token), np.log(measured_flops), ratios)
            return flops_per_token * float(ratio)

        return StepCost(
            token_seconds=interpolate([cost.token_seconds for cost in costs]),
            update_seconds=interpolate([cost.update_seconds for cost in costs]),
            compile_seconds=max(cost.compile_seconds for cost in costs),
        )


def read_data_size(options: ResolvedTrainOptions) -> DataSize:
    """Return the sizes of the text in --data_dir. Without shards a dry run plans for FineWeb-Edu's
    sample, and a run raises MissingShards."""
    try:
        # a Mixture has the corpora of --data_dir; its `stream` has the tokens of all of them
        train_stream = Mixture(options.data_dir, "train", options.block_size).stream
        val_data = Mixture(options.data_dir, "val", options.block_size)
    except MissingShards:
        if not options.dry_run:
            raise
        return DataSize()
    return DataSize(
        train_tokens=len(train_stream),
        val_tokens=len(val_data.stream),
        num_corpora=len(val_data.names),
        vocab_size=train_stream.vocab_size,
    )


def slowest(process: Process, seconds: float) -> float:
    """Return the most seconds of any process. Every process must call it."""
    nanoseconds = int(1e9 * seconds)  # Process.min takes an int
    return -process.min(-nanoseconds) / 1e9  # -min(-x) is the maximum


def measure_step(
    options: ResolvedTrainOptions, recipe: Recipe, model_config: GPTConfig, process: Process
) -> StepCost:
    """Return the cost of a step of a new model, measured on the processes of the run. Every process
    must call it. Raises UserError if --micro_batch_size auto finds no number of sequences, such as
    for a model that does not fit into a GPU's memory by its forecast."""
    if options.micro_batch_size == "auto":
        micro_batch_size, _ = fit_micro_batch(options, recipe, model_config, process)  # sequences
        options = replace(options, micro_batch_size=micro_batch_size)
    model, weights = new_model(GPT, model_config, options.seed)  # GPT on "meta", Rows by name
    # activation checkpointing and torch.compile, applied in place
    execute(model, Execution(options.activation_checkpointing, options.use_torch_compile))
    # DDP's module around the model, with its memory allocated and filled; the model itself in a
    # single process or with --sharding
    wrapped = wrap(model, weights, process, options.sharding)
    # Their learning rates are not set, because only the time of a step matters here.
    optimizers = make_optimizers(model, options, recipe, process.dtype)
    shape = (options.sequences_per_pass, options.block_size)  # (B, T)
    idx = torch.randint(model_config.vocab_size, shape, device=process.device)

    no_update: list[torch.optim.Optimizer] = []  # passes only add up gradients
    # Mean seconds of a pass, of the slowest process. The first pass compiles and allocates memory,
    # the first step creates the optimizers' state.
    first_pass_seconds = time_passes(wrapped, no_update, idx, options, process, num_passes=1)
    time_passes(wrapped, optimizers, idx, options, process, num_passes=1)
    one_pass_seconds = time_passes(wrapped, no_update, idx, options, process, num_passes=1)
    assert options.minutes is not None  # Dial has checked it
    budget_seconds = max(MIN_PASSES_SECONDS, PASSES_SHARE * 60 * options.minutes)
    budget_seconds = min(MAX_PASSES_SECONDS, budget_seconds)
    num_passes = max(1, int(budget_seconds / one_pass_seconds))
    pass_seconds = time_passes(wrapped, no_update, idx, options, process, num_passes)
    step_seconds = time_passes(wrapped, optimizers, idx, options, process, num_passes)
    return StepCost(
        token_seconds=pass_seconds / (idx.numel() * process.data_parallel),
        update_seconds=max(0.0, step_seconds - pass_seconds),  # noise can make it negative
        compile_seconds=first_pass_seconds - pass_seconds if options.use_torch_compile else 0.0,
    )


def time_passes(
    wrapped: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    idx: Tensor,
    options: ResolvedTrainOptions,
    process: Process,
    num_passes: int,
) -> float:
    """Return the mean seconds of a forward and backward pass of the slowest process. With
    `optimizers` each pass ends a step, with reduction, clipping and update; without, in an empty
    list, gradients only add up. Every process must call it."""
    is_step = len(optimizers) > 0
    start_seconds = time.perf_counter()
    for _ in range(num_passes):
        with sync_gradients(wrapped, options.sharding, is_last=is_step):
            with process.autocast(keep_weights=False):  # as in train_step
                loss = wrapped(idx, idx)  # any targets take as long
            loss.backward()
        if is_step:
            clip_grad_norm(wrapped, options.grad_clip)  # in place, over all processes
            for optimizer in optimizers:
                optimizer.step()
            wrapped.zero_grad(set_to_none=True)
    loss.item()  # waits for the device
    return slowest(process, time.perf_counter() - start_seconds) / num_passes


def forecast_step_cost(
    options: ResolvedTrainOptions, recipe: Recipe, model: GPT, hardware: Hardware
) -> StepCost:
    """Return the cost of a step for a dry run: by the peak of a known GPU, or by a matmul of this
    CPU. Updates and compiling are not forecast. Raises UserError if not one sequence fits into the
    memory of a GPU, or if the sequences do not divide among the processes."""
    # only for its UserError; a forecast needs no micro-batch
    choose_micro_batch(options, recipe, model.config, hardware)
    flops = model.flops_per_token()
    if hardware.gpu is None:
        token_seconds = seconds_on_cpu(flops, hardware.dtype)
    else:
        # of all GPUs together
        flops_per_second = hardware.world_size * hardware.gpu.peak_flops * ASSUMED_UTILIZATION
        token_seconds = flops / flops_per_second
    return StepCost(token_seconds, update_seconds=0.0, compile_seconds=0.0)


def choose_for_minutes(
    options: ResolvedTrainOptions, recipe: Recipe, process: Process | None
) -> tuple[ResolvedTrainOptions, list[str]]:
    """Return the options of the run that --minutes chooses on the devices of these processes, and
    the names of the derived options (read_options). Print the choice. Every process must call it.
    plan_for_minutes calls it without a process, for a forecast."""
    dial = Dial(options, recipe, process)
    plan = dial.choose()
    chosen_flags = to_flags(plan.flags)  # ["--n_layer", "2", ...], without those of the user
    if is_main_process():
        print_choice(dial, plan, chosen_flags)
    # Parse them as if the user had typed them. `derived` has the names of the options that no flag
    # sets, ["log_dir", ...]. `checkpoint` is None: callers choose only for new runs.
    given_options, derived, checkpoint = read_options(
        TrainOptions, "train.py", chosen_flags + sys.argv[1:]
    )
    options, _ = resolve_options(given_options, derived, checkpoint)  # ResolvedTrainOptions, Recipe
    # resolve_options may turn compiling on again where compile_if_all_can has turned it off (a
    # process has no working compiler)
    return replace(options, use_torch_compile=dial.options.use_torch_compile), derived


def plan_for_minutes(options: ResolvedTrainOptions, recipe: Recipe) -> ResolvedTrainOptions:
    """Return the options of the run that --minutes would choose on the devices that --device names,
    by a forecast of their speed, and print the choice. If their speed is not known, print a note
    and return the options as they are."""
    hardware = Hardware.of(options)  # asked again by Dial
    if hardware.gpu is None and hardware.device.type != "cpu":
        print("note: --minutes measures the speed of this device when the run starts")
        return options
    options, _ = choose_for_minutes(options, recipe, process=None)
    return options


def print_choice(dial: Dial, plan: Plan, chosen_flags: list[str]) -> None:
    """Print the size with its reason, how far the time goes, and the run as plain flags."""
    model = plan.size.meta_model
    print(
        f"n_layer {model.config.n_layer}, n_embd {model.config.n_embd} "
        f"({model.num_parameters():,} parameters): the smallest of "
        f"{len(dial.sizes)} sizes that reaches the lowest predicted loss, to {EQUAL_LOSS}, in "
        f"{dial.options.minutes:g} minutes"
    )
    epochs = plan.num_tokens / dial.data_size.train_tokens
    # 0.99: whole steps end a little before MOST_EPOCHS, where choose_batch has stopped
    stop_text = " and more repeats would hardly help" if epochs > 0.99 * MOST_EPOCHS else ""
    print(f"{plan.num_tokens:,} tokens fit into that time: {epochs:,.2f} epochs{stop_text}")
    # the command line without --minutes VALUE or --minutes=VALUE
    typed_flags = re.sub("--minutes[ =][^ ]* ?", "", shlex.join(sys.argv[1:]))
    # launcher: such as "python" or "torchrun --standalone --nproc_per_node=8"
    print(f"the same run: {launcher()} train.py {shlex.join(chosen_flags)} {typed_flags}")
