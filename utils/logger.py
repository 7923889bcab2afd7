"""Metrics of a run: metrics.jsonl in the log folder, progress on the console, reading them back."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tqdm import tqdm

from utils.errors import UserError
from utils.files import atomic_write

METRICS, SAMPLES, CONFIG = "metrics.jsonl", "samples.txt", "config.json"
PICTURE = "log_plot.png"  # of the run, beside its log
SECONDS_PER_LINE = 10  # least time between two lines on a console without a progress bar


class Tracker(Protocol):
    """Service that charts numbers, as a run of Weights & Biases does."""

    def log(self, values: dict[str, float], step: int) -> None: ...

    def finish(self) -> None: ...


class Logger:
    """Writes metrics.jsonl and samples.txt and shows progress; does nothing unless `is_main`. With
    `overwrite` the files begin empty. Otherwise rows come after one that marks the step `start`,
    and read_metrics drops the earlier rows of later steps. `trackers` get all numbers."""

    def __init__(
        self,
        folder: Path,
        *,
        start: int,
        total: int,
        is_main: bool,
        overwrite: bool = False,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        self.is_main, self.trackers = is_main, trackers
        if not is_main:
            return
        path, mode = folder / METRICS, "w" if overwrite else "a"
        folder.mkdir(parents=True, exist_ok=True)
        resuming = path.exists() and not overwrite
        if resuming:  # a killed process may have left half a row
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        self.file = open(path, mode, buffering=1, encoding="utf-8")
        self.samples = open(folder / SAMPLES, mode, buffering=1, encoding="utf-8")
        if resuming:
            self.log({"split": "resume"}, start)
        self.last_line = float("-inf")  # time of the last line on a console without a bar
        # disable=None: no bar where standard error is no terminal
        self.bar = tqdm(total=total, initial=start, unit="step", dynamic_ncols=True, disable=None)

    def log(self, row: dict, step: int) -> None:
        """Write one row, which holds its "split"."""
        if not self.is_main:
            return
        self.file.write(json.dumps({"step": step, **row}) + "\n")
        values = {f"{row['split']}/{k}": v for k, v in row.items() if isinstance(v, int | float)}
        for tracker in self.trackers:
            tracker.log(values, step=step)

    def log_train(self, row: dict, step: int) -> None:
        """Write a row of the split "train" and show it on the progress bar, or now and then."""
        self.log({"split": "train", **row}, step)
        if not self.is_main:
            return
        text = f"reward {row['reward']:.4f}  " if "reward" in row else ""
        text += f"loss {row['loss']:.4f}  {row['tokens_per_s']:,.0f} tok/s"
        text += f"  mfu {row['mfu']:.1%}" if row["mfu"] else ""
        if not self.bar.disable:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(step - self.bar.n)
        elif step == self.bar.total or time.monotonic() - self.last_line >= SECONDS_PER_LINE:
            self.last_line = time.monotonic()
            rates = f"lr {row['lr']:.2e}  norm {row['grad_norm']:.2f}  {row['ms']:,.0f} ms"
            self.print(f"step {step}/{self.bar.total}  {text}  {rates}")

    def log_scores(self, split: str, scores: dict[str, float | None], step: int) -> None:
        """Write and print the scores of a validation or benchmark; None: unknown."""
        self.log({"split": split, **scores}, step)
        found = (f"{name} {x:.5g}" for name, x in scores.items() if x is not None)
        text = f"{split} {', '.join(found)}"
        if split == "val":
            text = f"validation loss {scores['loss']:.4f}"
            if bits := scores.get("bits_per_byte"):
                text += f", {bits:.4f} bits per byte"
            parts = {k[5:]: x for k, x in scores.items() if k.startswith("loss_")}
            text += "".join(f", {name} {loss:.4f}" for name, loss in parts.items())
        self.print(f"step {step}: {text}")

    def log_skip(self, reason: str, sequences: list[int], step: int) -> None:
        """Write and print why the update of a step on these sequences was skipped."""
        self.log({"split": "skipped", "reason": reason, "sequences": sequences}, step)
        self.print(f"step {step} skipped: {reason}")

    def log_sample(self, text: str, step: int) -> None:
        """Append a generated text to samples.txt."""
        if self.is_main:
            self.samples.write(f"--- step {step}\n{text}\n")

    def print(self, message: str) -> None:
        """Print a message above the progress bar."""
        if self.is_main:
            try:
                self.bar.write(message, file=sys.stdout)
                sys.stdout.flush()
            except OSError:  # its reader has ended, as `tee` does at Ctrl-C: the run still saves
                sys.stdout = open(os.devnull, "w")

    def close(self) -> None:
        """Close the files, the bar and the trackers."""
        if self.is_main:
            for output in (self.bar, self.file, self.samples):
                output.close()
            for tracker in self.trackers:
                tracker.finish()


def logged_run(folder: Path) -> dict | None:
    """Return the config.json of the run whose metrics a folder holds, or {}; None without any."""
    if not (folder / METRICS).exists():
        return None
    with contextlib.suppress(OSError, ValueError):
        return json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    return {}


def read_metrics(path: Path | str) -> dict[str, list[dict]]:
    """Read a metrics.jsonl, or that of a folder, into rows by split, sorted by step. Rows that a
    resumed run repeats or drops are left out. Raises UserError naming a line that is no row."""
    places = [Path(path), Path(path, METRICS), Path(path, "logs", METRICS)]
    found = next(filter(Path.is_file, places), None)
    if found is None:
        raise UserError(f"there is no {path}; give the {METRICS} of a run, or its folder")
    splits: dict[str, dict[int, dict]] = {}
    with open(found, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                break  # a writer was killed, or still writes
            try:
                row = json.loads(line)
                step, split = int(row["step"]), str(row["split"])
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{found}, line {number}, is not a row of metrics") from error
            if split == "resume":
                for name, rows in splits.items():
                    splits[name] = {n: r for n, r in rows.items() if n <= step}
            else:
                splits.setdefault(split, {})[step] = row
    return {split: [rows[s] for s in sorted(rows)] for split, rows in splits.items()}


def copy_log(source: Path, target: Path, step: int) -> None:
    """Write the rows of the log in a folder, up to a step, as the log in another one."""
    with open(source / METRICS, encoding="utf-8") as log, atomic_write(target / METRICS) as copy:
        for line in log:
            # a writer that was killed leaves half a row
            if line.endswith("\n") and json.loads(line)["step"] <= step:
                copy.write(line.encode())
