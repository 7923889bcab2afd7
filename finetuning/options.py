"""Options of finetune.py: groups shared with train.py, with other defaults, and its own."""

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
    """Method. sft: learn dialogs; dpo: preferences; reward: a reward model; grpo: completions that
    the model samples, by their rewards."""
    data: Path | None = None
    """Training rows, a .jsonl file. sft: messages, or prompt and completion; dpo, reward: prompt,
    chosen, rejected; grpo: prompt."""
    eval_data: Path | None = None
    """Held-out rows in the same format. Every --eval_every steps logs their loss or, for grpo, the
    mean reward of greedy completions."""
    plain: bool = False
    """Train on plain text: prompts and completions without User: and Assistant:."""
    checkpoint_dir: Path = Path("runs/METHOD/checkpoints")
    """Folder for checkpoints."""


@dataclass(frozen=True)
class BatchOptions(OptimizerOptions):
    """Batch size, learning rate and AdamW."""

    batch_size: Count | None = None
    """Rows per step over all processes: dialogs (sft), pairs (dpo, reward) or prompts (grpo);
    default: the largest of 32, 16, 8 and 4 that is at most a sixteenth of the rows, else 4, as a
    multiple of the processes."""
    micro_batch_size: Count | None = None
    """Dialogs (sft), pairs (dpo, reward) or completions (grpo) per forward pass of a process. Lower
    it if memory runs out. Default: 8, or 4, 2, 1 if 8 does not divide a process's share."""
    block_size: Count | None = None
    """Context in tokens: longer texts are cut (grpo: refused); default: the model's context."""
    dropout: BelowOne = 0.0
    """sft, reward: dropout probability."""
    max_steps: Count | None = None
    """Optimizer steps; default: three passes over the rows, for sft at least 200 steps, for grpo
    one pass."""
    max_lr: NonNegative | None = None
    """Learning rate after warmup; default: 1e-4 for reward, 1e-6 for dpo and grpo, and for sft
    2e-5 with 1B parameters, more with fewer: 6e-5 with 124M, 6e-4 with 1M, at most 3e-3."""
    min_lr: NonNegative = 0.0
    """Learning rate at the end of the decay, just after the last step."""
    weight_decay: NonNegative = 0.0
    """Weight decay of matrices and embeddings."""
    # schedule and beta2 have trl's defaults
    schedule: ScheduleName = "linear"
    """Decay after warmup: cosine, linear, or wsd (constant, then linear in the last fifth)."""
    beta2: BelowOne = 0.999  # takes its help text from OptimizerOptions of config.py


@dataclass(frozen=True)
class MethodOptions:
    """Preferences and rewards."""

    # a negative beta or kl would reverse the loss
    beta: NonNegative = 0.1
    """dpo: scale of the implicit reward; higher keeps the model closer to --init_from."""
    reward: str | None = None
    """grpo: exact (1 if the completion equals the row's "answer", else 0), FILE.py:FUNCTION, or a
    reward model's checkpoint."""
    group_size: Annotated[int, "at least 2"] = 8
    """grpo: completions per prompt, whose rewards are compared with each other."""
    max_new_tokens: Count = 64
    """grpo: longest completion in tokens."""
    kl: NonNegative = 0.04
    """grpo: weight in the loss of the KL divergence from the model of --init_from; 0: none."""


@dataclass(frozen=True)
class FinetuneOptions(MachineOptions, SaveOptions, MethodOptions, BatchOptions, FileOptions):
    """Fine-tune a model. With --resume, options that are not given come from the checkpoint. A new
    run needs --method, --init_from and --data, grpo also --reward. --eval_data and --run_dir are
    useful."""

    # in steps; train.py has larger defaults, for runs a hundred times longer
    eval_every: Natural = 50
    save_every: Natural = 100
    sample_every: Natural = 10

    def __post_init__(self) -> None:
        # Required, although their default is None: with --resume the checkpoint provides them.
        required = ["method", "init_from", "data"]
        if self.method == "grpo":
            required.append("reward")
        for name in required:
            if getattr(self, name) is None:
                raise UserError(f"give --{name}; --help says what it takes")

    @classmethod
    def checkpoint_folder(cls, flags: list[str]) -> Path:
        """Return the --checkpoint_dir of a command line; by default runs/METHOD/checkpoints."""
        # called before the flags are parsed, because --resume auto looks for a checkpoint there
        # `flags` are ["--method", "sft", "--data", "chat.jsonl", ...]
        default = f"runs/{flag_value(flags, 'method')}/checkpoints"  # "runs/sft/checkpoints"
        return Path(flag_value(flags, "checkpoint_dir") or default)


@dataclass(frozen=True, kw_only=True)
class ResolvedFinetuneOptions(ResolvedOptions, FinetuneOptions):
    """Options of a run of finetune.py, in which derived values have replaced None."""

    method: MethodName
    data: Path
    init_from: str
    batch_size: int
    micro_batch_size: int

    @property
    def decay_end(self) -> int:
        # The rate reaches --min_lr one step after the last step, max_steps - 1. So with --min_lr 0
        # the last step still learns, as in trl.
        return self.max_steps


def resolve_options(
    options: FinetuneOptions, num_rows: int, num_parameters: int, data_parallel: int
) -> ResolvedFinetuneOptions:
    """Return the options with all defaults filled in. They depend on the number of rows of --data,
    the number of parameters of the model and the number of parts of the data, `data_parallel` (one
    per process). Raise UserError if a step does not divide into micro-batches."""
    assert options.method is not None  # FinetuneOptions requires --method
    # Default of --batch_size, in rows (for grpo, prompts): at least 16 steps an epoch, but at least
    # four rows a step, and one for each process.
    power_of_2 = 32  # divides among 2, 4 or 8 processes
    while power_of_2 > max(4, data_parallel, num_rows // 16):
        power_of_2 //= 2
    # a multiple of the processes: 30 for 3 of them, not 32
    default_batch_size = max(1, power_of_2 // data_parallel) * data_parallel
    batch_size = options.batch_size or default_batch_size  # rows per step of all processes

    # Micro-batches have equal sizes, and each process has equally many: a forward pass of a sharded
    # model waits for all processes.
    num_examples = batch_size  # per step: dialogs, pairs or completions
    if options.method == "grpo":
        num_examples *= options.group_size  # from prompts to completions
    # 8 if possible, else the largest power of 2 that divides a process's share
    micro_batch_size = options.micro_batch_size or math.gcd(8, num_examples // data_parallel)
    examples_per_pass = micro_batch_size * data_parallel  # in one forward pass of all processes
    if num_examples % examples_per_pass:
        raise UserError(
            f"the {num_examples} examples of a step do not divide by {examples_per_pass}, "
            "--micro_batch_size x processes; change --micro_batch_size or --batch_size"
        )

    # grpo trains for one epoch only, because it samples each token by a forward pass
    num_epochs = 1 if options.method == "grpo" else 3
    default_max_steps = math.ceil(num_epochs * num_rows / batch_size)
    if options.method == "sft":
        default_max_steps = max(default_max_steps, 200)  # enough even for a few dialogs
    max_steps = options.max_steps or default_max_steps

    # Peak learning rates, from trl 1.16. Its 2e-5 for sft suits models of 1B parameters; smaller
    # models need more.
    max_lr_by_method = {
        "sft": min(3e-3, 2e-5 * math.sqrt(1e9 / num_parameters)),
        "dpo": 1e-6,
        "reward": 1e-4,
        "grpo": 1e-6,
    }
    return resolve(  # each value below replaces its option only if that is None
        ResolvedFinetuneOptions,
        options,
        log_dir=log_folder(options.checkpoint_dir),  # runs/sft/checkpoints -> runs/sft/logs
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        max_steps=max_steps,
        warmup_steps=min(WARMUP_STEPS, max_steps // 10),  # the rule of pre-training
        max_lr=max_lr_by_method[options.method],
    )
