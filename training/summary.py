"""What train.py tells the user before the first step: warnings, and a summary of the run."""

from dataclasses import asdict

from config import ResolvedTrainOptions
from data.loader import Mixture, Slicing, TokenStream
from data.tokenizer import tokenizer_identity
from model.config import GPTConfig
from model.gpt import GPT
from recipes import Recipe
from training.forecast.step_time import step_flops
from training.options import continued_model_config
from training.parallel.tensor_parallel import check_divides
from training.run import Run
from training.start import InitialModel
from utils.devices import seconds_on_cpu
from utils.distributed import Process
from utils.errors import UserError

MOST_EPOCHS = 100  # above this the model would learn its text by heart
SLOW_RUN_SECONDS = 3600  # above this the user is told how long a run on a CPU takes


def agreed_model_config(
    options: ResolvedTrainOptions,
    recipe: Recipe,
    stream: TokenStream | None,
    initial: InitialModel | None,
) -> GPTConfig:
    """Return the architecture of the run: that of the model that it begins with, but dropout may
    differ, and a new run's context may be shorter. `stream` is None in a dry run without shards.

    Raise UserError if options ask for another architecture, if the processes that share each block
    do not divide it, and unless the shards hold the tokens of that model.
    """
    if initial is None:
        vocab_size = GPTConfig.vocab_size if stream is None else stream.vocab_size
        model_config = options.model_config(recipe, vocab_size)
    else:
        model_config = continued_model_config(options, recipe, initial.model_config)
        if stream is not None:
            identity = tokenizer_identity(initial.tokenizer)
            if identity != stream.tokenizer_identity:
                raise UserError(
                    f"{options.weights_from} takes tokens of {identity}, the shards hold those of "
                    f"{stream.tokenizer_identity}"
                )
    check_divides(model_config, options.tensor_parallel)
    return model_config


def note_recipe(
    options: ResolvedTrainOptions, recipe: Recipe, initial: InitialModel | None, process: Process
) -> None:
    """Say so if the weights that a run begins with were trained by another recipe."""
    # {} for a model of another project; finetune.py's have no recipe
    checkpoint = initial.checkpoint if initial is not None else {}
    if checkpoint.get("recipe", asdict(recipe)) != asdict(recipe):
        process.print(
            f"note: {options.weights_from} was trained by the recipe "
            f"{checkpoint['config']['recipe']}; its architecture stays, optimizer and rates are "
            f"now those of {options.recipe}"
        )


def describe_epochs(options: ResolvedTrainOptions, train_data: Mixture) -> str:
    """Return how often the run reads its data, with a warning above MOST_EPOCHS."""
    run_tokens = options.max_steps * options.total_batch_size
    text = train_data.describe_epochs(run_tokens)  # "0.53 epochs"
    if run_tokens > MOST_EPOCHS * len(train_data.stream):
        text += f" (more than {MOST_EPOCHS}: train fewer steps)"
    return text


def describe_steps(options: ResolvedTrainOptions, micro_steps: int, data_parallel: int) -> str:
    """Return how the run is cut into steps, and a step into micro-batches, `micro_steps` on each
    of `data_parallel` parts of the data."""
    text = (
        f"{options.max_steps:,} steps of {options.total_batch_size:,} tokens = "
        f"{options.block_size} x micro-batch {options.micro_batch_size} x micro-steps {micro_steps}"
    )
    if data_parallel > 1:
        text += f" x parts of the data {data_parallel}"
    return text


def print_summary(
    run: Run[ResolvedTrainOptions], model: GPT, train_data: Mixture, slicing: Slicing
) -> None:
    """Print the size of model and data, the steps, and how a step is cut into micro-batches. Before
    that, warn of each folder of train shards whose sharding was interrupted or still runs."""
    options = run.options
    # logger.print writes above the progress bar, on the main process only
    for folder in train_data.stream.unfinished:
        run.logger.print(f"warning: {folder} holds a part of its text: run the sharding to its end")
    if options.warmup_steps > options.max_steps // 2:
        run.logger.print(f"warning: warmup ends after half of the {options.max_steps:,} steps")
    epochs = describe_epochs(options, train_data)
    line = (
        f"{model.num_parameters():,} parameters; {len(train_data.stream):,} train tokens; "
        f"{epochs}: {describe_steps(options, slicing.micro_steps, run.process.data_parallel)}"
    )
    if run.progress.step > 0:
        line += f"; resumed at step {run.progress.step}"
    if options.use_torch_compile:
        line += "; the first step compiles"
    run.logger.print(line)

    if run.process.device.type == "cpu":
        # Estimated from the speed of a matmul: a progress bar shows nothing before the first step
        # ends, which may take minutes.
        step_seconds = seconds_on_cpu(step_flops(options, model), run.process.dtype)
        run_seconds = step_seconds * (options.max_steps - run.progress.step)
        if run_seconds > SLOW_RUN_SECONDS:
            run.logger.print(
                f"the run takes about {run_seconds / 3600:,.0f} hours on this processor, "
                f"{step_seconds:,.1f} s a step"
            )
