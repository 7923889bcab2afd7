"""Fine-tune a model on dialogs, preferences or rewards.

    python finetune.py --method sft --init_from checkpoints --data chat.jsonl
    python finetune.py --method dpo --init_from runs/sft --data pairs.jsonl
    python finetune.py --method grpo --init_from runs/sft --data questions.jsonl --reward exact

docs/FINETUNING.md has the formats and formulas. Data order, checkpoints, signals, --sharding and
--resume are as in train.py: a resumed run equals one that was never stopped, completions included.
"""

import json
import math
import signal
import sys
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from evaluation.live_plot import draw_picture
from torch import Tensor
from training.checkpoint_folder import BEST, LAST, remove_all
from training.run_folders import check_folders, lock_folders
from utils.log_files import CONFIG

from config import TrainConfig
from data.loader import Slicing, step_sequences
from data.tokenizer import Tokenizer, load_tokenizer
from evaluation.periodic import is_due
from finetuning.answers import QUESTION, Questions
from finetuning.examples import ChatData
from finetuning.grpo import GroupRelativePolicy
from finetuning.methods import (
    Batch,
    DirectPreference,
    Method,
    RewardModeling,
    SupervisedTuning,
)
from finetuning.options import FinetuneConfig
from finetuning.resume import resolve_run
from finetuning.rewards import load_reward
from finetuning.rows import read_rows
from finetuning.start import (
    build_finetuned,
    changed_inputs,
    input_checksums,
    open_reference,
)
from model.gpt import GPT
from training.optim import make_optimizers
from training.parallel import ParallelModel, clip_grad_norm, load_optimizer_state
from training.saver import Saver, finish_writing
from training.schedule import set_rates
from training.state import TrainState, seed_step
from utils import distributed, malloc
from utils.cli import given_options, run_and_exit
from utils.devices import pick_dtype
from utils.distributed import Process
from utils.errors import UserError
from utils.files import atomic_write
from utils.logger import Logger, catch_write_errors
from utils.signals import StopSignal
from utils.throughput import StepTimer, peak_flops

METHODS: dict[str, type[Method]] = {
    "sft": SupervisedTuning,
    "dpo": DirectPreference,
    "reward": RewardModeling,
    "grpo": GroupRelativePolicy,
}


def main() -> None:
    options, saved = resolve_run()
    process = distributed.start(options.device, before_exit=finish_writing)
    stop = StopSignal(announce=process.is_main)
    dtype = pick_dtype(options.dtype, process.device)

    # model: resumed, or of --init_from; the method reads the rows
    model, about, data_dir = build_finetuned(options, saved)
    config = options.train_config(model.config, data_dir)
    if not options.overwrite:
        check_folders(config, saved, saved and Path(options.resume), given_options(sys.argv[1:]))
    reference = open_reference(options, process)
    tokenizer, block_size = load_tokenizer(about["tokenizer"]), model.config.block_size
    setup = (tokenizer, block_size, process, dtype)
    method, held_out = open_methods(options, reference, *setup)
    questions = open_questions(options, *setup)
    slicing = slice_steps(options, process)
    resolve_length(options, config, len(method))
    checksums = input_checksums(options, reference)
    changed = changed_inputs(options, saved, checksums)
    reference = None  # frees DPO's, which has scored; GRPO's method holds it

    # progress, optimizer, log and checkpoints
    torch.manual_seed(options.seed)
    state = TrainState.start(config, saved)
    state.val_checksum = checksums.get("eval_data", 0)
    if options.eval_data in changed:  # losses on other rows do not compare
        state.best_loss = math.inf
    start = state.step
    engine = ParallelModel(model, config, process, dtype)
    optimizers = make_optimizers(model, config, dtype)
    load_optimizer_state(model, optimizers, saved["optimizer"] if saved else {})
    saved = None  # closes the file, which is mapped from disk
    notes = [f"warning: {path} has changed since the checkpoint was written" for path in changed]
    notes += lock_folders(config, start, process, 12 * model.num_parameters())
    logger = open_log(options, config, method, state, process, notes)
    about["finetune"] = options.to_dict() | {"checksums": checksums}
    saver = Saver(config, model, optimizers, about, process, logger.print)
    peak = peak_flops(process.device, dtype)
    timer, stopping = StepTimer(model.flops_per_token(), peak, process.world_size), False

    while True:
        # once in a while: save, evaluate, answer questions; every process takes part
        step, last = state.step, state.step == options.max_steps
        if step > start and (last or stopping or is_due(options.save_every, step)):
            saver.save(LAST, state)
        if stopping:
            break
        if held_out and (last or is_due(options.eval_every, step)):
            scores = held_out.evaluate(model)
            if method.selects_best_by_loss:
                logger.log_validation(scores, step)
                if state.record_validation(scores["loss"]):
                    saver.save(BEST, state)
            else:
                logger.log_benchmark("held_out", scores, step)
        if questions and (last or is_due(options.eval_every, step)):
            logger.log_benchmark("answers", questions.figures(model), step)
        if last:
            break

        # one step, then its log
        row, skip_reason, stopping = train_step(
            engine, optimizers, method, slicing, options, config, state, timer, stop
        )
        if skip_reason is None:
            logger.log_train(row, state.step)
        else:
            ids = step_sequences(step, options.batch_size, len(method), options.seed)
            logger.log_skip(skip_reason, ids.tolist(), state.guard.skipped, state.step)
        if is_due(options.sample_every, state.step) and (text := method.sample_text()) is not None:
            logger.log_sample(text, state.step)
        saver.end_after_patience(state, 0, options.batch_size)
        if state.step == start + 1:
            malloc.reuse_freed_memory()

    saver.finish()
    finish(logger, options, state.step, method, model, process, stop if stopping else None)


def train_step(
    engine: ParallelModel,
    optimizers: list[torch.optim.Optimizer],
    method: Method,
    slicing: Slicing,
    options: FinetuneConfig,
    config: TrainConfig,
    state: TrainState,
    timer: StepTimer,
    stop: StopSignal,
) -> tuple[dict, str | None, bool]:
    """Run one step, of one update or more, and count it in `state`.

    Returns the row for the log, why an update was skipped if one was, and whether a process was
    told to stop.
    """
    timer.start()
    lr = set_rates(optimizers, config, state.step)
    seed_step(options.seed, state.step, engine.process.rank)  # of dropout
    ids = step_sequences(state.step, options.batch_size, len(method), options.seed)
    grid = slicing.rank_ids(np.arange(slicing.batch))  # (micro-steps, micro-batch)
    batches, figures = method.micro_batches(engine.model, state.step, ids, grid)
    done, skip_reason = 0, None
    for update in range(options.updates):
        sums = run_micro_batches(engine, method, batches, len(grid), method.divisor(ids))
        grad_norm = clip_grad_norm(engine.wrapped, options.grad_clip)
        newest = mean_over_processes(sums, grad_norm, stop, engine.process)
        if update == 0:  # the guard counts steps
            skip_reason = state.guard.check(newest["loss"], newest["grad_norm"])
        usable = skip_reason is None and math.isfinite(newest["loss"] + newest["grad_norm"])
        for optimizer in optimizers:
            if usable:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if update == 0 or usable:
            row = newest
        if not usable:
            break
        done += 1
    tokens, stopped = round(row.pop("tokens")), row.pop("stopped") > 0
    state.advance(done * tokens)
    times = timer.stop(max(1, done) * tokens)
    if options.updates > 1:
        figures["updates"] = done
    if "rollout_ms" in figures:
        figures["update_ms"] = times["ms"] - figures["rollout_ms"] - figures["scoring_ms"]
    return {**row, "lr": lr, "tokens": state.tokens, **figures, **times}, skip_reason, stopped


def run_micro_batches(
    engine: ParallelModel, method: Method, batches: Iterable[Batch], count: int, divisor: int
) -> Counter:
    """Run forward and backward on the `count` batches of an update; return the sums of their
    figures."""
    sums = Counter()

    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        parts = method.partial_means(model, batch, divisor)
        sums.update({name: part.detach() for name, part in parts.items()})
        return parts["loss"] * engine.process.world_size  # gradients are means over processes

    for number, batch in enumerate(batches, 1):
        engine.backward(partial(loss_of, batch=batch), last=number == count)
        sums["tokens"] += batch["idx"].numel()
    return sums


def mean_over_processes(
    sums: Counter, grad_norm: Tensor, stop: StopSignal, process: Process
) -> dict[str, float]:
    """Return the figures of an update over all processes, by the one host sync of the update."""
    sums["grad_norm"] = grad_norm / process.world_size
    sums["stopped"] = float(stop.signal != 0)
    values = [torch.as_tensor(x, dtype=torch.float32, device=process.device) for x in sums.values()]
    return dict(zip(sums, process.sum(torch.stack(values)).tolist(), strict=True))


def open_methods(
    options: FinetuneConfig,
    reference: GPT | None,
    tokenizer: Tokenizer,
    block_size: int,
    process: Process,
    dtype: torch.dtype,
) -> tuple[Method, Method | None]:
    """Return the method of the run on the rows of --data, and on those of --eval_data if given."""
    kind, chat = METHODS[options.method], not options.plain
    fields = QUESTION if options.reward == "exact" else kind.fields
    compared = {}
    if options.method in ("dpo", "grpo"):
        compared["reference"] = reference
    if options.method == "grpo":
        compared["reward"] = load_reward(options.reward, tokenizer, chat, process.device, dtype)

    def open_method(path: Path) -> Method:
        data = ChatData(read_rows(path, fields), tokenizer, chat, block_size)
        return kind(data, options, process, dtype, **compared)

    method = open_method(options.data)
    return method, open_method(options.eval_data) if options.eval_data else None


def open_questions(options: FinetuneConfig, *setup) -> Questions | None:
    """Return the rows of --questions, None without them; tokenizer, block size, process and dtype
    are passed on to Questions."""
    if options.questions is None:
        return None
    micro_batch = options.resolved_micro_batch()
    sizes = {"max_new_tokens": options.max_new_tokens, "batch_size": micro_batch}
    return Questions(options.questions, *setup, chat=not options.plain, **sizes)


def resolve_length(options: FinetuneConfig, config: TrainConfig, num_examples: int) -> None:
    """Make one pass over the examples the default of --max_steps, and set the steps of the
    schedule, which reaches --min_lr one step after the last."""
    if options.max_steps is None:
        options.max_steps = -(-num_examples // options.batch_size)
    config.max_steps = options.max_steps
    config.warmup_steps = config.resolved_warmup
    config.max_steps += 1


def slice_steps(options: FinetuneConfig, process: Process) -> Slicing:
    """Return the division of a step into micro-batches; UserError where it does not divide."""
    items, micro_batch = options.items_per_step(), options.resolved_micro_batch()
    if items % (micro_batch * process.world_size):
        of = f" x --group_size {options.group_size}" if options.method == "grpo" else ""
        raise UserError(
            f"--batch_size {options.batch_size}{of} is not divisible by --micro_batch_size "
            f"{micro_batch} x {process.world_size} processes; change one of them"
        )
    return Slicing(items, micro_batch, process.rank, process.world_size)


def open_log(
    options: FinetuneConfig,
    config: TrainConfig,
    method: Method,
    state: TrainState,
    process: Process,
    notes: list[str],
) -> Logger:
    """Open the log, write config.json, print a summary of the run; first remove the checkpoints
    that --overwrite replaces."""
    if options.overwrite and process.is_main:
        remove_all(options.checkpoint_dir)
    logger = Logger(
        options.log_dir,
        start=state.step,
        total=options.max_steps,
        is_main=process.is_main,
        overwrite=options.overwrite,
    )
    if process.is_main:
        run = {"command": sys.argv, "run_id": state.run_id, "finetune": options.to_dict()}
        run["train_config"] = config.to_dict()
        with catch_write_errors(options.log_dir), atomic_write(options.log_dir / CONFIG) as file:
            file.write(json.dumps(run, indent=1).encode())
    data = method.data
    logger.print(
        f"{options.method} of {options.init_from} on {len(data.rows):,} rows of {options.data}: "
        f"{options.max_steps:,} steps of {options.batch_size} {method.unit}"
        + (f"; resumed at step {state.step}" if state.step else "")
    )
    if data.num_cut:
        logger.print(f"warning: {data.num_cut:,} texts are cut to {data.block_size} tokens")
    for note in notes:
        logger.print(note)
    return logger


def finish(
    logger: Logger,
    options: FinetuneConfig,
    step: int,
    method: Method,
    model: GPT,
    process: Process,
    stop: StopSignal | None,
) -> None:
    """Print how the run ended, draw its curves, and exit with 128 + the signal if one came."""
    if stop:
        logger.print(
            f"stopped by a signal; saved at step {step}: continue with --resume auto, or --resume "
            f"{options.checkpoint_dir} alone"
        )
    else:
        logger.print(f"done: see {options.checkpoint_dir}")
    logger.close()
    if process.is_main and not stop and method.selects_best_by_loss:
        draw_picture(options.log_dir, model.config.size)
    distributed.stop()
    if stop:
        sys.exit(128 + (stop.signal or signal.SIGTERM))


if __name__ == "__main__":
    run_and_exit(main, before_exit=finish_writing)
