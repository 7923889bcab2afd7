"""Metrics of a run: metrics.jsonl in the log folder, and progress on the console."""

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from tqdm import tqdm

from utils.errors import UserError
from utils.files import atomic_write
from utils.log_files import METRICS, PICTURE, SAMPLES, read_metrics

SECONDS_PER_LINE = 10  # least time between two lines on a console without a progress bar


@contextlib.contextmanager
def catch_write_errors(folder: Path, *, begun: bool = False) -> Iterator[None]:
    """Turn an OSError into a UserError about the log in `folder`; `begun`: the run has steps."""
    try:
        yield
    except FileExistsError as error:
        raise UserError(f"--log_dir {folder} is a file; give a folder") from error
    except OSError as error:
        remedy = "make it writable" + (
            " and continue with --resume auto" if begun else ", or give another --log_dir"
        )
        raise UserError(
            f"the log in {folder} could not be written: {error.strerror}; {remedy}"
        ) from error


def require_package(name: str) -> None:
    """Raise UserError with the command that installs a package if it is missing."""
    if find_spec(name) is None:
        raise UserError(f"--{name} needs a package that is not installed: pip install {name}")


class Plot(Protocol):
    """Picture of a log that is still being written."""

    def redraw(self) -> None: ...

    def close(self) -> None: ...


class Logger:
    """Writes metrics.jsonl and samples.txt and shows progress; does nothing unless `is_main`.

    With `overwrite` the files begin empty, and an old picture is removed. Otherwise rows come after
    one that marks the step `start`, and read_metrics drops the earlier rows of later steps.
    `tensorboard` and `wandb` (options of wandb.init) log there too; `plot` is redrawn after
    validations. Raises UserError if the folder cannot be written or a package is missing.
    """

    def __init__(
        self,
        folder: Path,
        *,
        start: int,
        total: int,
        is_main: bool,
        overwrite: bool = False,
        tensorboard: bool = False,
        wandb: dict | None = None,
        plot: Plot | None = None,
    ) -> None:
        self.folder, self.is_main, self.plot = folder, is_main, plot
        if not is_main:
            return
        path, mode = folder / METRICS, "w" if overwrite else "a"
        with catch_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            resuming = path.exists() and not overwrite
            if resuming:  # a killed process may have left half a row
                os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
                keep_samples(folder / SAMPLES, start)
            if overwrite:
                (folder / PICTURE).unlink(missing_ok=True)
            self.file = open(path, mode, buffering=1, encoding="utf-8")
            self.samples = open(folder / SAMPLES, mode, buffering=1, encoding="utf-8")
            self.tensorboard = self.wandb = None
            if tensorboard:
                require_package("tensorboard")
                from torch.utils.tensorboard import SummaryWriter

                self.tensorboard = SummaryWriter(str(folder), purge_step=start + 1)
            if wandb is not None:
                require_package("wandb")
                from wandb import init

                self.wandb = init(project="gpt2", resume="allow", dir=str(folder), **wandb)
        if resuming:
            self.log({"split": "resume"}, start)
        self.last_line = float("-inf")  # time of the last line on a console without a bar
        no_bar = not sys.stderr.isatty()
        self.bar = tqdm(total=total, initial=start, unit="step", dynamic_ncols=True, disable=no_bar)

    def log(self, metrics: dict, step: int) -> None:
        """Write one row; `metrics` holds its "split"."""
        if not self.is_main:
            return
        with catch_write_errors(self.folder, begun=True):
            self.file.write(json.dumps({"step": step, **metrics}) + "\n")
        split = metrics["split"]
        values = {f"{split}/{k}": v for k, v in metrics.items() if isinstance(v, int | float)}
        if self.tensorboard:
            for name, value in values.items():
                self.tensorboard.add_scalar(name, value, step)
        if self.wandb:
            self.wandb.log(values, step=step)

    def log_train(self, metrics: dict, step: int) -> None:
        """Write a row of the split "train" and show it on the progress bar, or now and then."""
        self.log({"split": "train", **metrics}, step)
        if not self.is_main:
            return
        mfu = "" if metrics["mfu"] is None else f"  mfu {metrics['mfu']:.1%}"
        loss, speed = f"loss {metrics['loss']:.4f}", f"{metrics['tokens_per_s']:,.0f} tok/s{mfu}"
        if "reward" in metrics:
            loss = f"reward {metrics['reward']:.4f}  {loss}"
        if not self.bar.disable:
            self.bar.set_postfix_str(f"{loss}  {speed}", refresh=False)
            self.bar.update(step - self.bar.n)
        elif step == self.bar.total or time.monotonic() - self.last_line >= SECONDS_PER_LINE:
            self.last_line = time.monotonic()
            rates = f"lr {metrics['lr']:.2e}  norm {metrics['grad_norm']:.2f}"
            times = f"{metrics['ms']:,.0f} ms  {speed}"
            self.print(f"step {step}/{self.bar.total}  {loss}  {rates}  {times}")

    def last_compile_seconds(self) -> float | None:
        """Return how long the first step of an earlier start took, None if none compiled."""
        with contextlib.suppress(UserError):  # a damaged log does not end a run
            rows = read_metrics(self.folder).get("compile") if self.is_main else None
            return rows[-1]["seconds"] if rows else None
        return None

    def log_start(self, since_start: float, ms: float, compiled: bool, step: int) -> None:
        """Print when the first step was done, and write how long it took if it compiled."""
        if compiled:
            self.log({"split": "compile", "seconds": ms / 1000}, step)
        self.print(f"the first step was done {since_start:.1f} s after the start")

    def log_validation(self, scores: dict[str, float], step: int) -> None:
        """Write and print the validation loss, and redraw the picture between start and end."""
        self.log({"split": "val", **scores}, step)
        bits = f", {scores['bits_per_byte']:.4f} bits per byte" if "bits_per_byte" in scores else ""
        self.print(f"step {step}: validation loss {scores['loss']:.4f}{bits}")
        if self.is_main and self.plot and 0 < step < self.bar.total:
            self.plot.redraw()

    def log_benchmark(self, task: str, scores: dict[str, float | None], step: int) -> None:
        """Write and print the scores of a benchmark; None is a standard error of one example."""
        self.log({"split": task, **scores}, step)
        text = ", ".join(f"{k} {x:.4g}" for k, x in scores.items() if x is not None)
        self.print(f"step {step}: {task} {text}")

    def log_skip(self, reason: str, sequences: list[int], skipped: int, step: int) -> None:
        """Write and print why the update of a step was skipped, the `skipped`-th of the run."""
        self.log({"split": "skipped", "reason": reason, "sequences": sequences}, step)
        self.print(f"step {step} skipped: {reason} ({skipped} so far)")

    def log_sample(self, text: str, step: int) -> None:
        """Append a generated text to samples.txt."""
        if self.is_main:
            with catch_write_errors(self.folder, begun=True):
                self.samples.write(f"--- step {step}\n{text}\n")

    def print(self, message: str) -> None:
        """Print a message above the progress bar."""
        if self.is_main:
            try:
                self.bar.write(message, file=sys.stdout)
                sys.stdout.flush()
            except OSError:  # the reader of standard output has ended: the run continues
                sys.stdout = open(os.devnull, "w")

    def close(self) -> None:
        if self.is_main:
            for output in (self.bar, self.file, self.samples, self.tensorboard, self.plot):
                if output is not None:
                    output.close()
            if self.wandb:
                self.wandb.finish()


def keep_samples(path: Path, start: int) -> None:
    """Drop the samples of steps after `start`, which a resumed run writes again."""
    if path.exists():
        text = path.read_bytes().decode(errors="replace")
        blocks = re.split(r"^--- step (\d+)\n", text, flags=re.MULTILINE)  # before, step, text, ...
        pairs = zip(blocks[1::2], blocks[2::2], strict=True)
        kept = [f"--- step {step}\n{block}" for step, block in pairs if int(step) <= start]
        if len(kept) < len(blocks) // 2:
            with atomic_write(path) as file:
                file.write("".join([blocks[0], *kept]).encode())
