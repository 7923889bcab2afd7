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
from utils.files import to_json

# files in the folder of a log
METRICS = "metrics.jsonl"
SAMPLES = "samples.txt"
CONFIG = "config.json"  # options, tokenizer and versions of the run, by training/run.py

# Time between two lines of training on a console without a progress bar.
SECONDS_PER_LINE = 10
# Steps of a start before the console shows the time left. The first ones take longer: they compile,
# allocate memory and fill caches.
STEPS_BEFORE_FORECAST = 10
# tqdm's own format, without the time left
BAR_WITHOUT_FORECAST = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}, {rate_fmt}{postfix}]"


class Logger:
    """Write the log of a run that begins after the step `start` and ends at the step `total`.

    It does nothing unless `is_main`. With `begins_empty`, as for a new run, the files are emptied;
    otherwise a row marks where an existing log continues. Numbers go to the run of Weights & Biases
    that `open_wandb` returns, too. As a context it closes the log however the with
    statement ends; `print` works after that, too.
    """

    def __init__(
        self,
        folder: Path,
        *,
        start: int,
        total: int,
        is_main: bool,
        begins_empty: bool = False,
        open_wandb: Callable[[], Any] | None = None,
    ) -> None:
        self.is_main = is_main
        if not is_main:
            return
        self.wandb_run: Any = None  # opened below, when a warning can be printed; read by `log`
        self.last_line_seconds = float("-inf")  # time.monotonic() of the last line
        self.forecast_step = start + STEPS_BEFORE_FORECAST  # first one that shows the time left
        folder.mkdir(parents=True, exist_ok=True)
        metrics_path = folder / METRICS
        is_resumed = metrics_path.exists() and not begins_empty
        if is_resumed:
            # cut off half a row after the last line break, which a killed process may have left
            num_bytes = metrics_path.read_bytes().rfind(b"\n") + 1
            os.truncate(metrics_path, num_bytes)
        mode = "w" if begins_empty else "a"
        # buffering=1: each line is written at once, and survives a kill
        self.metrics_file = open(metrics_path, mode, buffering=1, encoding="utf-8")
        self.samples_file = open(folder / SAMPLES, mode, buffering=1, encoding="utf-8")
        if is_resumed:
            # tells read_metrics to drop the earlier rows of later steps
            self.log({"split": "resume"}, start)
        # disable=None: no bar unless standard error is a terminal
        self.bar = tqdm(
            total=total,
            initial=start,
            unit="step",
            dynamic_ncols=True,
            disable=None,
            bar_format=BAR_WITHOUT_FORECAST,
        )
        if open_wandb is not None:
            self.wandb_run = self.call_wandb(open_wandb)  # None after an error

    def log(self, metrics: dict, step: int) -> None:
        """Write one row, which has its "split", and send its numbers to Weights & Biases."""
        if not self.is_main:
            return
        self.metrics_file.write(to_json({"step": step, **metrics}) + "\n")
        if self.wandb_run is None:
            return
        split = metrics["split"]
        # keys such as "train/loss"; texts and an MFU of None are left out
        numbers = {
            f"{split}/{name}": x for name, x in metrics.items() if isinstance(x, int | float)
        }
        # "step" is a column, because wandb's own step only grows and would lose repeated steps
        self.call_wandb(self.wandb_run.log, {"step": step, **numbers})

    def call_wandb(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Return the result of a function of Weights & Biases. After an error, as without a login
        or when its helper process has died, say so and go on without it."""
        try:
            return function(*arguments)
        except Exception as error:
            self.wandb_run = None  # no further rows are sent
            self.print(f"warning: the run goes on without Weights & Biases ({error!s:.200})")
            return None

    def log_train(self, metrics: dict, step: int) -> None:
        """Write a row of the split "train", after step `step`; show it on the progress bar, or as a
        line at times. `metrics` has those of StepResult and those of StepTimer.stop."""
        self.log({"split": "train", **metrics}, step)
        if not self.is_main:
            return
        text = f"loss {metrics['loss']:.4f}  {metrics['tokens_per_s']:,.0f} tok/s"
        if "reward" in metrics:  # GRPO
            text = f"reward {metrics['reward']:.4f}  {text}"
        # None on CPUs, and on GPUs whose peak is not known
        if metrics["mfu"]:
            text += f"  mfu {metrics['mfu']:.1%}"
        if not self.bar.disable:
            if step >= self.forecast_step:
                self.bar.bar_format = None  # tqdm's own, with the time left
            # `update` redraws the bar, at most ten times a second
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(step - self.bar.n)  # more than 1 after a skipped step
            return
        # without a terminal, print a line at times, for the log of a scheduler
        now = time.monotonic()
        is_last = step == self.bar.total
        if is_last or now - self.last_line_seconds >= SECONDS_PER_LINE:
            self.last_line_seconds = now
            details = (
                f"lr {metrics['lr']:.2e}  norm {metrics['grad_norm']:.2f}  {metrics['ms']:,.0f} ms"
            )
            if step >= self.forecast_step:
                # such as "1:23:45", at the speed of this step and without evaluations
                left = tqdm.format_interval((self.bar.total - step) * metrics["ms"] / 1000)
                details += f"  {left} left"
            self.print(f"step {step}/{self.bar.total}  {text}  {details}")

    def log_evaluation(self, split: str, metrics: dict[str, float], step: int) -> None:
        """Write and print the metrics of a validation or a benchmark."""
        self.log({"split": split, **metrics}, step)
        metrics = dict(metrics)  # a copy to pop from
        line = split  # "hellaswag", or "held_out" of fine-tuning
        if split == "val":
            line = f"validation loss {metrics.pop('loss'):.4f}"
            if "n" in metrics:  # absent in fine-tuning
                line += f" of {metrics.pop('n'):,} tokens"
            if "bits_per_byte" in metrics:  # absent if shards lack the size of their text
                line += f", {metrics.pop('bits_per_byte'):.4f} bits per byte"
        # those of a benchmark, or loss_NAME for each of several validation corpora
        for name, metric in metrics.items():
            line += f", {name} {metric:.5g}"
        self.print(f"step {step}: {line}")

    def log_skip(self, reason: str, sequence_ids: list[int], step: int) -> None:
        """Write and print why the update of a step was skipped; write the ids of the sequences
        (in fine-tuning of the examples) that it read, to look at or to leave out."""
        self.log({"split": "skipped", "reason": reason, "sequences": sequence_ids}, step)
        self.print(f"step {step} skipped: {reason}")

    def log_sample(self, text: str, step: int) -> None:
        """Append a generated text to samples.txt."""
        if self.is_main:
            self.samples_file.write(f"--- step {step}\n{text}\n")

    def print(self, message: str) -> None:
        """Print a message above the progress bar."""
        if not self.is_main:
            return
        try:
            self.bar.write(message, file=sys.stdout)  # a plain print would break the bar
            sys.stdout.flush()
        except OSError:  # Ctrl-C has ended `| tee`: go on without a console, to save
            sys.stdout = open(os.devnull, "w")

    def __enter__(self) -> "Logger":
        return self

    def __exit__(self, error_type: type[BaseException] | None, *error: object) -> None:
        """Close the files, the bar and the run of Weights & Biases, which fails after an error."""
        if not self.is_main:
            return
        # First: what is not uploaded is lost when the process ends, and on a full disk closing a
        # file raises an error.
        if self.wandb_run is not None:
            self.call_wandb(self.wandb_run.finish, 0 if error_type is None else 1)
        self.bar.close()
        self.metrics_file.close()
        self.samples_file.close()


def logged_run(folder: Path) -> dict | None:
    """Return the content of the config.json beside the metrics of a folder, which training/run.py
    writes: "run_id", "config" (the options), "tokenizer" and others; {} if it cannot be read.

    None means that there is no log in the folder. One without a row counts as none: its run was
    killed before its first step, and nothing in it is lost.
    """
    metrics_path = folder / METRICS
    if not metrics_path.exists() or metrics_path.stat().st_size == 0:
        return None
    try:
        return json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # for example, cut short when a run was killed


def find_metrics(path: Path | str) -> Path:
    """Return the metrics.jsonl that a path is, or that lies in the folder of a log or of a run.
    Raises UserError without one."""
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
    # `reading` turns what a line of another format raises into a UserError
    with reading(metrics_path, "the log of a run"), open(metrics_path, encoding="utf-8") as file:
        for line in file:
            if not line.endswith("\n"):
                break  # half a row: the writer was killed, or is writing it
            row = json.loads(line)
            if row["split"] == "resume":
                # The run continued after this step. Drop all later rows, because it may not write
                # each of them again: it may end before them, or have another --eval_every.
                rows = {key: old for key, old in rows.items() if old["step"] <= row["step"]}
            else:
                # a later row of the same step replaces an earlier one
                rows[row["split"], row["step"]] = row

    log: dict[str, list[dict]] = {}
    for split, step in sorted(rows):
        log.setdefault(split, []).append(rows[split, step])
    return log
