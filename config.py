"""Options of train.py as dataclasses: utils/cli.py makes the command line from them.

Each option is declared once, as a field with its type, default, unit and help text. finetune.py
uses the groups RunOptions, OptimizerOptions, SaveOptions and MachineOptions, too. scripts/bench.py
uses ModelOptions and MachineOptions. Other scripts declare their own options. SamplingConfig holds
the options of text generation. This file is not about files, checkpoints or processes.

Options are frozen and go one way: flags -> options (None: not given) -> resolved options, which
training/options.py completes from the recipe and the machine.
"""

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from model.config import GPT3_SIZES, SIZES, GPTConfig
from recipes import Recipe, ScheduleName, rate_and_batch
from utils.cli import flag_value
from utils.errors import UserError
from utils.ranges import BelowOne, Count, Natural, NonNegative

WARMUP_STEPS = 715  # GPT-3's 375M tokens, at 524,288 tokens per step (Brown et al. 2020)

# Options of one launch of a script. RunOptions.to_dict leaves them out of checkpoints and
# config.json, so that a resumed run does not take them over.
PER_LAUNCH = ("run_dir", "config", "resume", "overwrite", "dry_run", "minutes")

# Options that follow from other options, the recipe or the device if they are not given or "auto".
# A resumed run derives them again: a new --max_lr changes --min_lr. It keeps its warmup and, unless
# it was moved or branches off, the folder of its log (saved_options of training/options.py).
DERIVED = (
    "log_dir",
    "total_batch_size",
    "max_lr",
    "min_lr",
    "weight_decay",
    "schedule",
    "warmup_steps",
    "micro_batch_size",
    "use_torch_compile",
)

Resolved = TypeVar("Resolved", bound="ResolvedOptions")


@dataclass(frozen=True)
class RunOptions:
    """Where the run reads and writes."""

    run_dir: Path | None = None
    """Folder of the run: short for --checkpoint_dir RUN_DIR/checkpoints; the log goes to
    RUN_DIR/logs. The two flags below override it."""
    checkpoint_dir: Path = Path("checkpoints")
    """Folder for model_last.pt, model_best.pt and numbered checkpoints."""
    log_dir: Path | None = None
    """Folder for metrics.jsonl, samples.txt and config.json; default: logs, beside --checkpoint_dir
    if that is named checkpoints, else in it. A resumed run keeps its folder unless it was moved or
    branches off."""
    config: Path | None = None
    """File of options: a .toml file (see configs/) or a run's config.json. The command line
    overrides its options; default: none."""
    resume: str | None = None
    """Run to continue: a checkpoint or the folder of a run; auto, or no value: the run in --run_dir
    or --checkpoint_dir, or a new run if there is none. Default: a new run."""
    init_from: str | None = None
    """Weights to start from: a checkpoint of this project or its folder, a checkpoint of nanoGPT,
    build-nanogpt or llm.c, or a Hugging Face name (gpt2) or folder; train.py's default: random
    weights."""
    overwrite: bool = False
    """Replace the checkpoints and logs of another run, or of later steps of this run."""

    @property
    def resumed_file(self) -> Path | None:
        """Path of the checkpoint to resume; None for a new run. training/options.py has put this
        path into `resume`, or left "auto" there if there is no checkpoint to resume."""
        if self.resume is None or self.resume == "auto":
            return None
        return Path(self.resume)

    @property
    def weights_from(self) -> Path | str | None:
        """Checkpoint to resume, or else the value of --init_from; None for random weights."""
        return self.resumed_file or self.init_from

    @property
    def is_branch(self) -> bool:
        """True if the checkpoint to resume lies outside of --checkpoint_dir. The run is then a new
        run with its own id. A moved or copied folder continues the same run."""
        if self.resumed_file is None:
            return False
        # resolve: "runs/a" and a symbolic link to it are the same folder
        return self.resumed_file.parent.resolve() != self.checkpoint_dir.resolve()

    @classmethod
    def checkpoint_folder(cls, flags: list[str]) -> Path:
        """Return the --checkpoint_dir of a command line that is not parsed yet. --resume auto looks
        for a checkpoint there before parsing, because the checkpoint adds options."""
        # `flags` are ["--max_lr", "6e-4", ...]; flag_value returns None if there is no such flag.
        # cls.checkpoint_dir is the default of the field.
        return Path(flag_value(flags, "checkpoint_dir") or cls.checkpoint_dir)

    def to_dict(self) -> dict:
        """Return the resolved options of all groups as plain values, without those of PER_LAUNCH,
        for checkpoints and config.json."""
        options: dict[str, object] = {}  # {"max_lr": 0.0006, "data_dir": ["data/a"], ...}
        for name, value in vars(self).items():
            if name in PER_LAUNCH:
                continue
            # JSON and torch.load(weights_only=True) cannot hold paths
            if isinstance(value, Path):
                # A resume from another working directory must find the folders that are written.
                is_written = name in ("checkpoint_dir", "log_dir")
                value = str(value.absolute() if is_written else value)
            elif isinstance(value, tuple):  # a tuple of Paths, such as data_dir
                value = [str(folder) for folder in value]
            options[name] = value
        return options


@dataclass(frozen=True)
class DataOptions:
    """Tokens and batches."""

    data_dir: tuple[Path, ...] = (Path("data/edu_fineweb10B"),)
    """Folders of token shards, made by data/fineweb-edu.py, build-nanogpt, llm.c, modded-nanogpt or
    datatrove; with weights as FOLDER:0.7."""
    total_batch_size: Count | None = None
    """Tokens per step, over all processes; it sets the number of gradient accumulation steps.
    Default: by the width of the model: 524,288 for 768 channels, 2,048 for 128."""
    micro_batch_size: Count | Literal["auto"] = "auto"
    """Sequences per forward pass of a process; auto: on CUDA as many as should fit into memory,
    else up to 16."""

    @property
    def sequences_per_pass(self) -> int:
        """--micro_batch_size as a number; read it only after "auto" was replaced."""
        # resolve_on_device (training/options.py) or a dry run has replaced "auto" by a number
        assert self.micro_batch_size != "auto"
        return self.micro_batch_size


@dataclass(frozen=True)
class ModelOptions:
    """Architecture: --model_type or these options set the sizes, --recipe sets the rest."""

    recipe: str = "gpt2"
    """Architecture and optimizer: gpt2, modern or llama (docs/RECIPES.md).
    modern,qk_norm=False,max_lr=0.01 changes fields of a recipe: position=learned or rotary,
    norm=layer or rms, activation=gelu, gelu_exact, relu2 or swiglu, optimizer=adamw or muon,
    schedule=cosine, linear or wsd; True or False for qk_norm, bias, tied and to_zero; whole numbers
    for n_kv_head and n_inner; numbers for mlp_ratio, max_lr, embedding_rate, head_rate,
    weight_decay, normuon, momentum, rope_base and norm_eps."""
    model_type: Literal[
        "gpt2",
        "gpt2-medium",
        "gpt2-large",
        "gpt2-xl",
        "gpt3-small",
        "gpt3-medium",
        "gpt3-large",
        "gpt3-xl",
        "gpt3-2.7b",
        "gpt3-6.7b",
        "gpt3-13b",
        "gpt3-175b",
    ] = "gpt2"
    """Named size: GPT-2's sizes have 124M, 355M, 774M and 1558M parameters; GPT-3's have a context
    of 2,048 tokens. Learning rate and batch follow the size, as in the GPT-3 paper."""
    n_layer: Count | None = None
    """Number of transformer blocks; default: from --model_type."""
    n_head: Count | None = None
    """Number of attention heads; default: from --model_type."""
    n_embd: Count | None = None
    """Channels of the residual stream; default: from --model_type."""
    block_size: Count | None = None
    """Context length, tokens per sequence; default: 1,024, for GPT-3's sizes 2,048."""
    dropout: BelowOne = 0.0
    """Dropout probability; use 0 for runs of about one epoch."""

    @property
    def width(self) -> int:
        """Channels of the residual stream: --n_embd, or those of --model_type."""
        return self.n_embd or SIZES[self.model_type][2]  # 768 of (12, 12, 768) for gpt2

    @property
    def resolved_block_size(self) -> int:
        """Tokens per sequence: --block_size, or the default of --model_type."""
        default = 2048 if self.model_type in GPT3_SIZES else 1024
        return self.block_size or default

    def model_config(self, recipe: Recipe, vocab_size: int) -> GPTConfig:
        """Return the architecture: the recipe's fields, and the sizes of --model_type unless these
        options override them."""
        n_layer, n_head, _ = SIZES[self.model_type]  # (12, 12, 768): layers, heads, channels
        return GPTConfig(
            block_size=self.resolved_block_size,
            vocab_size=vocab_size,
            n_layer=self.n_layer or n_layer,
            n_head=self.n_head or n_head,
            n_embd=self.width,
            dropout=self.dropout,
            **recipe.model_fields(self.width),  # {} of gpt2, {"n_inner": 2048, ...} of modern
        )


@dataclass(frozen=True)
class OptimizerOptions:
    """Steps, learning rate and AdamW."""

    max_steps: Count | None = 19_073
    """Optimizer steps; 19,073 steps of 524,288 tokens are 10B tokens."""
    max_lr: NonNegative | None = None
    """Learning rate after warmup; default: from the recipe (gpt2: by the width of the model, 6e-4
    for 768 channels, 0.004 for 128; modern: 0.012)."""
    min_lr: NonNegative | None = None
    """Learning rate of the last step; default: from the recipe (gpt2: a tenth of --max_lr, modern:
    0)."""
    warmup_steps: Natural | None = None
    """Steps of linear warmup, at most half of --max_steps; default: 715, or a tenth of --max_steps
    if that is less."""
    schedule: ScheduleName | None = None
    """Decay of the learning rate after warmup: cosine, linear, or wsd (constant, then linear in the
    last fifth); default: from the recipe."""
    weight_decay: NonNegative | None = None
    """Weight decay of matrices and embeddings, with Muon only of Muon's matrices; default: 0.1."""
    beta1: BelowOne = 0.9
    """AdamW's decay of the first moment."""
    beta2: BelowOne = 0.95
    """AdamW's decay of the second moment."""
    grad_clip: NonNegative = 1.0
    """Clip the gradient to this norm; 0: no clipping."""


@dataclass(frozen=True)
class SaveOptions:
    """Evaluation, checkpoints, samples and Weights & Biases."""

    eval_every: Natural = 250
    """Steps between validations; 0: validate only after the last step."""
    save_every: Natural = 500
    """Steps between saves of model_last.pt; 0: only before the first and after the last step."""
    keep_last: Natural = 0
    """Number of numbered checkpoints (model_step_005000.pt) to keep besides model_last.pt and
    model_best.pt."""
    sample_every: Natural = 500
    """Steps between generated texts in samples.txt; 0: none."""
    wandb: bool = False
    """Log to Weights & Biases, too; WANDB_PROJECT and WANDB_NAME name the project and the run."""


@dataclass(frozen=True)
class EvaluationOptions:
    """Validation and benchmarks."""

    val_tokens: Count = 10_485_760
    """Tokens per validation, of each corpus; each validation reads the same tokens."""
    hellaswag_every: Natural = 0
    """Steps between HellaSwag scores; 0: none."""
    lambada_every: Natural = 0
    """Steps between LAMBADA scores; 0: none."""
    core_every: Natural = 0
    """Steps between scores of CORE, a set of 22 tasks; 0: none."""
    eval_full: bool = False
    """Score all examples of a benchmark, instead of a fixed subset of 500 (CORE: 500 per task)."""
    hellaswag_data: Path | None = None
    """HellaSwag .jsonl file in the original format; default: download it from the hub."""
    lambada_data: Path | None = None
    """LAMBADA .jsonl file in OpenAI's format; default: download it from the hub."""
    core_data: Path | None = None
    """Folder of CORE in the layout of nanochat's eval_bundle; default: download it, 160 MB."""


@dataclass(frozen=True)
class MachineOptions:
    """Device, precision, parallelism and memory."""

    seed: Natural = 1337
    """Seed of the initial weights, the data order, dropout and samples."""
    device: str = "auto"
    """Device: auto (the fastest of this machine), cpu, cuda, cuda:1 or mps."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of matmuls; auto: bfloat16 where it is faster, float16 on old GPUs, else float32."""
    sharding: Literal["none", "zero1", "zero2", "zero3"] = "none"
    """none: DDP; zero1: shard the optimizer state and the float32 weights; zero2: shard the
    gradients, too; zero3: shard also the weights in the dtype of matmuls."""
    tensor_parallel: Count = 1
    """Degree of tensor parallelism: processes of a machine that share each block; needs --sharding
    zero1, zero2 or zero3."""
    shard_across: Count | None = None
    """Processes that divide one copy of the training state under --sharding, a multiple of the
    processes of a machine; default: the processes of one machine, HSDP (docs/SCALING.md)."""
    activation_checkpointing: Literal["none", "cheap", "block"] = "none"
    """Recompute in the backward pass; cheap: norms and activations, block: whole blocks."""
    use_torch_compile: bool = False
    """Compile the transformer blocks for training, except in grpo; default: only on CUDA."""


@dataclass(frozen=True)
class PlanningOptions:
    """Choose a run, or print something instead of training."""

    minutes: NonNegative | None = None
    """Choose what no other flag gives (size, context, batch, steps, intervals), for the best model
    that these devices train on this text in so many minutes. A resumed run keeps its options."""

    dry_run: bool = False
    """Check options, shards, folders and benchmarks; print the model's size, memory, time and, for
    GPUs, cost; exit. --device may then name GPUs of other machines: a100, h100, 16xh100 (eight in a
    machine), 4x4xt4, ...; folders and benchmarks are not checked then."""


@dataclass(frozen=True)
class SamplingConfig:
    """Text generation: options of sample.py, and of every other script that generates text."""

    max_new_tokens: Natural = 200
    """Most tokens to generate. The end-of-text token ends a text earlier. A full context drops its
    older half."""
    temperature: NonNegative = 0.8
    """Divisor of the logits. Values below 1 make unlikely tokens rarer, which are mostly errors of
    a small model; 0: always take the likeliest token."""
    top_k: Count | None = None
    """Sample from the k likeliest tokens; of tied tokens only as many count as make k."""
    top_p: Annotated[float, "above 0 and at most 1"] | None = None
    """Sample from the fewest likeliest tokens whose probabilities add up to this."""
    num_samples: Count = 1
    """Number of texts that sample.py writes; it shows the first while generating it."""
    seed: Natural = 1337
    """Seed of sampling; sample i depends only on (seed, i)."""


@dataclass(frozen=True)
class TrainOptions(
    PlanningOptions,
    MachineOptions,
    EvaluationOptions,
    SaveOptions,
    OptimizerOptions,
    ModelOptions,
    DataOptions,
    RunOptions,
):
    """Train a GPT-2. With --resume, options that are not given come from the checkpoint. Most runs
    set --data_dir, --run_dir, --model_type (or sizes) and --max_steps, and some also
    --micro_batch_size and --resume."""

    def micro_steps(self, data_parallel: int) -> int:
        """Return the number of gradient accumulation steps: the micro-batches of each process in an
        optimizer step. `data_parallel` is the number of parts into which the processes divide the
        data. Raises UserError if --total_batch_size does not divide into micro-batches."""
        # tokens of one micro-step, over all processes
        tokens_together = self.sequences_per_pass * self.resolved_block_size * data_parallel
        assert self.total_batch_size is not None  # called on resolved options
        if self.total_batch_size % tokens_together:
            # the multiple of tokens_together that is nearest to --total_batch_size
            nearest = max(1, round(self.total_batch_size / tokens_together)) * tokens_together
            raise UserError(
                f"--total_batch_size {self.total_batch_size:,} does not divide by the micro-batch, "
                f"{self.sequences_per_pass} x {self.resolved_block_size} tokens x {data_parallel} "
                f"parts of the data = {tokens_together:,}: give {nearest:,}"
            )
        return self.total_batch_size // tokens_together


@dataclass(frozen=True, kw_only=True)
class ResolvedOptions(MachineOptions, SaveOptions, OptimizerOptions, RunOptions, ABC):
    """Options of a run of train.py or finetune.py, with a value for each None of DERIVED."""

    # declared again, with types that exclude None
    log_dir: Path
    max_steps: int
    max_lr: float
    min_lr: float
    warmup_steps: int
    schedule: ScheduleName
    weight_decay: float

    def __post_init__(self) -> None:
        if self.min_lr > self.max_lr:
            # A resumed run has the flags that it was begun with.
            origin = ""
            if self.resumed_file is not None:
                origin = f", one of which is of the run {self.resumed_file}"
            raise UserError(f"--min_lr {self.min_lr} is above --max_lr {self.max_lr}{origin}")
        # DDP divides no state. A resumed run may have --shard_across from a checkpoint with
        # sharding, and no flag can unset it. (--tensor_parallel 1 unsets the other option.)
        needs_sharding = self.shard_across is not None and self.resumed_file is None
        if self.sharding == "none" and (needs_sharding or self.tensor_parallel > 1):
            raise UserError(
                "--tensor_parallel and --shard_across need --sharding zero1, zero2 or zero3"
            )

    @property
    @abstractmethod
    def decay_end(self) -> int:
        """Step, counted from 0, at which the learning rate reaches --min_lr."""


@dataclass(frozen=True, kw_only=True)
class ResolvedTrainOptions(ResolvedOptions, TrainOptions):
    """Resolved options of a run of train.py. --micro_batch_size is "auto" until the model is
    known."""

    block_size: int
    total_batch_size: int

    @property
    def decay_end(self) -> int:
        return self.max_steps - 1


def resolve_from_recipe(options: TrainOptions, recipe: Recipe) -> ResolvedTrainOptions:
    """Return the options with values for each None of DERIVED and for block_size: learning rates,
    schedule, folder of the log and others follow from the recipe and from other options."""
    assert options.max_steps is not None  # its default is a number
    adamw_lr, total_batch_size = rate_and_batch(options.width)  # 6e-4, 524_288 for 768 channels
    max_lr = options.max_lr
    if max_lr is None:  # `or` would replace --max_lr 0, a valid learning rate
        max_lr = recipe.max_lr
    if max_lr is None:
        max_lr = adamw_lr
    return resolve(
        ResolvedTrainOptions,
        options,
        log_dir=log_folder(options.checkpoint_dir),
        block_size=options.resolved_block_size,
        total_batch_size=total_batch_size,
        max_lr=max_lr,
        min_lr=0.0 if recipe.to_zero else max_lr / 10,  # a tenth as in Brown et al. 2020
        weight_decay=recipe.weight_decay,
        schedule=recipe.schedule,
        warmup_steps=min(WARMUP_STEPS, options.max_steps // 10),
    )


def resolve(resolved_class: type[Resolved], options: RunOptions, **defaults: object) -> Resolved:
    """Return the options as a `resolved_class`; `defaults` replace options that are None."""
    values = dict(vars(options))
    for name, default in defaults.items():
        if values[name] is None:
            values[name] = default
    return resolved_class(**values)


def log_folder(checkpoint_dir: Path) -> Path:
    """Return the default folder of the log: X/logs for a `checkpoint_dir` X/checkpoints, else the
    folder logs inside `checkpoint_dir`."""
    # absolute, because the path "." has no name: its name is the name of the working directory
    if checkpoint_dir.absolute().name != "checkpoints":
        return checkpoint_dir / "logs"
    # normpath turns "checkpoints/../logs" into "logs"; for "." the result is "../logs"
    return Path(os.path.normpath(checkpoint_dir / "../logs"))
