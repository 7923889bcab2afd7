"""The log of a run: numbers in metrics.jsonl, texts in samples.txt, progress on the console.

A row is a line of JSON with "step" and "split": "train", "val", "held_out", a benchmark's name,
"skipped", or "resume", which says that the steps after it are run again. A run that is resumed
appends rows; `read_metrics` leaves out those that were run again. The picture of a log is the
subject of evaluation/figure.py.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from utils.errors import UserError, reading

# files in the folder of a log
METRICS = "metrics.jsonl"
SAMPLES = "samples.txt"
CONFIG = "config.json"  # the options of the run, its tokenizer and versions: training/run.py

SECONDS_PER_LINE = 10  # between two lines of training on a console without a progress bar


class Logger:
    """Write the log of a run that begins after the step `start` and ends at the step `total`.

    It does nothing unless `is_main`. With `begins_empty`, as for a new run, the files are emptied;
    otherwise a row marks where an existing log continues. Numbers go to `wandb_run`, too, where a
    run of Weights & Biases is open.
    """

    def __init__(
        self,
        folder: Path,
        *,
        start: int,
        total: int,
        is_main: bool,
        begins_empty: bool = False,
    ) -> None:
        self.is_main = is_main
        if not is_main:
            return
        self.wandb_run: Any = None
        self.last_line_seconds = float("-inf")  # time of the last line of training, on the console
        folder.mkdir(parents=True, exist_ok=True)
        metrics_path = folder / METRICS
        is_resumed = metrics_path.exists() and not begins_empty
        if is_resumed:
            # bytes of whole rows, up to the last line break
            num_bytes = metrics_path.read_bytes().rfind(b"\n") + 1
            # a process that was killed may have left half a row after them: cut it off
            os.truncate(metrics_path, num_bytes)
        mode = "w" if begins_empty else "a"
        # buffering=1: each line is written at once, and survives a kill
        self.metrics = open(metrics_path, mode, buffering=1, encoding="utf-8")
        self.samples = open(folder / SAMPLES, mode, buffering=1, encoding="utf-8")
        if is_resumed:
            self.log({"split": "resume"}, start)
        # disable=None: no bar where standard error is not a terminal
        self.bar = tqdm(total=total, initial=start, unit="step", dynamic_ncols=True, disable=None)

    def log(self, row: dict, step: int) -> None:
        """Write one row, which has its "split", and send its numbers to Weights & Biases."""
        if not self.is_main:
            return
        self.metrics.write(json.dumps({"step": step, **row}) + "\n")
        if self.wandb_run is None:
            return
        split = row["split"]
        numbers = {f"{split}/{k}": x for k, x in row.items() if isinstance(x, int | float)}
        self.call_wandb(self.wandb_run.log, {"step": step, **numbers})

    def call_wandb(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Return the result of a function of Weights & Biases. After an error, as without a login
        or when its helper process has died, say so and go on without it."""
        try:
            return function(*arguments)
        except Exception as error:  # of wandb, of the network, of the helper's socket
            self.wandb_run = None
            self.print(f"warning: the run goes on without Weights & Biases ({error!s:.200})")
            return None

    def log_train(self, row: dict, step: int) -> None:
        """Write a row of the split "train"; show it on the progress bar, or as a line at times."""
        self.log({"split": "train", **row}, step)
        if not self.is_main:
            return
        text = f"loss {row['loss']:.4f}  {row['tokens_per_s']:,.0f} tok/s"
        if "reward" in row:  # of GRPO
            text = f"reward {row['reward']:.4f}  {text}"
        # None on CPUs, and on GPUs whose peak is not known
        if row["mfu"]:
            text += f"  mfu {row['mfu']:.1%}"
        if not self.bar.disable:
            # update draws the bar, at most ten times a second
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(step - self.bar.n)
            return
        now = time.monotonic()
        is_last = step == self.bar.total
        if is_last or now - self.last_line_seconds >= SECONDS_PER_LINE:
            self.last_line_seconds = now  # since then SECONDS_PER_LINE have to pass
            details = f"lr {row['lr']:.2e}  norm {row['grad_norm']:.2f}  {row['ms']:,.0f} ms"
            # as the bar has it; without evaluations
            left = tqdm.format_interval((self.bar.total - step) * row["ms"] / 1000)
            self.print(f"step {step}/{self.bar.total}  {text}  {details}  {left} left")

    def log_scores(self, split: str, scores: dict[str, float], step: int) -> None:
        """Write and print the scores of a validation or a benchmark."""
        self.log({"split": split, **scores}, step)
        scores = dict(scores)
        text = split
        if split == "val":
            text = f"validation loss {scores.pop('loss'):.4f}"
            if "n" in scores:
                text += f" of {scores.pop('n'):,} tokens"
            if "bits_per_byte" in scores:
                text += f", {scores.pop('bits_per_byte'):.4f} bits per byte"
        for name, score in scores.items():  # of a mixture, loss_NAME for each corpus
            text += f", {name} {score:.5g}"
        self.print(f"step {step}: {text}")

    def log_skip(self, reason: str, sequences: list[int], step: int) -> None:
        """Write and print why the update of a step was skipped, and the sequences it trained on."""
        self.log({"split": "skipped", "reason": reason, "sequences": sequences}, step)
        self.print(f"step {step} skipped: {reason}")

    def log_sample(self, text: str, step: int) -> None:
        """Append a generated text to samples.txt."""
        if self.is_main:
            self.samples.write(f"--- step {step}\n{text}\n")

    def print(self, message: str) -> None:
        """Print a message above the progress bar."""
        if not self.is_main:
            return
        try:
            self.bar.write(message, file=sys.stdout)
            sys.stdout.flush()
        except OSError:  # `| tee` has ended at Ctrl-C: go on without a console, to save
            sys.stdout = open(os.devnull, "w")

    def close(self) -> None:
        """Close the files, the bar and the run of Weights & Biases."""
        if not self.is_main:
            return
        self.bar.close()
        self.metrics.close()
        self.samples.close()
        if self.wandb_run is not None:
            self.call_wandb(self.wandb_run.finish)


def logged_run(folder: Path) -> dict | None:
    """Return the config.json beside the metrics of a folder; {} if it cannot be read.

    None means that there is no log in the folder.
    """
    if not (folder / METRICS).exists():
        return None
    try:
        return json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # written by a run that was killed, or by others


def find_metrics(path: Path | str) -> Path:
    """Return the metrics.jsonl that a path is, or that lies in the folder of a log or of a run."""
    for metrics_path in (Path(path), Path(path, METRICS), Path(path, "logs", METRICS)):
        if metrics_path.is_file():
            return metrics_path
    raise UserError(f"{path} holds no {METRICS} of a run; give that file, or its folder")


def read_metrics(path: Path | str) -> dict[str, list[dict]]:
    """Read the log of a run into lists of rows by split, sorted by step.

    `path` is as for find_metrics. Of steps that were run again, the last rows are returned. Raises
    UserError for a file that holds other lines.
    """
    metrics_path = find_metrics(path)
    rows: dict[tuple[str, int], dict] = {}  # by split and step
    with reading(metrics_path, "the log of a run"), open(metrics_path, encoding="utf-8") as file:
        for line in file:
            if not line.endswith("\n"):
                break  # half a row: the writer was killed, or is writing it
            row = json.loads(line)
            if row["split"] == "resume":
                # the run continued at this step: later ones may never be written again
                rows = {key: old for key, old in rows.items() if old["step"] <= row["step"]}
            else:
                # a later row of a step takes the place of an earlier one
                rows[row["split"], row["step"]] = row

    log: dict[str, list[dict]] = {}
    for split, step in sorted(rows):
        log.setdefault(split, []).append(rows[split, step])
    return log
