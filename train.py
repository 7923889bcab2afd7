"""Train a GPT-2 on token shards.

    python train.py                                        # one GPU, Apple GPU or CPU
    torchrun --standalone --nproc_per_node=8 train.py      # eight GPUs
    python train.py --resume auto                          # continue after a crash or a signal

The global batch is --total_batch_size tokens for any number of processes: gradient accumulation
follows from it. SIGTERM, SIGINT, SIGHUP and SIGUSR1 end the step or the evaluation, save and exit;
SIGKILL costs the steps since the last checkpoint. On CPUs a resumed run equals one that was never
stopped to the bit.

Every process runs this file from top to bottom, and all of them take part in evaluation and saves;
the main process alone prints. What a run is besides its steps (folders, log, signals) stands in
training/run.py.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict

import utils.environment  # noqa: F401 (first: it says what to type without PyTorch)

import torch
import torch.nn as nn
from torch import Tensor

from config import ResolvedTrainOptions, TrainOptions
from data.loader import Mixture, Slicing, TokenStream, prefetch, train_batches
from model.execution import Execution, execute
from model.formats.checkpoint import Checkpoint
from model.gpt import GPT
from model.initial_weights import build_without_weights, initial_weights
from model.rows import Rows
from recipes import Recipe
from training.evaluator import Evaluator
from training.forecast.dry_run import print_forecast
from training.options import read_options, resolve_on_device, resolve_options
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
    # Options come from the flags; those not given follow from the recipe and the device, and
    # `derived` names them. `checkpoint` is the content of the file of --resume, None for a new run.
    given_options, derived, checkpoint = read_options(TrainOptions, "train.py", sys.argv[1:])
    options, recipe = resolve_options(given_options, derived, checkpoint)
    if options.dry_run:
        return print_forecast(options, recipe, checkpoint)
    process = start_process(options)  # signals are remembered from here on

    # data: shards cut into sequences; the batch of a step is a pure function of (seed, step)
    train_data = Mixture(options.data_dir, "train", options.block_size)
    val_data = Mixture(options.data_dir, "val", options.block_size)

    # The model is new, pre-trained or resumed. run.distribute gives it memory and fills in its
    # weights, which are read from a file or drawn from the seed row by row (model/rows.py).
    initial = open_initial(options, checkpoint, process)  # None for random weights
    note_recipe(options, recipe, initial, process)  # if the weights are from another one
    model, weights = build_model(options, recipe, train_data.stream, initial)
    if initial is not None:
        train_data.stream.tokenizer = initial.tokenizer  # the same tokens, perhaps for chats
    is_forecast = options.micro_batch_size == "auto"
    options = resolve_on_device(options, recipe, model.config, process)  # dtype and micro-batch
    began_from = init_checksum(options, checkpoint, initial, process)
    entries = checkpoint_entries(options, derived, recipe, train_data, val_data, began_from)
    run = Run.start(options, checkpoint, process, entries)  # locks the run's folders
    progress = run.progress  # step, tokens, ...
    # `wrapped` shares the weights of `model` and synchronizes gradients
    wrapped, optimizers = run.distribute(model, weights, recipe, checkpoint)
    if is_forecast:  # a micro-batch that runs out of memory is halved
        run.options = options = halve_until_it_fits(run, wrapped)
    del initial, weights, checkpoint  # closes the file from which their tensors are mapped

    # batches, evaluation, log, checkpoints
    batches, slicing = open_batches(run, train_data)
    evaluator = Evaluator(options, model, val_data, process)
    timer = StepTimer(model.flops_per_token(), process)
    with run.open_log(model.config):  # closed however the run ends
        saver = Saver(run, model, optimizers)
        print_summary(run, model, train_data, slicing)  # and warnings

        try:
            while True:
                # every so often: save, evaluate, score and sample
                step = progress.step
                if saver.due(step):
                    saver.save_last()
                if evaluator.due(step):
                    metrics = evaluator.validate()  # {"loss": nats per token, ...}
                    run.logger.log_evaluation("val", metrics, step)
                    saver.save_if_best(metrics["loss"])
                for benchmark, metrics in evaluator.benchmarks(step):
                    run.logger.log_evaluation(benchmark, metrics, step)
                text = evaluator.sample(step)  # None if it is not due
                if text is not None:
                    run.logger.log_sample(text, step)
                if run.ended:
                    break

                # one step, then its log
                timer.start()
                result = train_step(run, wrapped, optimizers, batches, slicing.micro_steps)
                progress.advance(result)  # counts the step, also a skipped one
                if result.skip_reason is None:
                    speed = timer.stop(result.num_tokens)  # tokens_per_s, mfu, ms
                    run.logger.log_train(result.metrics | speed, progress.step)
                else:
                    num_sequences = slicing.sequences_per_step
                    ids = train_data.sequence_ids_of_step(step, num_sequences, options.seed)
                    run.logger.log_skip(result.skip_reason, ids.tolist(), progress.step)
                saver.end_after_patience()  # UserError after 5 skipped steps in a row
                if result.got_signal:  # on any process
                    raise Stopped
        except Stopped:
            # A signal may have interrupted an evaluation; a resumed run does it again.
            run.stopping = True  # run.finish below then says how to continue
            saver.save_last()
        saver.finish()  # waits for the last write

    run.finish(next_commands(options))


def next_commands(options: ResolvedTrainOptions) -> list[str]:
    """Return commands to type after a run, without the folder that follows each."""
    evaluate = f"evaluate.py --tasks val --val_tokens {options.val_tokens} --checkpoint"
    return ["sample.py --checkpoint", evaluate]


def train_step(
    run: Run[ResolvedTrainOptions],
    wrapped: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    batches: Iterator[tuple[Tensor, Tensor]],
    micro_steps: int,
) -> StepResult:
    """Run one optimizer step on the next `micro_steps` of the batches, micro-batches of this
    process; the caller counts it. In a run of one process a signal raises Stopped between
    micro-steps; several processes end the step first, see StepResult.got_signal."""
    options = run.options
    process = run.process
    progress = run.progress
    lr = set_learning_rates(optimizers, options, progress.step)  # warmup and decay
    seed_step(options.seed, progress.step, process.rank)  # for dropout

    # Forward and backward, micro-batch by micro-batch. The gradients add up, and loss_sum becomes
    # the mean loss of this process in nats per token.
    loss_sum = torch.zeros((), device=process.device)
    for micro_step in range(micro_steps):
        # One of several processes must not leave the step alone: the others would wait for it.
        if process.world_size == 1:
            process.end_if_stopped()
        idx, targets = next(batches)  # token ids (B, T) each
        is_last = micro_step == micro_steps - 1
        # DDP and zero1 reduce gradients in the last micro-step, zero2 and zero3 in each.
        with sync_gradients(wrapped, options.sharding, is_last=is_last):
            # A forward pass casts each weight once: keeping the copies would only take memory.
            with process.autocast(keep_weights=False):
                # divided, so that gradients add up to the gradient of the mean loss
                loss = wrapped(idx, targets) / micro_steps
            run.scaler.scale(loss).backward()  # scaled up in float16 alone
        loss_sum += loss.detach()  # stays on the device: no wait for a GPU

    # In float16 the loss was scaled up: scale the gradients down before they are clipped.
    for optimizer in optimizers:
        run.scaler.unscale_(optimizer)  # records infinities, too, for scaler.update below
    grad_norm = clip_grad_norm(wrapped, options.grad_clip)  # norm before clipping

    # Means over processes. Under tensor parallelism process.sum counts those that share a block as
    # one, so that the divisor is data_parallel. At `tolist` the CPU waits for the GPU, in float16
    # at get_scale again.
    signals = torch.full_like(loss_sum, float(process.signal != 0))
    sums = process.sum(torch.stack([loss_sum, grad_norm, signals]))
    mean_loss, mean_norm, share_of_signals = (sums / process.data_parallel).tolist()

    # Update, unless loss or norm is not finite. Both are means, so that all processes update, or
    # none. scaler.step would decide for each optimizer alone, and look at gradients alone.
    skip_reason = reason_to_skip(mean_loss, mean_norm)  # None if both are finite
    metrics = {"loss": mean_loss, "lr": lr, "grad_norm": mean_norm}
    if run.scaler.is_enabled():
        metrics["scale"] = run.scaler.get_scale()  # before `update` changes it
    for optimizer in optimizers:
        if skip_reason is None:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    # float16: a lower scale after infinities, a higher one after 2,000 steps without any
    run.scaler.update()
    num_tokens = options.total_batch_size
    metrics["tokens"] = progress.tokens + num_tokens  # all tokens of the run so far
    return StepResult(metrics, skip_reason, got_signal=share_of_signals > 0, num_tokens=num_tokens)


def build_model(
    options: ResolvedTrainOptions, recipe: Recipe, stream: TokenStream, initial: InitialModel | None
) -> tuple[GPT, Mapping[str, Rows]]:
    """Return the model of the run, without memory yet, and the weights that it begins with: those
    of `initial`, or new ones from the seed. Raises UserError for weights of another architecture or
    tokenizer than the run's."""
    model_config = agreed_model_config(options, recipe, stream, initial)
    model = build_without_weights(GPT, model_config)
    execute(model, Execution(options.activation_checkpointing, options.use_torch_compile))
    if initial is not None:
        return model, initial.weights
    # random numbers, drawn when their rows are read
    return model, initial_weights(model, model_config, options.seed)


def open_batches(
    run: Run[ResolvedTrainOptions], train_data: Mixture
) -> tuple[Iterator[tuple[Tensor, Tensor]], Slicing]:
    """Return the micro-batches of this process, inputs and targets (B, T) on its device, from the
    next step of the run to its last one, and how a step is divided into them."""
    options = run.options
    process = run.process
    slicing = Slicing(
        options.micro_steps(process.data_parallel),
        options.sequences_per_pass,
        process.data_rank,
        process.data_parallel,
    )
    step_range = range(run.progress.step, options.max_steps)
    micro_batches = train_batches(train_data, slicing, options.seed, step_range)
    return prefetch(process.to_device(micro_batches)), slicing  # a thread reads ahead


def checkpoint_entries(
    options: ResolvedTrainOptions,
    derived: dict[str, str | None],
    recipe: Recipe,
    train_data: Mixture,
    val_data: Mixture,
    began_from: int | None,
) -> Checkpoint:
    """Return what checkpoints and config.json hold of a run beside options, model and progress.
    `began_from` is the checksum of the weights of --init_from, None for random ones."""
    return {
        "script": "train.py",
        "command": sys.argv,
        "derived": derived,  # a resumed run derives these options again
        "recipe": asdict(recipe),
        "tokenizer": train_data.stream.tokenizer,  # its spec, see data/tokenizer.py
        "corpus": train_data.title,
        # the batch of a step is a function of these values and the step
        "data_order": {
            "total_batch_size": options.total_batch_size,
            "seed": options.seed,
            "weights of --data_dir": train_data.corpus_weights,
            "checksum of --data_dir": train_data.checksum,
        },
        # the lowest loss counts among validations on the same tokens
        "val_checksum": crc32_of(
            [val_data.stream.checksum, options.val_tokens, val_data.corpus_weights]
        ),
        "init_checksum": began_from,
    }


if __name__ == "__main__":
    call_and_exit(main, before_exit=finish_writing, explain=distributed.explain_lost_process)
