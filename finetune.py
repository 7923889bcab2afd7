"""Fine-tune a model on dialogs, preferences or rewards.

    python finetune.py --method sft --init_from checkpoints --data chat.jsonl
    python finetune.py --method dpo --init_from runs/sft --data pairs.jsonl
    python finetune.py --method grpo --init_from runs/sft --data questions.jsonl --reward exact

docs/FINETUNING.md has the formats and formulas; checkpoints and --resume are as in train.py.
"""

import sys
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from config.recipes import Recipe
from data.loader import step_sequences
from data.tokenizer import load_tokenizer
from evaluation.evaluator import is_due
from finetuning.answers import Questions
from finetuning.examples import TextEncoder
from finetuning.grpo import GroupRelativePolicy
from finetuning.methods import DirectPreference, Method, RewardModeling, SupervisedTuning
from finetuning.options import FinetuneConfig
from finetuning.rewards import RewardModel, check_reward, load_reward
from model.build import resized
from model.compile import for_training, uncompiled
from model.gpt import GPT
from training.checkpoint import BEST, LAST, checksum, find_checkpoint, load_model, open_model
from training.optim import make_optimizers
from training.options import read_options, resolve_compile, resolve_dtype
from training.parallel import clip_grad_norm, sync_gradients, wrap
from training.run import Run, claim_folders, reason_to_skip, seed_step
from training.saver import Saver, finish_writing
from training.schedule import set_rates
from utils import distributed
from utils.cli import call_and_exit
from utils.devices import autocast
from utils.distributed import Stopped
from utils.errors import UserError
from utils.throughput import StepTimer, peak_flops

METHODS: dict[str, type[Method]] = {"sft": SupervisedTuning, "dpo": DirectPreference}
METHODS |= {"reward": RewardModeling, "grpo": GroupRelativePolicy}


def main() -> None:
    config, derived, saved = read_options(FinetuneConfig, "finetune.py", sys.argv[1:])
    config = resolve_compile(config, derived)
    config.init_from = str(find_checkpoint(config.init_from) or config.init_from)
    process = distributed.start(config.device, catch_signals=True)
    config = resolve_dtype(config, process, is_new=saved is None)
    claim_folders(config, saved, process)
    run = Run.start(config, saved, process)
    process, state, dtype = run.process, run.state, run.dtype

    model, about = build_model(config)
    about |= {"derived": derived, "command": sys.argv}
    config.resolve_batches(process)  # ends the run if they do not divide
    method, held_out, questions = open_rows(run, model, about, saved)
    config.resolve_training(len(method), model.num_parameters())
    compiled = config.use_torch_compile and config.method != "grpo"  # whose shapes vary
    for_training(model, process.device, config.activation_checkpointing, compiled)
    wrapped = wrap(model, process, config.sharding, dtype)  # shares the weights of `model`
    optimizers = make_optimizers(model, config, Recipe(), dtype)
    if saved is not None:
        run.resume_optimizers(model, optimizers, saved)
    saved = None  # closes the file, which is mapped from disk
    run.open_log(model, about)
    if held_out and state.validate_on(str(zlib.crc32(config.eval_data.read_bytes()))):
        run.logger.print("--eval_data has changed: the lowest loss is counted anew")
    saver = Saver(run, model, optimizers, about)
    process.print(
        f"{config.method} of {config.init_from} on {config.data}; {method.unit}: {len(method):,}, "
        f"in a step: {config.batch_size}; steps: {config.max_steps:,}"
        + (f"; resumed at step {state.step}" if state.step else "")
    )
    peak = peak_flops(process.device, dtype)
    timer = StepTimer(model.flops_per_token(), peak, process.world_size)

    try:
        while True:
            # once in a while: save, evaluate, answer questions; every process takes part
            step, tokens = state.step, state.tokens
            if step > saver.last_step and (run.ended or is_due(config.save_every, step)):
                saver.save(LAST)
            if run.ended or is_due(config.eval_every, step):
                if held_out:
                    with uncompiled(compiled):
                        scores = held_out.evaluate(model)
                    split = "val" if method.selects_best_by_loss else "held_out"
                    run.logger.log_scores(split, scores, step)
                    if method.selects_best_by_loss and state.record_validation(scores["loss"]):
                        saver.save(BEST)
                if questions:
                    with uncompiled(compiled):
                        (exact,), answers = questions.score(model)
                    scores = {"n": exact.n, "exact": exact.value, "stderr": exact.stderr}
                    scores["cut"] = sum(answer["cut"] for answer in answers) / exact.n
                    run.logger.log_scores("answers", scores, step)
            if run.ended:
                break

            timer.start()
            row, skip_reason = train_step(run, model, wrapped, optimizers, method)
            speed = timer.stop(state.tokens - tokens)
            if row:
                run.logger.log_train(row | speed, state.step)
            else:
                ids = step_sequences(step, config.batch_size, len(method), config.seed)
                run.logger.log_skip(skip_reason, ids.tolist(), state.step)
            if method.sample is not None and is_due(config.sample_every, state.step):
                run.logger.log_sample(method.sample, state.step)
            saver.end_after_patience()
            if run.stopping:
                raise Stopped
    except Stopped:  # by a signal; an evaluation that it interrupts is done again by a resumed run
        run.stopping = True
        if state.step > saver.last_step:
            saver.save(LAST)

    saver.finish()
    run.finish(f"done: see {config.checkpoint_dir}")


def train_step(
    run: Run, model: GPT, wrapped: nn.Module, optimizers: list[Optimizer], method: Method
) -> tuple[dict, str | None]:
    """Run and count one step, of several updates with grpo's --updates. Return the row for the log,
    of the last update that was applied, {} if none was, and why one was skipped, which ends a step.
    Raises Stopped before the first update, also while GRPO writes texts: the step is not taken."""
    config, process, state = run.config, run.process, run.state
    lr = set_rates(optimizers, config, state.step)
    seed_step(config.seed, state.step, process.rank)  # of dropout
    ids = step_sequences(state.step, config.batch_size, len(method), config.seed)
    batches, figures = method.micro_batches(model, state.step, ids)
    divisor = method.divisor(ids)
    row, skip_reason, updates, trained_tokens = {}, None, 0, 0
    for update in range(config.updates if config.method == "grpo" else 1):
        sums: Counter = Counter()
        for number, batch in enumerate(batches, 1):
            if update == 0 and process.world_size == 1:
                process.end_if_stopped()
            with sync_gradients(wrapped, config.sharding, last=number == len(batches)):
                with autocast(process.device, run.dtype, keep_weights=False):
                    parts = method.partial_means(wrapped, batch, divisor)
                # gradients are averaged
                state.scaler.scale(parts["loss"] * process.world_size).backward()
            sums.update({name: part.detach().float() for name, part in parts.items()})
        for optimizer in optimizers:
            state.scaler.unscale_(optimizer)  # in float16; else this does nothing
        sums["grad_norm"] = clip_grad_norm(wrapped, config.grad_clip) / process.world_size
        num_tokens = sum(batch["idx"].numel() for batch in batches)
        for name, number in (("tokens", num_tokens), ("stopped", process.stop.signal != 0)):
            sums[name] = torch.full_like(sums["grad_norm"], number)  # fills, without a copy
        # sums over processes, and the one host sync of an update
        totals = process.sum(torch.stack(list(sums.values()))).tolist()
        means = dict(zip(sums, totals, strict=True))
        run.stopping = means.pop("stopped") > 0  # a process got a signal
        if state.scaler.is_enabled():
            means["scale"] = state.scaler.get_scale()
        skip_reason = reason_to_skip(means["loss"], means["grad_norm"])
        for optimizer in optimizers:
            if skip_reason is None:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        state.scaler.update()
        if skip_reason is not None:
            break
        updates += 1
        trained_tokens += round(means["tokens"])
        row = means | figures | {"lr": lr}
    state.advance(trained_tokens, skip_reason)
    if updates > 0:
        row["tokens"] = state.tokens
        if config.method == "grpo":
            row["updates"] = updates
    return row, skip_reason


def build_model(config: FinetuneConfig) -> tuple[GPT, dict]:
    """Return the model, resumed or of --init_from, and the entries of its checkpoints."""
    name = config.resume if config.resumes else config.init_from
    rates = config.method == "reward"
    if config.resumes:
        model, before = load_model(Path(name), RewardModel if rates else GPT, exact=True)
        tokenizer = before["tokenizer"]
    else:
        model, tokenizer, before = open_model(name, exact=True)
    T = config.block_size or model.config.block_size
    if T > model.config.block_size:
        raise UserError(f"--block_size {T} exceeds {name}'s context of {model.config.block_size}")
    learned = before.get("config", {}).get("plain", config.plain)
    if config.method != "sft" and learned != config.plain:
        raise UserError(f"{name} was fine-tuned on another kind of text: change --plain")
    dropout = config.dropout if config.method in ("sft", "reward") else 0.0
    model = resized(model, replace(model.config, block_size=T, dropout=dropout))
    if rates and not config.resumes:
        model = RewardModel.from_gpt(model)
    about = {"tokenizer": tokenizer, "train_tokens": before.get("train_tokens", 0)}
    return model.train(), {"script": "finetune.py", **about}


def open_rows(
    run: Run, model: GPT, about: dict, saved: dict | None
) -> tuple[Method, Method | None, Questions | None]:
    """Return the method on the rows of --data, that on those of --eval_data, and the questions."""
    config, process, T = run.config, run.process, model.config.block_size
    held_out, questions, reference, reward = None, None, None, None
    encoder = TextEncoder(load_tokenizer(about["tokenizer"]), not config.plain, T)
    if config.method == "dpo" or (config.method == "grpo" and config.kl > 0):
        reference = resized(open_model(config.init_from, exact=True)[0], model.config)
        about["reference"] = checksum(reference.state_dict())
        if saved and saved.get("reference") != about["reference"]:
            raise UserError(f"{config.init_from} has changed since this run began, which needs it")
        reference.eval().requires_grad_(False).to(process.device)
        compiled = config.use_torch_compile and config.method == "dpo"
        for_training(reference, process.device, compiled=compiled)  # rounds as the model does
    if config.method == "grpo":
        reward = load_reward(config.reward, encoder, process.device, run.dtype)
    method = METHODS[config.method](run, encoder, config.data, reference, reward)
    if reward:
        row, prompt = method.examples[0]
        check_reward(config.reward, reward, row, prompt, encoder.tokenizer.eot)
    if config.eval_data:
        held_out = type(method)(run, encoder, config.eval_data, reference, reward)
    if config.questions:
        sizes = (config.max_new_tokens, config.micro_batch_size)
        questions = Questions(config.questions, encoder, process, run.dtype, *sizes)
    if encoder.num_cut:
        process.print(f"warning: {encoder.num_cut:,} texts are cut to {T} tokens")
    return method, held_out, questions


if __name__ == "__main__":
    call_and_exit(main, before_exit=finish_writing, explain=distributed.explain)
