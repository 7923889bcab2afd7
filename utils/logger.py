"""Metrics of a run: a line or a progress bar on the console, and logs/metrics.jsonl."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

METRICS = "metrics.jsonl"


class LogError(ValueError):
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


class Logger:
    """Appends rows to metrics.jsonl and shows them; on other processes than the main it is silent.

    A new run (start == 0) begins the file anew if `overwrite`; a resumed one marks the step it
    starts from, and the reader forgets the rows after it that the earlier try had written.
    Raises LogError where the folder cannot be written.
    """

    def __init__(
        self, folder: Path, *, start: int, total: int, is_main: bool, overwrite: bool = False
    ) -> None:
        self.folder, self.is_main = folder, is_main
        if not is_main:
            return
        path = folder / METRICS
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if overwrite:
                path.unlink(missing_ok=True)
            _drop_partial_line(path)
            appending = path.exists()
            self.file = open(path, "a", buffering=1, encoding="utf-8")
            self.samples = open(folder / "samples.txt", "w" if overwrite else "a", encoding="utf-8")
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
            self.bar.write(message, file=sys.stdout)
            sys.stdout.flush()

    def close(self) -> None:
        if self.is_main:
            self.bar.close()
            self.file.close()
            self.samples.close()


def _drop_partial_line(path: Path) -> None:
    """A killed process may have left half a row."""
    if path.exists():
        with open(path, "r+b") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)


def read_metrics(path: Path) -> dict[str, list[dict]]:
    """Rows by split, in order of step, the last of each step: what a run never killed had written.

    `path` is a metrics.jsonl or its folder. Raises LogError naming the line that is no row.
    """
    if path.is_dir():
        path = path / METRICS
    splits: dict[str, dict[int, dict]] = {}
    if not path.is_file():
        raise LogError(f"there is no {path}; give the metrics.jsonl of a run, or its folder")
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                step, split = int(row["step"]), str(row["split"])
            except (ValueError, KeyError, TypeError) as error:
                raise LogError(f"{path}, line {number}, is not a row of metrics") from error
            if split == "resume":
                for rows in splits.values():
                    for later in [s for s in rows if s > step]:
                        del rows[later]
            else:
                splits.setdefault(split, {})[step] = row
    return {split: [rows[s] for s in sorted(rows)] for split, rows in splits.items()}


def has_rows(folder: Path) -> bool:
    """Whether a run has logged into this folder."""
    path = folder / METRICS
    return path.exists() and os.path.getsize(path) > 0
