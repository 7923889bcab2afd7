"""Metrics of a run: a line or a progress bar on the console, and logs/metrics.jsonl."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from tqdm import tqdm

from utils.errors import UserError

METRICS = "metrics.jsonl"


class LogError(UserError):
    """A log that cannot be read or written. Names the path."""


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Around writes to the log in `folder`: LogError where the disk refuses one."""
    try:
        yield
    except OSError as error:
        raise LogError(
            f"the log in {folder} could not be written: {error.strerror}; continue with "
            "--resume auto once it can"
        ) from error


def require(package: str) -> None:
    """LogError with the line that installs it where the package of a sink is not here."""
    if find_spec(package) is None:
        raise LogError(f"--{package} needs a package that is not here: pip install {package}")


class Sink(Protocol):
    """Another place for metrics, beside metrics.jsonl."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Takes values named "split/metric"."""

    def close(self) -> None:
        """Writes what is still held back."""


class TensorBoard:
    """Event files in the log folder; what an earlier try wrote from `start` on is dropped."""

    def __init__(self, folder: Path, start: int) -> None:
        require("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=start + 1)

    def log(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WandB:
    """A Weights & Biases run with these `options`; a resumed training goes on in the same one."""

    def __init__(self, folder: Path, options: dict) -> None:
        require("wandb")
        import wandb

        self.run = wandb.init(project="gpt2", resume="allow", dir=str(folder), **options)

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.run.log(metrics, step=step)

    def close(self) -> None:
        self.run.finish()


class Logger:
    """Appends rows to metrics.jsonl and shows them; on other processes than the main it is silent.

    A new run (start == 0) begins the file anew if `overwrite`; a resumed one marks the step it
    starts from, and the reader forgets the rows after it that the earlier try had written.
    `tensorboard` and `wandb` (options of wandb.init) choose further sinks. Raises LogError where
    the folder cannot be written or a package is missing.
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
    ) -> None:
        self.folder, self.is_main = folder, is_main
        if not is_main:
            return
        path = folder / METRICS
        self.sinks: list[Sink] = []
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if overwrite:
                path.unlink(missing_ok=True)
            _drop_partial_line(path)
            appending = path.exists()
            self.file = open(path, "a", buffering=1, encoding="utf-8")
            self.samples = open(folder / "samples.txt", "w" if overwrite else "a", encoding="utf-8")
            if tensorboard:
                self.sinks.append(TensorBoard(folder, start))
            if wandb is not None:
                self.sinks.append(WandB(folder, wandb))
        if appending:
            self.log({"split": "resume"}, start)
        self.shown = float("-inf")  # when the last line went to a console without a bar
        self.bar = tqdm(
            total=total,
            initial=start,
            unit="step",
            dynamic_ncols=True,
            disable=not sys.stderr.isatty(),
        )

    def log(self, metrics: dict, step: int) -> None:
        """Writes one row; `metrics` names its "split"."""
        if self.is_main:
            with writing(self.folder):
                self.file.write(json.dumps({"step": step, **metrics}) + "\n")
            split = metrics["split"]
            values = {k: v for k, v in metrics.items() if isinstance(v, int | float)}
            for sink in self.sinks:
                sink.log({f"{split}/{key}": value for key, value in values.items()}, step)

    def train(self, metrics: dict, step: int) -> None:
        """A row of the training split: on the progress bar, or as a line every ten seconds."""
        self.log({"split": "train", **metrics}, step)
        if not self.is_main:
            return
        mfu = "" if metrics["mfu"] is None else f"  mfu {metrics['mfu']:.1%}"
        speed = f"{metrics['tokens_per_s']:,.0f} tok/s{mfu}"
        if not self.bar.disable:
            self.bar.set_postfix_str(f"loss {metrics['loss']:.4f}  {speed}", refresh=False)
            self.bar.update(step - self.bar.n)
        elif step == self.bar.total or time.monotonic() - self.shown >= 10:
            self.shown = time.monotonic()
            self.say(
                f"step {step}/{self.bar.total}  loss {metrics['loss']:.4f}  "
                f"lr {metrics['lr']:.2e}  norm {metrics['grad_norm']:.2f}  "
                f"{metrics['ms']:,.0f} ms  {speed}"
            )

    def sample(self, text: str, step: int) -> None:
        """Adds a sample to samples.txt."""
        if self.is_main:
            with writing(self.folder):
                self.samples.write(f"--- step {step}\n{text}\n")
                self.samples.flush()

    def say(self, message: str) -> None:
        """A line for people, above the progress bar."""
        if self.is_main:
            try:
                self.bar.write(message, file=sys.stdout)
                sys.stdout.flush()
            except OSError:  # nobody listens any more (| tee, | head): the run goes on
                sys.stdout = open(os.devnull, "w")

    def close(self) -> None:
        if self.is_main:
            self.bar.close()
            self.file.close()
            self.samples.close()
            for sink in self.sinks:
                sink.close()


def _drop_partial_line(path: Path) -> None:
    """A killed process may have left half a row."""
    if path.exists():
        with open(path, "r+b") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)


def is_row(row: object) -> bool:
    """Whether a value is a row of metrics: a split, a step, and figures that may be None. Rows of
    skipped steps say why in words and list sequences."""
    if type(row) is not dict or type(row.get("split")) is not str:
        return False
    figures = [v for k, v in row.items() if k != "split" and v is not None]
    figures = figures if row["split"] != "skipped" else []
    numbers = all(type(v) is float or (type(v) is int and abs(v) < 2**63) for v in figures)
    return numbers and type(row.get("step")) is int and row["step"] >= 0


def read_metrics(path: Path) -> dict[str, list[dict]]:
    """Rows by split, in order of step, the last of each step: what a run never killed had written.

    `path` is a metrics.jsonl or its folder. Raises LogError naming the line that is no row.
    """
    if path.is_dir():
        path = path / METRICS
    splits: dict[str, dict[int, dict]] = {}
    if not path.is_file():
        raise LogError(f"there is no {path}; give the metrics.jsonl of a run, or its folder")
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not is_row(row):
                raise LogError(f"{path}, line {number}, is not a row of metrics")
            step, split = row["step"], row["split"]
            if split == "resume":
                for rows in splits.values():
                    for later in [s for s in rows if s > step]:
                        del rows[later]
            else:
                splits.setdefault(split, {})[step] = row
    return {split: [rows[s] for s in sorted(rows)] for split, rows in splits.items()}


def has_rows_of_another(folder: Path, checkpoint_dir: Path | None) -> bool:
    """Whether a run with another folder of checkpoints has logged into this folder. One with the
    same and no checkpoint in it was killed before its first save."""
    path = folder / METRICS
    if not path.exists() or not os.path.getsize(path):
        return False
    try:
        run = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return run["train_config"]["checkpoint_dir"] != str(checkpoint_dir)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return True
