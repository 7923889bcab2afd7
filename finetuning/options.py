"""Options of finetune.py: the groups that it shares with train.py, with defaults of its own."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from config import (
    WARMUP_STEPS,
    MachineOptions,
    OptimizerOptions,
    ResolvedOptions,
    RunOptions,
    SaveOptions,
    log_folder,
    resolve,
)
from recipes import ScheduleName
from utils.cli import flag_value
from utils.errors import UserError
from utils.ranges import BelowOne, Count, Natural, NonNegative

MethodName = Literal["sft", "dpo", "reward", "grpo"]


@dataclass(frozen=True)
class FileOptions(RunOptions):
    """Files and folders."""

    method: MethodName | None = None
    """sft: dialogs; dpo: preferences; reward: a reward model; grpo: rewards of its own text."""
    data: Path | None = None
    """Rows to learn from, .jsonl. sft: messages, or prompt and completion; dpo, reward: prompt,
    chosen, rejected; grpo: prompt."""
    eval_data: Path | None = None
    """Held-out rows of the same format: their loss, for grpo the reward of the likeliest
    completions, is logged every --eval_every steps."""
    plain: bool = False
    """Train on plain text: prompts and completions without User: and Assistant:."""
    checkpoint_dir: Path = Path("runs/METHOD/checkpoints")
    """Folder for checkpoints."""


@dataclass(frozen=True)
class BatchOptions(OptimizerOptions):
    """Batch size, learning rate and AdamW."""

    batch_size: Count | None = None
    """Dialogs (sft), pairs (dpo, reward) or prompts (grpo) per step of all processes; default: the
    largest of 32, 16, 8 and 4 that is at most a sixteenth of the rows, else 4."""
    micro_batch_size: Count | None = None
    """Dialogs (sft), pairs (dpo, reward) or completions (grpo) per forward pass of a process; lower
    it where memory runs out. Default: 8, or 4, 2, 1 if 8 does not divide a process's share."""
    block_size: Count | None = None
    """Longest text in tokens; default: the model's context."""
    dropout: BelowOne = 0.0
    """sft, reward: dropout probability."""
    max_steps: Count | None = None
    """Optimizer steps; default: three passes over the rows, for sft at least 200 steps, for grpo
    one pass."""
    max_lr: NonNegative | None = None
    """Learning rate after warmup; default: 1e-4 for reward, 1e-6 for dpo and grpo, and for sft
    2e-5 with 1B parameters, more with fewer: 6e-5 with 124M, 6e-4 with 1M, at most 3e-3."""
    min_lr: NonNegative = 0.0
    """Learning rate that is reached after the last step."""
    weight_decay: NonNegative = 0.0
    """Weight decay of matrices and embeddings."""
    # defaults of trl
    schedule: ScheduleName = "linear"
    """Decay after warmup: cosine, linear, or wsd (constant, then linear in the last fifth)."""
    beta2: BelowOne = 0.999  # its help is that of train.py


@dataclass(frozen=True)
class MethodOptions:
    """Preferences and rewards."""

    # a negative beta or kl would reverse the loss
    beta: NonNegative = 0.1
    """dpo: scale of the implicit reward; the higher, the closer the model stays to --init_from."""
    reward: str | None = None
    """grpo: exact (1 for the row's "answer"), FILE.py:FUNCTION, or a reward model's checkpoint."""
    group_size: Annotated[int, "at least 2"] = 8
    """grpo: completions of a prompt; one alone would have no advantage."""
    max_new_tokens: Count = 64
    """grpo: longest completion in tokens."""
    kl: NonNegative = 0.04
    """grpo: factor of the KL divergence from the model of --init_from; 0: none."""


@dataclass(frozen=True)
class FinetuneOptions(MachineOptions, SaveOptions, MethodOptions, BatchOptions, FileOptions):
    """Fine-tune a model. With --resume, options that are not given come from the checkpoint. Every
    run needs --method, --init_from and --data, perhaps --eval_data, --run_dir and --resume."""

    # In steps. The defaults of train.py are for runs a hundred times longer.
    eval_every: Natural = 50
    save_every: Natural = 100
    sample_every: Natural = 10

    def __post_init__(self) -> None:
        # required, although None by default: --resume brings their values along
        for name in ("method", "init_from", "data"):
            if getattr(self, name) is None:
                raise UserError(f"give --{name}; --help says what it takes")
        if self.method == "grpo" and self.reward is None:
            raise UserError("--method grpo needs --reward: exact, FILE.py:FUNCTION or a checkpoint")

    @classmethod
    def checkpoint_folder(cls, flags: list[str]) -> Path:
        """Return the --checkpoint_dir of a command line, by default in a folder named after its
        --method."""
        # called before the flags are parsed, as --resume auto looks for a checkpoint there
        default = f"runs/{flag_value(flags, 'method')}/checkpoints"
        return Path(flag_value(flags, "checkpoint_dir") or default)


@dataclass(frozen=True, kw_only=True)
class ResolvedFinetuneOptions(ResolvedOptions, FinetuneOptions):
    """Options of a run of finetune.py, with what was derived in place of None."""

    method: MethodName
    data: Path
    init_from: str
    batch_size: int
    micro_batch_size: int

    @property
    def decay_end(self) -> int:
        # One after the last step, max_steps - 1, so that it still learns with --min_lr 0, as in
        # trl.
        return self.max_steps


def resolve_options(
    options: FinetuneOptions, num_rows: int, num_parameters: int, data_parallel: int
) -> ResolvedFinetuneOptions:
    """Return the options with the defaults that follow from the rows of --data, the model's number
    of parameters and the number of processes, `data_parallel`. Raise UserError where a step does
    not divide into micro-batches."""
    assert options.method is not None  # FinetuneOptions demands it
    # --batch_size: at least 16 steps an epoch, if that leaves four examples in a step, and one for
    # each process
    batch_size = 32  # a power of 2, which divides among 2, 4 or 8 processes
    while batch_size > max(4, data_parallel, num_rows // 16):
        batch_size //= 2
    batch_size = max(1, batch_size // data_parallel) * data_parallel  # 3 processes: 30, not 32
    batch_size = options.batch_size or batch_size

    # Micro-batches are of equal size, as many on each process: a forward pass of a sharded model
    # waits for all processes.
    num_examples = batch_size  # in a step: dialogs, pairs or completions
    if options.method == "grpo":
        num_examples *= options.group_size
    # 8 if possible, else the largest power of 2 that divides a process's share
    micro_batch_size = options.micro_batch_size or math.gcd(8, num_examples // data_parallel)
    examples_per_pass = micro_batch_size * data_parallel  # in one forward pass of all processes
    if num_examples % examples_per_pass:
        raise UserError(
            f"the {num_examples} examples of a step do not divide by {examples_per_pass}, "
            "--micro_batch_size x processes; change it, or --batch_size"
        )

    # grpo samples each token by a forward pass, so one epoch has to do
    num_epochs = 1 if options.method == "grpo" else 3
    max_steps = math.ceil(num_epochs * num_rows / batch_size)
    if options.method == "sft":
        max_steps = max(max_steps, 200)  # enough to learn a few dialogs
    max_steps = options.max_steps or max_steps

    # Learning rates after warmup: those of trl 1.16, whose 2e-5 for sft suits models of 1B
    # parameters. Small models need more.
    max_lrs = {
        "sft": min(3e-3, 2e-5 * math.sqrt(1e9 / num_parameters)),
        "dpo": 1e-6,
        "reward": 1e-4,
        "grpo": 1e-6,
    }
    return resolve(  # the values below replace None alone
        ResolvedFinetuneOptions,
        options,
        log_dir=log_folder(options.checkpoint_dir),
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        max_steps=max_steps,
        warmup_steps=min(WARMUP_STEPS, max_steps // 10),  # as in pre-training
        max_lr=max_lrs[options.method],
    )
