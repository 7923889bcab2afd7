"""What train.py tells the user before the first step: warnings, and a summary of the run."""

from pathlib import Path

from config import ResolvedTrainConfig
from data.loader import Mixture, Slicing, TokenStream
from data.tokenizer import tokenizer_identity
from evaluation.validation import too_few_tokens
from model.gpt import GPT
from model.recipes import Recipe
from training.run import Run
from utils.devices import seconds_on_cpu
from utils.distributed import launched
from utils.errors import UserError

MANY_EPOCHS = 100  # a small text is learned by heart long before
SLOW_RUN_SECONDS = 3600  # a run on a CPU that takes longer is announced


def check_tokenizer(stream: TokenStream, weights_from: Path | str, tokenizer: str) -> None:
    """Raise UserError unless the shards hold the tokens of a model; `tokenizer` is the spec of the
    model's. The shards' tokenizer takes over its chat template, which checkpoints save."""
    identity = tokenizer_identity(tokenizer)
    if identity != stream.tokenizer_identity:
        raise UserError(
            f"{weights_from} takes tokens of {identity}, the shards hold those of "
            f"{stream.tokenizer_identity}"
        )
    stream.tokenizer = tokenizer  # equal tokens, but the spec may hold a chat template, too


def announce_recipe(options: ResolvedTrainConfig, recipe: Recipe, checkpoint: dict) -> None:
    """Print, on the main process, that another recipe than this run's has trained the weights of
    --init_from, those of `checkpoint`."""
    # {} of a model of another project; finetune.py has no recipe
    earlier_options = checkpoint.get("config", {})
    earlier_name = earlier_options.get("recipe", options.recipe)
    if earlier_name != options.recipe and launched("RANK") == 0:
        print(
            f"{options.init_from} was trained by --recipe {earlier_name}, at a rate of "
            f"{earlier_options['max_lr']:g}; this run trains it by --recipe {options.recipe}, with "
            f"{recipe.optimizer} at {options.max_lr:g}"
        )


def warn_of_data(run: Run[ResolvedTrainConfig], train_data: Mixture, val_data: Mixture) -> None:
    """Warn where shards are unfinished, text is seen often, or validation is rough."""
    options = run.config
    warn = run.process.print
    # a sharding that was interrupted, or that still runs
    for folder in train_data.stream.unfinished:
        warn(f"warning: {folder} holds a part of its text: run the sharding to its end")
    # each corpus is validated alone, on up to --val_tokens of its tokens
    for name, part in zip(val_data.names, val_data.parts, strict=True):
        if len(part) * part.block_size < options.val_tokens:
            warn(too_few_tokens(name, part, options.val_tokens))
    train_tokens = options.max_steps * options.total_batch_size
    if train_data.epochs(train_tokens)[0] > MANY_EPOCHS:
        smaller = "--max_steps, --total_batch_size and perhaps --n_layer, --n_head, --n_embd"
        warn(f"warning: {train_data.describe_epochs(train_tokens)} are many: see {smaller}")


def data_order(options: ResolvedTrainConfig, train_data: Mixture) -> dict:
    """Return what the batch of a step follows from, beside the step; checkpoints keep it."""
    return {
        "total_batch_size": options.total_batch_size,
        "seed": options.seed,
        "weights of --data_dir": train_data.weights,
        "checksum of --data_dir": train_data.stream.digest,
    }


def print_summary(
    run: Run[ResolvedTrainConfig], model: GPT, train_data: Mixture, slicing: Slicing
) -> None:
    """Print the size of model and data, the steps, and how a step is cut into micro-batches."""
    options = run.config
    tokens_per_step = options.total_batch_size
    epochs = train_data.describe_epochs(options.max_steps * tokens_per_step)
    text = (
        f"{model.num_parameters():,} parameters; {len(train_data.stream):,} train tokens; "
        f"{epochs}: {options.max_steps:,} steps of {tokens_per_step:,} tokens = "
        f"{options.block_size} x micro-batch {options.micro_batch_size} x micro-steps "
        f"{slicing.micro_steps} x processes {run.process.world_size}"
    )
    if run.start_step > 0:
        text += f"; resumed at step {run.start_step}"
    if options.use_torch_compile:
        text += "; the first step compiles"
    run.logger.print(text)

    if run.process.device.type == "cpu":
        # measured by one matmul: a progress bar shows nothing before the first step ends
        step_seconds = seconds_on_cpu(tokens_per_step * model.flops_per_token(), run.dtype)
        run_seconds = step_seconds * (options.max_steps - run.start_step)
        if run_seconds > SLOW_RUN_SECONDS:
            run.logger.print(
                f"the run takes about {run_seconds / 3600:,.0f} hours on this processor, "
                f"{step_seconds:,.1f} s a step"
            )
