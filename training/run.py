"""A run of train.py or finetune.py: its progress, its folders, its log, its end.

One run at a time uses a checkpoint folder and a log folder. Without --overwrite, a run refuses a
folder of another run, or with a later step than the resumed one. This file is not about the options
of a run (training/options.py), its steps (train.py) or the format of its checkpoints
(model/formats/checkpoint.py).
"""

import json
import math
import os
import shlex
import shutil
import signal
import sys
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.amp import GradScaler

from config import MachineOptions, ResolvedOptions
from data.tokenizer import tokenizer_identity
from model.config import GPTConfig
from model.formats.checkpoint import (
    BEST,
    REWARD_HEAD,
    Checkpoint,
    existing_checkpoints,
    load_checkpoint,
    reading_checkpoint,
    run_and_step,
    verify,
)
from model.gpt import GPT
from model.loss import has_fast_loss
from model.rows import Rows
from recipes import Recipe
from training.optimizer_state import fill_optimizers
from training.optimizers import make_optimizers, matrix_optimizer
from training.parallel.data_parallel import wrap
from training.parallel.own_rows import fill_weights
from training.start import compare_processes, warn_of_log, warn_of_order
from training.weights_and_biases import open_wandb
from utils import distributed
from utils.devices import describe_device
from utils.distributed import Process
from utils.errors import UserError
from utils.files import atomic_write, lock_folder
from utils.logger import CONFIG, Logger, read_logged_config, read_metrics
from utils.seeds import hash_seed

Options = TypeVar("Options", bound=ResolvedOptions)

PATIENCE = 5  # Saver.check_step ends a run after this many skipped steps in a row
# In float16 small gradients become 0, so the loss is scaled up. From PyTorch's default, 2^16, the
# first steps would overflow and be skipped.
FIRST_LOSS_SCALE = 2.0**10


@dataclass(frozen=True)
class StepResult:
    """Outcome of one training step, the same on every process but for rollout_ms of grpo."""

    metrics: dict[str, float]
    """Row of the log for the step: loss, lr, grad_norm, ... "tokens" counts the tokens of the run,
    this step included."""
    skip_reason: str | None
    """Why the update was skipped: a loss or gradient that is not finite. None if it was applied."""
    got_signal: bool
    """True if a signal told any process to stop: all processes then save and end."""
    num_tokens: int
    """Targets of the step on all processes; in finetune.py its inputs, padding included."""
    positions: range = range(0)
    """Positions in the data order that the step has read on all processes, such as range(512, 1024)
    for the second step of 512 sequences; finetune.py has none."""


@dataclass
class Progress:
    """Progress of a run: what changes from step to step beside weights and optimizer state. Each
    checkpoint saves it, and a resumed run continues from it."""

    step: int = 0
    """Steps done, skipped ones included."""
    tokens: int = 0
    """Sum of StepResult.num_tokens over these steps."""
    position: int = 0
    """Position in the data order of the next sequence: how many sequences these steps have read on
    all processes. finetune.py has no position: a step determines its examples."""
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Random name of the run. A resumed run keeps it; a branch gets its own."""
    parent: dict | None = None
    """{"run_id", "step"} of the checkpoint that a branch began from; None for other runs."""
    bad_steps: int = 0
    """Skipped steps in a row, up to now. Saver.check_step ends the run at PATIENCE."""

    @classmethod
    def start(cls, checkpoint: Checkpoint | None) -> "Progress":
        """Return the progress in the resumed checkpoint. None: a new run, from step 0."""
        if checkpoint is None:
            return cls()
        # as a Mapping, because mypy wants literal keys for a TypedDict
        saved_entries: Mapping[str, Any] = checkpoint
        # the fields of Progress (step, tokens, ...); older files lack `parent`
        return cls(**{name: saved_entries[name] for name in asdict(cls()) if name in saved_entries})

    def advance(self, result: StepResult) -> None:
        """Count a step that has ended, its tokens, and the skipped steps in a row. Raises UserError
        if the step has not read what comes next in the data order."""
        self.step += 1  # also if skipped: its data is not read again
        self.tokens += result.num_tokens
        if len(result.positions) > 0 and result.positions.start != self.position:
            raise UserError(
                f"the step reads {result.positions} of the data order, which goes on at "
                f"{self.position}: a run that reads from two orders could not be resumed"
            )
        self.position += len(result.positions)  # by 0 in finetune.py
        self.bad_steps = 0 if result.skip_reason is None else self.bad_steps + 1


def start_process(options: MachineOptions) -> Process:
    """Return this process, after it has joined the processes that the launcher started. From then
    on a signal does not end it: the run reads the signal, saves and ends. Raises UserError for a
    missing device, and for a dtype that the device lacks."""
    return distributed.start(
        options.device,  # a name: "auto", "cuda:1", ...
        options.dtype,  # a name: "auto", "bfloat16", ...
        catch_signals=True,
        tensor_parallel=options.tensor_parallel,  # processes that share each block
        shard_across=options.shard_across,  # processes that divide one copy of the state, or None
    )


def seed_step(seed: int, step: int, rank: int) -> None:
    """Make dropout a pure function of (seed, step, rank), so that no random state is saved. `step`
    counts the steps done, `rank` is that of the process among all."""
    torch.manual_seed(hash_seed(f"{seed} {step} {rank}"))  # CRC-32 of the text


def reason_to_skip(loss: float, grad_norm: float) -> str | None:
    """Return why to skip an update; None, to apply it, if loss and gradient are finite."""
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return None
    return f"loss {loss}, gradient norm {grad_norm}"


# the folders of a run


def claim_folders(
    options: ResolvedOptions, checkpoint: Checkpoint | None, process: Process
) -> None:
    """Lock the folders of this run until its process ends. Raises UserError on every process if
    the folders hold another run. Every process must call it."""
    # Only the main process creates and replaces files, so only it checks.
    with process.raise_on_all():
        if process.is_main:
            # a set: both may be the same folder, which can be locked only once
            for folder in {options.checkpoint_dir.resolve(), options.log_dir.resolve()}:
                # stays locked until the process ends: nobody closes the returned descriptor
                lock_folder(folder, activity="writing to")
            refuse_overwriting(options, checkpoint)


def refuse_overwriting(options: ResolvedOptions, checkpoint: Checkpoint | None) -> None:
    """Raise UserError if the run would write over files of another run, or over its own later
    checkpoints. --overwrite allows it."""
    if options.overwrite:
        return
    # None matches no file. A new run has no id yet. A branch, which resumes a checkpoint of another
    # folder, gets a new id.
    run_id = None
    step = 0
    if checkpoint is not None and not options.is_branch:
        run_id = checkpoint["run_id"]
        step = checkpoint["step"]

    remedy = "give another --run_dir, or --overwrite it"
    # "continue it by: python train.py --resume checkpoints; or give another ..."
    continue_or = f"continue it by: {resume_command(options.checkpoint_dir)}; or {remedy}"
    # the content of each file, model_last.pt first; tensors are mapped, not read
    existing = [load_checkpoint(path) for path in existing_checkpoints(options.checkpoint_dir)]
    for existing_checkpoint in existing:
        if existing_checkpoint["run_id"] != run_id:  # True for any file if run_id is None
            raise UserError(
                f"{options.checkpoint_dir} holds the checkpoints of another run; {continue_or}"
            )
    # A run that resumes an earlier file would mix its new checkpoints with later ones. Only the
    # first file, model_last.pt, counts: after a kill model_best.pt may be of a later step, which
    # the run reaches again.
    if existing and existing[0]["step"] > step:
        raise UserError(
            f"{options.checkpoint_dir} holds a checkpoint of step {existing[0]['step']}, after "
            f"step {step}; {continue_or}"
        )

    # content of config.json: None without a log, {} if it cannot be read
    logged_config = read_logged_config(options.log_dir)
    # The default is "", because None would equal the run_id of a new run.
    if logged_config is not None and logged_config.get("run_id", "") != run_id:
        raise UserError(f"{options.log_dir} holds the log of another run; {remedy}")


def resume_command(path: Path) -> str:
    """Return the command that continues the run of a checkpoint or of a folder of checkpoints."""
    # launcher: "python", or "torchrun --standalone --nproc_per_node=8"
    return f"{distributed.launcher()} {sys.argv[0]} --resume {shlex.quote(str(path))}"


def describe_best(folder: Path) -> str:
    """Return the end of a line about a folder: loss and step of its model_best.pt, or "" if no
    validation had a lower loss than step 0."""
    path = folder / BEST
    if not path.exists():
        return ""
    checkpoint = load_checkpoint(path)  # tensors are mapped, not read
    loss, step = checkpoint["best_loss"], checkpoint["step"]  # best_loss is that of this step
    return f", the best with a validation loss of {loss:.4f} at step {step:,}"


def remove_checkpoints(folder: Path, progress: Progress) -> None:
    """Remove checkpoints that are damaged, of other runs, or of later steps than `progress`."""
    for path in existing_checkpoints(folder):
        try:
            checkpoint = load_checkpoint(path)
            is_earlier = (
                checkpoint["run_id"] == progress.run_id and checkpoint["step"] <= progress.step
            )
        except UserError:  # damaged
            is_earlier = False
        if not is_earlier:
            path.unlink()


def check_space(options: ResolvedOptions, recipe: Recipe, num_parameters: int) -> None:
    """Raise UserError if the disk has no room for the checkpoints of a run.

    This must be known before the run: its first checkpoint has no optimizer state and may fit where
    later ones do not. A failed save does not end a run, which could then lose all of its steps.
    """
    # 4 bytes a number: the weights, and as if all of them had the optimizer state of matrices, of
    # which AdamW has 2 moments and Muon 1
    file_bytes = 4 * (1 + matrix_optimizer(recipe).moments) * num_parameters
    # model_best.pt, a temporary file, and either model_last.pt or the numbered checkpoints, to the
    # newest of which model_last.pt is a link
    needed_bytes = (2 + max(1, options.keep_last)) * file_bytes
    # The run replaces or removes existing checkpoints. Links to one file share its st_ino (inode).
    stats = [path.stat() for path in existing_checkpoints(options.checkpoint_dir)]
    bytes_by_inode = {stat.st_ino: stat.st_size for stat in stats}
    missing_bytes = needed_bytes - sum(bytes_by_inode.values())
    folder = options.checkpoint_dir.absolute()
    while not folder.exists():  # in a dry run, which makes no folder
        folder = folder.parent
    free_bytes = shutil.disk_usage(folder).free
    if missing_bytes > free_bytes:
        raise UserError(
            f"the disk of {options.checkpoint_dir} has {free_bytes / 1e9:.2f} GB free, and "
            f"checkpoints need {missing_bytes / 1e9:.2f} GB more"
        )


# a run


def followed_recipe(recipe: dict[str, Any], options: ResolvedOptions) -> dict[str, Any]:
    """Return the fields of Recipe by name as the run follows them. `recipe` has them as --recipe
    gives them, such as {"optimizer": "adamw", "max_lr": None, ...}."""
    # where a field and an option have one name, the option decides: max_lr, weight_decay, schedule
    shared_names = recipe.keys() & vars(options).keys()
    followed = {name: vars(options)[name] for name in shared_names}
    # to_zero: the learning rate decays to 0, which --min_lr decides
    return recipe | followed | {"to_zero": options.min_lr == 0}


@dataclass
class Run(Generic[Options]):
    """State that all parts of a run share: options, this process, progress and log."""

    options: Options
    """Resolved options of train.py or finetune.py."""
    process: Process
    """This process: rank, device, collectives."""
    scaler: GradScaler
    """In float16, scales the loss up and gradients down again. Disabled in other dtypes."""
    progress: Progress
    """Steps, tokens, ... so far; the loop of the script advances it."""
    entries: Checkpoint
    """Entries of checkpoints and config.json that do not change from step to step: {"script":
    "train.py", "recipe": {...}, "tokenizer": "gpt2", "data_order": {...}, ...}. See
    checkpoint_entries in train.py and finetune.py. Saver adds options, model and progress."""
    ended_early: bool = False
    """True once a signal or an error has ended the loop. `finish` says how to continue after a
    signal; it is not called after an error."""
    logger: Logger = field(init=False)
    """Log of the run, set by open_log. It writes and prints on the main process only."""

    @classmethod
    def start(
        cls, options: Options, checkpoint: Checkpoint | None, process: Process, entries: Checkpoint
    ) -> "Run[Options]":
        """Begin a run, or continue the run of a checkpoint: lock its folders, but write no log and
        no checkpoint yet. Raises UserError on all processes if the folders hold another run, or if
        the processes differ in options, weights or data."""
        claim_folders(options, checkpoint, process)  # locks; UserError for another run's folders
        compare_processes(options, entries, process)  # UserError if options or data differ
        warn_of_order(process, checkpoint, entries["data_order"])  # prints if seed or data differ
        warn_of_log(process, options, checkpoint)  # prints if the log lies elsewhere
        in_float16 = process.dtype is torch.float16
        scaler = GradScaler(process.device.type, FIRST_LOSS_SCALE, enabled=in_float16)
        # the saved state is {} unless the run trained in float16
        if checkpoint is not None and checkpoint["scaler"]:
            scaler.load_state_dict(checkpoint["scaler"])
        progress = Progress.start(checkpoint)
        if options.is_branch:
            # a branch resumes a checkpoint, which read_options has returned
            assert checkpoint is not None
            # a new id: the run in the other folder may continue under its own. `parent` is
            # {"run_id": "8c1f...", "step": 1000}.
            progress = replace(progress, run_id=uuid.uuid4().hex, parent=run_and_step(checkpoint))
        # "device NVIDIA H100 80GB HBM3, torch 2.13.0+cu130, matmuls torch.bfloat16"
        description = describe_device(process.device)
        device_text = ", ".join(f"{name} {x}" for name, x in description.items())
        process.print(f"{device_text}, matmuls {process.dtype}")  # on the main process only
        return cls(options, process, scaler, progress, entries)

    @property
    def ended(self) -> bool:
        """True after the last step of the run, where the loop of the script ends. A signal raises
        Stopped instead, after which the script sets `ended_early`."""
        return self.progress.step == self.options.max_steps

    def distribute(
        self,
        model: GPT,
        weights: Mapping[str, Rows],
        recipe: Recipe,
        checkpoint: Checkpoint | None,
    ) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        """Allocate `model`, which is on the device "meta", and fill in its `weights`. Return the
        module to train, which shares these weights and averages gradients over processes, and its
        optimizers, with the state of the resumed checkpoint. Every process must call it. Raises
        UserError for a damaged file, and for a disk without room for checkpoints."""
        # Now, because a failed save does not end a run: refuse a disk that is too small before the
        # first step. The recipe's optimizer decides how many numbers are saved for each weight.
        with self.process.raise_on_all():
            if self.process.is_main:
                check_space(self.options, recipe, model.num_parameters())
        # DDP around the model, or the model itself with FSDP2 or in a single process
        wrapped = wrap(model, weights, self.process, self.options.sharding)
        # Compare both ways to compute the loss now, and not in the first step. This comes after
        # `wrap`, because the result is kept by class, and FSDP2 changes the class of the model. A
        # reward model has no loss of tokens.
        if REWARD_HEAD not in weights:
            has_fast_loss(model)
        # after `wrap`, because sharding replaces the parameters of the model
        optimizers = make_optimizers(model, self.options, recipe, dtype=self.process.dtype)
        if checkpoint is not None:
            # a Path: read_options has replaced --resume by the path of the checkpoint
            assert self.options.resumed_file is not None
            with reading_checkpoint(self.options.resumed_file):
                # each process reads a part of the rows; UserError unless they have their checksum
                verify(checkpoint, "optimizer", self.process)
            fill_optimizers(model, optimizers, checkpoint["optimizer"], checkpoint["group_values"])
            # Again: fill_optimizers lets optimizers create their state by a step with a learning
            # rate of 0, in which some change the weights nevertheless.
            fill_weights(model, weights)
        return wrapped, optimizers

    def open_log(self, model_config: GPTConfig) -> Logger:
        """Remove the checkpoints that --overwrite replaces, write config.json, and open the log.
        Return the log as a context, which the caller closes."""
        options = self.options
        run_id = self.progress.run_id
        config_json: dict[str, Any] = {
            "run_id": run_id,
            "parent": self.progress.parent,
            **self.entries,  # "script", "command", "recipe", "data_order", ...
            # a short name: the spec itself may be megabytes of JSON
            "tokenizer": tokenizer_identity(self.entries["tokenizer"]),
            "config": options.to_dict(),
            "model_config": asdict(model_config),
            "versions": describe_device(self.process.device),
        }
        # Checkpoints keep the recipe that --recipe names, from which a resumed run derives the
        # options that no flag gives.
        if "recipe" in self.entries:  # not in finetune.py
            config_json["recipe"] = followed_recipe(self.entries["recipe"], options)
        # Append rows only to a log of the same run: read config.json before it is replaced.
        logged_config = read_logged_config(options.log_dir)  # None without a log
        begins_empty = logged_config is None or logged_config.get("run_id") != run_id
        # The others wait here: they must not read checkpoints that the main process removes, which
        # are damaged ones, and those of other runs or of later steps.
        with self.process.raise_on_all():
            if self.process.is_main:
                if options.overwrite:
                    remove_checkpoints(options.checkpoint_dir, self.progress)
                # Written before the Logger opens its files: if the run is killed in between, it
                # finds its log by this run_id when it is resumed.
                with atomic_write(options.log_dir / CONFIG) as file:
                    file.write(json.dumps(config_json, indent=1).encode())
        self.logger = Logger(
            options.log_dir,
            steps_done=self.progress.step,
            last_step=options.max_steps,
            is_main=self.process.is_main,
            begins_empty=begins_empty,  # False: append to the log of this run
            open_wandb=partial(open_wandb, options, run_id) if options.wandb else None,
        )
        return self.logger

    def finish(self, next_commands: list[str]) -> None:
        """Print how the run ended. After the last step, also print its metrics and `next_commands`,
        such as "sample.py --checkpoint", each followed by the checkpoint folder. After a signal,
        exit with 128 + its number. Call it when the log is closed."""
        folder = self.options.checkpoint_dir
        # a demo or a sweep, which sets the variable, says itself what to type
        says_what_next = "RUN_IS_PART" not in os.environ
        if self.ended_early:
            line = f"stopped; saved at step {self.progress.step}"
            if says_what_next:
                line += f": continue with {resume_command(folder)}"
            self.logger.print(line)
        elif self.process.is_main:
            quoted_folder = shlex.quote(str(folder))  # for a shell
            self.logger.print(f"done; checkpoints: {quoted_folder}{describe_best(folder)}")
            self.print_metrics()
            if says_what_next:
                print("next:")
                for command in next_commands:
                    print(f"  python {command} {quoted_folder}")
                print(f"  python plot.py --log {shlex.quote(str(self.options.log_dir))}")
        distributed.stop()  # leaves the process group; NCCL waits for the other processes
        if self.ended_early:
            # `signal` is 0 on a process that stops because another one got a signal
            sys.exit(128 + (self.process.signal or signal.SIGTERM))

    def print_metrics(self) -> None:
        """Print metrics as `key: value` lines, which a script can parse. `step` and `tokens` count
        the whole run, peak_memory_gb is of this process, and the others come from the log, which
        also has the steps before a resume unless they were logged to another folder."""
        # {"train": [{"step": 1, "loss": 10.9, "ms": 430.0, ...}, ...], "val": [...], ...}
        log = read_metrics(self.options.log_dir)
        if "val" in log:  # not with grpo, and not without --eval_data
            loss = log["val"][-1]["loss"]
            if loss is None:  # JSON has no NaN
                loss = math.nan
            print(f"val_loss: {loss:.6f}")
        print(f"step: {self.progress.step}")
        print(f"tokens: {self.progress.tokens}")
        if "train" in log:  # False for a branch from a last step, which takes no steps
            rows = log["train"]
            # time of the steps only, without validations and saves
            seconds = sum(row["ms"] for row in rows) / 1000
            # not progress.tokens, which also counts steps that another folder has logged
            logged_tokens = sum(row["tokens_per_s"] * row["ms"] / 1000 for row in rows)
            print(f"seconds: {seconds:.3f}")
            print(f"tokens_per_s: {logged_tokens / seconds:.0f}")
        if self.process.device.type == "cuda":
            peak_bytes = torch.cuda.max_memory_allocated(self.process.device)
            print(f"peak_memory_gb: {peak_bytes / 1e9:.2f}")  # of this process since its start
