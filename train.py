"""Train a GPT-2 on token shards.

    python train.py                                        # one GPU, Apple GPU or CPU
    torchrun --standalone --nproc_per_node=8 train.py      # eight GPUs
    python train.py --resume auto                          # continue after a crash or a signal

The global batch is --total_batch_size tokens for any number of processes: gradient accumulation
follows from it. SIGTERM, SIGINT and SIGUSR1 end the step or the evaluation, save and exit; SIGKILL
costs the steps since the last checkpoint. On CPUs a resumed run equals one that was never stopped
to the bit.
"""

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from config.options import TrainConfig
from data.loader import Slicing, TokenStream, prefetch, train_batches
from data.mixture import Mixture, parse_corpora
from data.tokenizer import tokenizer_identity
from evaluation.evaluator import Evaluator, is_due
from evaluation.validation import too_few_tokens
from model.build import resized
from model.compile import for_training
from model.config import GPTConfig
from model.gpt import GPT
from training.checkpoint import BEST, LAST, load_weights, open_model, reading
from training.optim import make_optimizers
from training.parallel import clip_grad_norm, sync_gradients, wrap
from training.plan import resolve_micro_batch
from training.run import Run, resolve
from training.saver import Saver, finish_writing
from training.schedule import set_rates
from training.state import reason_to_skip, seed_step
from utils import distributed
from utils.cli import call_and_exit
from utils.devices import autocast, seconds_on_cpu
from utils.distributed import Stopped
from utils.errors import UserError
from utils.throughput import StepTimer, peak_flops


def main() -> None:
    config, saved = resolve(TrainConfig, "train.py")
    if config.dry_run:
        return import_module("training.dry_run").dry_run(config, saved)
    run = Run.start(config, saved)
    process, state, dtype = run.process, run.state, run.dtype

    # data: the batch of a step is a pure function of (seed, step)
    train = Mixture(config.data_dir, "train", config.block_size)
    val = Mixture(config.data_dir, "val", config.block_size)
    warn_of_data(run, train, val)

    # model and optimizers: new, pre-trained or resumed
    model = build_model(run, train.stream).to(process.device)
    recompute, compiled = config.activation_checkpointing, config.use_torch_compile
    for_training(model, process.device, recompute, compiled)
    resolve_micro_batch(config, saved, model, process)
    wrapped = wrap(model, process, config.sharding, dtype)  # shares the weights of `model`
    optimizers = make_optimizers(model, config, config.parsed_recipe, dtype)
    run.load_state(model, optimizers)
    saved = None  # closes the file, which is mapped from disk

    # batches, evaluation, log and checkpoints; unreadable data ends the run before it writes
    batch = config.sequences_per_step(process.world_size)
    steps = range(state.step, config.max_steps)
    slicing = Slicing(batch, config.micro_batch_size, process.rank, process.world_size)
    val.batch(np.arange(1))
    next(train_batches(train, slicing, config.seed, steps), None)
    batches = prefetch(process.to_device(train_batches(train, slicing, config.seed, steps)))
    evaluator = Evaluator(config, model, val, process, dtype)
    about = {"script": "train.py", "tokenizer": train.stream.tokenizer}
    about |= {"train_tokens": len(train.stream), "data_digest": train.stream.digest}
    about |= {"corpus": train.title}
    run.open_log(model, about)
    if state.validate_on(evaluator.validation_text):
        run.logger.print("the validation text has changed: the lowest loss is counted anew")
    describe(run, model, train, slicing)
    saver = Saver(config, model, optimizers, about, process, run.logger.print, state.step)
    peak = peak_flops(process.device, dtype)
    timer = StepTimer(model.flops_per_token(), peak, process.world_size)

    try:
        while True:
            # once in a while: save, evaluate, score and sample; every process takes part
            step = state.step
            if step > saver.last_step and (run.ended or is_due(config.save_every, step)):
                saver.save(LAST, state)
            if evaluator.due(step):
                scores = evaluator.validate()
                run.logger.log_scores("val", scores, step)
                if state.record_validation(scores["loss"]):
                    saver.save(BEST, state)
            for task, scores in evaluator.benchmarks(step):
                run.logger.log_scores(task, scores, step)
            text = evaluator.sample(step) if step > 0 else None
            if text is not None:
                run.logger.log_sample(text, step)
            if run.ended:
                break

            # one step, then its log
            row, skip_reason = train_step(
                run, wrapped, optimizers, batches, slicing.micro_steps, timer
            )
            if skip_reason is None:
                run.logger.log_train(row, state.step)
            else:
                ids = train.order(step * batch + np.arange(batch), config.seed)
                run.logger.log_skip(skip_reason, ids.tolist(), state.step)
            saver.end_after_patience(state)
            if run.stopping:
                raise Stopped
    except Stopped:  # by a signal: what the evaluation of this step lacks, a resumed run does again
        run.stopping = True
        if state.step > saver.last_step:
            saver.save(LAST, state)

    saver.finish()
    run.finish(f"done: best validation loss {state.best_loss:.4f}, see {config.checkpoint_dir}")


def train_step(
    run: Run,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    batches: Iterator[tuple[Tensor, Tensor]],
    micro_steps: int,
    timer: StepTimer,
) -> tuple[dict, str | None]:
    """Run and count one optimizer step; return the row for the log, and why it was skipped. Raises
    Stopped between micro-steps where no other process has to agree: the step is not taken."""
    config, process, state = run.config, run.process, run.state
    timer.start()
    lr = set_rates(optimizers, config, state.step)
    seed_step(config.seed, state.step, process.rank)  # of dropout
    total = torch.zeros((), device=process.device)
    for micro_step in range(micro_steps):
        if process.world_size == 1:
            process.end_if_stopped()
        with timer.waiting():
            idx, targets = next(batches)
        with sync_gradients(model, config.sharding, last=micro_step == micro_steps - 1):
            with autocast(process.device, run.dtype, keep_weights=False):
                loss = model(idx, targets) / micro_steps
            state.scaler.scale(loss).backward()
        total += loss.detach()
    for optimizer in optimizers:
        state.scaler.unscale_(optimizer)  # in float16; else this does nothing
    grad_norm = clip_grad_norm(model, config.grad_clip)
    # means over ranks, and the one host sync of a step
    stopped = torch.full_like(total, float(process.stop.signal != 0))
    sums = process.sum(torch.stack([total, grad_norm, stopped]))
    mean_loss, grad_norm, stopped = (sums / process.world_size).tolist()
    run.stopping = stopped > 0  # a process got a signal
    row = {"loss": mean_loss, "lr": lr, "grad_norm": grad_norm}
    if state.scaler.is_enabled():
        row["scale"] = state.scaler.get_scale()
    skip_reason = reason_to_skip(mean_loss, grad_norm)
    for optimizer in optimizers:
        if skip_reason is None:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    state.scaler.update()
    state.advance(config.total_batch_size, skip_reason)
    return row | {"tokens": state.tokens} | timer.stop(config.total_batch_size), skip_reason


def build_model(run: Run, stream: TokenStream) -> GPT:
    """Return the model of the run on the CPU: resumed, pre-trained or from the seed."""
    config, saved = run.config, run.saved
    torch.manual_seed(config.seed)
    if saved is None and config.init_from:
        model, tokenizer, _ = open_model(config.init_from, exact=True)
        check_tokenizer(stream, config.init_from, tokenizer)
        config.adopt_architecture(model.config)
        shape = replace(model.config, block_size=config.block_size, dropout=config.dropout)
        return resized(model, shape).train()
    vocab_size = saved["model_config"]["vocab_size"] if saved else stream.vocab_size
    model = GPT(config.model_config(vocab_size))
    if saved:
        check_tokenizer(stream, config.resume, saved["tokenizer"])
        shape = replace(GPTConfig(**saved["model_config"]), dropout=config.dropout)
        if shape != model.config:
            theirs, ours = vars(shape), vars(model.config)
            changes = [f"{x} {theirs[x]} (here {ours[x]})" for x in ours if ours[x] != theirs[x]]
            raise UserError(
                f"{config.resume} holds a model of another shape: {', '.join(changes)}; leave out "
                "the options that change it, or start a new run in another --checkpoint_dir"
            )
        with reading(Path(config.resume)):
            load_weights(model, saved, exact=True)
    elif config.parsed_recipe.zero_init:  # each block begins as the identity
        for block in model.transformer.h:
            nn.init.zeros_(block.attn.c_proj.weight)
            nn.init.zeros_(block.mlp.c_proj.weight)
    return model


def check_tokenizer(stream: TokenStream, name: str, tokenizer: str) -> None:
    """Raise UserError unless the shards have the tokens of a model; keep its chat template."""
    identity = tokenizer_identity(tokenizer)
    if identity != stream.tokenizer_identity:
        raise UserError(
            f"{name} takes tokens of {identity}, the shards hold those of "
            f"{stream.tokenizer_identity}"
        )
    stream.tokenizer = tokenizer


def warn_of_data(run: Run, train: Mixture, val: Mixture) -> None:
    """Warn where the order of the data changes, it is seen often, or validation is rough."""
    config, saved, warn = run.config, run.saved, run.process.print
    for folder in train.stream.unfinished:
        warn(f"warning: {folder} holds a part of its text: run the sharding to its end")
    for name, part in zip(val.names, val.parts, strict=True):
        if len(part) * part.block_size < config.val_tokens:
            warn(too_few_tokens(name, part, config.val_tokens))
    train_tokens = config.max_steps * config.total_batch_size
    if train.epochs(train_tokens)[0] > 100:
        smaller = "--max_steps, --total_batch_size and perhaps --n_layer, --n_head, --n_embd"
        warn(f"warning: {train.describe_epochs(train_tokens)} are many: see {smaller}")
    if saved and saved["optimizer"]:
        for name in ("total_batch_size", "seed"):
            before, now = saved["config"][name], getattr(config, name)
            if before != now:
                warn(f"warning: {name} was {before}, is {now}: the data order changes")
        weights = [float(x.weight) for x in parse_corpora(saved["config"]["data_dir"])]
        if weights != train.weights:
            warn(f"warning: weights were {weights}, are {train.weights}: the data order changes")
        if saved["data_digest"] != train.stream.digest:
            warn("warning: --data_dir has other shards, or another order: the data order changes")


def describe(run: Run, model: GPT, train: Mixture, slicing: Slicing) -> None:
    """Print a summary of the run."""
    config, process = run.config, run.process
    tokens, batch = len(train.stream), config.total_batch_size
    epochs = train.describe_epochs(config.max_steps * batch)
    run.logger.print(
        f"{model.num_parameters():,} parameters; {tokens:,} train tokens; "
        f"{epochs}: {config.max_steps:,} steps of {batch:,} "
        f"tokens = {config.block_size} x micro-batch {config.micro_batch_size} x micro-steps "
        f"{slicing.micro_steps} x processes {process.world_size}"
        + (f"; resumed at step {run.start_step}" if run.start_step else "")
        + ("; the first step compiles" if config.use_torch_compile else "")
    )
    on_cpu, flops = process.device.type == "cpu", batch * model.flops_per_token()
    if on_cpu and (seconds := seconds_on_cpu(flops, run.dtype)) > 20:
        run.logger.print(f"a step takes about {seconds:,.0f} s on this processor")


if __name__ == "__main__":
    call_and_exit(main, before_exit=finish_writing, explain=distributed.explain)
