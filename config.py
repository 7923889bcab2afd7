"""Every setting of every script, declared once: the command line is made from these dataclasses."""

import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from model.config import SIZES, GPTConfig
from recipes import Recipe, recipe_of
from utils.errors import UserError


class ConfigError(UserError):
    """Settings that are wrong by themselves or do not fit each other."""


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
    """Read these instead: files or folders of .parquet, .jsonl, .txt, .py (or URLs, with
    fsspec[http] installed)."""
    tokenizer: Literal["gpt2", "bytes"] = "gpt2"
    """gpt2: 50,257 tokens through tiktoken; bytes: one token a byte, no download."""
    shard_size: int = 100_000_000
    """Tokens in a shard."""
    max_shards: int | None = None
    """Stop after this many train shards."""
    format: Literal["npy", "bin"] = "npy"
    """npy: numpy.load reads it; bin: llm.c's format."""
    val_fraction: float = 0.01
    """Share of documents for validation, chosen by a hash of their text."""
    num_workers: int = os.cpu_count() or 1
    """Threads that tokenise; the shards do not depend on it."""
    worker_index: int = 0
    """Which of --worker_count machines this one is, from 0; each needs its own --local_dir."""
    worker_count: int = 1
    """Machines that share the work: number i takes every n-th source file, from the i-th on."""
    merge: tuple[Path, ...] = ()
    """Read no text but merge these folders, one of each worker, into --local_dir. Shards are linked
    where the file system can, else copied."""


@dataclass
class TrainConfig:
    """Train a GPT-2. With --resume, settings not given come from the checkpoint."""

    data_dir: Path = Path("data/edu_fineweb10B")
    """Folder of token shards, from data/fineweb-edu.py or build-nanogpt, llm.c, modded-nanogpt."""
    checkpoint_dir: Path = Path("checkpoints")
    """Folder for model_last.pt, model_best.pt and those that --keep_last keeps."""
    log_dir: Path = Path("logs")
    """Folder for metrics.jsonl, samples.txt and config.json."""
    resume: str | None = None
    """A checkpoint to go on from; auto: the newest in --checkpoint_dir, a new run if none."""
    init_from: str | None = None
    """Start from these weights instead of random ones, to fine-tune: a Hugging Face GPT-2 by name
    (gpt2, gpt2-xl, ...) or folder; the architecture is read from it."""
    overwrite: bool = False
    """Start a new run over the checkpoints and logs of another."""

    recipe: str = "gpt2"
    """gpt2, faithful; modern, for the same loss with fewer tokens; or llama. modern,qk_norm=False
    changes one field: those of recipes.py, and of GPTConfig beside its sizes."""
    model_type: Literal["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"] = "gpt2"
    """Named size: 124M, 350M, 774M, 1558M parameters."""
    n_layer: int | None = None
    """Blocks, over the named size."""
    n_head: int | None = None
    """Attention heads, over the named size."""
    n_embd: int | None = None
    """Width, over the named size."""
    block_size: int = 1024
    """Tokens in a sequence."""
    dropout: float = 0.0
    """Share of activations dropped; 0 for runs of about one epoch."""

    max_steps: int = 19_073
    """Optimizer steps; 19,073 of 524,288 tokens are 10B."""
    total_batch_size: int = 524_288
    """Tokens in a step, over all processes; gradient accumulation follows from it."""
    micro_batch_size: int | Literal["auto"] = 16
    """Sequences in one forward on one process; auto: as many as should fit its memory, by the
    forecast of --dry_run (not on Apple's GPUs). What a step learns from does not depend on it."""
    max_lr: float | None = None
    """Learning rate after warmup; 6e-4 for gpt2, 0.012 for modern, whose matrices Muon trains."""
    min_lr: float | None = None
    """Learning rate of the last step; a tenth of --max_lr for gpt2, 0 for modern."""
    warmup_steps: int = 715
    """Steps of linear warmup."""
    schedule: Literal["cosine", "linear", "wsd"] | None = None
    """After warmup: cosine (gpt2) or linear (modern) decay to --min_lr; or wsd, constant until the
    last fifth, before which model_stable.pt is kept: a longer run can go on from there."""
    weight_decay: float | None = None
    """Decay of matrices and embeddings, with Muon of its matrices alone; 0.1 unless given."""
    beta1: float = 0.9
    """AdamW, first moment."""
    beta2: float = 0.95
    """AdamW, second moment."""
    grad_clip: float = 1.0
    """Largest norm of the gradient; 0 for no clipping."""

    eval_every: int = 250
    """Steps between validations; 0 for only the last."""
    val_tokens: int = 10_485_760
    """Validation tokens, the same ones each time, or all there are."""
    save_every: int = 500
    """Steps between checkpoints; 0 for only the last."""
    keep_last: int = 0
    """Numbered checkpoints (model_step_005000.pt) kept beside the last and the best."""
    sample_every: int = 500
    """Steps between samples in samples.txt; 0 for none."""
    hellaswag_every: int = 0
    """Steps between HellaSwag scores; 0 for none."""
    lambada_every: int = 0
    """Steps between LAMBADA scores; 0 for none."""
    eval_full: bool = False
    """Score all examples of a benchmark, not 500 that stand evenly over it."""
    hellaswag_data: Path | None = None
    """HellaSwag .jsonl in the original format; from the hub unless given."""
    lambada_data: Path | None = None
    """LAMBADA .jsonl in OpenAI's format; from the hub unless given."""
    tensorboard: bool = False
    """Log to TensorBoard too, in --log_dir."""
    wandb: bool = False
    """Log to Weights & Biases too."""

    seed: int = 1337
    """Of weights, data order, dropout and samples."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of matrix products; weights stay float32. auto: bfloat16 on GPUs that have it."""
    sharding: Literal["none", "zero1", "zero2", "zero3"] = "none"
    """What several processes divide: nothing (DDP), optimizer state, gradients too, weights too."""
    activation_checkpointing: Literal["none", "mlp", "cheap", "block"] = "none"
    """Compute again in the backward pass, for memory: nothing, GELUs, these and LayerNorms (which
    costs little; compiled, mlp too is what cheap is), whole blocks."""
    skip_spikes: float | None = None
    """Leave out steps whose loss or gradient norm is this many standard deviations above the last
    128; those that are not finite are always left out."""
    use_torch_compile: bool = False
    """Compile the training step; evaluation and sampling use the plain module."""
    profile: bool = False
    """Write a trace of three steps to trace.json in --log_dir, for ui.perfetto.dev."""
    dry_run: bool = False
    """Check the settings, say what would be trained, and end."""

    def check(self) -> None:
        """ConfigError for the first setting that cannot be."""
        at_least = {
            1: "max_steps total_batch_size micro_batch_size block_size val_tokens",
            0: "warmup_steps eval_every save_every keep_last sample_every hellaswag_every "
            "lambada_every seed max_lr weight_decay grad_clip",
        }
        for least, names in at_least.items():
            for name in names.split():
                if name == "micro_batch_size" and self.micro_batch_size == "auto":
                    continue
                value = getattr(self, name)
                if value is not None and not value >= least:
                    raise ConfigError(f"--{name} {value} must be at least {least}")
        if self.init_from and not self.model_config(1).is_gpt2:
            raise ConfigError(
                f"--init_from starts from a GPT-2, and --recipe {self.recipe} is none"
            )
        if self.skip_spikes is not None and not self.skip_spikes > 0:
            raise ConfigError(f"--skip_spikes {self.skip_spikes} must be above 0")
        if self.seed >= 2**31:
            raise ConfigError(f"--seed {self.seed} must be below {2**31}")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ConfigError("--beta1 and --beta2 must be at least 0 and below 1")
        if not 0 <= self.floor_lr <= self.chosen.max_lr:
            raise ConfigError(
                f"--min_lr {self.floor_lr} must be between 0 and --max_lr {self.chosen.max_lr}"
            )

    @property
    def chosen(self) -> Recipe:
        """The recipe, with what was given over it. Raises ModelError if there is none such."""
        names = ("max_lr", "weight_decay", "schedule")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return replace(recipe_of(self.recipe), **given)

    @property
    def floor_lr(self) -> float:
        """Learning rate of the last step."""
        if self.min_lr is not None:
            return self.min_lr
        return 0.0 if self.chosen.to_zero else self.chosen.max_lr / 10

    def to_dict(self) -> dict:
        """Plain values, for checkpoints and config.json; `chosen` tells what the recipe settled."""
        given = {k: str(v) if isinstance(v, Path) else v for k, v in vars(self).items()}
        return given | {"chosen": asdict(self.chosen)}

    @classmethod
    def from_dict(cls, values: dict) -> "TrainConfig":
        """The settings of an earlier run, but for those that are of one start of it.
        Raises ConfigError for a value of a wrong type."""
        known = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        kinds = get_type_hints(cls)
        wrong = [name for name, value in known.items() if not fits(value, kinds[name])]
        if wrong:
            raise ConfigError(f"the saved settings are damaged: {', '.join(wrong)}")
        paths = {k: Path(v) for k, v in known.items() if k.endswith(("_dir", "_data")) and v}
        of_a_start = {"resume": None, "overwrite": False, "dry_run": False, "profile": False}
        return cls(**{**known, **paths, **of_a_start})

    def model_config(self, vocab_size: int) -> GPTConfig:
        """The architecture: the named size, with what was given over it, and the recipe's."""
        size = SIZES[self.model_type]
        given = {k: getattr(self, k) for k in size if getattr(self, k) is not None}
        shape = {**size, **given, **self.chosen.model}
        return GPTConfig(self.block_size, vocab_size, dropout=self.dropout, **shape)

    def sequences_per_step(self, world_size: int) -> int:
        """Sequences in a global batch; ConfigError where the batch sizes do not divide."""
        micro = self.micro_batch_size * self.block_size * world_size
        if self.total_batch_size % micro:
            raise ConfigError(
                f"--total_batch_size {self.total_batch_size:,} does not divide by "
                f"{self.micro_batch_size} sequences x {self.block_size} tokens x {world_size} "
                f"processes = {micro:,}; nearest that does: "
                f"{max(1, round(self.total_batch_size / micro)) * micro:,}"
            )
        return self.total_batch_size // self.block_size


def fits(value: object, kind: object) -> bool:
    """Whether `value`, as to_dict writes it, is one for a field of type `kind`."""
    if get_origin(kind) is Literal:
        return type(value) is str and value in get_args(kind)
    if parts := get_args(kind):  # of a union
        return any(fits(value, part) for part in parts)
    written = {Path: (str,), float: (float, int)}
    return type(value) in written.get(kind, (kind,)) and not (
        type(value) is str and "\0" in value
    )  # of no path


@dataclass
class SamplingConfig:
    """Write text with a trained model."""

    checkpoint: Path = Path("checkpoints/model_best.pt")
    """Checkpoint of train.py; architecture and tokenizer are read from it."""
    model: str | None = None
    """Sample from this instead: a Hugging Face GPT-2 (gpt2, gpt2-xl, ...) or a folder of one."""
    prompt: str = ""
    """Text to continue; @FILE reads a file, - standard input; empty: from nothing."""
    num_samples: int = 1
    """Texts to write; the first is shown as it is made."""
    interactive: bool = False
    """Ask for prompts, and for settings between them."""
    json: bool = False
    """Write a line of JSON for each text instead, for machines."""
    max_new_tokens: int = 200
    """Longest continuation in tokens; end of text ends it sooner."""
    temperature: float = 0.8
    """Above 1 wilder, below 1 tamer, 0 always the likeliest token."""
    top_k: int | None = None
    """Choose among the k likeliest tokens."""
    top_p: float | None = None
    """Choose among the likeliest tokens that together have this probability."""
    seed: int = 1337
    """Sample i depends on (seed, i) alone, not on how many are made."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of matrix products. auto: bfloat16 on GPUs that have it."""
    use_torch_compile: bool = False
    """Compile the reading of a token, for long texts: on a CPU half a minute, then up to 1.6 times
    as fast."""


@dataclass
class EvalConfig:
    """Score a model: validation loss, HellaSwag, LAMBADA, the Children's Book Test."""

    checkpoint: Path = Path("checkpoints/model_best.pt")
    """Checkpoint of train.py."""
    model: str | None = None
    """Score this instead: a Hugging Face GPT-2 (gpt2, gpt2-medium, gpt2-large, gpt2-xl, ...) or a
    folder in that format."""
    tasks: tuple[Literal["val", "hellaswag", "lambada", "cbt_cn", "cbt_ne"], ...] = (
        "hellaswag",
        "lambada",
    )
    """What to score."""
    data: tuple[Path, ...] = ()
    """Files in the original formats, one for each benchmark of --tasks in that order; else they
    come from the hub."""
    data_dir: Path | None = None
    """Folder of shards for the task val; unless given, the one the checkpoint was trained on."""
    hellaswag_protocols: tuple[Literal["build-nanogpt", "lm-eval"], ...] = (
        "build-nanogpt",
        "lm-eval",
    )
    """Each is a pass over the data: the raw text, and the text that lm-evaluation-harness makes."""
    limit: int | None = None
    """Score only the first examples of each benchmark."""
    val_tokens: int = 10_485_760
    """Validation tokens, or all there are."""
    batch_size: int = 16
    """Examples in a forward; the figures do not depend on it."""
    out: Path = Path("logs/evaluation.json")
    """JSON file for the table."""
    dump: Path | None = None
    """JSON lines file for one row per example and protocol."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    """Of matrix products; losses are summed in float32. auto: bfloat16 on GPUs that have it."""


@dataclass
class ConvertConfig:
    """Convert between this project's checkpoints and Hugging Face folders."""

    out: Path
    """What to write: a folder with --checkpoint, a .pt file with --model."""
    checkpoint: Path | None = None
    """Checkpoint to turn into a folder that transformers loads."""
    model: str | None = None
    """Hugging Face GPT-2, by name or folder, to turn into a checkpoint."""


@dataclass
class PlotConfig:
    """Draw the curves of one or more runs."""

    log: tuple[Path, ...] = (Path("logs"),)
    """metrics.jsonl files, or the folders that hold them."""
    sz: Literal["124M", "350M", "774M", "1558M"] | None = None
    """Draw OpenAI's GPT-2 of this size as dashed lines, where figures were published."""
    x: Literal["tokens", "hours", "step"] = "tokens"
    """What runs are laid over each other by; hours are those of the training steps."""
    out: Path = Path("plots/log_plot.png")
    """Picture to write."""


@dataclass
class SweepConfig:
    """Train with every combination of settings and every seed."""

    grid: tuple[str, ...]
    """Settings of train.py with their values: "recipe gpt2 modern" "max_lr 1e-3 2e-3"."""
    fixed: tuple[str, ...] = ()
    """Settings that are the same in every run: "data_dir data/novels" "use_torch_compile"."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Each combination is trained with each."""
    jobs: int = 1
    """Runs at a time; they divide the processor's cores."""
    out: Path = Path("runs/sweep")
    """Folder for the runs, table.md and sweep.png."""


@dataclass
class BenchConfig:
    """Measure this machine: what the scripts reach beside its limits and beside their peers."""

    what: Literal["train", "data", "sample", "eval", "all"]
    """The part to measure."""
    peer: Path | None = None
    """A checkout of nanoGPT, whose model.py trains in turn with ours."""
    repeats: int = 5
    """Of each measurement, of which the median counts."""
    model_type: Literal["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"] = "gpt2"
    """Named size: 124M, 350M, 774M, 1558M parameters."""
    block_size: int = 1024
    """Tokens in a sequence."""
    micro_batch_size: int = 4
    """Sequences in a training step."""
    use_torch_compile: bool = False
    """Compile our model of the named size; nanoGPT's always is, transformers' never."""
    activation_checkpointing: Literal["none", "mlp", "cheap", "block"] = "none"
    """As in train.py."""
    input: tuple[Path, ...] = ()
    """Text files to shard: .parquet, .jsonl or .txt; without, made-up words."""
    num_workers: int = os.cpu_count() or 1
    """Threads that tokenise."""
    hellaswag: Path | None = None
    """HellaSwag's file in the original format; without, made-up items of its size."""
    harness: Path | None = None
    """A Python interpreter that has lm-evaluation-harness, which then scores in turn with ours."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    dtype: Literal["auto", "float32", "bfloat16"] = "bfloat16"
    """Of matrix products in training and sampling."""
    out: Path = Path("logs/bench.json")
    """JSON file for all figures."""
