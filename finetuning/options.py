"""Options of finetune.py: the groups that it shares with train.py, with defaults of its own."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from config import (
    WARMUP_STEPS,
    MachineOptions,
    OptimizerOptions,
    RunOptions,
    SaveOptions,
    check_ranges,
    check_run_options,
    log_folder,
    not_given,
)
from data.loader import Slicing
from utils.cli import flag_value
from utils.distributed import Process
from utils.errors import UserError


@dataclass
class FileOptions(RunOptions):
    """Files and folders."""

    method: Literal["sft", "dpo", "reward", "grpo"] | None = None
    """sft: dialogs; dpo: preferences; reward: a reward model; grpo: rewards of its own text."""
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


@dataclass
class BatchOptions(OptimizerOptions):
    """Batch size, learning rate and AdamW."""

    batch_size: int | None = None
    """Packed sequences (sft), pairs (dpo, reward) or prompts (grpo) per step of all processes;
    default: 32, but at most a quarter of the rows."""
    micro_batch_size: int | None = None
    """Packed sequences, pairs or completions (grpo) per forward pass of a process; default: the
    largest of 8, 4, 2 and 1 that divides a step."""
    block_size: int | None = None
    """Longest text in tokens; default: the model's context."""
    dropout: float = 0.0
    """sft, reward: dropout probability."""
    max_steps: int | None = None
    """Optimizer steps; default: three passes over the data, for grpo one."""
    max_lr: float | None = None
    """Learning rate after warmup; default: 2e-5 for sft, 1e-4 for reward, 1e-6 for dpo and grpo."""
    min_lr: float = 0.0
    """Learning rate that is reached after the last step."""
    weight_decay: float = 0.0
    """Weight decay of matrices and embeddings."""
    schedule: str = "linear"
    beta2: float = 0.999


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
class FinetuneConfig(MachineOptions, SaveOptions, MethodOptions, BatchOptions, FileOptions):
    """Fine-tune a model. With --resume, options that are not given come from the checkpoint."""

    eval_every: int = 50
    save_every: int = 100
    sample_every: int = 10
    derived: list[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.derived = not_given(self)
        for name in ("method", "init_from", "data"):
            if getattr(self, name) is None:
                raise UserError(f"give --{name}; --help says what it takes")
        if self.method == "grpo" and self.reward is None:
            raise UserError("--method grpo needs --reward: exact, FILE.py:FUNCTION or a checkpoint")
        self.checkpoint_dir = self.checkpoint_dir or Path(f"runs/{self.method}/checkpoints")
        self.log_dir = self.log_dir or log_folder(self.checkpoint_dir)
        if self.max_lr is None:  # those of trl
            self.max_lr = {"sft": 2e-5, "dpo": 1e-6, "reward": 1e-4, "grpo": 1e-6}[self.method]
        check_ranges(self, "group_size", 2)
        check_ranges(self, "max_steps batch_size micro_batch_size max_new_tokens updates", 1)
        check_ranges(self, "beta clip kl", 0)
        check_run_options(self)

    @classmethod
    def checkpoint_folder(cls, flags: list[str]) -> Path:
        """Return the --checkpoint_dir of a command line."""
        default = f"runs/{flag_value(flags, 'method')}/checkpoints"
        return Path(flag_value(flags, "checkpoint_dir") or default).expanduser()

    @property
    def last_update(self) -> int:
        """Update, counted from 0, at which the learning rate is --min_lr."""
        return self.max_steps

    def resolve_length(self, num_examples: int) -> None:
        """Set --max_steps, if not given, to passes over the examples; warmup follows from it."""
        if self.max_steps is None:
            passes = 1 if self.method == "grpo" else 3
            self.max_steps = -(-passes * num_examples // self.batch_size)
        if self.warmup_steps is None:
            self.warmup_steps = min(WARMUP_STEPS, self.max_steps // 10)

    def slice_steps(self, process: Process) -> Slicing:
        """Return the division of a step into micro-batches; UserError where it does not divide."""
        if self.batch_size is None:
            quarter = self.data.read_bytes().count(b"\n") // 4
            self.batch_size = max(process.world_size, 2 ** min(5, max(1, quarter).bit_length() - 1))
        items = self.batch_size * (self.group_size if self.method == "grpo" else 1)
        if self.micro_batch_size is None:
            self.micro_batch_size = math.gcd(8, items // process.world_size)
        if items % (together := self.micro_batch_size * process.world_size):
            raise UserError(
                f"the {items} examples of a step do not divide by {together}, --micro_batch_size x "
                "processes; change it, or --batch_size"
            )
        return Slicing(items, self.micro_batch_size, process.rank, process.world_size)
