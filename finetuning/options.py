"""Options of finetune.py."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from config import TrainConfig
from model.config import GPTConfig
from utils.distributed import world_size
from utils.errors import UserError


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
    """Packed sequences, pairs or completions (grpo) per forward pass of a process; default: the
    largest number up to 8 that divides a step."""
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
    def needs_reference(self) -> bool:
        """True where the loss compares with the model of --init_from."""
        return self.method == "dpo" or (self.method == "grpo" and self.kl > 0)

    def check(self) -> None:
        """Raise UserError for the first option that is missing or out of range."""
        for name in ("method", "init_from", "data"):
            if getattr(self, name) is None:
                raise UserError(f"give --{name}; --help says what it takes")
        if self.method == "grpo" and self.reward is None:
            raise UserError("--method grpo needs --reward: exact, FILE.py:FUNCTION or a checkpoint")
        wrong = {  # what a method has no use for
            "dropout": self.dropout and self.method in ("dpo", "grpo"),
            "questions": self.questions and self.method == "reward",
            "updates": self.updates != 1 and self.method != "grpo",
        }
        for name in (name for name in wrong if wrong[name]):
            raise UserError(f"--method {self.method} has no use for --{name}: leave it out")
        least = {1: "batch_size micro_batch_size max_new_tokens updates", 2: "group_size"}
        least[0] = "beta clip kl min_lr"
        for value, names in least.items():
            for name in names.split():
                given = getattr(self, name)
                if given is not None and not given >= value:
                    raise UserError(f"--{name} {given} must be at least {value}")

    def items_per_step(self) -> int:
        """Return the number of packed sequences, pairs or completions in a step."""
        return self.batch_size * (self.group_size if self.method == "grpo" else 1)

    def resolved_micro_batch(self) -> int:
        """Return --micro_batch_size, or its default for the number of processes."""
        if self.micro_batch_size is not None:
            return self.micro_batch_size
        share = self.items_per_step() // world_size()
        return next((n for n in range(min(8, share), 0, -1) if share % n == 0), 1)

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
        config.micro_batch_size = self.resolved_micro_batch()
        config.check()
        return config
