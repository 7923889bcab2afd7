"""Options of train.py as dataclasses.

An option is declared once: the command line is made from its default, type and docstring. The
groups RunOptions, OptimizerOptions, SaveOptions and MachineOptions are finetune.py's, too. The
other scripts declare their options themselves.
"""

import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

from config.recipes import Recipe, parse_recipe
from model.config import SIZES, GPTConfig
from utils.cli import flag_value
from utils.errors import UserError
from utils.throughput import NAMED_GPUS

# options of one start of a script, which the next start does not take over
PER_LAUNCH = ("config", "resume", "overwrite", "dry_run")
# options that follow from others where nobody gives them; the next start derives them again
DERIVED = ("log_dir", "max_lr", "min_lr", "weight_decay", "schedule", "warmup_steps")
DERIVED += ("micro_batch_size", "use_torch_compile")  # from the device
WARMUP_STEPS = 715  # of GPT-3 at 524,288 tokens a step (Brown et al. 2020: 375M tokens)


@dataclass
class RunOptions:
    """Where the run reads and writes."""

    checkpoint_dir: Path = Path("checkpoints")
    """Folder for model_last.pt, model_best.pt and numbered checkpoints."""
    log_dir: Path | None = None
    """Folder for metrics.jsonl, samples.txt, config.json and log_plot.png; default: logs, beside a
    --checkpoint_dir named checkpoints, else in it."""
    config: Path | None = None
    """Options from a .toml file (see configs/) or a run's config.json; the command line wins."""
    resume: str | None = None
    """Checkpoint, or a folder with model_last.pt; auto: --checkpoint_dir, or else a new run."""
    init_from: str | None = None
    """Weights to start from: a checkpoint, its folder, or a Hugging Face name (gpt2) or folder."""
    overwrite: bool = False
    """Replace the checkpoints and logs of another run, or of later steps."""

    derived = ()  # options of DERIVED that nobody gave; no option itself, set by training/run.py

    @classmethod
    def checkpoint_folder(cls, flags: list[str]) -> Path:
        """Return the --checkpoint_dir of a command line."""
        return Path(flag_value(flags, "checkpoint_dir") or cls.checkpoint_dir).expanduser()

    def to_dict(self) -> dict:
        """Return the resolved options as plain values, for checkpoints and config.json."""
        names = [f.name for f in fields(self) if f.init and f.name not in PER_LAUNCH]
        values = {name: getattr(self, name) for name in names}
        for name, value in values.items():
            if isinstance(value, Path):
                values[name] = str(value)
            elif isinstance(value, tuple):
                values[name] = list(map(str, value))
        return values


@dataclass
class DataOptions:
    """Tokens and batches."""

    data_dir: tuple[Path, ...] = (Path("data/edu_fineweb10B"),)
    """Folders of token shards, by data/fineweb-edu.py, build-nanogpt, llm.c or modded-nanogpt."""
    total_batch_size: int = 524_288
    """Tokens per step over all processes; gradient accumulation follows from it."""
    micro_batch_size: int | Literal["auto"] = 16
    """Sequences per forward pass of a process; auto, the default on CUDA: what should fit."""


@dataclass
class ModelOptions:
    """Architecture: sizes from --model_type or from these options, the rest from --recipe."""

    recipe: str = "gpt2"
    """gpt2, modern, speedrun or llama; modern,qk_norm=False changes a field (docs/RECIPES.md)."""
    model_type: Literal["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"] = "gpt2"
    """Named size: 124M, 350M, 774M, 1558M parameters."""
    n_layer: int | None = None
    """Transformer blocks."""
    n_head: int | None = None
    """Attention heads."""
    n_embd: int | None = None
    """Channels of the residual stream."""
    block_size: int = 1024
    """Tokens per sequence."""
    dropout: float = 0.0
    """Dropout probability; 0 for runs of about one epoch."""


@dataclass
class OptimizerOptions:
    """Steps, learning rate and AdamW."""

    max_steps: int = 19_073
    """Optimizer steps; 19,073 of 524,288 tokens are 10B."""
    max_lr: float | None = None
    """Learning rate after warmup; gpt2: 6e-4, modern: 0.012."""
    min_lr: float | None = None
    """Learning rate of the last step; gpt2: a tenth of --max_lr, modern: 0."""
    warmup_steps: int | None = None
    """Steps of linear warmup, at most half of --max_steps; default: 715, at most a tenth."""
    schedule: str | None = None
    """Decay after warmup: cosine, linear, or wsd (constant, then linear in the last fifth)."""
    weight_decay: float | None = None
    """Weight decay of matrices and embeddings (Muon: of its matrices only); default 0.1."""
    beta1: float = 0.9
    """AdamW: decay of the first moment."""
    beta2: float = 0.95
    """AdamW: decay of the second moment."""
    grad_clip: float = 1.0
    """Largest gradient norm; 0: no clipping."""


@dataclass
class SaveOptions:
    """Evaluation, checkpoints and samples."""

    eval_every: int = 250
    """Steps between validations; 0: only after the last step."""
    save_every: int = 500
    """Steps between checkpoints; 0: only after the last step."""
    keep_last: int = 0
    """Numbered checkpoints (model_step_005000.pt) to keep beside the last and the best."""
    sample_every: int = 500
    """Steps between samples in samples.txt; 0: none."""


@dataclass
class EvaluationOptions:
    """Validation, benchmarks and trackers."""

    val_tokens: int = 10_485_760
    """Validation tokens, the same at every validation."""
    hellaswag_every: int = 0
    """Steps between HellaSwag scores; 0: none."""
    lambada_every: int = 0
    """Steps between LAMBADA scores; 0: none."""
    eval_full: bool = False
    """Score all examples of a benchmark, not an evenly spaced subset of 500."""
    hellaswag_data: Path | None = None
    """HellaSwag .jsonl in the original format; default: from the hub."""
    lambada_data: Path | None = None
    """LAMBADA .jsonl in OpenAI's format; default: from the hub."""
    wandb: bool = False
    """Log to Weights & Biases as well; WANDB_PROJECT and WANDB_NAME name project and run."""
    trackio: bool = False
    """Log to trackio as well, a local dashboard without an account; TRACKIO_PROJECT names it."""


@dataclass
class MachineOptions:
    """Device, precision, parallelism and memory."""

    seed: int = 1337
    """Seed of weights, data order, dropout and samples."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of matmuls. auto: bfloat16 where it is faster, float16 on old GPUs."""
    sharding: Literal["none", "zero1", "zero2", "zero3"] = "none"
    """none: DDP; zero1: shard optimizer state, zero2: gradients too, zero3: weights too."""
    activation_checkpointing: Literal["none", "cheap", "block"] = "none"
    """Recompute in the backward pass: cheap: norms and activations, block: whole blocks."""
    use_torch_compile: bool = False
    """Compile the training step, for grpo that of sampling; on by default on CUDA alone."""


@dataclass
class StepOptions:
    """Planning."""

    dry_run: bool = False
    """Check the options, print model, memory, time and cost, and exit. --device then takes a GPU
    that need not be there, too: a100, h100, h200, b200, t4, ..."""


@dataclass
class TrainConfig(
    StepOptions,
    MachineOptions,
    EvaluationOptions,
    SaveOptions,
    OptimizerOptions,
    ModelOptions,
    DataOptions,
    RunOptions,
):
    """Train a GPT-2. With --resume, options that are not given come from the checkpoint. Options
    that are None are resolved from the recipe as soon as they are parsed; `recipe` becomes text
    that names every field. Raises UserError for the first option out of range."""

    parsed_recipe: Recipe = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.log_dir is None:
            self.log_dir = log_folder(self.checkpoint_dir)
        self.parsed_recipe = recipe = parse_recipe(self.recipe)
        self.recipe = str(recipe)
        for name in ("max_lr", "weight_decay", "schedule"):
            if getattr(self, name) is None:
                setattr(self, name, getattr(recipe, name))
        if self.min_lr is None:
            self.min_lr = 0.0 if recipe.to_zero else self.max_lr / 10
        if self.warmup_steps is None:
            self.warmup_steps = min(WARMUP_STEPS, self.max_steps // 10)
        check_ranges(self, "max_steps total_batch_size micro_batch_size block_size val_tokens", 1)
        check_ranges(self, "hellaswag_every lambada_every", 0)
        check_run_options(self)
        if self.device in NAMED_GPUS and not self.dry_run:
            raise UserError(f"--device {self.device} is for --dry_run; to train, give cuda")

    @property
    def last_update(self) -> int:
        """Update, counted from 0, at which the learning rate is --min_lr."""
        return self.max_steps - 1

    @property
    def benchmarks(self) -> list[str]:
        """Benchmarks that can be scored during training: those with options NAME_data."""
        return [f.name.removesuffix("_data") for f in fields(self) if f.name.endswith("_data")]

    def model_config(self, vocab_size: int) -> GPTConfig:
        """Return the architecture: the recipe's, the named size and the options over it."""
        named = SIZES[self.model_type]
        size = named | {k: getattr(self, k) for k in named if getattr(self, k) is not None}
        shape = self.parsed_recipe.shape(size["n_embd"], self.block_size, vocab_size)
        return GPTConfig(**size | shape, dropout=self.dropout)

    def adopt_architecture(self, pretrained: GPTConfig) -> None:
        """Take the architecture of the model of --init_from; raise UserError if the options name
        another one, or a longer context."""
        if self.block_size > (context := pretrained.block_size):
            raise UserError(f"{self.init_from} has a context of {context}: give a --block_size")
        sizes = {name: getattr(pretrained, name) for name in ("n_layer", "n_head", "n_embd")}
        asked = self.model_config(pretrained.vocab_size)
        default = GPTConfig(self.block_size, pretrained.vocab_size, dropout=self.dropout)
        differs = list(asked.differences(pretrained))
        differs += [name for name in sizes if getattr(asked, name) != sizes[name]]
        if asked != default and differs:
            raise UserError(
                f"{self.init_from} has another {', '.join(differs)}: leave out --recipe, "
                "--model_type and the sizes, which follow from it"
            )
        model = pretrained.differences(GPTConfig())
        architecture = {"model": model, "mlp_ratio": 4.0, "ngram_bits": 0.0}
        self.parsed_recipe = replace(self.parsed_recipe, **architecture)
        vars(self).update(sizes, recipe=str(self.parsed_recipe))

    def sequences_per_step(self, world_size: int) -> int:
        """Return the sequences in a global batch; UserError where the batch does not divide."""
        micro = self.micro_batch_size * self.block_size * world_size
        if self.total_batch_size % micro:
            fitting = max(1, round(self.total_batch_size / micro)) * micro
            raise UserError(
                f"--total_batch_size {self.total_batch_size:,} does not divide by the micro-batch, "
                f"{self.micro_batch_size} x {self.block_size} tokens x {world_size} processes = "
                f"{micro:,}: give {fitting:,}, or another --micro_batch_size"
            )
        return self.total_batch_size // self.block_size


def log_folder(checkpoint_dir: Path) -> Path:
    """Return the folder of the log that belongs to a folder of checkpoints."""
    inside = checkpoint_dir.name != "checkpoints"
    return (checkpoint_dir if inside else checkpoint_dir.parent) / "logs"


def check_run_options(options: OptimizerOptions) -> None:
    """Raise UserError for the first option that train.py and finetune.py share and is wrong."""
    check_ranges(options, "warmup_steps eval_every save_every keep_last sample_every seed", 0)
    check_ranges(options, "max_lr min_lr weight_decay grad_clip", 0)
    if options.max_lr is not None and options.min_lr > options.max_lr:
        raise UserError(f"--min_lr {options.min_lr} is above --max_lr {options.max_lr}")
    if not (0 <= options.beta1 < 1 and 0 <= options.beta2 < 1):
        raise UserError("--beta1 and --beta2 must be at least 0 and below 1")


def check_ranges(options: object, names: str, least: int) -> None:
    """Raise UserError for the first of the named options that is a number below `least`."""
    for name in names.split():
        value = getattr(options, name)
        if value is not None and value != "auto" and not least <= value < math.inf:
            raise UserError(f"--{name} {value} must be at least {least}")
