"""Options of train.py as dataclasses: the command line is made from them.

An option is declared once, as a field with its type, default, unit and help. The groups RunOptions,
OptimizerOptions, SaveOptions and MachineOptions are finetune.py's, too, and scripts/bench.py takes
ModelOptions and MachineOptions; other scripts declare their options themselves. SamplingConfig says
how text is written. This file is not about files, checkpoints or processes.

Options are frozen, and go one way: flags -> options, in which None stands for what nobody gave ->
resolved options, which training/options.py completes from the recipe and the machine.
"""

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from model.config import GPT3_SIZES, SIZES, GPTConfig
from recipes import Recipe, ScheduleName
from utils.cli import flag_value
from utils.errors import UserError
from utils.ranges import BelowOne, Count, Natural, NonNegative

WARMUP_STEPS = 715  # GPT-3's 375M tokens at 524,288 a step (Brown et al. 2020)

# Options of one start of a script: RunOptions.to_dict leaves them out of checkpoints and
# config.json, so that a resumed run does not take them over.
PER_LAUNCH = ("run_dir", "config", "resume", "overwrite", "dry_run")

# Options that follow from other options, the recipe or the device if they are not given, or are
# "auto". A resumed run derives them again (saved_options of training/options.py), except for its
# warmup: a new --max_lr changes --min_lr.
DERIVED = (
    "log_dir",
    "max_lr",
    "min_lr",
    "weight_decay",
    "schedule",
    "warmup_steps",
    "micro_batch_size",
    "use_torch_compile",
)

# last words of each error that refuses to write over another run
OTHER_RUN_REMEDY = "continue that one by --resume, give another --run_dir, or --overwrite it"

Resolved = TypeVar("Resolved", bound="ResolvedOptions")


@dataclass(frozen=True)
class RunOptions:
    """Where the run reads and writes."""

    run_dir: Path | None = None
    """Folder of the run: short for --checkpoint_dir RUN_DIR/checkpoints, where that is not given;
    the log goes to RUN_DIR/logs. Without it the two flags below name the folders."""
    checkpoint_dir: Path = Path("checkpoints")
    """Folder for model_last.pt, model_best.pt and numbered checkpoints."""
    log_dir: Path | None = None
    """Folder for metrics.jsonl, samples.txt and config.json; default: logs, beside a
    --checkpoint_dir named checkpoints, else in it. A resumed run keeps it unless it was moved."""
    config: Path | None = None
    """Options from a .toml file (see configs/) or a run's config.json, behind those of the command
    line; default: none."""
    resume: str | None = None
    """Checkpoint, or the folder of a run; auto: that of --run_dir or --checkpoint_dir, or a new run
    if there is none. Default: a new run."""
    init_from: str | None = None
    """Weights to start from: a checkpoint of ours or its folder, one of nanoGPT, build-nanogpt or
    llm.c, or a Hugging Face name (gpt2) or folder; train.py without it: random weights."""
    overwrite: bool = False
    """Replace the checkpoints and logs of another run, or of later steps."""

    @property
    def resumed(self) -> Path | None:
        """The checkpoint that is resumed, None for a new run: training/options.py puts the path
        into `resume`, and leaves "auto" where there is none to continue."""
        if self.resume is None or self.resume == "auto":
            return None
        return Path(self.resume)

    @property
    def weights_from(self) -> Path | str | None:
        """Where the weights come from that this start of the run begins with, None for new ones."""
        return self.resumed or self.init_from

    @property
    def is_branch(self) -> bool:
        """True if the checkpoint that is resumed lies in another folder than --checkpoint_dir. The
        run there is another one from then on; a whole folder that was moved or copied is not."""
        if self.resumed is None:
            return False
        # resolved: "runs/a" and a link to it are one folder
        return self.resumed.parent.resolve() != self.checkpoint_dir.resolve()

    @classmethod
    def checkpoint_folder(cls, flags: list[str]) -> Path:
        """Return the --checkpoint_dir of a command line, before it is parsed: --resume auto looks
        there for a checkpoint, which brings options along."""
        return Path(flag_value(flags, "checkpoint_dir") or cls.checkpoint_dir)

    def to_dict(self) -> dict:
        """Return the resolved options of all groups as plain values, for checkpoints and
        config.json."""
        options: dict[str, object] = {}
        for name, value in vars(self).items():
            if name in PER_LAUNCH:
                continue
            # neither JSON nor torch.load(weights_only=True) has paths
            if isinstance(value, Path):
                # A start from another working directory has to find the folders that are written.
                is_written = name in ("checkpoint_dir", "log_dir")
                value = str(value.absolute() if is_written else value)
            elif isinstance(value, tuple):  # a tuple of Paths
                value = [str(folder) for folder in value]
            options[name] = value
        return options


@dataclass(frozen=True)
class DataOptions:
    """Tokens and batches."""

    data_dir: tuple[Path, ...] = (Path("data/edu_fineweb10B"),)
    """Folders of token shards, by data/fineweb-edu.py, build-nanogpt, llm.c or modded-nanogpt."""
    total_batch_size: Count = 524_288
    """Tokens per step over all processes; gradient accumulation follows from it."""
    micro_batch_size: Count | Literal["auto"] = 16
    """Sequences per forward pass of a process; auto: what should fit; default: 16, on CUDA auto."""

    @property
    def sequences_per_pass(self) -> int:
        """--micro_batch_size, once a number is found for "auto"."""
        # resolve_on_device (training/options.py), or a dry run, has replaced it by a number
        assert self.micro_batch_size != "auto"
        return self.micro_batch_size


@dataclass(frozen=True)
class ModelOptions:
    """Architecture: sizes from --model_type or from these options, the rest from --recipe."""

    recipe: str = "gpt2"
    """gpt2, modern, speedrun or llama; modern,qk_norm=False changes a field (docs/RECIPES.md)."""
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
    """Named size: GPT-2's 124M, 355M, 774M, 1558M parameters, or one of GPT-3, whose context is
    2,048 tokens. The paper trained those with total_batch_size 524288 and max_lr 6e-4 (small), 3e-4
    (medium), 2.5e-4 (large); 1048576 and 2e-4 (xl), 1.6e-4 (2.7b); 2097152 and 1.2e-4 (6.7b), 1e-4
    (13b); 3145728 and 6e-5 (175b)."""
    n_layer: Count | None = None
    """Transformer blocks; default: those of --model_type."""
    n_head: Count | None = None
    """Attention heads; default: those of --model_type."""
    n_embd: Count | None = None
    """Channels of the residual stream; default: those of --model_type."""
    block_size: Count | None = None
    """Tokens per sequence; default: 1,024, for GPT-3's sizes 2,048."""
    dropout: BelowOne = 0.0
    """Dropout probability; 0 for runs of about one epoch."""

    @property
    def resolved_block_size(self) -> int:
        """--block_size, or the default of the size in --model_type: tokens per sequence."""
        default = 2048 if self.model_type in GPT3_SIZES else 1024
        return self.block_size or default

    def model_config(self, recipe: Recipe, vocab_size: int) -> GPTConfig:
        """Return the architecture: the recipe's, the named size and the options over it."""
        n_layer, n_head, n_embd = SIZES[self.model_type]
        # n_embd, block_size, vocab_size, and the fields that the recipe sets, such as "position"
        model_fields = recipe.model_fields(
            self.n_embd or n_embd, self.resolved_block_size, vocab_size
        )
        return GPTConfig(
            n_layer=self.n_layer or n_layer,
            n_head=self.n_head or n_head,
            dropout=self.dropout,
            **model_fields,
        )


@dataclass(frozen=True)
class OptimizerOptions:
    """Steps, learning rate and AdamW."""

    max_steps: Count | None = 19_073
    """Optimizer steps; 19,073 of 524,288 tokens are 10B."""
    max_lr: NonNegative | None = None
    """Learning rate after warmup; default: of the recipe, gpt2: 6e-4, modern: 0.012."""
    min_lr: NonNegative | None = None
    """Learning rate of the last step; default: gpt2: a tenth of --max_lr, modern: 0."""
    warmup_steps: Natural | None = None
    """Steps of linear warmup, at most half of --max_steps; default: 715, at most a tenth."""
    schedule: ScheduleName | None = None
    """Decay after warmup: cosine, linear, or wsd (constant, then linear in the last fifth);
    default: of the recipe."""
    weight_decay: NonNegative | None = None
    """Weight decay of matrices and embeddings (Muon: of its matrices only); default: 0.1."""
    beta1: BelowOne = 0.9
    """AdamW: decay of the first moment."""
    beta2: BelowOne = 0.95
    """AdamW: decay of the second moment."""
    grad_clip: NonNegative = 1.0
    """Largest gradient norm; 0: no clipping."""


@dataclass(frozen=True)
class SaveOptions:
    """Evaluation, checkpoints, samples and Weights & Biases."""

    eval_every: Natural = 250
    """Steps between validations; 0: only after the last step."""
    save_every: Natural = 500
    """Steps between checkpoints; 0: only before the first step and after the last one."""
    keep_last: Natural = 0
    """Numbered checkpoints (model_step_005000.pt) to keep beside the last and the best."""
    sample_every: Natural = 500
    """Steps between samples in samples.txt; 0: none."""
    wandb: bool = False
    """Log to Weights & Biases as well; WANDB_PROJECT and WANDB_NAME name project and run."""


@dataclass(frozen=True)
class EvaluationOptions:
    """Validation and benchmarks."""

    val_tokens: Count = 10_485_760
    """Validation tokens, the same at every validation."""
    hellaswag_every: Natural = 0
    """Steps between HellaSwag scores; 0: none."""
    lambada_every: Natural = 0
    """Steps between LAMBADA scores; 0: none."""
    core_every: Natural = 0
    """Steps between CORE scores, of 22 tasks; 0: none."""
    eval_full: bool = False
    """Score all examples of a benchmark, not a fixed subset of 500 (of CORE, 500 a task)."""
    hellaswag_data: Path | None = None
    """HellaSwag .jsonl in the original format; default: from the hub."""
    lambada_data: Path | None = None
    """LAMBADA .jsonl in OpenAI's format; default: from the hub."""
    core_data: Path | None = None
    """Folder of CORE in the layout of nanochat's eval_bundle; default: downloaded, 160 MB."""


@dataclass(frozen=True)
class MachineOptions:
    """Device, precision, parallelism and memory."""

    seed: Natural = 1337
    """Seed of weights, data order, dropout and samples."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of matmuls. auto: bfloat16 where it is faster, float16 on old GPUs."""
    sharding: Literal["none", "zero1", "zero2", "zero3"] = "none"
    """none: DDP; zero1: shard optimizer state and float32 weights, zero2: gradients, too, zero3:
    also the weights in the dtype of matmuls."""
    tensor_parallel: Count = 1
    """Processes of a machine that share each block; needs --sharding zero1, zero2 or zero3."""
    shard_across: Count | None = None
    """Processes that divide one copy of the state under --sharding, a multiple of those of a
    machine, which are the default (docs/SCALING.md)."""
    activation_checkpointing: Literal["none", "cheap", "block"] = "none"
    """Recompute in the backward pass: cheap: norms and activations, block: whole blocks."""
    use_torch_compile: bool = False
    """Compile the blocks of training, except in grpo; default: on CUDA alone."""


@dataclass(frozen=True)
class PlanningOptions:
    """Print something instead of training."""

    dry_run: bool = False
    """Check options, shards, folders and benchmarks, print model, memory, time and, for GPUs, cost,
    and exit. --device then takes a GPU that need not be there, too: a100, h100, h200, b200, t4,
    ..., whose run has other folders."""


@dataclass(frozen=True)
class SamplingConfig:
    """How text is written: options of sample.py, and of every other place that writes text."""

    max_new_tokens: Natural = 200
    """Most tokens of a continuation; end of text ends it, a full context drops its older half."""
    temperature: NonNegative = 0.8
    """Divisor of the logits: below 1 unlikely tokens, which are mostly errors of a small model, get
    rarer; 0: always the likeliest token."""
    top_k: Count | None = None
    """Sample from the k likeliest tokens, exactly k where some are tied."""
    top_p: Annotated[float, "above 0 and at most 1"] | None = None
    """Sample from the likeliest tokens that together have this probability."""
    num_samples: Count = 1
    """Texts that sample.py writes; the first is shown while it is generated."""
    seed: Natural = 1337
    """Seed; sample i depends on (seed, i) alone."""


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
    """Train a GPT-2. With --resume, options that are not given come from the checkpoint. Most
    runs set --data_dir, --run_dir, --model_type (or sizes) and --max_steps, perhaps
    --micro_batch_size and --resume."""

    def micro_steps(self, data_parallel: int) -> int:
        """Return the micro-batches that each process takes in a step, whose gradients add up, where
        the processes read `data_parallel` parts of the data. Raises UserError for a
        --total_batch_size that does not divide into them."""
        # tokens of one micro-step of all processes
        tokens_together = self.sequences_per_pass * self.resolved_block_size * data_parallel
        if self.total_batch_size % tokens_together:
            nearest = max(1, round(self.total_batch_size / tokens_together)) * tokens_together
            raise UserError(
                f"--total_batch_size {self.total_batch_size:,} does not divide by the micro-batch, "
                f"{self.micro_batch_size} x {self.resolved_block_size} tokens x {data_parallel} "
                f"parts of the data = {tokens_together:,}: give {nearest:,}"
            )
        return self.total_batch_size // tokens_together


@dataclass(frozen=True, kw_only=True)
class ResolvedOptions(MachineOptions, SaveOptions, OptimizerOptions, RunOptions, ABC):
    """Options of a run of train.py or finetune.py, with what was derived in place of None."""

    # declared again with types that exclude None
    log_dir: Path
    max_steps: int
    max_lr: float
    min_lr: float
    warmup_steps: int
    schedule: ScheduleName
    weight_decay: float

    def __post_init__(self) -> None:
        if self.min_lr > self.max_lr:
            raise UserError(f"--min_lr {self.min_lr} is above --max_lr {self.max_lr}")
        if self.tensor_parallel > 1 and self.sharding == "none":
            raise UserError(
                f"--tensor_parallel {self.tensor_parallel} needs --sharding zero1, zero2 or zero3"
            )
        # DDP divides no state. A resumed run may bring the flag from one that was sharded.
        if self.shard_across is not None and self.sharding == "none" and self.resumed is None:
            raise UserError("--shard_across needs --sharding zero1, zero2 or zero3")

    @property
    @abstractmethod
    def decay_end(self) -> int:
        """Step, counted from 0, whose learning rate is --min_lr."""


@dataclass(frozen=True, kw_only=True)
class ResolvedTrainOptions(ResolvedOptions, TrainOptions):
    """Options of a run of train.py; --micro_batch_size may be "auto" until the model is known."""

    block_size: int

    @property
    def decay_end(self) -> int:
        return self.max_steps - 1


def resolve_from_recipe(options: TrainOptions, recipe: Recipe) -> ResolvedTrainOptions:
    """Return the options with the learning rates, the schedule and the folder of the log, as far as
    nobody gave them, from the recipe and from other options."""
    assert options.max_steps is not None  # its default is a number
    # `is None`, not `or`: --max_lr 0 is a rate, too
    max_lr = recipe.max_lr if options.max_lr is None else options.max_lr
    # `resolve` uses these values only for options that are None
    return resolve(
        ResolvedTrainOptions,
        options,
        log_dir=log_folder(options.checkpoint_dir),
        block_size=options.resolved_block_size,
        max_lr=max_lr,
        min_lr=0.0 if recipe.to_zero else max_lr / 10,  # a tenth: Brown et al. 2020
        weight_decay=recipe.weight_decay,
        schedule=recipe.schedule,
        warmup_steps=min(WARMUP_STEPS, options.max_steps // 10),
    )


def resolve(resolved_class: type[Resolved], options: RunOptions, **defaults: object) -> Resolved:
    """Return the options as `resolved_class`, with these values in place of those that are None."""
    given = {name: value for name, value in vars(options).items() if value is not None}
    # later dicts win: a given value over its default, a default over None
    return resolved_class(**vars(options) | defaults | given)


def log_folder(checkpoint_dir: Path) -> Path:
    """Return the folder of the log of a folder of checkpoints: X/logs for X/checkpoints, else logs
    in the folder itself."""
    # absolute: the name of "." is that of the working directory
    if checkpoint_dir.absolute().name != "checkpoints":
        return checkpoint_dir / "logs"
    # "checkpoints/../logs" to "logs"; of "." it is "../logs"
    return Path(os.path.normpath(checkpoint_dir / "../logs"))
