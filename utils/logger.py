"""The log of a run: numbers in metrics.jsonl, texts in samples.txt, progress on the console.

A row is one line of JSON with a "step" and a "split": "train", "val", "held_out", a benchmark's
name, "skipped" or "resume". A resumed run appends its rows: its first row has the split "resume",
and says that the steps after that step run again. `read_metrics` then drops the earlier rows of
these steps. evaluation/figure.py draws a log.
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
from utils.files import describe_searched_place, to_json

# names of the files in the folder of a log
METRICS = "metrics.jsonl"
SAMPLES = "samples.txt"
CONFIG = "config.json"  # options, tokenizer and versions of the run, written by training/run.py

# Time between two progress lines on a console without a progress bar
SECONDS_PER_LINE = 10
# The console shows the time left after this number of steps. The first steps are slower: they
# compile, allocate memory and fill caches.
STEPS_BEFORE_FORECAST = 10
# tqdm's default format, but without its speed and time left, which a validation would change
BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


class Logger:
    """Write the log of a run that begins after `steps_done` steps and ends at the step `last_step`.

    Without `is_main` no method does anything. `begins_empty` (a new run) empties the files.
    Otherwise a row of the split "resume" and the new rows follow an existing log. `open_wandb`
    returns a run of Weights & Biases, which gets the numbers, too. The with statement closes the
    log, also after an error; `print` still works then.
    """

    def __init__(
        self,
        folder: Path,
        *,
        steps_done: int,
        last_step: int,
        is_main: bool,
        begins_empty: bool = False,
        open_wandb: Callable[[], Any] | None = None,
    ) -> None:
        self.is_main = is_main  # the methods of other processes return at once
        if not is_main:
            return
        self.wandb_run: Any = None  # opened below, once `print` works for its warning
        self.last_line_seconds = float("-inf")  # time.monotonic() of the last progress line
        # first step that shows time left
        self.first_forecast_step = steps_done + STEPS_BEFORE_FORECAST
        self.forecast_ms = 0.0  # time of the steps from that one on
        self.num_forecast_steps = 0
        folder.mkdir(parents=True, exist_ok=True)
        metrics_path = folder / METRICS
        is_resumed = metrics_path.exists() and not begins_empty  # an earlier start wrote the file
        if is_resumed:
            # cut off half a row after the last line break: a killed process may have left one
            num_bytes = metrics_path.read_bytes().rfind(b"\n") + 1
            os.truncate(metrics_path, num_bytes)
        mode = "w" if begins_empty else "a"
        # buffering=1 writes each line at once, so that it survives a kill
        self.metrics_file = open(metrics_path, mode, buffering=1, encoding="utf-8")
        self.samples_file = open(folder / SAMPLES, mode, buffering=1, encoding="utf-8")
        if is_resumed:
            # read_metrics reads this row and drops the earlier rows of later steps
            self.log({"split": "resume"}, steps_done)
        # disable=None shows a bar only if standard error is a terminal
        self.bar = tqdm(
            total=last_step,
            initial=steps_done,  # by earlier starts of the run
            unit="step",
            dynamic_ncols=True,
            disable=None,
            bar_format=BAR_FORMAT,
        )
        if open_wandb is not None:
            self.wandb_run = self.call_wandb(open_wandb)  # None after an error

    def log(self, metrics: dict, step: int) -> None:
        """Write one row, such as {"split": "train", "loss": 3.2, "mfu": None, ...} with the step
        before it; send its numbers to Weights & Biases."""
        if not self.is_main:
            return
        self.metrics_file.write(to_json({"step": step, **metrics}) + "\n")  # NaN becomes null
        if self.wandb_run is None:
            return
        split = metrics["split"]
        # Keys are such as "train/loss". Texts and an MFU of None are left out.
        numbers = {
            f"{split}/{name}": x for name, x in metrics.items() if isinstance(x, int | float)
        }
        # "step" is a column, because wandb's own step can only grow: a resumed run repeats steps
        self.call_wandb(self.wandb_run.log, {"step": step, **numbers})

    def call_wandb(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Call a function of Weights & Biases and return its result. After an error, such as a
        missing login or a dead helper process, print a warning, return None and send no more."""
        try:
            return function(*arguments)
        except Exception as error:
            self.wandb_run = None  # `log` sends no further rows
            self.print(f"warning: the run goes on without Weights & Biases ({error!s:.200})")
            return None

    def log_train(self, metrics: dict, step: int) -> None:
        """Write a row of the split "train". Show it on the progress bar; without a bar, print a
        line every SECONDS_PER_LINE. `metrics` holds StepResult.metrics (loss, lr, ...) and what
        StepTimer.stop returns (tokens_per_s, mfu, ms)."""
        self.log({"split": "train", **metrics}, step)
        if not self.is_main:
            return
        if step >= self.first_forecast_step:  # for describe_time_left
            self.forecast_ms += metrics["ms"]
            self.num_forecast_steps += 1
        if not self.bar.disable:
            # refresh=False: `update` redraws the bar, at most ten times a second
            postfix = describe_step(metrics) + self.describe_time_left(step)
            self.bar.set_postfix_str(postfix, refresh=False)
            self.bar.update(step - self.bar.n)  # more than 1 after a skipped step
            return
        # without a terminal, as in the log of a scheduler, print a line from time to time
        current_seconds = time.monotonic()
        is_last = step == self.bar.total  # a disabled bar has its total, too
        if is_last or current_seconds - self.last_line_seconds >= SECONDS_PER_LINE:
            self.last_line_seconds = current_seconds
            self.print(
                f"step {step}/{self.bar.total}  {describe_step(metrics)}  lr {metrics['lr']:.2e}  "
                f"norm {metrics['grad_norm']:.2f}  {metrics['ms']:,.0f} ms"
                f"{self.describe_time_left(step)}"
            )

    def describe_time_left(self, step: int) -> str:
        """Return the time that the steps left will take, such as "  1:23:45 left", from the mean
        time of the steps since first_forecast_step; "" before. Validations and saves take time, but
        in the mean of a few steps one of them would look like hours."""
        if step < self.first_forecast_step:
            return ""
        ms_left = (self.bar.total - step) * self.forecast_ms / self.num_forecast_steps
        return f"  {tqdm.format_interval(ms_left / 1000)} left"

    def log_evaluation(self, split: str, metrics: dict[str, float], step: int) -> None:
        """Write and print the metrics of a validation (`split` is "val", or "held_out" of
        grpo) or of the benchmark that `split` names."""
        self.log({"split": split, **metrics}, step)
        unprinted = dict(metrics)  # a copy, from which `pop` takes what the line has already
        line = split
        if split == "val":
            line = f"validation loss {unprinted.pop('loss'):.4f}"
            if "n" in unprinted:  # number of tokens; absent in fine-tuning
                line += f" of {unprinted.pop('n'):,} tokens"
            if "bits_per_byte" in unprinted:  # absent if shards lack the size of their text
                line += f", {unprinted.pop('bits_per_byte'):.4f} bits per byte"
        # {"n": 500, "acc_norm": 0.29} of a benchmark, or loss_NAME of each of several corpora
        for name, metric in unprinted.items():
            line += f", {name} {metric:.5g}"
        self.print(f"step {step}: {line}")

    def log_skip(self, reason: str, sequence_ids: list[int], step: int) -> None:
        """Write and print why the update of a step was skipped. The row has the ids of the step's
        sequences (in fine-tuning: examples), to inspect or to remove them."""
        self.log({"split": "skipped", "reason": reason, "sequences": sequence_ids}, step)
        self.print(f"step {step} skipped: {reason}")

    def log_sample(self, text: str, step: int) -> None:
        """Append a generated text to samples.txt."""
        if self.is_main:
            self.samples_file.write(f"--- step {step}\n{text}\n")

    def print(self, message: str) -> None:
        """Print a message above the progress bar, on the main process only."""
        if not self.is_main:
            return
        try:
            self.bar.write(message, file=sys.stdout)  # a plain print would break the bar
            sys.stdout.flush()
        except OSError:  # Ctrl-C has ended `| tee`: go on without a console, so that the run saves
            sys.stdout = open(os.devnull, "w")

    def __enter__(self) -> "Logger":
        return self

    def __exit__(self, error_type: type[BaseException] | None, *error: object) -> None:
        """Close the files, the bar and the run of Weights & Biases. After an error, that run is
        marked as failed."""
        if not self.is_main:
            return
        # Weights & Biases comes first: rows that are not uploaded are lost when the process ends,
        # and on a full disk closing a file raises an error.
        if self.wandb_run is not None:
            self.call_wandb(self.wandb_run.finish, 0 if error_type is None else 1)
        self.bar.close()
        self.metrics_file.close()
        self.samples_file.close()


def describe_step(metrics: dict) -> str:
    """Return what the console shows of a step: "loss 3.2801  170,000 tok/s  mfu 41.2%"."""
    line = f"loss {metrics['loss']:.4f}  {metrics['tokens_per_s']:,.0f} tok/s"
    if "reward" in metrics:  # only in GRPO
        line = f"reward {metrics['reward']:.4f}  {line}"
    # a fraction; None on CPUs and on GPUs with unknown peak FLOP/s
    if metrics["mfu"]:
        line += f"  mfu {metrics['mfu']:.1%}"
    return line


def read_logged_config(folder: Path) -> dict | None:
    """Return the config.json of the log in a folder, which tells whose log it is.

    Its keys are "run_id", "config" (the options), "tokenizer" and others. Return {} if the file is
    missing or no JSON, and None without a log. A log without rows counts as none: its run was
    killed before its first step, and overwriting it loses nothing.
    """
    metrics_path = folder / METRICS
    if not metrics_path.exists() or metrics_path.stat().st_size == 0:
        return None
    try:
        return json.loads((folder / CONFIG).read_text(encoding="utf-8"))  # {"run_id": ..., ...}
    except (FileNotFoundError, ValueError):
        return {}  # another program's log, for example


def find_metrics(path: Path | str) -> Path:
    """Return the path of a metrics.jsonl. `path` is this file, the folder of its log, or the folder
    of its run (which has the log in logs/). Raises UserError if none of these exists."""
    for metrics_path in (Path(path), Path(path, METRICS), Path(path, "logs", METRICS)):
        if metrics_path.is_file():
            return metrics_path
    place = ""
    if not Path(path).exists():
        place = describe_searched_place(path)  # " in /tmp" for a relative path
    raise UserError(f"{path} holds no {METRICS} of a run{place}; give that file, or its folder")


def read_metrics(path: Path | str) -> dict[str, list[dict]]:
    """Read the log of a run. Return its rows by split, sorted by step: {"train": [{"step": 1,
    "split": "train", "loss": 10.9, ...}, ...], "val": [...]}.

    `path` is a metrics.jsonl, the folder of a log or the folder of a run. If a step ran more than
    once, only its last row is returned. Raises UserError without such a file, and for lines of
    another format.
    """
    metrics_path = find_metrics(path)
    row_of: dict[tuple[str, int], dict] = {}  # by split and step
    # `reading` raises UserError in place of the errors that a line of another format causes
    with reading(metrics_path, "the log of a run"), open(metrics_path, encoding="utf-8") as file:
        for line in file:
            if not line.endswith("\n"):
                break  # half a row: the writer was killed, or is writing it
            row = json.loads(line)  # {"step": 7, "split": "train", "loss": 10.2, ...}
            if row["split"] == "resume":
                # The run was resumed after this step. Drop all rows of later steps: it may not
                # write each of them again, as it may end earlier or have another --eval_every.
                row_of = {key: old for key, old in row_of.items() if old["step"] <= row["step"]}
            else:
                # a later row of the same step replaces an earlier one
                row_of[row["split"], row["step"]] = row

    rows_by_split: dict[str, list[dict]] = {}
    for split, step in sorted(row_of):
        rows_by_split.setdefault(split, []).append(row_of[split, step])
    return rows_by_split
