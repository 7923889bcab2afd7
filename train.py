"""Train a GPT-2 on token shards.

    python train.py                                        # one GPU, Apple GPU or CPU
    torchrun --standalone --nproc_per_node=8 train.py      # eight GPUs
    python train.py --resume auto                          # continue after a crash or a signal

The global batch is --total_batch_size tokens for any number of processes: gradient accumulation
follows from it. SIGTERM, SIGINT and SIGUSR1 finish the step, save and exit; SIGKILL costs the steps
since the last checkpoint. Either way a resumed run equals one that was never stopped.
"""

import contextlib
import json
import signal
import sys
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.profiler import profile

from config import TrainConfig
from data.loader import (
    Sequences,
    Slicing,
    TokenStream,
    prefetch,
    step_sequences,
    train_batches,
)
from data.shards import corpus_name
from evaluation.live_plot import LivePlot, draw_picture
from evaluation.periodic import is_due, open_evaluator
from model.gpt import GPT
from training import resume
from training.checkpoint import config_values
from training.checkpoint_folder import BEST, LAST, STABLE, remove_all, step_of_best
from training.dry_run import dry_run, resolve_micro_batch
from training.initial_model import build_model
from training.optim import make_optimizers
from training.parallel import ParallelModel, clip_grad_norm, load_optimizer_state
from training.run_folders import lock_folders
from training.saver import Saver, finish_writing
from training.schedule import set_rates, wsd_stable_step
from training.state import TrainState, seed_step
from utils import distributed, malloc
from utils.cli import run_and_exit
from utils.devices import is_emulated, pick_dtype
from utils.distributed import Process
from utils.errors import UserError
from utils.files import atomic_write
from utils.log_files import CONFIG
from utils.logger import Logger, catch_write_errors
from utils.signals import StopSignal
from utils.throughput import StepTimer, peak_flops, profile_steps, seconds_since_start


def main() -> None:
    config, saved = resume.resolve_run()
    if config.dry_run:
        return dry_run(config, saved)
    process = distributed.start(config.device, before_exit=finish_writing)
    stop = StopSignal(announce=process.is_main)
    dtype = pick_dtype(config.dtype, process.device)

    # data: the batch of a step is a pure function of (seed, step)
    train = Sequences(TokenStream(config.data_dir, "train"), config.block_size)
    val = Sequences(TokenStream(config.data_dir, "val"), config.block_size)
    resume.check_checkpoint(config, saved, train.stream, process)
    notes = resolve_micro_batch(config, saved, process, dtype)
    batch = config.sequences_per_step(process.world_size)
    slicing = Slicing(batch, config.micro_batch_size, process.rank, process.world_size)

    # model, optimizers and progress: new, pre-trained or resumed
    state = TrainState.start(config, saved, val)
    start, steps = state.step, range(state.step, config.max_steps)
    model = build_model(config, saved, train.stream.vocab_size)
    engine = ParallelModel(model, config, process, dtype)
    optimizers = make_optimizers(model, config, dtype)
    load_optimizer_state(model, optimizers, saved["optimizer"] if saved else {})
    notes += resume.run_warnings(config, saved, train, val)
    saved = None  # closes the file, which is mapped from disk

    # evaluation, log and checkpoints; unreadable shards end the run before it writes anything
    evaluator = open_evaluator(config, model, val, process, dtype, notes)
    check_readable(train, val, slicing, config.seed, steps)
    notes += lock_folders(config, start, process, 12 * model.num_parameters())
    batches = prefetch(process.to_device(train_batches(train, slicing, config.seed, steps)))
    logger = open_log(config, state, model, train, slicing, process, dtype, notes)
    saver = Saver(config, model, optimizers, train.stream.about, process, logger.print)
    peak = peak_flops(process.device, dtype)
    timer = StepTimer(model.flops_per_token(), peak, process.world_size)
    profiler = start_profiler(config, process, logger)
    stable, stopping = wsd_stable_step(config), False

    while True:
        # once in a while: save, evaluate, score and sample; every process takes part
        step, last = state.step, state.step == config.max_steps
        if step > start and (last or stopping or is_due(config.save_every, step)):
            saver.save(LAST, state)
        if step == stable and (step > start or not saver.has(STABLE)):
            saver.save(STABLE, state)
        if stopping:
            break
        if evaluator.due(step):
            scores = evaluator.validate()
            logger.log_validation(scores, step)
            if state.record_validation(scores["loss"]):
                saver.save(BEST, state)
        for task, scores in evaluator.benchmarks(step):
            logger.log_benchmark(task, scores, step)
        if step > start and (text := evaluator.sample(step)) is not None:
            logger.log_sample(text, step)
        if last:
            break

        # one step, then its log
        with saving_at_bad_data(saver, state, start, process):
            row, skip_reason, stopping = train_step(
                engine, optimizers, batches, slicing.micro_steps, config, state, timer, stop
            )
        if profiler:
            profiler.step()
        if skip_reason is None:
            logger.log_train(row, state.step)
        else:
            ids = step_sequences(step, batch, len(train), config.seed).tolist()
            logger.log_skip(skip_reason, ids, state.guard.skipped, state.step)
        saver.end_after_patience(state, config.total_batch_size, batch)
        if state.step == start + 1:
            malloc.reuse_freed_memory()  # weights and optimizer state are allocated now
            logger.log_start(seconds_since_start(), row["ms"], config.use_torch_compile, step + 1)

    if profiler:
        profiler.stop()
    saver.finish()
    finish(logger, config, state, start, model, process, stop if stopping else None)


def check_readable(
    train: Sequences, val: Sequences, slicing: Slicing, seed: int, steps: range
) -> None:
    """Raise UserError if the first batch of either split cannot be read."""
    next(train_batches(train, slicing, seed, steps), None)
    val.batch(np.arange(1))


def train_step(
    engine: ParallelModel,
    optimizers: list[torch.optim.Optimizer],
    batches: Iterator[tuple[Tensor, Tensor]],
    micro_steps: int,
    config: TrainConfig,
    state: TrainState,
    timer: StepTimer,
    stop: StopSignal,
) -> tuple[dict, str | None, bool]:
    """Run one optimizer step and count it in `state`.

    Returns the row for the log, why the update was skipped if it was, and whether a process was
    told to stop.
    """
    timer.start()
    lr = set_rates(optimizers, config, state.step)
    seed_step(config.seed, state.step, engine.process.rank)  # of dropout
    loss = torch.zeros((), device=engine.process.device)
    for micro_step in range(micro_steps):
        with timer.waiting():
            idx, targets = next(batches)
        last = micro_step == micro_steps - 1
        loss += engine.micro_step(idx, targets, of=micro_steps, last=last)  # forward and backward
    grad_norm = clip_grad_norm(engine.wrapped, config.grad_clip)
    # means over ranks, and the one host sync of a step
    stopped = torch.full_like(loss, float(stop.signal != 0))
    sums = engine.process.sum(torch.stack([loss, grad_norm, stopped]))
    loss, grad_norm, stopped = (sums / engine.process.world_size).tolist()
    skip_reason = state.guard.check(loss, grad_norm)
    for optimizer in optimizers:
        if skip_reason is None:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    state.advance(config.total_batch_size)
    row = {"loss": loss, "lr": lr, "grad_norm": grad_norm, "tokens": state.tokens}
    return row | timer.stop(config.total_batch_size), skip_reason, stopped > 0


def open_log(
    config: TrainConfig,
    state: TrainState,
    model: GPT,
    train: Sequences,
    slicing: Slicing,
    process: Process,
    dtype: torch.dtype,
    notes: list[str],
) -> Logger:
    """Open the log, write config.json, print a summary of the run; first remove the checkpoints
    that --overwrite replaces, lest a killed run leave them to --resume auto."""
    if config.overwrite and process.is_main:
        remove_all(config.checkpoint_dir)
    logger = Logger(
        config.log_dir,
        start=state.step,
        total=config.max_steps,
        is_main=process.is_main,
        overwrite=config.overwrite,
        tensorboard=config.tensorboard,
        wandb={"id": state.run_id, "config": config.to_dict()} if config.wandb else None,
        plot=LivePlot(config.log_dir, model.config.size),
    )
    if process.is_main:
        write_run_config(config, model, state)
    epochs = config.max_steps * config.total_batch_size / len(train.stream)
    logger.print(
        f"{model.num_parameters():,} parameters, {len(train.stream):,} train tokens, "
        f"{epochs:.2f} epochs in {config.max_steps:,} steps of {config.total_batch_size:,} tokens "
        f"= {slicing.micro_steps} x {config.micro_batch_size} x {config.block_size} x "
        f"{process.world_size} on {process.device}, {dtype}"
        + (f"; resumed at step {state.step}" if state.step else "")
    )
    if is_emulated(dtype, process.device):
        notes.append(f"{process.device} emulates matmuls in {dtype}: --dtype float32 is faster")
    if config.use_torch_compile:
        seconds = logger.last_compile_seconds()
        took = f"{seconds:.0f} s last time" if seconds else "a minute or so"
        notes.append(f"the first step compiles: {took}")
    for note in notes:
        logger.print(note)
    return logger


def write_run_config(config: TrainConfig, model: GPT, state: TrainState) -> None:
    """Write config.json: all that is needed to run this again."""
    run = {
        "command": sys.argv,
        "run_id": state.run_id,
        "train_config": config.to_dict(),
        "model_config": config_values(model.config),
        "corpus": corpus_name(config.data_dir),
        "resumed_at_step": state.step if config.resume else None,
        "versions": {
            "python": sys.version.split()[0],
            "torch": str(torch.__version__),
            "numpy": np.__version__,
        },
    }
    with catch_write_errors(config.log_dir), atomic_write(config.log_dir / CONFIG) as file:
        file.write(json.dumps(run, indent=1).encode())


def start_profiler(config: TrainConfig, process: Process, logger: Logger) -> profile | None:
    """Start the profiler of --profile on the main process."""
    if not (config.profile and process.is_main):
        return None
    return profile_steps(config.log_dir / "trace.json", process.device, logger.print)


@contextlib.contextmanager
def saving_at_bad_data(
    saver: Saver, state: TrainState, start: int, process: Process
) -> Iterator[None]:
    """Save the steps before one whose tokens cannot be read. With several processes the others do
    not know of it, so these steps are lost."""
    try:
        yield
    except UserError as error:
        if process.world_size > 1 or state.step == start:
            raise
        saver.save(LAST, state)
        saver.finish()
        raise UserError(
            f"{error}; saved at step {state.step}, from where --resume auto continues"
        ) from error


def finish(
    logger: Logger,
    config: TrainConfig,
    state: TrainState,
    start: int,
    model: GPT,
    process: Process,
    stop: StopSignal | None,
) -> None:
    """Print how the run ended, draw its curves, and exit with 128 + the signal if one came."""
    if stop:
        logger.print(
            f"stopped by a signal; saved at step {state.step}: continue with --resume auto, or "
            f"--resume {config.checkpoint_dir} alone"
        )
    else:
        best = step_of_best(config.checkpoint_dir)
        logger.print(
            f"done: best validation loss {state.best_loss:.4f}"
            + (f" at step {best}" if best is not None else "")
            + f", see {config.checkpoint_dir}"
            + resume.already_done(config, start)
        )
    logger.close()
    if process.is_main and not stop:
        draw_picture(config.log_dir, model.config.size)
    distributed.stop()
    if stop:
        sys.exit(128 + (stop.signal or signal.SIGTERM))


if __name__ == "__main__":
    run_and_exit(main, before_exit=finish_writing)
