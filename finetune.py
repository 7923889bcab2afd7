"""Fine-tune a model on dialogs, preferences or rewards.

    python finetune.py --method sft --init_from checkpoints --data chat.jsonl
    python finetune.py --method dpo --init_from runs/sft --data pairs.jsonl
    python finetune.py --method grpo --init_from runs/sft --data questions.jsonl --reward exact

docs/FINETUNING.md has the formats of rows and the formulas. Folders, checkpoints, signals and
--resume work as in train.py. finetuning/ holds the differences between the methods: a method makes
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

from data.loader import sequence_ids_of_step
from data.tokenizer import load_tokenizer
from finetuning.examples import TextEncoder, read_lines
from finetuning.grpo import GroupRelativePolicy
from finetuning.methods import (
    DirectPreference,
    Method,
    PreparedStep,
    RewardModeling,
    SupervisedTuning,
)
from finetuning.options import FinetuneOptions, ResolvedFinetuneOptions, resolve_options
from finetuning.rewards import (
    RewardError,
    RewardModel,
    load_reward_function,
    reward_checksum,
)
from model.execution import Execution, execute, uncompiled
from model.formats.checkpoint import REWARD_HEAD, Checkpoint, check_head, find_checkpoint
from model.gpt import GPT
from model.initial_weights import build_without_weights
from model.rows import Rows
from recipes import Recipe
from training.evaluator import is_due
from training.options import compile_if_all_can, read_options, resolve_compile, resolve_dtype
from training.parallel.data_parallel import clip_grad_norm, sync_gradients
from training.parallel.own_rows import fill_model
from training.run import Run, StepResult, reason_to_skip, seed_step, start_process
from training.saver import Saver, finish_writing
from training.schedule import set_learning_rates
from training.start import InitialModel, init_checksum, open_initial, open_original
from utils import distributed
from utils.cli import call_and_exit
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
    # derived: ["max_lr", ...], options to compute below; checkpoint: a dict, None for a new run
    given_options, derived, checkpoint = read_options(FinetuneOptions, "finetune.py", sys.argv[1:])
    process = start_process(given_options)  # catches signals from here on
    device_options = resolve_on_device(given_options, derived, process)  # dtype, compile, files
    # `initial` has the architecture, weights and tokenizer of the resumed checkpoint, or of the
    # model of --init_from.
    initial = open_initial(device_options, checkpoint, process)  # an InitialModel
    assert initial is not None  # --init_from is required
    weights_checksum = init_checksum(device_options, checkpoint, initial, process)  # of --init_from
    # model on "meta"; weights: {"transformer.wte.weight": Rows (50304, 768), ...}, read row by row
    model, weights = build_model(device_options, initial)
    # The numbers of data rows and of parameters set the defaults of --batch_size, --max_steps and
    # --max_lr.
    assert device_options.data is not None  # FinetuneOptions refuses a run without --data
    num_rows = len(read_lines(device_options.data))  # lines that are not empty
    num_parameters = model.num_parameters()
    # UserError unless a step divides into micro-batches for all `data_parallel` parts of the data
    options = resolve_options(device_options, num_rows, num_parameters, process.data_parallel)
    # {"tokenizer": "gpt2", "data_order": {...}, ...}, which all checkpoints of the run repeat
    entries = checkpoint_entries(options, derived, initial.tokenizer_spec, weights_checksum)
    run = Run.start(options, checkpoint, process, entries)  # locks folders, compares processes
    progress = run.progress  # step, tokens, ... of `checkpoint`, or 0; advanced in the loop below

    method = open_method(run, model, weights, checkpoint)  # a Method; encodes all rows
    # Fills the weights into `model`, on the device. Recipe() trains all of them with AdamW, even if
    # Muon pre-trained the model. The loop trains `wrapped` (`model` or DDP around it), which shares
    # the weights; saving, evaluation and sampling use `model`.
    wrapped, optimizers = run.distribute(model, weights, Recipe(), checkpoint)
    del weights, initial, checkpoint  # closes the file that their tensors are mapped from

    # The log opens last: an error above then leaves the files of an earlier run unchanged.
    with run.open_log(model.config):  # closes the log however the run ends
        saver = Saver(run, model, optimizers)  # for model_last.pt and model_best.pt
        print_summary(run, num_rows)
        timer = StepTimer(model.flops_per_token(), process)  # for tokens/s and MFU

        try:
            while True:
                # save and evaluate every few steps; all processes take part
                step = progress.step
                if saver.due(step):
                    saver.save_last()
                # `held_out` is empty without --eval_data
                if method.held_out and (run.ended or is_due(options.eval_every, step)):
                    evaluate(run, method, model, saver)  # logs; saves if the loss is the lowest
                if run.ended:  # the last step is done, saved and evaluated
                    break

                # one step, then its log
                timer.start()  # with grpo, the time of a step includes sampling
                # row indices (batch_size,), a pure function of seed and step
                example_ids = sequence_ids_of_step(step, options.batch_size, num_rows, options.seed)
                prepared = method.prepare(model, step, example_ids)  # batches and their divisor
                result = train_step(run, wrapped, optimizers, method, prepared)  # a StepResult
                progress.advance(result)  # progress.step is now step + 1, even if skipped
                if result.skip_reason is None:
                    speed = timer.stop(result.num_tokens)  # tokens_per_s, mfu, ms
                    run.logger.log_train(result.metrics | speed, progress.step)
                else:
                    run.logger.log_skip(result.skip_reason, example_ids.tolist(), progress.step)
                # `sample` is a text with grpo, else None; --sample_every 0 is never due
                if prepared.sample and is_due(options.sample_every, progress.step):
                    run.logger.log_sample(prepared.sample, progress.step)
                # UserError: a checkpoint would lose optimizer state, or 5 skipped steps in a row
                saver.check_step()
                if result.got_signal:  # on any process
                    raise Stopped
        except Stopped:
            # A resumed run repeats the evaluation or the sampling that the signal interrupted.
            run.ended_early = True  # run.finish then prints how to continue
            saver.save_last()
        except RewardError:  # on all processes: save first
            run.ended_early = True  # the saver then does not print that the run continues
            saver.save_last()
            saver.finish()
            raise
        saver.finish()  # waits for the last write

    run.finish(next_commands(options))  # prints the result; exits after a signal


def evaluate(run: Run[ResolvedFinetuneOptions], method: Method, model: GPT, saver: Saver) -> None:
    """Log the metrics of the held-out rows, and save the model if its loss on them is the lowest so
    far. Every process must call it."""
    # Blocks and model.loss run uncompiled: each batch shape would need a graph for evaluation.
    with uncompiled(run.options.use_torch_compile, model.loss):
        metrics = method.evaluate(model)  # {"loss": 0.29, ...}; of grpo {"reward": 0.4}
    # grpo has a mean reward and no loss, and keeps no best model
    has_loss = "loss" in metrics
    # for metrics.jsonl, the console and W&B; progress.step is the number of steps done
    run.logger.log_evaluation("val" if has_loss else "held_out", metrics, run.progress.step)
    if has_loss:
        saver.save_if_best(metrics["loss"])


def print_summary(run: Run[ResolvedFinetuneOptions], num_rows: int) -> None:
    """Print the method, model, data, number of rows and number of steps before the first step."""
    options = run.options
    step = run.progress.step
    resumed_text = f"; resumed at step {step}" if step > 0 else ""
    run.logger.print(  # above the progress bar, on the main process only
        f"{options.method} of {options.init_from} on {options.data}: {num_rows:,} rows, "
        f"{options.batch_size} in a step; {options.max_steps:,} steps{resumed_text}"
    )


def next_commands(options: ResolvedFinetuneOptions) -> list[str]:
    """Return the commands to suggest at the end of a run, without the folder of the checkpoints,
    which Run.finish appends to each."""
    if options.method == "reward":
        return []  # a reward model writes no text
    return ["sample.py --checkpoint" if options.plain else "sample.py --chat --checkpoint"]


def resolve_on_device(
    options: FinetuneOptions, derived: list[str], process: Process
) -> FinetuneOptions:
    """Return the options with --use_torch_compile and --dtype resolved for this device, and the
    files of --init_from and --reward in place of their folders. `derived` has the names of the
    options that no flag sets (read_options). Every process must call it."""
    options = resolve_compile(options, derived)  # by default only on CUDA
    options = resolve_dtype(options, process)  # "auto" becomes process.dtype
    # completions of grpo have too many lengths: the model would be compiled for each of them
    if options.method == "grpo":
        options = replace(options, use_torch_compile=False)
    options = compile_if_all_can(options, process)  # off without a working compiler
    assert options.init_from is not None  # FinetuneOptions requires --init_from
    # Checkpoints of this run record a file, not its folder: a resumed run must read the same file
    # again, although the folder may have a newer one. find_checkpoint returns None for a model of
    # another project, such as "gpt2", which keeps its name.
    init_from = str(find_checkpoint(options.init_from) or options.init_from)
    reward = options.reward
    if reward is not None:  # "exact" and FILE.py:FUNCTION keep their names, too
        reward = str(find_checkpoint(reward) or reward)
    return replace(options, init_from=init_from, reward=reward)


def train_step(
    run: Run[ResolvedFinetuneOptions],
    wrapped: nn.Module,
    optimizers: list[Optimizer],
    method: Method,
    prepared: PreparedStep,
) -> StepResult:
    """Run one optimizer step on prepared batches, without counting it in the run's progress. The
    result has the metrics for the log: the means of the method's metrics over the step, with
    "loss", and lr, grad_norm and tokens as in train.py. `wrapped` comes from Run.distribute."""
    options = run.options
    process = run.process
    progress = run.progress  # its `step` and `tokens` do not include this step
    # sets the rate of each parameter group by warmup and decay
    lr = set_learning_rates(optimizers, options, progress.step)
    seed_step(options.seed, progress.step, process.rank)  # for dropout

    # scalars, what this process adds to each mean of the step: {"loss": 0.29, "accuracy": 0.06}
    local_addends: dict[str, Tensor] = {}
    num_local_tokens = 0  # of this process in this step
    # gradient accumulation: each micro-batch adds its gradients to those before
    for batch in prepared.batches:  # Batch objects: idx, targets (B, T), ...
        is_last = batch is prepared.batches[-1]
        # --sharding none and zero1 reduce gradients after the last micro-batch, others after each
        with sync_gradients(wrapped, options.sharding, is_last=is_last):
            # A forward pass casts each weight once, so cached casts would only take memory.
            with process.autocast(keep_weights=False):
                sums = method.metric_sums(wrapped, batch)  # {"loss": Tensor (), ...}
            # The divisor counts the targets (sft), pairs or completions (grpo) of the step on all
            # processes. So the sum of `loss` over micro-batches and processes is the step's mean.
            loss = sums["loss"] / prepared.divisor
            # DDP and FSDP2 average gradients over processes, but this mean needs their sum: times
            # data_parallel. In float16 the GradScaler scales the loss; unscale_ removes the scale.
            run.scaler.scale(loss * process.data_parallel).backward()
        for name, value in sums.items():
            addend = value.detach() / prepared.divisor
            # on the device, because reading a number here would wait for the GPU
            local_addends[name] = local_addends.get(name, 0.0) + addend.float()
        # padding counts as tokens, because it takes the same time
        num_local_tokens += batch.idx.numel()

    # clip the gradient; in float16 first divide it by the scale of the loss
    for optimizer in optimizers:
        run.scaler.unscale_(optimizer)  # also records infinities, for scaler.update below
    grad_norm = clip_grad_norm(wrapped, options.grad_clip)  # (), the norm before clipping
    # Every process has the norm of the whole gradient. Divide it, because the sum below adds it up.
    local_addends["grad_norm"] = grad_norm / process.data_parallel

    # One all-reduce sums all numbers. full_like creates a tensor on the device, without a copy from
    # the host.
    local_addends["tokens"] = torch.full_like(grad_norm, num_local_tokens)
    local_addends["signals"] = torch.full_like(grad_norm, process.signal != 0)  # 1.0: told to stop
    # tolist waits for the GPU, and so does get_scale in float16
    totals = process.sum(torch.stack(list(local_addends.values()))).tolist()
    # {"loss": 0.29, ..., "grad_norm": 1.1, "tokens": 8192.0, "signals": 0.0} on every process
    metrics = dict(zip(local_addends, totals, strict=True))
    got_signal = metrics.pop("signals") > 0  # some process got a signal: main raises Stopped

    # update the weights, unless the loss or gradient is not finite: then no process updates
    skip_reason = reason_to_skip(metrics["loss"], metrics["grad_norm"])  # None if both are finite
    metrics |= prepared.metrics  # grpo: reward, equal_rewards, completion_tokens, cut, rollout_ms
    metrics["lr"] = lr
    if run.scaler.is_enabled():
        metrics["scale"] = run.scaler.get_scale()  # before `update` changes it
    for optimizer in optimizers:
        if skip_reason is None:
            optimizer.step()  # not scaler.step: the check for infinities is done
    wrapped.zero_grad(set_to_none=True)
    run.scaler.update()  # float16: lower after infinities, higher after 2,000 steps without any
    num_tokens = round(metrics["tokens"])  # of this step on all processes; the sum is a float
    metrics["tokens"] = progress.tokens + num_tokens  # replaced for the log: of all steps so far
    return StepResult(metrics, skip_reason, got_signal, num_tokens)


def choose_block_size(options: FinetuneOptions, initial_block_size: int) -> int:
    """Return --block_size, by default the context of the initial model. Raise UserError if it is
    longer than that, or in a resumed run shorter."""
    block_size = options.block_size or initial_block_size
    # A resumed run keeps its context: AdamW's moments of the position embedding have block_size
    # rows.
    if block_size > initial_block_size or (
        options.resumed_file and block_size < initial_block_size
    ):
        raise UserError(
            f"--block_size {block_size}: {options.weights_from} has a context of "
            f"{initial_block_size}; give that, or leave out --block_size"
        )
    return block_size


def build_model(options: FinetuneOptions, initial: InitialModel) -> tuple[GPT, dict[str, Rows]]:
    """Return the model to train, on the device "meta", and its initial weights by parameter name.
    The weights are Rows (model/rows.py), which Run.distribute later copies into the model.
    Raise UserError for a --block_size that choose_block_size refuses, for a model of the other kind
    of text (chats, plain text), and for a resumed model with another head (logits, rewards)."""
    is_reward = options.method == "reward"
    # options.resumed_file is the Path of the checkpoint of --resume, None for a new run;
    # options.weights_from is that path, or else --init_from.
    if options.resumed_file is not None:
        check_head(options.resumed_file, initial.checkpoint, is_reward)
    block_size = choose_block_size(options, initial.model_config.block_size)

    # Only sft may change --plain: a chat model writes and scores plain text badly, and vice versa.
    # Checkpoints of train.py and models of other projects do not record --plain, so they allow
    # both.
    learned_plain = initial.checkpoint.get("config", {}).get("plain", options.plain)
    if options.method != "sft" and learned_plain != options.plain:
        raise UserError(
            f"{options.weights_from} was fine-tuned on another kind of text: change --plain"
        )
    # no dropout for dpo and grpo: they compare log-probabilities of two forward passes
    dropout = options.dropout if options.method in ("sft", "reward") else 0.0
    # for a shorter context, Run.distribute reads only the first rows of the position embedding
    model_config = replace(initial.model_config, block_size=block_size, dropout=dropout)
    weights = dict(initial.weights)  # Rows by name, not yet read; a copy of the dict to change
    model_class: type[GPT] = GPT
    if is_reward:
        model_class = RewardModel
        # REWARD_HEAD is "reward_head.weight", which a resumed reward model has. A new head is zero,
        # so all rewards begin at 0.
        weights.setdefault(REWARD_HEAD, torch.zeros(1, model_config.n_embd))
        # Rewards need no logits: drop the lm_head of an untied model, which nothing would train.
        weights.pop("lm_head.weight", None)
        model_config = replace(model_config, tied=True)  # RewardModel needs it
    model = build_without_weights(model_class, model_config)  # on the device "meta"
    # in place: activation checkpointing ("none", "cheap" or "block") and torch.compile
    execute(model, Execution(options.activation_checkpointing, options.use_torch_compile))
    return model, weights


def checkpoint_entries(
    options: ResolvedFinetuneOptions,
    derived: list[str],
    tokenizer_spec: str,
    weights_checksum: int | None,
) -> Checkpoint:
    """Return the entries of checkpoints and config.json beside options, model and progress. They
    identify the command, tokenizer and data of the run, so that a resumed run can compare them.
    `weights_checksum` is the checksum of the weights of --init_from."""
    # of the held-out rows: if they change, the Saver of a resumed run begins a new lowest loss
    val_checksum = None
    if options.eval_data is not None:
        val_checksum = zlib.crc32(options.eval_data.read_bytes())
    # These determine the examples of each step: a resumed run warns if one of them has changed.
    data_order = {
        "batch_size": options.batch_size,
        "seed": options.seed,
        "checksum of --data": zlib.crc32(options.data.read_bytes()),
    }
    if options.method == "grpo" and options.reward is not None:  # never None for grpo
        data_order["checksum of --reward"] = reward_checksum(options.reward)  # 0 for "exact"
    return {
        "script": "finetune.py",  # train.py refuses to resume it
        "command": sys.argv,
        "derived": derived,  # ["max_lr", ...], options that a resumed run derives again
        "tokenizer": tokenizer_spec,
        "init_checksum": weights_checksum,  # open_original refuses other weights
        "data_order": data_order,  # warn_of_order compares it
        "val_checksum": val_checksum,
    }


def open_reference(
    run: Run[ResolvedFinetuneOptions], model: GPT, weights: Mapping[str, Rows]
) -> GPT:
    """Return the reference model of dpo and grpo: a frozen copy of `model` with the `weights` of
    --init_from. It is whole on every process, even if --sharding divides `model`."""
    options = run.options
    reference = build_without_weights(GPT, model.config)  # on the device "meta"
    # in place, with the same options as `model`, because both must round alike
    execute(reference, Execution(options.activation_checkpointing, options.use_torch_compile))
    fill_model(reference, weights, run.process.device)  # allocates it, too
    return reference.eval().requires_grad_(False)


def open_method(
    run: Run[ResolvedFinetuneOptions],
    model: GPT,
    weights: Mapping[str, Rows],
    checkpoint: Checkpoint | None,
) -> Method:
    """Read and encode the rows of a run, and open the models that its method needs beside `model`:
    a reference model for dpo and grpo, a reward model for grpo. `weights` are the initial weights
    of `model`, and `checkpoint` is the checkpoint of --resume.

    Return the method, with the examples of --data and --eval_data. Raise UserError if --init_from
    of a resumed run holds other weights than before, and for a row that cannot be encoded.
    """
    options = run.options
    process = run.process
    tokenizer = load_tokenizer(run.entries["tokenizer"])  # from its spec, such as "gpt2"
    block_size = model.config.block_size
    # In a vocabulary of characters end of text is a line break, which answers have, too.
    if not options.plain and not tokenizer.end_ids:
        raise UserError("a vocabulary of characters has no token that ends an answer: give --plain")
    # Encodes texts of rows as an Example (token ids, loss mask) or a Question (grpo), as chats
    # unless --plain. Cuts an Example to its first block_size tokens.
    encoder = TextEncoder(tokenizer, chat=not options.plain, block_size=block_size)

    reference: GPT | None = None
    if options.method == "dpo" or (options.method == "grpo" and options.kl > 0):
        if checkpoint is not None:
            # A resumed run begins with trained weights, so read --init_from again. Other weights
            # than before would make the loss jump: open_original raises UserError for them.
            weights = open_original(options, checkpoint, process)
        reference = open_reference(run, model, weights)

    reward_function = None  # grpo: takes completions, returns their rewards
    if options.method == "grpo":
        assert options.reward is not None  # FinetuneOptions requires --reward for grpo
        reward_function = load_reward_function(options.reward, encoder, process)
    method_class = METHODS[options.method]  # DirectPreference for "dpo"
    # The constructor reads and encodes the rows. For dpo it also computes the log-probabilities
    # under the reference, and frees the reference.
    method = method_class(options, process, encoder, reference, reward_function)
    if encoder.num_cut:  # counted while the constructor encoded the rows
        process.print(f"warning: {encoder.num_cut:,} texts are cut to {block_size} tokens")
    return method


if __name__ == "__main__":
    call_and_exit(main, before_exit=finish_writing, explain=distributed.explain_lost_process)
