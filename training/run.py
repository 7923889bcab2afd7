"""A run of train.py or finetune.py: its progress, its folders, its log, its end.

One run at a time holds a checkpoint folder and a log folder. A folder that holds another run, or a
later step than the one that is resumed, is refused unless --overwrite. This file is not about the
options of a run (training/options.py), its steps (train.py) or its checkpoints' format
(model/formats/checkpoint.py).
"""

import json
import math
import shlex
import shutil
import signal
import sys
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.amp import GradScaler

from config import OTHER_RUN_REMEDY, MachineOptions, ResolvedOptions
from data.tokenizer import tokenizer_identity
from model.config import GPTConfig
from model.formats.checkpoint import (
    BEST,
    Checkpoint,
    load_checkpoint,
    newest_first,
    reading_checkpoint,
    run_and_step,
    verify,
)
from model.gpt import GPT
from model.rows import Rows
from recipes import Recipe
from training.optimizers import MOMENTS, make_optimizers
from training.parallel.data_parallel import wrap
from training.parallel.own_rows import fill_optimizers
from training.start import compare_processes, warn_of_order
from training.weights_and_biases import open_wandb
from utils import distributed
from utils.devices import describe_device
from utils.distributed import Process
from utils.errors import UserError
from utils.files import atomic_write, lock_folder
from utils.logger import CONFIG, Logger, logged_run, read_metrics
from utils.seeds import hash_seed

Options = TypeVar("Options", bound=ResolvedOptions)

PATIENCE = 5  # skipped steps in a row that end a run
# In float16 small gradients become 0, so the loss is scaled up. PyTorch begins at 2^16, where the
# first steps overflow and are skipped.
FIRST_LOSS_SCALE = 2.0**10


@dataclass(frozen=True)
class StepResult:
    """Outcome of one training step, the same on every process."""

    metrics: dict[str, float]
    """Row for the log, of the whole step: loss, lr, grad_norm, ...; "tokens" are those of the run,
    this step included."""
    skip_reason: str | None
    """Why the update was not applied: a loss or gradient that is not finite. None if it was."""
    got_signal: bool
    """True if a process was told to stop: all of them then save and end."""
    num_tokens: int
    """Tokens of the step, on all processes."""


@dataclass
class Progress:
    """Progress of a run: what changes from step to step beside weights and optimizer state. A
    checkpoint holds it, and a resumed run continues from it."""

    step: int = 0
    """Steps done, skipped ones included."""
    tokens: int = 0
    """Tokens of these steps."""
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Name of the run, which a resumed run keeps."""
    parent: dict | None = None
    """run_and_step of the checkpoint that a branch began from; else None."""
    bad_steps: int = 0
    """Newest steps in a row without finite loss and gradient."""

    @classmethod
    def start(cls, checkpoint: Checkpoint | None) -> "Progress":
        """Return the progress of a new run, or that in the checkpoint that is resumed."""
        if checkpoint is None:
            return cls()
        # a Mapping, as mypy wants literal keys for a TypedDict
        progress: Mapping[str, Any] = checkpoint
        # `parent` is not in older files.
        return cls(**{name: progress[name] for name in asdict(cls()) if name in progress})

    def advance(self, result: StepResult) -> None:
        """Count a step, its tokens, and the steps in a row that were skipped."""
        self.step += 1  # also if skipped, so that a step always reads the same data
        self.tokens += result.num_tokens
        self.bad_steps = 0 if result.skip_reason is None else self.bad_steps + 1


def start_process(options: MachineOptions) -> Process:
    """Return this process among those that the launcher has started. A signal no longer ends it,
    but is remembered until the run has saved. Raises UserError for a device that is not there, and
    for a dtype that it lacks."""
    return distributed.start(
        options.device,
        options.dtype,
        catch_signals=True,
        tensor_parallel=options.tensor_parallel,
        shard_across=options.shard_across,
    )


def seed_step(seed: int, step: int, rank: int) -> None:
    """Make dropout a pure function of (seed, step, rank), so that no random state is saved."""
    torch.manual_seed(hash_seed(f"{seed} {step} {rank}"))


def reason_to_skip(loss: float, grad_norm: float) -> str | None:
    """Return why an update is not applied, None for a finite loss and gradient."""
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return None
    return f"loss {loss}, gradient norm {grad_norm}"


# the folders of a run


def claim_folders(
    options: ResolvedOptions, checkpoint: Checkpoint | None, process: Process
) -> None:
    """Keep other runs out of the folders of this one until its process ends. Raises UserError on
    every process if the folders hold another run. Every process must call it."""
    # Only the main process writes, so only it checks; `together` raises its error on the others.
    with process.together():
        if process.is_main:
            # a set, as both may be one folder, which can be locked only once
            for folder in {options.checkpoint_dir.resolve(), options.log_dir.resolve()}:
                # locked until the process ends: nobody closes the descriptor that is returned
                lock_folder(folder, activity="writing to")
            check_folders(options, checkpoint)


def check_folders(options: ResolvedOptions, checkpoint: Checkpoint | None) -> None:
    """Raise UserError if the run would write over files that are not its own, or over its own later
    ones."""
    if options.overwrite:
        return
    # None matches no file: a new run has no id yet, and a branch, which resumes a checkpoint of
    # another folder, gets a new one.
    run_id = None
    step = 0
    if checkpoint is not None and not options.is_branch:
        run_id = checkpoint["run_id"]
        step = checkpoint["step"]

    existing = [load_checkpoint(path) for path in newest_first(options.checkpoint_dir)]
    for existing_checkpoint in existing:
        if existing_checkpoint["run_id"] != run_id:
            raise UserError(
                f"{options.checkpoint_dir} holds the checkpoints of another run; {OTHER_RUN_REMEDY}"
            )
    # A run that resumes an earlier file would mix its new checkpoints with the later ones. Only
    # model_last.pt, the first, counts: after a kill model_best.pt may be later, and the run comes
    # to that step again.
    if existing and existing[0]["step"] > step:
        raise UserError(
            f"{options.checkpoint_dir} holds a checkpoint of step {existing[0]['step']}, after "
            f"step {step}; {OTHER_RUN_REMEDY}"
        )

    # content of config.json: None without a log, {} if it cannot be read
    logged_config = logged_run(options.log_dir)
    # A branch that was killed before its first checkpoint has left its log alone.
    if logged_config is not None and not existing and options.is_branch and checkpoint is not None:
        if logged_config.get("parent") == run_and_step(checkpoint):
            return
    # The default is "", as the run_id of a new run is None here.
    if logged_config is not None and logged_config.get("run_id", "") != run_id:
        raise UserError(f"{options.log_dir} holds the log of another run; {OTHER_RUN_REMEDY}")


def remove_checkpoints(folder: Path, progress: Progress) -> None:
    """Remove the checkpoints of other runs and of later steps than `progress`, and damaged ones."""
    for path in newest_first(folder):
        try:
            checkpoint = load_checkpoint(path)
            is_earlier = (
                checkpoint["run_id"] == progress.run_id and checkpoint["step"] <= progress.step
            )
        except UserError:  # damaged
            is_earlier = False
        if not is_earlier:
            path.unlink()


def check_space(options: ResolvedOptions, file_bytes: int) -> None:
    """Raise UserError if the disk has no room for the checkpoints of a run, of `file_bytes` each.
    The first one has no optimizer state, and may fit where later ones do not: a failed save does
    not end a run, which would lose all of its steps."""
    # the best, the last or the numbered ones, of which one is the last, and a temporary file
    missing_bytes = (2 + max(1, options.keep_last)) * file_bytes
    # Less those that will be replaced or removed; links to one file have one st_ino.
    stats = [path.stat() for path in newest_first(options.checkpoint_dir)]
    missing_bytes -= sum({stat.st_ino: stat.st_size for stat in stats}.values())
    free_bytes = shutil.disk_usage(options.checkpoint_dir).free
    if missing_bytes > free_bytes:
        raise UserError(
            f"the disk of {options.checkpoint_dir} has {free_bytes / 1e9:.2f} GB free, and "
            f"checkpoints need {missing_bytes / 1e9:.2f} GB more"
        )


# a run


@dataclass
class Run(Generic[Options]):
    """Shared by all parts of a run: options, this process, progress, the log."""

    options: Options
    """Resolved options."""
    process: Process
    """This process: rank, device, collectives."""
    scaler: GradScaler
    """Scales the loss up in float16, and gradients down again; disabled in other dtypes."""
    progress: Progress
    """Progress: step, tokens, ..."""
    entries: Checkpoint
    """Entries of its checkpoints and config.json beside options, model and progress."""
    stopping: bool = False
    """True once a signal has ended the loop, which sets it; `finish` then says how to continue."""
    logger: Logger = field(init=False)
    """Log of the run, set by open_log; it writes and prints on the main process alone."""

    @classmethod
    def start(
        cls, options: Options, checkpoint: Checkpoint | None, process: Process, entries: Checkpoint
    ) -> "Run[Options]":
        """Begin a run, or go on with that of a checkpoint: lock its folders, but write no log and
        no checkpoint yet. Raises UserError on all processes if the folders hold another run, or if
        the processes differ."""
        claim_folders(options, checkpoint, process)
        compare_processes(options, entries, process)
        warn_of_order(process, checkpoint, entries["data_order"])
        in_float16 = process.dtype is torch.float16
        scaler = GradScaler(process.device.type, FIRST_LOSS_SCALE, enabled=in_float16)
        # {} in the checkpoint unless it trained in float16
        if checkpoint is not None and checkpoint["scaler"]:
            scaler.load_state_dict(checkpoint["scaler"])
        progress = Progress.start(checkpoint)
        if options.is_branch:
            # read_options returns a checkpoint whenever --resume names one, as a branch's does
            assert checkpoint is not None
            # the run in the other folder may go on under its own id
            progress = replace(progress, run_id=uuid.uuid4().hex, parent=run_and_step(checkpoint))
        # "device NVIDIA H100 80GB HBM3, torch 2.13.0+cu130, matmuls torch.bfloat16"
        description = describe_device(process.device)
        device_text = ", ".join(f"{name} {x}" for name, x in description.items())
        process.print(f"{device_text}, matmuls {process.dtype}")
        return cls(options, process, scaler, progress, entries)

    @property
    def ended(self) -> bool:
        """True after the last step; a signal raises Stopped instead."""
        return self.progress.step == self.options.max_steps

    def distribute(
        self,
        model: GPT,
        weights: Mapping[str, Rows],
        recipe: Recipe,
        checkpoint: Checkpoint | None,
    ) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        """Give `model`, which is on the device "meta", memory and `weights`. Return the module to
        train, which shares them and synchronizes gradients, and its optimizers, with their
        state in the checkpoint that is resumed. Every process must call it; raises UserError for a
        damaged file, and for a disk without room for checkpoints."""
        # float32 weights, and the optimizer state of the matrices, which are most of them
        file_bytes = 4 * (1 + MOMENTS[recipe.optimizer]) * model.num_parameters()
        with self.process.together():
            if self.process.is_main:
                check_space(self.options, file_bytes)
        # DDP around the model, or the model itself: under sharding, and with one process
        wrapped = wrap(model, weights, self.process, self.options.sharding)
        # after `wrap`, as sharding replaces the parameters of the model
        optimizers = make_optimizers(model, self.options, recipe, self.process.dtype)
        if checkpoint is not None:
            # read_options has put the path of the checkpoint that it returned into --resume
            assert self.options.resumed is not None
            with reading_checkpoint(self.options.resumed):
                verify(checkpoint, "optimizer", self.process)
            fill_optimizers(model, optimizers, checkpoint["optimizer"])
        return wrapped, optimizers

    def open_log(self, model_config: GPTConfig) -> Logger:
        """Open the log of a model of this architecture, and write config.json. Before, remove the
        checkpoints that --overwrite replaces. The caller closes the log, which is a context."""
        options = self.options
        progress = self.progress
        # The config.json in the folder, read before it is written anew below; None without a log.
        logged_config = logged_run(options.log_dir)
        # rows are appended to a log of the same run only
        begins_empty = logged_config is None or logged_config.get("run_id") != progress.run_id
        if self.process.is_main:
            if options.overwrite:
                remove_checkpoints(options.checkpoint_dir, progress)
            # Before the Logger opens its files: by run_id a run that is killed here finds its log.
            content = {
                "run_id": progress.run_id,
                "parent": progress.parent,
                **self.entries,
                # a short name: the spec itself may be megabytes of JSON
                "tokenizer": tokenizer_identity(self.entries["tokenizer"]),
                "config": options.to_dict(),
                "model_config": asdict(model_config),
                "versions": describe_device(self.process.device),
            }
            with atomic_write(options.log_dir / CONFIG) as file:
                file.write(json.dumps(content, indent=1).encode())
        self.logger = Logger(
            options.log_dir,
            start=progress.step,
            total=options.max_steps,
            is_main=self.process.is_main,
            begins_empty=begins_empty,
            open_wandb=partial(open_wandb, options, progress.run_id) if options.wandb else None,
        )
        return self.logger

    def finish(self, next_commands: list[str]) -> None:
        """Print how the run ended, and exit with 128 + the signal if one came. After the last step,
        print its metrics and `next_commands`, each with the folder of the run behind it. The log is
        closed by then."""
        folder = shlex.quote(str(self.options.checkpoint_dir))
        if self.stopping:
            command = f"{distributed.launcher()} {sys.argv[0]} --resume {folder}"
            self.logger.print(
                f"stopped; saved at step {self.progress.step}: continue with {command}"
            )
        elif self.process.is_main:
            best = ""
            best_path = self.options.checkpoint_dir / BEST
            if best_path.exists():
                best_checkpoint = load_checkpoint(best_path)  # tensors are mapped, not read
                loss, step = best_checkpoint["best_loss"], best_checkpoint["step"]
                best = f", the best with a validation loss of {loss:.4f} at step {step:,}"
            self.logger.print(f"done; checkpoints: {folder}{best}")
        if self.process.is_main and not self.stopping:
            self.print_metrics()
            print("next:")
            for command in next_commands:
                print(f"  python {command} {folder}")
            print(f"  python plot.py --log {shlex.quote(str(self.options.log_dir))}")
        distributed.stop()  # leaves the process group; NCCL waits for the other processes
        if self.stopping:
            # `signal` is 0 on a process that stops because another one got a signal
            sys.exit(128 + (self.process.signal or signal.SIGTERM))

    def print_metrics(self) -> None:
        """Print metrics of the whole run in lines `key: value`, which a script can read. They are
        from its log, so that those of a resumed run are of all its steps."""
        log = read_metrics(self.options.log_dir)
        if "val" in log:  # not with GRPO
            loss = log["val"][-1]["loss"]
            if loss is None:  # JSON has no NaN
                loss = math.nan
            print(f"val_loss: {loss:.6f}")
        print(f"step: {self.progress.step}")
        print(f"tokens: {self.progress.tokens}")
        if "train" in log:  # all steps may have been taken by the run that a branch began from
            rows = log["train"]
            # of the steps alone, without validations and saves
            print(f"seconds: {sum(row['ms'] for row in rows) / 1000:.3f}")
            # the median step, as the first one compiles
            print(f"tokens_per_s: {median(row['tokens_per_s'] for row in rows):.0f}")
        if self.process.device.type == "cuda":
            peak_bytes = torch.cuda.max_memory_allocated(self.process.device)
            print(f"peak_memory_gb: {peak_bytes / 1e9:.2f}")  # of this process, since its start
