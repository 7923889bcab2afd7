"""Options of finetune.py: the command line over those of the checkpoint that it resumes."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

from config import ConfigError, TrainConfig, mistyped
from model.config import GPTConfig
from training import checkpoint as ckpt
from training.checkpoint_folder import checkpoint_folder, find_newest
from training.initial_model import checkpoint_to_start_from
from training.run_folders import best_loss, check_encoding, run_to_begin_again
from utils.cli import parse
from utils.distributed import world_size
from utils.log_files import CONFIG

PATHS = ("data", "eval_data", "questions", "checkpoint_dir", "log_dir")
PER_LAUNCH = {"resume": None, "overwrite": False}


# default learning rates after warmup, those of trl
LEARNING_RATES = {"sft": 2e-5, "dpo": 1e-6, "reward": 1e-4, "grpo": 1e-6}


@dataclass
class FileOptions:
    """Files and folders."""

    method: Literal["sft", "dpo", "reward", "grpo"] | None = None
    """sft: dialogs; dpo: preferences; reward: a reward model; grpo: rewards of its own text."""
    init_from: str | None = None
    """Weights to start from: a checkpoint or its folder, or a Hugging Face name or folder."""
    data: Path | None = None
    """Rows to learn from, .jsonl. sft: messages, or prompt and completion; dpo, reward: prompt,
    chosen, rejected; grpo: prompt."""
    eval_data: Path | None = None
    """Held-out rows of the same format."""
    questions: Path | None = None
    """Rows of prompt and answer, .jsonl: the share that is answered exactly is logged."""
    plain: bool = False
    """Train on plain text: prompts and completions without User: and Assistant:."""
    checkpoint_dir: Path | None = None
    """Folder for checkpoints; default: runs/METHOD/checkpoints."""
    log_dir: Path | None = None
    """Folder for metrics.jsonl, samples.txt and config.json; default: runs/METHOD/logs."""
    resume: str | None = None
    """Checkpoint, or a folder with model_last.pt; auto: --checkpoint_dir, or else a new run."""
    overwrite: bool = False
    """Replace the checkpoints and logs of an earlier run."""


@dataclass
class ScheduleOptions:
    """Batch size, learning rate and AdamW."""

    max_steps: int | None = None
    """Optimizer steps; default: one pass over the data."""
    batch_size: int = 32
    """Packed sequences (sft), pairs (dpo, reward) or prompts (grpo) per step of all processes."""
    micro_batch_size: int | None = None
    """Packed sequences, pairs or completions (grpo) per forward pass of a process; default: 8, or
    what a process has in a step if that is less."""
    block_size: int | None = None
    """Longest text in tokens; default: the model's context."""
    dropout: float = 0.0
    """sft, reward: dropout probability."""
    max_lr: float | None = None
    """Learning rate after warmup, from which it falls linearly to --min_lr; default: 2e-5 for sft,
    1e-4 for reward, 1e-6 for dpo and grpo."""
    min_lr: float = 0.0
    """Learning rate that is reached after the last step."""
    warmup_steps: int | None = None
    """Steps of linear warmup; default: a tenth of --max_steps."""
    weight_decay: float = 0.0
    """Weight decay of matrices and embeddings."""
    beta1: float = 0.9
    """AdamW: decay of the first moment."""
    beta2: float = 0.999
    """AdamW: decay of the second moment."""
    grad_clip: float = 1.0
    """Largest gradient norm; 0: no clipping."""
    skip_spikes: float | None = None
    """Skip steps with loss or gradient norm this many standard deviations above the last 128."""


@dataclass
class MethodOptions:
    """Preferences and rewards."""

    beta: float = 0.1
    """dpo: scale of the implicit reward; the higher, the closer the model stays to --init_from."""
    reward: str | None = None
    """grpo: exact (1 for the row's "answer"), FILE.py:FUNCTION, or a reward model's checkpoint."""
    group_size: int = 8
    """grpo: completions of a prompt."""
    max_new_tokens: int = 64
    """Longest completion in tokens (grpo, --questions)."""
    clip: float = 0.2
    """grpo: clipping range of the probability ratio (PPO's epsilon)."""
    kl: float = 0.04
    """grpo: factor of the KL divergence from the model of --init_from; 0: none."""
    updates: int = 1
    """grpo: optimizer updates with the completions of a step."""


@dataclass
class EvaluationOptions:
    """Evaluation and checkpoints."""

    eval_every: int = 50
    """Steps between evaluations on --eval_data and --questions; 0: only after the last step."""
    save_every: int = 100
    """Steps between checkpoints; 0: only after the last step."""
    keep_last: int = 0
    """Numbered checkpoints (model_step_005000.pt) to keep beside the last and the best."""
    sample_every: int = 10
    """grpo: steps between completions with their rewards in samples.txt; 0: none."""


@dataclass
class MachineOptions:
    """Device, precision, parallelism and memory."""

    seed: int = 1337
    """Seed of data order, dropout and completions."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of matmuls; weights stay float32. auto: bfloat16 where the processor has it."""
    sharding: Literal["none", "zero1", "zero2", "zero3"] = "none"
    """none: DDP; zero1: shard optimizer state, zero2: gradients too, zero3: weights too."""
    activation_checkpointing: Literal["none", "cheap", "block"] = "none"
    """Recompute in the backward pass: cheap: norms and activations, block: whole blocks."""


@dataclass
class FinetuneConfig(
    MachineOptions, EvaluationOptions, MethodOptions, ScheduleOptions, FileOptions
):
    """Fine-tune a model. With --resume, options that are not given come from the checkpoint."""

    @property
    def compares(self) -> bool:
        """True where the model is compared with that of --init_from."""
        return self.method == "dpo" or (self.method == "grpo" and self.kl > 0)

    def check(self) -> None:
        """Raise ConfigError for the first option that is missing or out of range."""
        for name in ("method", "init_from", "data"):
            if getattr(self, name) is None:
                raise ConfigError(f"give --{name}; --help says what it takes")
        if self.method == "grpo" and self.reward is None:
            raise ConfigError(
                "--method grpo needs --reward: exact, FILE.py:FUNCTION or a checkpoint"
            )
        wrong = {  # what a method has no use for
            "dropout": self.dropout and self.method in ("dpo", "grpo"),
            "questions": self.questions and self.method == "reward",
            "updates": self.updates != 1 and self.method != "grpo",
        }
        for name in (name for name in wrong if wrong[name]):
            raise ConfigError(f"--method {self.method} has no use for --{name}: leave it out")
        least = {1: "batch_size micro_batch_size max_new_tokens updates", 2: "group_size"}
        least[0] = "beta clip kl min_lr"
        for value, names in least.items():
            for name in names.split():
                given = getattr(self, name)
                if given is not None and not given >= value:
                    raise ConfigError(f"--{name} {given} must be at least {value}")

    def to_dict(self) -> dict:
        """Return plain values for checkpoints and config.json."""
        return {k: str(v) if isinstance(v, Path) else v for k, v in vars(self).items()}

    def train_config(self, shape: GPTConfig, data_dir: str) -> TrainConfig:
        """Return the options of train.py under which a model of `shape` is optimized and saved
        alike; `data_dir` are the shards that it was trained on before."""
        names = [f.name for f in fields(TrainConfig) if hasattr(self, f.name)]
        shared = {n: getattr(self, n) for n in names if getattr(self, n) is not None}
        recipe = [f"{name}={getattr(shape, name)}" for name in shape.differs_from({})]
        sizes = {name: getattr(shape, name) for name in ("n_layer", "n_head", "n_embd")}
        config = TrainConfig(**shared | sizes | {"data_dir": Path(data_dir)})
        config.recipe = ",".join(["gpt2", *recipe, "schedule=linear"])
        config.block_size, config.dropout = shape.block_size, shape.dropout
        config.total_batch_size = self.batch_size * shape.block_size
        config.check()
        return config


def resolve_run() -> tuple[FinetuneConfig, dict | None]:
    """Return the options of this run, and the checkpoint that it resumes, if any, which has the
    options that are not on the command line."""
    options, saved = parse(FinetuneConfig), None
    if options.resume and options.overwrite:
        raise ConfigError("--resume continues a run, --overwrite replaces it: give one of the two")
    path = Path(options.resume) if options.resume else None
    if options.resume == "auto":
        if options.checkpoint_dir is None or options.log_dir is None:
            options = with_defaults(options)
        folders = options.checkpoint_dir, options.log_dir
        path = find_newest(options.checkpoint_dir)
        if path is None and (run := run_to_begin_again(*folders)):
            options = parse(FinetuneConfig, default=saved_options(run, options.log_dir / CONFIG))
    elif path is not None and path.is_dir():
        folder, path = path, find_newest(checkpoint_folder(path))
        if path is None:
            raise ConfigError(f"--resume {folder}: the folder holds no checkpoint")
    if path is not None:
        saved = ckpt.load_checkpoint(path)
        before = saved_options(saved, path)
        options = parse(FinetuneConfig, default=before)
        check_unchanged(before, options, path)
        options.resume = str(path)
    elif options.init_from:
        options.init_from = str(checkpoint_to_start_from(options.init_from) or options.init_from)
    options = with_defaults(options)
    check_encoding(options.checkpoint_dir)
    if saved:
        saved["best_loss"] = min(saved["best_loss"], best_loss(options.checkpoint_dir, saved))
    return options, saved


def check_unchanged(before: FinetuneConfig, now: FinetuneConfig, path: Path) -> None:
    """Raise ConfigError if a resumed run is to have another method, model or kind of text. The
    model that it compares with may have another path; changed_inputs looks at its weights."""
    if not Path(before.init_from).is_relative_to(now.init_from):  # not the folder it was found in
        now.init_from = str(checkpoint_to_start_from(now.init_from) or now.init_from)
    names = ("method", "block_size", "dropout", "plain")
    for name in names if before.compares else (*names, "init_from"):
        was, value = getattr(before, name), getattr(now, name)
        if value != was:
            raise ConfigError(
                f"{path} is of a run with --{name} {was}, not {value}: leave it out, or begin "
                "another run in another --checkpoint_dir"
            )


def with_defaults(options: FinetuneConfig) -> FinetuneConfig:
    """Return options, checked, with the values of those that follow from others."""
    options.check()
    run = Path("runs") / options.method
    items = options.batch_size * (options.group_size if options.method == "grpo" else 1)
    defaults = {
        "checkpoint_dir": run / "checkpoints",
        "log_dir": run / "logs",
        "max_lr": LEARNING_RATES[options.method],
        "micro_batch_size": max(1, min(8, items // world_size())),
    }
    return replace(options, **{k: x for k, x in defaults.items() if getattr(options, k) is None})


def saved_options(saved: dict, path: Path) -> FinetuneConfig:
    """Return the options in a checkpoint of finetune.py; raise ConfigError for another one."""
    values = saved.get("finetune")
    if type(values) is not dict:
        raise ConfigError(f"{path} was written by train.py: begin from it by --init_from {path}")
    known = {f.name: values[f.name] for f in fields(FinetuneConfig) if f.name in values}
    if wrong := mistyped(known, FinetuneConfig):
        raise ConfigError(f"{path}: the saved options are damaged: {', '.join(wrong)}")
    if "model_config" in saved:
        known["block_size"] = ckpt.model_config(saved, path).block_size
    paths = {name: Path(known[name]) for name in PATHS if known.get(name) is not None}
    return FinetuneConfig(**{**known, **paths, **PER_LAUNCH})
