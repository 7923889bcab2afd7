"""Train a GPT-2 on token shards.

    python train.py                                        # one GPU, Apple GPU or CPU
    torchrun --standalone --nproc_per_node=8 train.py      # eight GPUs
    python train.py --resume auto                          # continue after a crash or a signal

The global batch has --total_batch_size tokens on any number of processes: each process accumulates
gradients over its share. After SIGTERM, SIGINT, SIGHUP or SIGUSR1 the run ends its step (a single
process drops it), or breaks off an evaluation, saves and exits. SIGKILL loses the steps since the
last checkpoint. On CPUs a resumed run gives the same bits as a run that was never stopped.

Every process runs this file from top to bottom and takes part in evaluation and saves. Only the
main process prints. training/run.py has the rest of a run: folders, log and signals.
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict

import utils.environment  # noqa: F401 (first: it says what to type without PyTorch)

import torch
import torch.nn as nn

from config import ResolvedTrainOptions, TrainOptions
from data.loader import Mixture, Slicing, TokenStream, TrainBatches, prefetch, train_batches
from model.execution import Execution, execute
from model.formats.checkpoint import Checkpoint
from model.gpt import GPT
from model.initial_weights import new_model
from model.rows import Rows
from recipes import Recipe
from training.evaluator import Evaluator
from training.forecast.dry_run import print_forecast
from training.minutes import choose_for_minutes
from training.options import (
    compile_if_all_can,
    read_options,
    resolve_on_device,
    resolve_options,
)
from training.parallel.data_parallel import clip_grad_norm, sync_gradients
from training.run import Run, StepResult, reason_to_skip, seed_step, start_process
from training.saver import Saver, finish_writing
from training.schedule import set_learning_rates
from training.start import InitialModel, crc32_of, init_checksum, open_initial
from training.summary import agreed_model_config, note_recipe, print_summary
from training.trial import halve_until_it_fits
from utils import distributed
from utils.cli import call_and_exit
from utils.distributed import Stopped
from utils.throughput import StepTimer


def main() -> None:
    # `derived` names the options that no flag sets, ["max_lr", "min_lr", ...]: the recipe, other
    # options and the device decide them. `checkpoint` is the content of the --resume file, or None.
    given_options, derived, checkpoint = read_options(TrainOptions, "train.py", sys.argv[1:])
    options, recipe = resolve_options(given_options, derived, checkpoint)  # ResolvedTrainOptions
    if options.dry_run:
        return print_forecast(options, recipe, checkpoint)  # size, memory, time; trains nothing
    process = start_process(options)  # rank, device, ...; a signal now ends the loop, which saves
    options = compile_if_all_can(options, process)  # off without a working compiler
    if options.minutes is not None and checkpoint is None:  # a resumed run keeps its options
        options, derived = choose_for_minutes(options, recipe, process)  # sets size, batch, steps

    # A Mixture is one split of all corpora, as sequences. data_dir has Paths such as data/a:0.7.
    train_data = Mixture(options.data_dir, "train", options.block_size)
    val_data = Mixture(options.data_dir, "val", options.block_size)

    initial = open_initial(options, checkpoint, process)  # of --resume or --init_from, or None
    note_recipe(options, recipe, initial, process)  # prints if the weights had another recipe
    # `model` has no memory until run.distribute fills in `weights`, Rows that are read row by row
    model, weights = build_model(options, recipe, train_data.stream, initial)
    if initial is not None:
        train_data.stream.tokenizer_spec = initial.tokenizer_spec  # saved; may add a chat template
    options = resolve_on_device(options, recipe, model.config, process)  # dtype, micro_batch_size
    weights_checksum = init_checksum(options, checkpoint, initial, process)  # of --init_from
    # {"derived": ["max_lr", ...], "recipe": {...}, ...}, which all checkpoints of the run repeat
    entries = checkpoint_entries(options, derived, recipe, train_data, val_data, weights_checksum)
    run = Run.start(options, checkpoint, process, entries)  # locks folders, compares processes
    progress = run.progress  # step, tokens, ... of `checkpoint`, or 0; advanced in the loop below
    # Fills in `weights`, and optimizer state of `checkpoint`. `wrapped`: `model`, or DDP around it.
    wrapped, optimizers = run.distribute(model, weights, recipe, checkpoint)
    run.options = options = halve_until_it_fits(run, wrapped)  # an automatic micro-batch, on GPUs
    del initial, weights, checkpoint  # closes the file that their tensors are mapped from

    batches = open_batches(run, train_data)  # TrainBatches, endless, in an order of the seed
    micro_steps = options.micro_steps(process.data_parallel)  # micro-batches per process and step
    evaluator = Evaluator(options, model, val_data, process)  # validation, benchmarks, samples
    timer = StepTimer(model.flops_per_token(), process)  # for tokens/s and MFU
    with run.open_log(model.config):  # closes the log after an error, too
        saver = Saver(run, model, optimizers)  # for model_last.pt and model_best.pt
        print_summary(run, model, train_data, micro_steps)  # and warnings

        try:
            while True:
                # every so often: save, evaluate, score and sample
                step = progress.step  # number of steps done
                if saver.due(step):
                    saver.save_last()
                if evaluator.due(step):
                    metrics = evaluator.validate()  # {"loss": nats per token, ...}
                    run.logger.log_evaluation("val", metrics, step)
                    saver.save_if_best(metrics["loss"])
                for benchmark, metrics in evaluator.due_benchmarks(step):
                    run.logger.log_evaluation(benchmark, metrics, step)  # {"n": 500, "acc": 0.3}
                text = evaluator.sample(step)  # on all processes; None if no sample is due
                if text is not None:
                    run.logger.log_sample(text, step)
                if run.ended:  # step == max_steps
                    break

                # one step, then its log
                timer.start()
                result = train_step(run, wrapped, optimizers, batches, micro_steps)  # StepResult
                progress.advance(result)  # now progress.step == step + 1, also if it was skipped
                if result.skip_reason is None:
                    speed = timer.stop(result.num_tokens)  # tokens_per_s, mfu, ms
                    run.logger.log_train(result.metrics | speed, progress.step)
                else:
                    ids = train_data.sequence_ids_at(result.positions, options.seed)  # int64 (N,)
                    run.logger.log_skip(result.skip_reason, ids.tolist(), progress.step)
                # UserError: a checkpoint would lose optimizer state, or 5 skipped steps in a row
                saver.check_step()
                if result.got_signal:  # on any process
                    raise Stopped
        except Stopped:
            # If the signal interrupted an evaluation, the resumed run repeats it.
            run.ended_early = True  # run.finish below then prints how to continue
            saver.save_last()
        saver.finish()  # waits for the last write

    run.finish(next_commands(options))  # prints the result; exits after a signal


def next_commands(options: ResolvedTrainOptions) -> list[str]:
    """Return the commands that a finished run suggests. Run.finish adds its folder to each."""
    evaluate = f"evaluate.py --tasks val --val_tokens {options.val_tokens} --checkpoint"
    return ["sample.py --checkpoint", evaluate]


def train_step(
    run: Run[ResolvedTrainOptions],
    wrapped: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    batches: TrainBatches,
    micro_steps: int,
) -> StepResult:
    """Run one optimizer step on the next `micro_steps` micro-batches of this process. The caller
    counts the step. After a signal, a single process raises Stopped between micro-steps; several
    processes finish the step first and return the signal in StepResult.got_signal."""
    options = run.options
    process = run.process
    progress = run.progress
    lr = set_learning_rates(optimizers, options, progress.step)  # in place, with warmup and decay
    seed_step(options.seed, progress.step, process.rank)  # for dropout

    # Forward and backward, micro-batch by micro-batch. Gradients accumulate, and own_loss becomes
    # the mean loss of this process in nats per token.
    own_loss = torch.zeros((), device=process.device)
    num_targets = 0  # of this process
    first_position = batches.position  # in the data order
    for micro_step in range(micro_steps):
        # If one of several processes left the step here, the others would wait for it forever.
        if process.world_size == 1:
            process.end_if_stopped()
        idx, targets = next(batches)  # token ids (B, T) each
        is_last = micro_step == micro_steps - 1
        # DDP and zero1 reduce gradients in the last micro-step only, zero2 and zero3 in each.
        with sync_gradients(wrapped, options.sharding, is_last=is_last):
            # A forward pass casts each weight once. Keeping the copies would only take memory.
            with process.autocast(keep_weights=False):
                # the gradients of these parts add up to the gradient of the mean loss
                loss = wrapped(idx, targets) / micro_steps
            num_targets += targets.numel()
            run.scaler.scale(loss).backward()  # a GradScaler, which scales in float16 only
        own_loss += loss.detach()  # stays on the device, so the CPU does not wait for it

    # float16: undo the loss scale in the gradients before they are clipped.
    for optimizer in optimizers:
        run.scaler.unscale_(optimizer)  # also records infinities, for scaler.update below
    # Clips in place; 0 means no limit. grad_norm, (), is the norm of all gradients before that.
    grad_norm = clip_grad_norm(wrapped, options.grad_clip)

    # Average over processes. process.sum counts the processes of a tensor-parallel group as one,
    # so the divisor is data_parallel. The CPU waits for the GPU at `tolist`, and in float16 again
    # at get_scale.
    signals = torch.full_like(own_loss, float(process.signal != 0))  # 1.0: told to stop
    sums = process.sum(torch.stack([own_loss, grad_norm, signals]))  # (3,)
    mean_loss, mean_norm, share_of_signals = (sums / process.data_parallel).tolist()

    # Update only if loss and norm are finite. Both are means over processes, so all processes
    # decide alike. scaler.step would decide for each optimizer separately, and by gradients only.
    skip_reason = reason_to_skip(mean_loss, mean_norm)  # None if both are finite
    metrics = {"loss": mean_loss, "lr": lr, "grad_norm": mean_norm}
    if run.scaler.is_enabled():
        metrics["scale"] = run.scaler.get_scale()  # before `update` changes it
    if skip_reason is None:
        for optimizer in optimizers:
            optimizer.step()
    wrapped.zero_grad(set_to_none=True)
    # float16: lower the scale after infinities, raise it after 2,000 steps without any
    run.scaler.update()
    num_tokens = num_targets * process.data_parallel  # of all processes; num_targets: of this one
    metrics["tokens"] = progress.tokens + num_tokens  # all tokens of the run so far
    return StepResult(
        metrics=metrics,
        skip_reason=skip_reason,
        got_signal=share_of_signals > 0,
        num_tokens=num_tokens,
        positions=range(first_position, batches.position),  # in the data order, of all processes
    )


def build_model(
    options: ResolvedTrainOptions, recipe: Recipe, stream: TokenStream, initial: InitialModel | None
) -> tuple[GPT, Mapping[str, Rows]]:
    """Return the model of the run, still without memory, and its first weights by name: the
    weights of `initial`, or random ones from the seed. Raises UserError if `initial` has another
    architecture or tokenizer than the run."""
    model_config = agreed_model_config(options, recipe, stream, initial)  # a GPTConfig
    # a model on "meta", and Rows by name: rows[0:4] draws the first four rows of a weight
    model, weights = new_model(GPT, model_config, options.seed)
    # in place: activation checkpointing ("none", "cheap" or "block") and torch.compile
    execute(model, Execution(options.activation_checkpointing, options.use_torch_compile))
    return model, initial.weights if initial is not None else weights


def open_batches(run: Run[ResolvedTrainOptions], train_data: Mixture) -> TrainBatches:
    """Return the micro-batches of this process from the next step on, without end, as inputs and
    targets (B, T) on its device."""
    process = run.process
    # this process reads B = sequences_per_pass sequences of each micro-step, those of data_rank
    slicing = Slicing(run.options.sequences_per_pass, process.data_rank, process.data_parallel)
    position = run.progress.position  # int: the sequences that all processes have read so far
    # NumPy arrays (B, T) of inputs and targets, read when `next` asks for them
    micro_batches = train_batches(train_data, slicing, run.options.seed, position)
    # A thread reads ahead, and this one copies: copies to an Apple GPU from a second thread have
    # given wrong numbers (pytorch issue 197805).
    return TrainBatches(process.to_device(prefetch(micro_batches)), slicing, position)


def checkpoint_entries(
    options: ResolvedTrainOptions,
    derived: list[str],
    recipe: Recipe,
    train_data: Mixture,
    val_data: Mixture,
    weights_checksum: int | None,
) -> Checkpoint:
    """Return the entries of checkpoints and config.json that do not change from step to step. Saver
    adds options, model and progress. `weights_checksum` is of the --init_from weights, None for
    random weights."""
    return {
        "script": "train.py",
        "command": sys.argv,
        "derived": derived,  # ["max_lr", ...], options that a resumed run derives again
        "recipe": asdict(recipe),
        "tokenizer": train_data.stream.tokenizer_spec,  # its spec, see data/tokenizer.py
        "corpus": train_data.title,  # "FineWeb-Edu", or "75 % of a, 25 % of b"
        # The order of the sequences depends on these values. A resumed run warns if they changed.
        "data_order": {
            "seed": options.seed,
            "weights of --data_dir": train_data.corpus_weights,
            "checksum of --data_dir": train_data.checksum,
        },
        # Losses are compared only between validations on the same tokens.
        "val_checksum": crc32_of(
            [val_data.stream.checksum, options.val_tokens, val_data.corpus_weights]
        ),
        "init_checksum": weights_checksum,
    }


if __name__ == "__main__":
    call_and_exit(main, before_exit=finish_writing, explain=distributed.explain_lost_process)
