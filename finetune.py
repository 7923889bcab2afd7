"""Fine-tune a model on dialogs, preferences or rewards.

    python finetune.py --method sft --init_from checkpoints --data chat.jsonl
    python finetune.py --method dpo --init_from runs/sft --data pairs.jsonl
    python finetune.py --method grpo --init_from runs/sft --data questions.jsonl --reward exact

docs/FINETUNING.md has the formats of rows and the formulas. Folders, checkpoints, signals and
--resume are those of train.py. What differs between the methods is in finetuning/: a method makes
the batches of a step from its rows, and computes their loss.
"""

import sys
import zlib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from config import log_folder, with_defaults
from data.loader import step_sequences
from data.tokenizer import load_tokenizer
from evaluation.evaluator import is_due
from finetuning.answers import Questions
from finetuning.examples import TextEncoder, read_lines
from finetuning.grpo import GroupRelativePolicy
from finetuning.methods import (
    DirectPreference,
    Method,
    PreparedStep,
    RewardModeling,
    SupervisedTuning,
)
from finetuning.options import FinetuneConfig, resolve_options
from finetuning.rewards import RewardModel, check_reward, load_reward
from model.execution import Execution, uncompiled
from model.gpt import GPT, rebuild
from model.recipes import Recipe
from training.checkpoint import BEST, LAST, checksum, find_checkpoint, load_model, open_model
from training.optim import make_optimizers
from training.options import read_options, resolve_compile, resolve_dtype
from training.parallel import clip_grad_norm, sync_gradients, wrap
from training.run import Run, StepResult, claim_folders, reason_to_skip, seed_step
from training.saver import Saver, finish_writing
from training.schedule import set_rates
from utils import distributed
from utils.cli import call_and_exit
from utils.devices import autocast
from utils.distributed import Stopped
from utils.errors import UserError
from utils.throughput import StepTimer, peak_flops

METHODS: dict[str, type[Method]] = {
    "sft": SupervisedTuning,
    "dpo": DirectPreference,
    "reward": RewardModeling,
    "grpo": GroupRelativePolicy,
}


@dataclass
class Data:
    """The rows of a run, encoded."""

    method: Method
    """Rows of --data."""
    held_out: Method | None = None
    """Rows of --eval_data."""
    questions: Questions | None = None
    """Rows of --questions."""


def main() -> None:
    # options: flags, then what follows from the machine, the rows and the model
    options, derived, checkpoint = read_options(FinetuneConfig, "finetune.py", sys.argv[1:])
    options = resolve_paths_and_compile(options, derived)
    process = distributed.start(options.device, catch_signals=True)
    options = resolve_dtype(options, process)
    claim_folders(options, checkpoint, process)
    # the lengths of run and batches depend on what is read here
    model, entries = build_model(options)
    num_rows = len(read_lines(options.data))
    options = resolve_options(options, num_rows, model.num_parameters(), process.world_size)
    entries |= {"derived": derived, "command": sys.argv}

    # rows and optimizers; `wrapped` shares the weights of the model and synchronizes gradients
    run = Run.start(options, checkpoint, process)
    state = run.state
    data = open_data(run, model, entries, checkpoint)
    method = data.method
    wrapped = wrap(model, process, options.sharding, run.dtype)
    # the default recipe is AdamW for all weights, also of a model that was trained with Muon
    optimizers = make_optimizers(model, options, Recipe(), run.dtype)
    if checkpoint is not None:
        run.resume_optimizers(model, optimizers, checkpoint)
    checkpoint = None  # closes the file, from which its tensors are mapped

    # log and checkpoints: whatever is wrong above has removed and written nothing
    run.open_log(model, entries)
    # a checksum tells whether losses of a resumed run can be compared with the lowest one before
    if options.eval_data:
        run.validate_on(str(zlib.crc32(options.eval_data.read_bytes())))
    saver = Saver(run, model, optimizers, entries)
    resumed = f"; resumed at step {run.start_step}" if run.start_step else ""
    process.print(
        f"{options.method} of {options.init_from} on {options.data}: {len(method):,} "
        f"{method.unit}, {options.batch_size} in a step; {options.max_steps:,} steps{resumed}"
    )
    peak = peak_flops(process.device, run.dtype)
    timer = StepTimer(model.flops_per_token(), peak, process.world_size)

    try:
        while True:
            # once in a while: save, evaluate, answer questions; every process takes part
            step = state.step
            if step > saver.last_step and (run.ended or is_due(options.save_every, step)):
                saver.save(LAST)
            if run.ended or is_due(options.eval_every, step):
                # batches of other shapes than those of training
                with uncompiled(options.use_torch_compile):
                    evaluate(run, model, data, saver)
            if run.ended:
                break

            # one step, then its log
            tokens_before = state.tokens  # how many a step has depends on its rows
            timer.start()
            # as in pre-training, the rows of a step are a pure function of seed and step
            ids = step_sequences(step, options.batch_size, len(method), options.seed)
            prepared = method.prepare(model, step, ids)  # with grpo, it samples completions
            result = train_step(run, wrapped, optimizers, method, prepared)
            speed = timer.stop(state.tokens - tokens_before)
            if result.figures:  # with several updates, the first ones may have been applied
                run.logger.log_train(result.figures | speed, state.step)
            else:
                run.logger.log_skip(result.skip_reason, ids.tolist(), state.step)
            if prepared.sample is not None and is_due(options.sample_every, state.step):
                run.logger.log_sample(prepared.sample, state.step)
            saver.end_after_patience()
            if result.got_signal:
                raise Stopped
    except Stopped:  # a resumed run does the evaluation or the roll-out of this step again
        run.stopping = True
        if state.step > saver.last_step:
            saver.save(LAST)

    saver.finish()
    run.finish(f"done: see {options.checkpoint_dir}")


def resolve_paths_and_compile(options: FinetuneConfig, derived: tuple[str, ...]) -> FinetuneConfig:
    """Return the options with the folder of the log, the file of --init_from, and whether the step
    is compiled; `derived` are the names of options that nobody gave."""
    options = resolve_compile(options, derived)
    if options.method == "grpo":  # its completions have too many lengths to compile each
        options = replace(options, use_torch_compile=False)
    # the path of a checkpoint: a resumed run reads the same one, not the best or newest by then
    init_from = str(find_checkpoint(options.init_from) or options.init_from)
    options = replace(options, init_from=init_from)
    return with_defaults(options, log_dir=log_folder(options.checkpoint_dir))


def train_step(
    run: Run,
    wrapped: nn.Module,
    optimizers: list[Optimizer],
    method: Method,
    prepared: PreparedStep,
) -> StepResult:
    """Run and count one step on prepared batches; with grpo's --updates it has several updates.

    The figures for the log are those of the last update that was applied. An update that is not
    finite ends the step.
    """
    options, state = run.config, run.state
    lr = set_rates(optimizers, options, state.step)
    seed_step(options.seed, state.step, run.process.rank)  # for dropout

    # each update of grpo uses the same completions, sampled before the first
    max_updates = options.updates if options.method == "grpo" else 1
    figures: dict[str, float] = {}  # stays empty if no update is applied
    skip_reason = None
    got_signal = False
    num_updates = 0
    num_tokens = 0
    while num_updates < max_updates and skip_reason is None:
        means = backward(run, wrapped, optimizers, method, prepared)
        got_signal = got_signal or means.pop("signals") > 0
        if state.scaler.is_enabled():
            means["scale"] = state.scaler.get_scale()
        # no update from a loss or gradient that is not finite, on all processes alike
        skip_reason = reason_to_skip(means["loss"], means["grad_norm"])
        for optimizer in optimizers:
            if skip_reason is None:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        state.scaler.update()  # a lower scale after infinities
        if skip_reason is None:
            num_updates += 1
            # of all processes; padding counts, as it takes the same time (for tokens per second)
            num_tokens += round(means["tokens"])
            figures = means | prepared.metrics | {"lr": lr}

    # a step counts once, however many updates it has; none at all makes it a skipped one
    state.advance(num_tokens, skip_reason)
    if figures:
        figures["tokens"] = state.tokens
        if options.method == "grpo":
            figures["updates"] = num_updates
    return StepResult(figures, skip_reason, got_signal)


def backward(
    run: Run,
    wrapped: nn.Module,
    optimizers: list[Optimizer],
    method: Method,
    prepared: PreparedStep,
) -> dict[str, float]:
    """Compute the gradients of one update from the batches of all processes, and clip them.

    Return the means of the method's metrics over the step, "grad_norm" before clipping, the number
    of "tokens", padding included, and "signals", the number of processes that were told to stop.
    """
    process, scaler, sharding = run.process, run.state.scaler, run.config.sharding

    # forward and backward, micro-batch by micro-batch: the gradients add up
    sums: dict[str, Tensor] = {}  # of this process, by name of the metric
    num_tokens = 0
    for number, batch in enumerate(prepared.batches, 1):
        with sync_gradients(wrapped, sharding, last=number == len(prepared.batches)):
            # cast weights are kept for one forward pass only: the next one sees the new weights
            with autocast(process.device, run.dtype, keep_weights=False):
                means = method.partial_means(wrapped, batch, prepared.divisor)
            # DDP and FSDP2 average gradients over processes; the parts of the mean are to be added
            scaler.scale(means["loss"] * process.world_size).backward()
        for name, mean in means.items():
            sums[name] = sums.get(name, 0.0) + mean.detach().float()  # stays on the device
        num_tokens += batch.idx.numel()

    # clip the gradient; in float16 the loss was scaled up, and the gradient is scaled down before
    for optimizer in optimizers:
        scaler.unscale_(optimizer)  # records infinities, too, for scaler.update
    grad_norm = clip_grad_norm(wrapped, run.config.grad_clip)
    sums["grad_norm"] = grad_norm / process.world_size  # each process has the norm of the whole

    # Sum all numbers over processes at once. full_like fills a tensor on the device, without a copy
    # from the host.
    sums["tokens"] = torch.full_like(grad_norm, num_tokens)
    sums["signals"] = torch.full_like(grad_norm, process.stop.signal != 0)
    # `tolist` is the one time in an update at which the CPU waits for the GPU
    totals = process.sum(torch.stack(list(sums.values()))).tolist()
    return dict(zip(sums, totals, strict=True))


def evaluate(run: Run, model: GPT, data: Data, saver: Saver) -> None:
    """Score the model on --eval_data, of which the lowest loss is saved, and on --questions."""
    step = run.state.step
    if data.held_out:
        scores = data.held_out.evaluate(model)
        if "loss" in scores:  # grpo has the reward instead, and no best model
            run.logger.log_scores("val", scores, step)
            # before the questions: a signal while they are answered would lose the best model
            if run.state.record_validation(scores["loss"]):
                saver.save(BEST)
        else:
            run.logger.log_scores("held_out", scores, step)
    if data.questions:
        (exact,), answers = data.questions.score(model)
        num_cut = sum(answer["cut"] for answer in answers)
        scores = {"n": exact.n, "exact": exact.value, "stderr": exact.stderr}
        run.logger.log_scores("answers", scores | {"cut": num_cut / exact.n}, step)


def build_model(options: FinetuneConfig) -> tuple[GPT, dict]:
    """Return the model, resumed or of --init_from, on the CPU, and the entries of its checkpoints
    beside weights, options and progress."""
    is_reward = options.method == "reward"
    if options.resumes:
        name = options.resume
        model, checkpoint = load_model(Path(name), RewardModel if is_reward else GPT, exact=True)
        tokenizer = checkpoint["tokenizer"]
    else:
        name = options.init_from
        model, tokenizer, checkpoint = open_model(name, exact=True)

    # its shape: a shorter context, and the dropout of fine-tuning
    T = options.block_size or model.config.block_size
    if T > model.config.block_size:
        raise UserError(f"--block_size {T} exceeds {name}'s context of {model.config.block_size}")

    # A chat model would rate or write plain text badly, and the other way round. sft may change it.
    learned_plain = checkpoint.get("config", {}).get("plain", options.plain)
    if options.method != "sft" and learned_plain != options.plain:
        raise UserError(f"{name} was fine-tuned on another kind of text: change --plain")
    # dpo and grpo compare log-probabilities of two passes, which dropout would make random
    dropout = options.dropout if options.method in ("sft", "reward") else 0.0
    # a shorter context drops the last rows of the table of positions
    shape = replace(model.config, block_size=T, dropout=dropout)
    execution = Execution(options.activation_checkpointing, options.use_torch_compile)
    model = rebuild(model, shape, execution)
    if is_reward and not options.resumes:  # a resumed one has its head already
        model = RewardModel.from_gpt(model)
    entries = {
        "script": "finetune.py",
        "tokenizer": tokenizer,
    }
    return model.train(), entries


def open_data(run: Run, model: GPT, entries: dict, checkpoint: dict | None) -> Data:
    """Read and encode the rows of a run, and open the models that its method needs beside `model`,
    the trained one.

    The checksum of a reference model is added to the entries of checkpoints. Raise UserError if a
    resumed run began with another one.
    """
    options, process = run.config, run.process
    tokenizer = load_tokenizer(entries["tokenizer"])
    block_size = model.config.block_size
    encoder = TextEncoder(tokenizer, chat=not options.plain, block_size=block_size)

    # dpo and grpo compare the trained model with that of --init_from
    reference = None
    if options.method == "dpo" or (options.method == "grpo" and options.kl > 0):
        pretrained, _, _ = open_model(options.init_from, exact=True)
        # compiled if the trained model is: both then round alike
        reference = rebuild(pretrained, model.config, Execution(compiled=options.use_torch_compile))
        entries["reference"] = checksum(reference.state_dict())
        if checkpoint is not None and checkpoint.get("reference") != entries["reference"]:
            raise UserError(f"{options.init_from} has changed since this run began, which needs it")
        reference = reference.eval().requires_grad_(False).to(process.device)

    # rows, and what rates completions of theirs
    reward = None
    if options.method == "grpo":
        reward = load_reward(options.reward, encoder, process, run.dtype)
    method_class = METHODS[options.method]
    open_rows = partial(method_class, options, process, run.dtype, encoder, reference, reward)
    data = Data(open_rows(options.data))
    if reward is not None:
        # once before open_log, which removes the files of another run with --overwrite
        check_reward(options.reward, reward, data.method.examples[0], tokenizer.eot)
    if options.eval_data:
        data.held_out = open_rows(options.eval_data)
    if options.questions:
        sizes = (options.max_new_tokens, options.micro_batch_size)
        data.questions = Questions(options.questions, encoder, process, run.dtype, *sizes)
    if encoder.num_cut:
        process.print(f"warning: {encoder.num_cut:,} texts are cut to {block_size} tokens")
    return data


if __name__ == "__main__":
    call_and_exit(main, before_exit=finish_writing, explain=distributed.explain)
