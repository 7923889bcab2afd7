"""Train a GPT-2 on token shards.

    python train.py                                        # one GPU, Apple GPU or CPU
    torchrun --standalone --nproc_per_node=8 train.py      # eight GPUs
    python train.py --resume auto                          # go on after any kind of end

The global batch is --total_batch_size tokens whatever the number of processes: accumulation follows
from it. SIGTERM, SIGINT and SIGUSR1 finish the step, save and exit; SIGKILL costs the steps since
the last checkpoint. Either way --resume gives the run that was never stopped.
"""

import json
import math
import signal
import sys
import time
import uuid
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import torch

from config import ConfigError, TrainConfig
from data.loader import (
    Sequences,
    Slicing,
    TokenStream,
    read_ahead,
    step_sequences,
    train_batches,
)
from data.shards import DataError, corpus_name
from data.tokenizer import Tokenizer, bytes_per_token, load_tokenizer
from evaluation.metrics import benchmark_row, shared_rows, spread, validation_loss
from evaluation.scoring import score_items
from model.generate import complete
from model.gpt import GPT
from model.huggingface import load_pretrained
from training import checkpoint as ckpt
from training import guard, parallel
from training.attention import fastest_kernel, preferring
from training.dry_run import dry_run, largest_micro_batch, model_shape
from training.optim import make_optimizers
from training.resume import fitting, other_order, settings
from training.saver import Saver, finish_writing
from training.schedule import learning_rate, momentum, stable_steps
from utils import distributed, malloc
from utils.cli import run_and_exit
from utils.files import atomic_write
from utils.logger import Logger, writing
from utils.signals import Stop
from utils.throughput import flops_per_token, peak_flops, since_start, tracer


def main() -> None:
    config, saved = settings()
    if config.dry_run:
        dry_run(config, saved)
        return
    process = distributed.start(config.device, before_exit=finish_writing)
    device, dtype = process.device, distributed.pick_dtype(config.dtype, process.device)
    recipe, floor_lr, stop = config.chosen, config.floor_lr, Stop()

    # data: what step s trains on follows from the seed and s alone
    train = Sequences(TokenStream(config.data_dir, "train"), config.block_size)
    val = Sequences(TokenStream(config.data_dir, "val"), config.block_size)
    tokenizer_name, vocab_size = train.stream.tokenizer, train.stream.vocab_size
    if saved and saved["tokenizer"] != tokenizer_name:
        raise ConfigError(
            f"{config.data_dir} holds {tokenizer_name} tokens, but the checkpoint was trained on "
            f"{saved['tokenizer']} tokens"
        )
    if config.micro_batch_size == "auto":
        free = torch.tensor([distributed.free_memory(device)], device=device)
        least = int(process.extremes(free)[0])
        shape = model_shape(config, saved)
        config.micro_batch_size = largest_micro_batch(
            config, saved, shape, dtype, process.world_size, device, least
        )
    batch = config.sequences_per_step(process.world_size)
    slicing = Slicing(batch, config.micro_batch_size, process.rank, process.world_size)
    accumulation = slicing.micro_steps

    # model and optimizer, from the checkpoint if there is one
    agree(process, saved, config.resume)
    torch.manual_seed(config.seed)
    if config.init_from and not saved:
        model = start_from(config, vocab_size)
    else:
        model = GPT(config.model_config(vocab_size))
    start, best_loss, run_id, tokens_before = 0, math.inf, uuid.uuid4().hex, 0
    if saved:
        ckpt.load_weights(model, saved, Path(config.resume), exact=True)
        start, best_loss, run_id = saved["step"], saved["best_loss"], saved["run_id"]
    judge = guard.Guard(config.skip_spikes, saved["guard"] if saved else {})
    # the compiled module trains; evaluation, samples and checkpoints use the plain one inside it
    parallel.recompute(model, config.activation_checkpointing, compiled=config.use_torch_compile)
    wrapped = parallel.wrap(model, process, config.sharding, dtype)
    attention, notes = fastest_kernel(model.config, config.micro_batch_size, dtype, process)
    module = torch.compile(wrapped) if config.use_torch_compile else wrapped
    optimizers = make_optimizers(
        model,
        weight_decay=recipe.weight_decay,
        betas=(config.beta1, config.beta2),
        embedding_rate=recipe.embedding_rate,
        head_rate=recipe.head_rate,
        vector_rate=recipe.vector_rate,
        muon=recipe.optimizer == "muon",
        cautious=recipe.cautious,
        dtype=dtype,
    )
    if saved:
        parallel.load_optimizer_state(model, optimizers, saved["optimizer"])
        if start > config.max_steps:
            raise ConfigError(f"{config.resume} is at step {start}, after --max_steps")
        tokens_before = saved["tokens"] - start * config.total_batch_size
        notes += other_order(config, saved, len(train.stream))
    resumed, saved = saved is not None, None  # lets go of the file, which is mapped from disk

    steps = range(start, config.max_steps)
    batches = read_ahead(process.to_device(train_batches(train, slicing, config.seed, steps)))
    benchmarks = {}
    for task, every, path in (
        ("hellaswag", config.hellaswag_every, config.hellaswag_data),
        ("lambada", config.lambada_every, config.lambada_data),
    ):
        if every:
            rows = shared_rows(task, path, process)
            benchmarks[task] = rows if config.eval_full else spread(rows, 500)
    first = next(batches, None)  # shards that cannot be read are found before anything is written
    val.batch(np.arange(1))
    logger = Logger(
        config.log_dir,
        start=start,
        total=config.max_steps,
        is_main=process.is_main,
        overwrite=config.overwrite,
        tensorboard=config.tensorboard,
        wandb={"id": run_id, "config": config.to_dict()} if config.wandb else None,
    )
    if config.overwrite and process.is_main:
        ckpt.remove_all(config.checkpoint_dir)
    tokenizer = tokenizer_or_none(tokenizer_name, logger.say)
    if not process.all(tokenizer is not None):
        tokenizer = None
    token_bytes = bytes_per_token(tokenizer) if tokenizer else None
    flops = flops_per_token(
        model.num_multiplying(), model.config.n_layer, model.config.n_embd, config.block_size
    )
    peak = peak_flops(device, dtype)
    if process.is_main:
        describe_run(config, model, start if resumed else None)
    logger.say(
        f"{model.num_parameters():,} parameters, {len(train.stream):,} train tokens, "
        f"{config.max_steps * config.total_batch_size / len(train.stream):.2f} epochs in "
        f"{config.max_steps:,} steps of {config.total_batch_size:,} tokens = "
        f"{accumulation} x {config.micro_batch_size} x {config.block_size} x "
        f"{process.world_size} on {device}, {dtype}"
        + (f"; resumed at step {start}" if resumed else "")
    )
    if distributed.is_emulated(dtype, device):
        notes.append(f"{device} has no products of {dtype} of its own: --dtype float32 is faster")
    for note in notes:
        logger.say(note)

    saver = Saver(config.checkpoint_dir, keep_last=config.keep_last, say=logger.say)

    def save(name: str, step: int) -> None:
        saver.wait()  # before there is a second copy of the state
        weights, optimizer_state = parallel.gather_state(model, optimizers)
        if process.is_main:
            saver.save(
                name,
                weights,
                optimizer_state,
                step=step,
                tokens=tokens_before + step * config.total_batch_size,
                best_loss=best_loss,
                seed=config.seed,
                run_id=run_id,
                model_config=ckpt.describe(model.config),
                tokenizer=tokenizer_name,
                train_tokens=len(train.stream),
                train_config=config.to_dict(),
                guard=judge.state,
            )

    def due(every: int, step: int) -> bool:
        return every > 0 and step % every == 0

    score = partial(
        score_items,
        model,
        tokenizer,
        process,
        batch_size=config.micro_batch_size,
        dtype=dtype,
    )
    trace = None
    if config.profile and process.is_main:
        trace = tracer(config.log_dir / "trace.json", device, logger.say)
    stable = None
    if recipe.schedule == "wsd":
        stable = stable_steps(config.max_steps, recipe.decay)
    step, stopping = start, False
    while True:
        last = step == config.max_steps
        if step > start and (last or stopping or due(config.save_every, step)):
            save(ckpt.LAST, step)
        if step == stable and (step > start or not (config.checkpoint_dir / ckpt.STABLE).exists()):
            save(ckpt.STABLE, step)
        if stopping:
            break
        if last or due(config.eval_every, step):
            scores = validation_loss(
                model,
                val,
                process,
                tokens=config.val_tokens,
                batch_size=config.micro_batch_size,
                dtype=dtype,
                token_bytes=token_bytes,
            )
            logger.log({"split": "val", **scores}, step)
            bits = f", {scores['bits_per_byte']:.4f} bits per byte" if tokenizer else ""
            logger.say(f"step {step}: validation loss {scores['loss']:.4f}{bits}")
            if scores["loss"] < best_loss and step > 0:
                best_loss = scores["loss"]
                save(ckpt.BEST, step)
        for task, rows in benchmarks.items() if tokenizer else ():
            if last or due(getattr(config, f"{task}_every"), step):
                row = benchmark_row(task, rows, score, tokenizer)
                logger.log({"split": task, **row}, step)
                told = ", ".join(f"{key} {value:.4g}" for key, value in row.items())
                logger.say(f"step {step}: {task} {told}")
        if tokenizer and step > start and config.sample_every:
            if last or due(config.sample_every, step):
                logger.sample(sample(model, tokenizer, config.seed + step, dtype), step)
        if last:
            break

        # one step: all micro-batches forward and backward, then one update
        began, waited = time.perf_counter(), 0.0
        lr = learning_rate(
            step,
            schedule=recipe.schedule,
            max_lr=recipe.max_lr,
            min_lr=floor_lr,
            warmup_steps=config.warmup_steps,
            max_steps=config.max_steps,
            decay=recipe.decay,
        )
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = lr * group["rate"]
            if "momentum" in group:
                group["momentum"] = momentum(step, recipe.momentum_warmup)
        # dropout follows from (seed, step, rank), so there is no random state to save
        torch.manual_seed((config.seed << 32) + step * 65_536 + process.rank)
        total = torch.zeros((), device=device)
        for micro_step in range(accumulation):
            asked = time.perf_counter()
            idx, targets = first if first is not None else next(batches)
            first = None
            distributed.heartbeat()
            waited += time.perf_counter() - asked
            final = micro_step == accumulation - 1
            with (
                parallel.accumulating(wrapped, config.sharding, last=final),
                preferring(attention),
            ):
                with distributed.autocast(device, dtype, keep_weights=False):
                    loss = module(idx, targets) / accumulation
                distributed.heartbeat()
                loss.backward()
            total += loss.detach()
        norm = parallel.clip_grad_norm(model, config.grad_clip)

        # means over processes, and whether one of them was told to stop
        stopped = torch.full_like(total, float(stop.signal != 0))
        sums = process.sum(torch.stack([total, norm, stopped]))
        loss, grad_norm, stopped = (sums / process.world_size).tolist()
        stopping = stopped > 0
        left_out = judge.reason(loss, grad_norm)
        for optimizer in optimizers:
            if left_out is None:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - began
        step += 1
        if step == start + 1:
            malloc.shared()  # all that stays is there: weights and moments
            if since_start():
                logger.say(f"the first step was done {since_start():.1f} s after the start")
        if trace is not None:
            trace.step()
        if left_out is not None:
            ids = step_sequences(step - 1, batch, len(train), config.seed).tolist()
            logger.log({"split": "skipped", "reason": left_out, "sequences": ids}, step)
            logger.say(f"step {step} left out: {left_out} ({judge.skipped} so far)")
            if judge.in_a_row == guard.PATIENCE:
                sentence = judge.explain(step, batch)
                judge.in_a_row = 0
                save(ckpt.LAST, step - guard.PATIENCE)
                finish(saver, process)
                raise guard.TrainingError(sentence)
            continue
        tokens_per_s = config.total_batch_size / seconds
        logger.train(
            {
                "loss": loss,
                "lr": lr,
                "grad_norm": grad_norm,
                "tokens": tokens_before + step * config.total_batch_size,
                "tokens_per_s": tokens_per_s,
                "mfu": peak and flops * tokens_per_s / (peak * process.world_size),
                "ms": 1000 * seconds,
                "data_ms": 1000 * waited,
            },
            step,
        )

    if trace is not None:
        trace.stop()
    finish(saver, process)
    if stopping:
        logger.say(f"stopped by a signal; saved at step {step}: continue with --resume auto")
    else:
        logger.say(f"done: best validation loss {best_loss:.4f}, see {config.checkpoint_dir}")
    logger.close()
    if process.is_main and not stopping:
        from evaluation.figure import draw_if_possible  # matplotlib takes its time

        size = model.config.size if corpus_name(config.data_dir) == "FineWeb-Edu" else None
        draw_if_possible([config.log_dir], config.log_dir / "log_plot.png", size)
    distributed.stop()
    if stopping:
        sys.exit(128 + (stop.signal or signal.SIGTERM))


def finish(saver: Saver, process: distributed.Process) -> None:
    """Waits on all processes for the last checkpoint: none leaves while the main one writes."""
    problem = saver.close()
    if not process.all(problem is None):
        raise problem or ckpt.CheckpointError("the main process could not save")


def agree(process: distributed.Process, saved: dict | None, path: str | None) -> None:
    """ConfigError unless all processes go on from the same step of the same run."""
    step, run = (saved["step"], zlib.crc32(saved["run_id"].encode())) if saved else (-1, 0)
    least, most = process.extremes(torch.tensor([step, run], device=process.device))
    if not torch.equal(least, most):
        found = f"goes on from {path}, step {step}" if saved else "found no checkpoint"
        raise ConfigError(
            f"rank {process.rank} {found}, others from another step or run; is --checkpoint_dir "
            "a folder that all machines share?"
        )


def start_from(config: TrainConfig, vocab_size: int) -> GPT:
    """The pre-trained model of --init_from; its shape becomes that of the run."""
    model = load_pretrained(config.init_from, config.block_size, config.dropout)
    if model.config.vocab_size != vocab_size:
        raise ConfigError(
            f"{config.init_from} has {model.config.vocab_size:,} tokens, {config.data_dir} "
            f"{vocab_size:,}: the shards need the same tokenizer"
        )
    fitting(config, model.config)
    return model


def tokenizer_or_none(name: str, say) -> Tokenizer | None:
    """The tokenizer of the shards; a run does not end for want of it, it goes without samples."""
    try:
        return load_tokenizer(name)
    except DataError as error:
        say(f"{error}. This run goes without samples and bits per byte.")
        return None


def sample(model: GPT, tokenizer: Tokenizer, seed: int, dtype: torch.dtype) -> str:
    """A short text from nothing; every process makes the same one."""
    model.eval()
    length = min(128, model.config.block_size)
    with distributed.autocast(model.transformer.wte.weight.device, dtype):
        (tokens,) = complete(
            model, [tokenizer.eot], tokenizer.eot, max_new_tokens=length, temperature=0.8, seed=seed
        )
    model.train()
    return tokenizer.decode_bytes(tokens).decode(errors="replace")


def describe_run(config: TrainConfig, model: GPT, resumed_at: int | None) -> None:
    """Writes config.json: everything needed to run it again."""
    run = {
        "command": sys.argv,
        "train_config": config.to_dict(),
        "model_config": ckpt.describe(model.config),
        "resumed_at_step": resumed_at,
        "versions": {
            "python": sys.version.split()[0],
            "torch": str(torch.__version__),
            "numpy": np.__version__,
        },
    }
    with writing(config.log_dir), atomic_write(config.log_dir / "config.json") as file:
        file.write(json.dumps(run, indent=1).encode())


if __name__ == "__main__":
    run_and_exit(main, before_exit=finish_writing)
