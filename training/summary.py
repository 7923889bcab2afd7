"""What train.py checks and tells the user before the first step: whether weights, shards and
options fit together, warnings, and a summary of the run."""

from dataclasses import asdict

from config import ResolvedTrainOptions
from data.loader import Mixture, TokenStream
from data.tokenizer import tokenizer_identity
from model.config import GPTConfig
from model.gpt import GPT
from model.layers import attention_kernel
from recipes import Recipe
from training.options import continued_model_config
from training.parallel.tensor_parallel import check_divides
from training.run import Run
from training.start import InitialModel
from utils.devices import seconds_on_cpu
from utils.distributed import Process
from utils.errors import UserError

WARNED_EPOCHS = 100  # above this the model would memorize its text
SLOW_RUN_SECONDS = 3600  # above this, a run on a CPU prints how long it will take


def agreed_model_config(
    options: ResolvedTrainOptions,
    recipe: Recipe,
    stream: TokenStream | None,
    initial: InitialModel | None,
) -> GPTConfig:
    """Return the architecture of the run: for a new model the options decide it. A run from
    `initial` keeps its architecture, except for dropout and, in a new run, a shorter context.
    `stream` has the train tokens; it is None in a dry run without shards.

    Raises UserError if options ask for another architecture, if the number of processes that share
    each block (tensor parallelism) does not divide it, or if shards and model differ in tokenizer.
    """
    if initial is None:
        # without shards (in a dry run) GPT-2's, 50257
        vocab_size = GPTConfig.vocab_size if stream is None else stream.vocab_size
        # sizes from --model_type or the flags, the rest from the recipe
        model_config = options.model_config(recipe, vocab_size)
    else:
        # the architecture of the weights, with the options' dropout and perhaps a shorter context;
        # UserError if the options or the recipe ask for another
        model_config = continued_model_config(options, recipe, initial.model_config)
        if stream is not None:
            # "gpt2", "bytes" or "tokenizer-8f3a01c2 with <|endoftext|>"
            identity = tokenizer_identity(initial.tokenizer_spec)
            if identity != stream.tokenizer_identity:
                raise UserError(  # weights_from: a path, or a name such as "gpt2"
                    f"{options.weights_from} takes tokens of {identity}, the shards hold tokens of "
                    f"{stream.tokenizer_identity}"
                )
    check_divides(model_config, options.tensor_parallel)  # UserError: heads or MLP do not divide
    return model_config


def note_recipe(
    options: ResolvedTrainOptions, recipe: Recipe, initial: InitialModel | None, process: Process
) -> None:
    """Print a note if another recipe trained the weights that a run begins with."""
    # {} for random weights or a model of another project; files of finetune.py have no recipe
    checkpoint = initial.checkpoint if initial is not None else {}
    if checkpoint.get("recipe", asdict(recipe)) != asdict(recipe):  # the fields of Recipe by name
        # weights_from is a path here. Both recipes are texts of --recipe: "modern,qk_norm=False".
        process.print(
            f"note: {options.weights_from} was trained by the recipe "
            f"{checkpoint['config']['recipe']}; this run keeps its architecture and "
            f"takes optimizer and learning rates from {options.recipe}"
        )


def describe_run_epochs(options: ResolvedTrainOptions, train_data: Mixture) -> str:
    """Return how often the run reads its data, "0.53 epochs", with a warning above WARNED_EPOCHS;
    of several corpora that of the one seen most often."""
    run_tokens = options.max_steps * options.total_batch_size  # total_batch_size is in tokens
    epochs_by_corpus = train_data.epochs_by_corpus(run_tokens)  # {"books": 1.2, "code": 0.3}
    name, most_epochs = max(epochs_by_corpus.items(), key=lambda item: item[1])
    text = f"{most_epochs:,.2f} epochs"
    if len(epochs_by_corpus) > 1:
        text += f" of {name}, the corpus seen most often"
    if most_epochs > WARNED_EPOCHS:
        text += f" (more than {WARNED_EPOCHS}: train fewer steps)"
    return text


def describe_steps(options: ResolvedTrainOptions, micro_steps: int, data_parallel: int) -> str:
    """Return as text how the run is divided into steps, and a step into micro-batches: each of the
    `data_parallel` parts of the data has `micro_steps` of them."""
    text = (
        f"{options.max_steps:,} steps of {options.total_batch_size:,} tokens = "
        f"{options.block_size} x micro-batch {options.micro_batch_size} x micro-steps {micro_steps}"
    )
    if data_parallel > 1:
        text += f" x parts of the data {data_parallel}"
    return text


def print_summary(
    run: Run[ResolvedTrainOptions], model: GPT, train_data: Mixture, micro_steps: int
) -> None:
    """Warn of train shards whose sharding is not finished and of a long warmup. Then print the size
    of model and data, the steps, their micro-batches, on a GPU the attention kernel and, for a slow
    run on a CPU, its time."""
    options = run.options
    # logger.print writes above the progress bar, on the main process only
    for folder in train_data.stream.unfinished_folders:
        run.logger.print(
            f"warning: {folder} holds only a part of its text: run the sharding to its end"
        )
    if options.warmup_steps > options.max_steps // 2:  # learning_rate ends it there
        run.logger.print(f"warning: warmup ends after half of the {options.max_steps:,} steps")
    epochs_text = describe_run_epochs(options, train_data)
    line = (
        f"{model.num_parameters():,} parameters; {len(train_data.stream):,} train tokens; "
        f"{epochs_text}: {describe_steps(options, micro_steps, run.process.data_parallel)}"
    )
    if run.progress.step > 0:
        line += f"; resumed at step {run.progress.step}"
    if options.use_torch_compile:
        line += "; the first step compiles"
    run.logger.print(line)
    if run.process.device.type == "cuda":
        # "FLASH_ATTENTION", "CUDNN_ATTENTION", ...
        kernel = attention_kernel(model.config, run.process.device, run.process.dtype)
        run.logger.print(f"attention by PyTorch's {kernel}")

    if run.process.device.type == "cpu":
        # Estimated from the speed of a matmul, because a progress bar shows nothing until the first
        # step ends, which may take minutes. model.flops_per_token is a formula
        # without recomputed FLOPs: to measure them would take a second.
        step_flops = options.total_batch_size * model.flops_per_token()  # of all processes
        step_seconds = seconds_on_cpu(step_flops, run.process.dtype) / run.process.world_size
        run_seconds = step_seconds * (options.max_steps - run.progress.step)
        if run_seconds > SLOW_RUN_SECONDS:
            run.logger.print(
                f"the run takes about {run_seconds / 3600:,.0f} hours on this processor, "
                f"{step_seconds:,.1f} s a step"
            )
