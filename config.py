"""Options of data/fineweb-edu.py, train.py and sample.py as dataclasses, and the recipes.

An option is declared once: the command line is made from its default, type and docstring. The other
scripts declare their options themselves.
"""

import ast
import math
import os
import sys
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from model.config import SIZED, SIZES, GPTConfig
from utils.errors import UserError, did_you_mean
from utils.gpus import NAMED_GPUS

WARMUP_STEPS = 715  # of GPT-3 at 524,288 tokens a step (Brown et al. 2020: 375M tokens)


# options of one start of train.py, which another start does not take over
PER_LAUNCH = {
    "config": None,
    "resume": None,
    "overwrite": False,
    "dry_run": False,
    "profile": False,
}


@dataclass
class DataConfig:
    """Turn text into token shards. Killed and started again, it continues where it was."""

    local_dir: Path = Path("data/edu_fineweb10B")
    """Folder for the shards and their manifest."""
    dataset: str = "HuggingFaceFW/fineweb-edu"
    """Hugging Face dataset to stream; HuggingFaceFW/fineweb works too."""
    remote_name: str = "sample-10BT"
    """Configuration of the dataset: sample-10BT, sample-100BT, sample-350BT, default, ..."""
    input: tuple[str, ...] = ()
    """Files, or folders of .parquet, .jsonl, .txt and .py, to read instead, also as .gz, .bz2, .xz,
    .zst; a file may also be .json, .csv, .tsv, other text, or a URL (with fsspec[http])."""
    text_column: str = "text"
    """Column of parquet, JSON or CSV that holds the text."""
    tokenizer: Literal["gpt2", "bytes"] = "gpt2"
    """gpt2: 50,257 tokens through tiktoken; bytes: one token a byte, no download."""
    shard_size: int = 100_000_000
    """Tokens per shard."""
    max_shards: int | None = None
    """Stop after this many train shards."""
    format: Literal["npy", "bin"] = "npy"
    """npy: numpy.load reads it; bin: llm.c's format."""
    val_fraction: float = 0.01
    """Share of documents for validation, chosen by a hash of their text."""
    num_workers: int = os.cpu_count() or 1
    """Tokenizer threads; the shards do not depend on it."""
    worker_index: int = 0
    """Index of this machine, from 0 to --worker_count - 1; each needs its own --local_dir."""
    worker_count: int = 1
    """Machines that share the work: machine i reads every n-th source file, beginning with i."""
    merge: tuple[Path, ...] = ()
    """Merge the folders of all workers into --local_dir instead of reading text."""


SHARES = ("decay", "momentum", "normuon", "window_share")  # fields of a recipe that are at most 1


@dataclass(frozen=True)
class Recipe:
    """A way to build and train a model: architecture, optimizer, learning rates, schedule.

    Options on the command line override it. Raises UserError for a value out of range.
    """

    model: dict = field(default_factory=dict)
    """Fields of GPTConfig that differ from GPT-2's."""
    optimizer: str = "adamw"
    """Optimizer of the blocks' matrices: adamw or muon. AdamW trains the rest."""
    max_lr: float = 6e-4
    """Learning rate after warmup."""
    embedding_rate: float = 1.0
    """Factor on the learning rate of embeddings."""
    head_rate: float = 1.0
    """Factor on the learning rate of an untied head."""
    vector_rate: float = 1.0
    """Factor on the learning rate of norms and biases."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""
    cautious: bool = False
    """Muon: decay only weights that the update makes smaller."""
    normuon: float = 0.0
    """NorMuon: decay of each row's mean squared update, by which it is divided; 0: Muon."""
    momentum: float = 0.95
    """Muon: momentum."""
    momentum_warmup: int = 0
    """Muon: steps in which momentum rises to its value from 0.1 less."""
    zero_init: bool = False
    """Initialize the projections into the residual stream to zero."""
    window_share: float = 0.0
    """Share of the context that blocks with a window attend to; 0: all of it."""
    ngram_bits: float = 0.0
    """Longest n-gram with an embedding, in bits: log2(V) for each token of a vocabulary of V."""
    schedule: str = "cosine"
    """Decay after warmup: cosine, linear or wsd."""
    decay: float = 0.2
    """Share of the steps in which wsd decays."""
    to_zero: bool = False
    """Decay to 0 instead of a tenth of max_lr."""

    def shape(self, block_size: int, vocab_size: int) -> dict:
        """Return the fields of GPTConfig that differ from GPT-2's, for a context and vocabulary."""
        window = round(self.window_share * block_size)
        ngrams = int(self.ngram_bits / math.log2(vocab_size + 1))
        resolved = {"window": window} if window else {}
        return resolved | ({"ngrams": ngrams} if ngrams > 1 else {}) | self.model

    def __post_init__(self) -> None:
        choices = {"optimizer": ("adamw", "muon"), "schedule": ("cosine", "linear", "wsd")}
        for name, allowed in choices.items():
            if (value := getattr(self, name)) not in allowed:
                raise UserError(f"{name}={value} in a recipe must be one of {', '.join(allowed)}")
        for f in fields(self):
            value, most = getattr(self, f.name), 1.0 if f.name in SHARES else sys.float_info.max
            if type(value) in (int, float) and not 0 <= value <= most:
                raise UserError(f"{f.name}={value} in a recipe must be between 0 and {most:g}")


LLAMA = {"position": "rotary", "norm": "rms", "activation": "swiglu", "bias": False, "tied": False}
MODERN = Recipe(
    model=LLAMA | {"activation": "relu2", "qk_norm": True},
    optimizer="muon",
    max_lr=0.012,
    embedding_rate=0.5,
    head_rate=0.5,
    cautious=True,
    normuon=0.95,
    momentum=0.9,
    zero_init=True,
    window_share=0.125,
    schedule="linear",
    to_zero=True,
)
RECIPES = {
    "gpt2": Recipe(),
    "modern": MODERN,
    # 5 bytes, 2 of GPT-2's tokens; at width 128 a table below 32 MiB, memory that glibc reuses
    "speedrun": replace(MODERN, model=MODERN.model | {"ngram_rows": 65_000}, ngram_bits=42.0),
    "llama": Recipe(model=LLAMA),
}


def parse_recipe(text: str) -> Recipe:
    """Return the recipe of NAME,FIELD=VALUE,...; raise UserError for an unknown name or value."""
    name, *changes = (part.strip() for part in text.split(","))
    if name not in RECIPES:
        raise UserError(f"there is no recipe {name!r}; there are {', '.join(RECIPES)}")
    recipe = RECIPES[name]
    model_fields = [f.name for f in fields(GPTConfig) if f.name not in SIZED]
    recipe_fields = [f.name for f in fields(Recipe) if f.name != "model"]
    for change in changes:
        key, _, value = (part.strip() for part in change.partition("="))
        if key not in model_fields + recipe_fields:
            hint = did_you_mean(key, model_fields + recipe_fields)
            raise UserError(f"a recipe has no {key!r}{hint}")
        try:
            parsed = ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            parsed = value
        if key in model_fields:
            recipe = replace(recipe, model={**recipe.model, key: parsed})
        else:
            kind = type(getattr(recipe, key))
            if kind is float and type(parsed) is int and abs(parsed) < 2**53:
                parsed = float(parsed)
            if type(parsed) is not kind:
                raise UserError(f"{key}={value} in a recipe must be of type {kind.__name__}")
            recipe = replace(recipe, **{key: parsed})
    return recipe


def recorded_recipe(values: dict) -> str:
    """Return the recipe of a run's saved options, with the fields that RECIPES has changed since;
    one that was not saved had its default then."""
    text, saved = values["recipe"], values["resolved_recipe"]
    now = asdict(parse_recipe(text))
    now |= GPTConfig().fields | now.pop("model")
    then = {**asdict(Recipe()), **GPTConfig().fields, **saved, **saved.get("model", {})}
    changed = [name for name in now if then[name] != now[name] and values.get(name) is None]
    return ",".join([text, *(f"{name}={then[name]}" for name in changed)])


def recipe_of(shape: GPTConfig) -> str:
    """Return the recipe that builds this architecture, with as few changed fields as there are."""
    misfits = {
        name: shape.differs_from(recipe.shape(shape.block_size, shape.vocab_size))
        for name, recipe in RECIPES.items()
    }
    for name, recipe in RECIPES.items():
        if recipe.window_share and "window" not in misfits[name]:
            misfits[name].append("window")
    name = min(misfits, key=lambda name: len(misfits[name]))
    return ",".join([name, *(f"{field}={getattr(shape, field)}" for field in misfits[name])])


@dataclass
class DataOptions:
    """Where the run reads and writes."""

    data_dir: Path = Path("data/edu_fineweb10B")
    """Folder of token shards, by data/fineweb-edu.py, build-nanogpt, llm.c or modded-nanogpt."""
    checkpoint_dir: Path = Path("checkpoints")
    """Folder for model_last.pt, model_best.pt and numbered checkpoints."""
    log_dir: Path = Path("logs")
    """Folder for metrics.jsonl, samples.txt, config.json and log_plot.png."""
    config: Path | None = None
    """Options from a .toml file (see configs/) or a run's config.json; the command line wins."""
    resume: str | None = None
    """Checkpoint, or a folder with model_last.pt; auto: --checkpoint_dir, or else a new run."""
    init_from: str | None = None
    """Weights to fine-tune: a checkpoint or its folder, or a Hugging Face name (gpt2) or folder."""
    overwrite: bool = False
    """Replace the checkpoints and logs of an earlier run."""


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
class ScheduleOptions:
    """Batch size, learning rate and optimizer; defaults of rates and decay are the recipe's."""

    max_steps: int = 19_073
    """Optimizer steps; 19,073 of 524,288 tokens are 10B."""
    total_batch_size: int = 524_288
    """Tokens per step over all processes; gradient accumulation follows from it."""
    micro_batch_size: int | Literal["auto"] = 16
    """Sequences per forward pass of a process; auto: the most that should fit its memory."""
    max_lr: float | None = None
    """Learning rate after warmup; gpt2: 6e-4, modern: 0.012."""
    min_lr: float | None = None
    """Learning rate of the last step; gpt2: a tenth of --max_lr, modern: 0."""
    warmup_steps: int | None = None
    """Steps of linear warmup; default: 715, but at most a tenth of --max_steps."""
    schedule: Literal["cosine", "linear", "wsd"] | None = None
    """Decay after warmup; wsd: constant, save model_stable.pt, then linear in the last fifth."""
    weight_decay: float | None = None
    """Weight decay of matrices and embeddings (Muon: of its matrices only); default 0.1."""
    beta1: float = 0.9
    """AdamW: decay of the first moment."""
    beta2: float = 0.95
    """AdamW: decay of the second moment."""
    grad_clip: float = 1.0
    """Largest gradient norm; 0: no clipping."""
    skip_spikes: float | None = None
    """Skip steps with loss or gradient norm this many standard deviations above the last 128."""


@dataclass
class EvaluationOptions:
    """Validation, benchmarks, samples, checkpoints and logs."""

    eval_every: int = 250
    """Steps between validations; 0: only after the last step."""
    val_tokens: int = 10_485_760
    """Validation tokens, the same at every validation."""
    save_every: int = 500
    """Steps between checkpoints; 0: only after the last step."""
    keep_last: int = 0
    """Numbered checkpoints (model_step_005000.pt) to keep beside the last and the best."""
    sample_every: int = 500
    """Steps between samples in samples.txt; 0: none."""
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
    tensorboard: bool = False
    """Log to TensorBoard as well, in --log_dir."""
    wandb: bool = False
    """Log to Weights & Biases as well."""


@dataclass
class MachineOptions:
    """Device, precision, parallelism and memory."""

    seed: int = 1337
    """Seed of weights, data order, dropout and samples."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps; with --dry_run also a100, h100, h200, b200, rtx4090."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of matmuls; weights stay float32. auto: bfloat16 where the processor has it."""
    sharding: Literal["none", "zero1", "zero2", "zero3"] = "none"
    """none: DDP; zero1: shard optimizer state, zero2: gradients too, zero3: weights too."""
    activation_checkpointing: Literal["none", "cheap", "block"] = "none"
    """Recompute in the backward pass: cheap: norms and activations, block: whole blocks."""
    use_torch_compile: bool = False
    """Compile the training step; on by default on CUDA, --no_use_torch_compile turns it off."""
    profile: bool = False
    """Write a trace of three steps to trace.json in --log_dir, for ui.perfetto.dev."""
    dry_run: bool = False
    """Check the options, print model, memory, time and cost, and exit."""


@dataclass
class TrainConfig(MachineOptions, EvaluationOptions, ScheduleOptions, ModelOptions, DataOptions):
    """Train a GPT-2. With --resume, options that are not given come from the checkpoint."""

    def check(self) -> None:
        """Raise UserError for the first option out of range."""
        at_least = {
            1: "max_steps total_batch_size micro_batch_size block_size val_tokens",
            0: "warmup_steps eval_every save_every keep_last sample_every hellaswag_every "
            "lambada_every seed max_lr weight_decay grad_clip",
        }
        for least, names in at_least.items():
            for name in names.split():
                value = getattr(self, name)
                if value is not None and value != "auto" and not value >= least:
                    raise UserError(f"--{name} {value} must be at least {least}")
        if self.device in NAMED_GPUS and not self.dry_run:
            raise UserError(
                f"--device {self.device} is for --dry_run, which forecasts a run on that GPU; to "
                "train on one, give --device cuda"
            )
        if self.skip_spikes is not None and not self.skip_spikes > 0:
            raise UserError(f"--skip_spikes {self.skip_spikes} must be above 0")
        if self.seed >= 2**31:
            raise UserError(f"--seed {self.seed} must be below {2**31}")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise UserError("--beta1 and --beta2 must be at least 0 and below 1")
        max_lr = self.resolved_recipe.max_lr
        if not 0 <= self.final_lr <= max_lr:
            raise UserError(f"--min_lr {self.final_lr} must be between 0 and --max_lr {max_lr}")

    @property
    def resolved_recipe(self) -> Recipe:
        """Recipe with the options of the command line. Raises UserError if there is none such, and
        UserError for an option out of range."""
        names = ("max_lr", "weight_decay", "schedule")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        for name, value in given.items():
            if name != "schedule" and not 0 <= value < math.inf:
                raise UserError(f"--{name} {value} must be at least 0 and finite")
        return replace(parse_recipe(self.recipe), **given)

    @property
    def final_lr(self) -> float:
        """Learning rate of the last step."""
        if self.min_lr is not None:
            return self.min_lr
        return 0.0 if self.resolved_recipe.to_zero else self.resolved_recipe.max_lr / 10

    def to_dict(self) -> dict:
        """Return plain values for checkpoints and config.json, the resolved recipe among them."""
        given = {k: str(v) if isinstance(v, Path) else v for k, v in vars(self).items()}
        resolved = {"resolved_recipe": asdict(self.resolved_recipe)}
        return given | resolved | {"warmup_steps": self.resolved_warmup}

    @classmethod
    def from_dict(cls, values: dict) -> "TrainConfig":
        """Return the options of an earlier run, without its per-launch options.

        Raises UserError for a value of a wrong type.
        """
        if values.get("activation_checkpointing") == "mlp":  # old name of a part of cheap
            values = values | {"activation_checkpointing": "cheap"}
        known = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        if wrong := mistyped(known):
            raise UserError(f"the saved options are damaged: {', '.join(wrong)}")
        if type(values.get("resolved_recipe")) is dict:  # older runs have none
            known["recipe"] = recorded_recipe(values)
        paths = {k: Path(v) for k, v in known.items() if k.endswith(("_dir", "_data")) and v}
        return cls(**{**known, **paths, **PER_LAUNCH})

    @property
    def resolved_warmup(self) -> int:
        """Steps of warmup: as given, else 715 or a tenth of a run that is shorter than 7,150."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return min(WARMUP_STEPS, self.max_steps // 10)

    def model_config(self, vocab_size: int) -> GPTConfig:
        """Return the architecture: the recipe's, the named size and the options over it."""
        size = SIZES[self.model_type]
        given = {k: getattr(self, k) for k in size if getattr(self, k) is not None}
        shape = {**size, **given, **self.resolved_recipe.shape(self.block_size, vocab_size)}
        return GPTConfig(self.block_size, vocab_size, dropout=self.dropout, **shape)

    def sequences_per_step(self, world_size: int) -> int:
        """Return the sequences in a global batch; UserError where the batch does not divide."""
        micro = self.micro_batch_size * self.block_size * world_size
        if self.total_batch_size % micro:
            share = self.total_batch_size / (self.block_size * world_size)  # of a process
            fitting = [n for n in range(self.micro_batch_size, 0, -1) if share % n == 0]
            smaller = f"--micro_batch_size {fitting[0]}, or " if fitting else ""
            raise UserError(
                f"--total_batch_size {self.total_batch_size:,} does not divide by "
                f"{self.micro_batch_size} sequences x {self.block_size} tokens x {world_size} "
                f"processes = {micro:,}; give {smaller}--total_batch_size "
                f"{max(1, round(self.total_batch_size / micro)) * micro:,}"
            )
        return self.total_batch_size // self.block_size


def mistyped(values: dict, config_class: type = TrainConfig) -> list[str]:
    """Return the names of options whose values, as to_dict writes them, are of a wrong type."""
    kinds = get_type_hints(config_class)
    return [name for name, x in values.items() if name in kinds and not has_type(x, kinds[name])]


def has_type(value: object, kind: object) -> bool:
    """Return whether `value`, as to_dict writes it, suits a field of type `kind`."""
    if get_origin(kind) is Literal:
        return type(value) is str and value in get_args(kind)
    if parts := get_args(kind):  # of a union
        return any(has_type(value, part) for part in parts)
    written = {Path: (str,), float: (float, int)}
    valid = "\0" not in value if type(value) is str else True  # no path has a NUL
    return type(value) in written.get(kind, (kind,)) and valid


@dataclass
class SamplingConfig:
    """Write text with a trained model."""

    checkpoint: Path = Path("checkpoints")
    """Checkpoint of train.py, or a folder: its best one, else its newest."""
    model: str | None = None
    """Hugging Face GPT-2 to sample from instead: a name (gpt2, gpt2-xl, ...) or a folder."""
    prompt: str = ""
    """Text to continue; @FILE reads a file, - standard input."""
    num_samples: int = 1
    """Texts to write; the first is shown as it is made."""
    interactive: bool = False
    """Ask for prompts, and for options between them."""
    chat: bool = False
    """Answer as the assistant of a chat; without --prompt, talk with the keyboard."""
    json: bool = False
    """Write one line of JSON per text."""
    max_new_tokens: int = 200
    """Longest continuation in tokens; end of text ends it sooner. Where the context is full,
    its older half is dropped."""
    temperature: float = 0.8
    """Sampling temperature; 0: always the likeliest token."""
    top_k: int | None = None
    """Sample from the k likeliest tokens."""
    top_p: float | None = None
    """Sample from the likeliest tokens that together have this probability."""
    seed: int = 1337
    """Seed; sample i depends on (seed, i) alone."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of matmuls. auto: bfloat16 where the processor has it."""
    use_torch_compile: bool = False
    """Compile the forward pass of one token, for long texts."""
