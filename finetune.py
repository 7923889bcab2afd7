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
from collections.abc import Mapping
from dataclasses import replace

import utils.environment  # noqa: F401 (first: it says what to type without PyTorch)

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from data.loader import step_sequences
from data.tokenizer import load_tokenizer
from evaluation.evaluator import is_due
from finetuning.examples import TextEncoder, read_lines
from finetuning.grpo import GroupRelativePolicy
from finetuning.methods import (
    DirectPreference,
    Method,
    PreparedStep,
    RewardModeling,
    SupervisedTuning,
)
from finetuning.options import FinetuneConfig, ResolvedFinetuneConfig, resolve_options
from finetuning.rewards import RewardModel, load_reward_function
from model.execution import Execution, uncompiled
from model.gpt import GPT, build_without_weights
from model.recipes import Recipe
from model.rows import Rows
from training.checkpoint import REWARD_HEAD, Checkpoint, find_checkpoint
from training.options import read_options, resolve_compile, resolve_dtype
from training.parallel import clip_grad_norm, sync_gradients
from training.parts import fill_model
from training.run import Run, StepResult, reason_to_skip, seed_step, start_process
from training.saver import Saver, finish_writing
from training.schedule import set_rates
from training.start import SavedModel, init_checksum, open_original, open_start
from utils import distributed
from utils.cli import call_and_exit
from utils.devices import autocast
from utils.distributed import Process, Stopped
from utils.errors import UserError
from utils.throughput import StepTimer

METHODS: dict[str, type[Method]] = {
    "sft": SupervisedTuning,
    "dpo": DirectPreference,
    "reward": RewardModeling,
    "grpo": GroupRelativePolicy,
}


def main() -> None:
    # options: flags, then what follows from the machine, then from the rows and the model
    # `derived`: options that nobody gave; `checkpoint`: content of that of --resume, None if new
    given_options, derived, checkpoint = read_options(FinetuneConfig, "finetune.py", sys.argv[1:])
    process = start_process(given_options)  # one of torchrun's, or alone; signals are remembered
    device_options = resolve_on_device(given_options, derived, process)
    # `start`: shape, weights and tokenizer of the resumed model, or of that of --init_from
    is_reward = device_options.method == "reward"
    start = open_start(device_options, checkpoint, process, is_reward_model=is_reward)
    assert start is not None  # --init_from is required
    weights_checksum = init_checksum(device_options, checkpoint, start, process)  # of --init_from
    model, weights = build_model(device_options, start)
    # --batch_size and --max_steps follow from the number of rows, --max_lr from that of parameters
    assert device_options.data is not None  # FinetuneConfig demands it
    num_rows = len(read_lines(device_options.data))
    options = resolve_options(device_options, num_rows, model.num_parameters(), process.world_size)
    entries = checkpoint_entries(options, derived, start.tokenizer, weights_checksum)
    run = Run.start(options, checkpoint, process, entries)  # locks the folders of the run
    state = run.state  # step, tokens, lowest loss, ...

    # rows and optimizers; `wrapped` shares the weights of the model and synchronizes gradients
    method = open_data(run, model, weights, checkpoint)
    # the default recipe is AdamW for all weights, also of a model that was trained with Muon
    wrapped, optimizers = run.distribute(model, weights, Recipe(), checkpoint)
    del weights, start, checkpoint  # closes the file, from which their tensors are mapped

    # Log and checkpoints come last: an error above has removed and written nothing.
    run.open_log(model.config)
    if options.eval_data:
        run.validate_on(str(entries["val_checksum"]))  # the lowest loss of other rows is forgotten
    saver = Saver(run, model, optimizers)
    resumed = f"; resumed at step {state.step}" if state.step else ""
    process.print(
        f"{options.method} of {options.init_from} on {options.data}: {num_rows:,} rows, "
        f"{options.batch_size} in a step; {options.max_steps:,} steps{resumed}"
    )
    timer = StepTimer(model.flops_per_token(), process.device, run.dtype, process.num_processes)

    try:
        while True:
            # once in a while: save and evaluate; every process takes part
            step = state.step
            if saver.due(step):  # every --save_every steps, and before the first
                saver.save_last()
            if method.held_out and (run.ended or is_due(options.eval_every, step)):
                # Without gradients and dropout each shape would need a compiled graph of its own.
                with uncompiled(options.use_torch_compile):
                    scores = method.evaluate(model)  # means by metric, over the rows of --eval_data
                if "loss" in scores:
                    run.logger.log_scores("val", scores, step)
                    saver.save_if_best(scores["loss"])  # as model_best.pt
                else:  # grpo has the reward instead, and no best model
                    run.logger.log_scores("held_out", scores, step)
            if run.ended:  # the last step is taken, saved and evaluated; a signal raises Stopped
                break

            # one step, then its log
            tokens_before = state.tokens  # how many a step has depends on its examples
            timer.start()  # with grpo, sampling counts as time of the step
            # indices (batch_size,) of rows, as in pre-training a pure function of seed and step
            example_ids = step_sequences(step, options.batch_size, num_rows, options.seed)
            prepared = method.prepare(model, step, example_ids)  # with grpo, it samples completions
            result = train_step(run, wrapped, optimizers, method, prepared)
            speed = timer.stop(state.tokens - tokens_before)  # tokens_per_s, mfu, ms
            if result.skip_reason is None:
                run.logger.log_train(result.figures | speed, state.step)
            else:
                run.logger.log_skip(result.skip_reason, example_ids.tolist(), state.step)
            if prepared.sample and is_due(options.sample_every, state.step):
                run.logger.log_sample(prepared.sample, state.step)  # grpo: completions and rewards
            saver.end_after_patience()  # UserError after 5 skipped steps in a row
            if result.got_signal:  # any process
                raise Stopped
    except Stopped:  # a resumed run does the evaluation, or samples completions, again
        run.stopping = True  # run.finish then says how to continue
        saver.save_last()

    saver.finish()  # waits for the last write
    chat = "" if options.plain else "--chat "  # in the command that is printed as the next one
    run.finish([] if options.method == "reward" else [f"sample.py {chat}--checkpoint"])


def resolve_on_device(
    options: FinetuneConfig, derived: dict[str, str | None], process: Process
) -> FinetuneConfig:
    """Return the options with the file of --init_from in place of its folder, --use_torch_compile
    and --dtype as this device has them; `derived` has the options that nobody gave. Every process
    must call it."""
    options = resolve_dtype(resolve_compile(options, derived), process)
    # the completions of grpo have too many lengths to compile the model for each
    is_compiled = options.use_torch_compile and options.method != "grpo"
    assert options.init_from is not None
    # The path of a checkpoint, which goes into those of this run: when it is resumed it reads the
    # same file, not the best or newest by then. None for a model of another project.
    init_from = str(find_checkpoint(options.init_from) or options.init_from)
    return replace(options, use_torch_compile=is_compiled, init_from=init_from)


def train_step(
    run: Run[ResolvedFinetuneConfig],
    wrapped: nn.Module,
    optimizers: list[Optimizer],
    method: Method,
    prepared: PreparedStep,
) -> StepResult:
    """Run and count one optimizer step on prepared batches. The figures for the log are the means
    of the method's metrics over the step, "loss" among them, and what train.py logs beside its
    loss. `wrapped` is what Run.distribute returned."""
    options = run.config
    process = run.process
    state = run.state
    lr = set_rates(optimizers, options, state.step)
    seed_step(options.seed, state.step, process.rank)  # of dropout

    # forward and backward, micro-batch by micro-batch: the gradients add up
    shares: dict[str, Tensor] = {}  # by metric, (): this process's part of the mean
    num_tokens = 0  # of this process
    for batch in prepared.batches:  # as many on every process
        is_last = batch is prepared.batches[-1]
        # under none and zero1 processes reduce gradients in the last micro-batch, else in each
        with sync_gradients(wrapped, options.sharding, last=is_last):
            # A forward pass casts each weight once: keeping the copies would only take memory.
            with autocast(process.device, run.dtype, keep_weights=False):
                sums = method.metric_sums(wrapped, batch)
            # the divisor is that of the whole step: of all micro-batches of all processes
            loss = sums["loss"] / prepared.divisor
            # DDP and FSDP2 average gradients over processes; these losses are to be added
            run.scaler.scale(loss * process.world_size).backward()
        for name, value in sums.items():
            share = value.detach() / prepared.divisor
            shares[name] = shares.get(name, 0.0) + share.float()  # on the device: no wait for a GPU
        # padding counts, as it takes the same time: tokens per second are of these
        num_tokens += batch.idx.numel()

    # clip the gradient; in float16 the loss was scaled up, and the gradient is scaled down before
    for optimizer in optimizers:
        run.scaler.unscale_(optimizer)  # records infinities, too, for scaler.update below
    grad_norm = clip_grad_norm(wrapped, options.grad_clip)  # (), the norm before
    # every process has the norm of the whole gradient: the sum of these shares is that norm
    shares["grad_norm"] = grad_norm / process.world_size

    # Sum all numbers over processes at once. full_like fills a tensor on the device, without a copy
    # from the host.
    shares["tokens"] = torch.full_like(grad_norm, num_tokens)
    shares["signals"] = torch.full_like(grad_norm, process.signal != 0)
    # at `tolist` the CPU waits for the GPU, in float16 at get_scale again
    totals = process.sum(torch.stack(list(shares.values()))).tolist()
    figures = dict(zip(shares, totals, strict=True))  # the same on every process from here on
    got_signal = figures.pop("signals") > 0

    # update, unless a loss or gradient is not finite: then no process updates
    skip_reason = reason_to_skip(figures["loss"], figures["grad_norm"])
    figures |= prepared.metrics  # of grpo: reward, completion_tokens, cut
    figures["lr"] = lr
    if run.scaler.is_enabled():
        figures["scale"] = run.scaler.get_scale()
    for optimizer in optimizers:
        if skip_reason is None:
            optimizer.step()  # also in float16: what scaler.step would look at is decided above
        optimizer.zero_grad(set_to_none=True)
    run.scaler.update()  # a lower scale after infinities, a higher one after 2,000 steps without
    state.advance(round(figures["tokens"]), skip_reason)  # round: it was summed as a float
    figures["tokens"] = state.tokens  # of all steps so far, skipped ones included
    return StepResult(figures, skip_reason, got_signal)


def build_model(options: FinetuneConfig, start: SavedModel) -> tuple[GPT, dict[str, Rows]]:
    """Return the model to train, on the device "meta", and the weights that it begins with, by
    parameter name. Raise UserError for a context that `start` does not have, and for one that
    learned another kind of text."""
    # its shape: a shorter context, and the dropout of fine-tuning
    longest = start.shape.block_size
    T = options.block_size or longest
    # a resumed run keeps its context: its optimizer state has that of the position embedding
    if T > longest or (options.resumed and T < longest):
        raise UserError(
            f"--block_size {T}: {options.source} has a context of {longest}; give that, or none"
        )

    # A chat model would rate or write plain text badly, and the other way round. sft may change it.
    # Checkpoints of train.py and models of others have no such option: any --plain suits them.
    learned_plain = start.checkpoint.get("config", {}).get("plain", options.plain)
    if options.method != "sft" and learned_plain != options.plain:
        raise UserError(f"{options.source} was fine-tuned on another kind of text: change --plain")
    # dpo and grpo compare log-probabilities of two passes, which dropout would make random
    dropout = options.dropout if options.method in ("sft", "reward") else 0.0
    shape = replace(start.shape, block_size=T, dropout=dropout)
    execution = Execution(options.activation_checkpointing, options.use_torch_compile)
    weights = dict(start.weights)  # a copy, which is changed below
    if options.method != "reward":
        return build_without_weights(shape, execution), weights
    # the head of a resumed reward model is there; all rewards of a new one begin at 0
    weights.setdefault(REWARD_HEAD, torch.zeros(1, shape.n_embd))
    # Rewards need no logits: without the lm_head of an untied model, which nothing would train.
    weights.pop("lm_head.weight", None)
    shape = replace(shape, tied=True)
    return build_without_weights(shape, execution, RewardModel), weights


def checkpoint_entries(
    options: ResolvedFinetuneConfig,
    derived: dict[str, str | None],
    tokenizer_spec: str,
    weights_checksum: int | None,
) -> Checkpoint:
    """Return what checkpoints and config.json hold of a run beside options, model and progress;
    `weights_checksum` is of the weights of --init_from."""
    val_checksum = None  # names the held-out rows that the lowest loss belongs to
    if options.eval_data is not None:
        val_checksum = zlib.crc32(options.eval_data.read_bytes())
    return {
        "script": "finetune.py",
        "command": sys.argv,
        "derived": derived,  # options that follow from others: a resumed run derives them again
        "tokenizer": tokenizer_spec,
        "init_checksum": weights_checksum,
        # what the examples of a step follow from, beside the step: a resumed run warns of changes
        "data_order": {
            "batch_size": options.batch_size,
            "seed": options.seed,
            "checksum of --data": zlib.crc32(options.data.read_bytes()),
        },
        "val_checksum": val_checksum,
    }


def open_data(
    run: Run[ResolvedFinetuneConfig],
    model: GPT,
    weights: Mapping[str, Rows],
    checkpoint: Checkpoint | None,
) -> Method:
    """Read and encode the rows of a run, and open the models that its method needs beside `model`,
    the trained one, which begins with `weights`. `checkpoint` is that of --resume.

    Return the method, with the examples of --data and --eval_data. Raise UserError if the reference
    model of a resumed run has changed, and for a row that cannot be encoded.
    """
    options = run.config
    process = run.process
    tokenizer = load_tokenizer(run.entries["tokenizer"])  # from its spec
    block_size = model.config.block_size
    encoder = TextEncoder(tokenizer, chat=not options.plain, block_size=block_size)

    # dpo and grpo compare the trained model with that of --init_from
    reference: GPT | None = None
    if options.method == "dpo" or (options.method == "grpo" and options.kl > 0):
        # `weights` of a resumed run are the trained ones. Its losses would jump with another
        # reference, and nobody would know why: open_original raises UserError for other weights.
        if checkpoint is not None:
            weights = open_original(options, checkpoint, process)
        # compiled if the trained model is: both then round alike
        execution = Execution(compiled=options.use_torch_compile)
        reference = build_without_weights(model.config, execution)
        fill_model(reference, weights, process.device)  # whole, also where --sharding divides model
        reference.eval().requires_grad_(False)  # in place: it is never trained

    # examples, and for grpo the function that rates completions of their prompts
    reward_function = None
    if options.method == "grpo":
        assert options.reward is not None  # FinetuneConfig demands it
        reward_function = load_reward_function(options.reward, encoder, process, run.dtype)
    # reads and encodes the rows; dpo also rates them by the reference, which is freed then
    method_class = METHODS[options.method]
    method = method_class(options, process, run.dtype, encoder, reference, reward_function)
    if encoder.num_cut:  # counted while the rows of --data and --eval_data were encoded
        process.print(f"warning: {encoder.num_cut:,} texts are cut to {block_size} tokens")
    return method


if __name__ == "__main__":
    call_and_exit(main, before_exit=finish_writing, explain=distributed.explain)
