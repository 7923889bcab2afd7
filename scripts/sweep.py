"""Train with every combination of a grid and every seed; print and draw the losses.

python scripts/sweep.py --out runs/rates --grid "recipe gpt2 modern" "max_lr 2e-3 4e-3" \\
  --seeds 1 2 3 --fixed "data_dir data/books"

Each run is a process of train.py. Its folder under --out is named by grid and seed. If a run fails
or is stopped, the sweep ends. Start the same command again to continue the sweep: each run goes on
from its newest checkpoint, and a finished run ends after a validation. So table and picture always
have all seeds. Stop a sweep with Ctrl-C, which also stops the run; `kill` ends the sweep alone.
"""

import itertools
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# Python puts scripts/ on the path, not the project's folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import utils.environment  # noqa: F401 (first: it says what to type without PyTorch)

import numpy as np
from matplotlib import colormaps

from config import TrainOptions, resolve_from_recipe
from evaluation.figure import (
    LoggedRun,
    comparable_loss,
    curve,
    make_panels,
    read_run,
    save_picture,
    tokens_per_step,
)
from recipes import parse_recipe
from training.options import expand_flags, read_options
from training.start import describe_differences
from utils.cli import flag_value, named_flags, start_script
from utils.errors import UserError
from utils.logger import read_logged_config

TRAIN = Path(__file__).resolve().parents[1] / "train.py"
# Options that change a loss only by rounding: how a run is executed, and which files it writes.
NOT_COMPARED = (
    "checkpoint_dir",
    "log_dir",
    "micro_batch_size",
    "device",
    "sharding",
    "tensor_parallel",
    "shard_across",
    "activation_checkpointing",
    "use_torch_compile",
    "save_every",
    "keep_last",
    "sample_every",
    "wandb",
)


@dataclass(frozen=True)
class SweepOptions:
    """Train with every combination of options and every seed."""

    grid: tuple[str, ...]
    """Options of train.py, each with its values in one word of quotes, "NAME VALUE VALUE ...":
    "recipe gpt2 modern" "max_lr 1e-3 2e-3"."""
    fixed: tuple[str, ...] = ()
    """Options that are the same in every run: "data_dir data/books" "use_torch_compile"."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seeds to train each combination with."""
    out: Path = Path("runs/sweep")
    """Folder for the runs, table.md and sweep.png."""


def list_groups(grid: tuple[str, ...]) -> list[str]:
    """Return every combination of the values of --grid, such as "recipe=gpt2 max_lr=2e-3".

    A combination is a group of runs that differ only in their seeds.
    """
    settings_of_options: list[list[str]] = []  # for each option, as ["max_lr=1e-3", "max_lr=2e-3"]
    for option in grid:  # "max_lr 1e-3 2e-3"
        name, *choices = option.split()
        if not choices:  # the user forgot quotes: --grid max_lr 1e-3
            raise UserError(f'{name} has no values; write --grid "NAME VALUE VALUE ..."')
        settings_of_options.append([f"{name}={choice}" for choice in choices])
    return [" ".join(settings) for settings in itertools.product(*settings_of_options)]


def folder_of(options: SweepOptions, run_name: str) -> Path:
    """Return the folder of a run: "max_lr-2e-3_seed-1" for "max_lr=2e-3 seed=1", so that no shell
    needs quotes for it."""
    return options.out / re.sub(r"[^\w.,+-]", "_", run_name.replace("=", "-"))


def command_of(options: SweepOptions, run_name: str) -> list[str]:
    """Return the command that trains a run, such as "recipe=gpt2 max_lr=2e-3 seed=1", or continues
    an earlier run of this name. Raise UserError if its folder has a run with other options."""
    # The last of two flags with one name wins: grid and seed override --fixed.
    settings = list(options.fixed) + run_name.split()
    # `split` because a fixed option may have several values: "data_dir data/a:0.7 data/b:0.3".
    flags = " ".join(f"--{setting}" for setting in settings).split()  # ["--max_lr=2e-3", ...]
    folder = folder_of(options, run_name)
    check_earlier_run(folder, flags)
    # "auto" resumes the newest checkpoint, or begins a new run if there is none.
    return [sys.executable, str(TRAIN), *flags, "--resume", "auto", "--run_dir", str(folder)]


def check_earlier_run(folder: Path, flags: list[str]) -> None:
    """Raise UserError if the folder has a run with other options than these flags give.

    The folder's name does not contain --fixed. Without this check the table could compare a run of
    an earlier sweep, with other data or another length, with new runs.
    """
    logged_config = read_logged_config(folder / "logs")  # of config.json; None without a log
    if not logged_config:
        return
    changes = describe_changes(logged_config["config"], flags)  # "grad_clip 1.0 (here 2.0)"
    # config.json has --minutes only in "command", the run's sys.argv. A run resumed by hand has
    # none there.
    minutes = flag_value(flags, "minutes")
    earlier_minutes = flag_value(logged_config.get("command", []), "minutes")
    if not changes and earlier_minutes not in (None, minutes):
        changes = f"minutes {earlier_minutes} (here {minutes})"
    if changes:  # "" if all options are equal
        raise UserError(f"{folder} has a run with {changes}; give another --out")


def plan(options: SweepOptions, run_name: str) -> None:
    """Print the forecast of a run in one line. Raise UserError for wrong flags."""
    command = command_of(options, run_name) + ["--dry_run"]
    # stderr is not caught: the user sees why train.py fails
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    check_exit_code(run_name, finished.returncode)
    # "3.54e+08 FLOPs for 2,560 tokens: about 0.1 minutes on this processor", or that it has ended
    forecast_lines = re.findall(".* FLOPs for .*|the run is at its last step.*", finished.stdout)
    print(f"{run_name}: {' '.join(forecast_lines)}", flush=True)


def train(options: SweepOptions, run_name: str) -> None:
    """Train a run, or continue it. Raise UserError if the run fails."""
    print(f"--- {run_name}", flush=True)  # before the output of train.py
    # Not subprocess.run, which would kill the run at Ctrl-C: the terminal signals the run, too, and
    # it saves. RUN_IS_PART: the run does not print what to type next.
    process = subprocess.Popen(command_of(options, run_name), env=os.environ | {"RUN_IS_PART": "1"})
    try:
        process.wait()
    finally:
        process.wait()  # after Ctrl-C, too
    check_exit_code(run_name, process.returncode)


def check_exit_code(run_name: str, exit_code: int) -> None:
    """Raise UserError if train.py has failed for a run; it has printed why."""
    if exit_code != 0:
        raise UserError(
            f"the run {run_name} has failed, see above; mend it or take its values out of --grid"
        )


def describe_changes(saved: dict, flags: list[str]) -> str:
    """Describe how the options of a new run with these flags differ from `saved`, the options in
    the config.json of an earlier run: "grad_clip 1.0 (here 2.0)", or "" if they do not differ."""
    # the TrainOptions that train.py would read from these flags; None where the recipe decides
    given_options, _derived, _checkpoint = read_options(TrainOptions, "train.py", flags)
    # The recipe fills in what the flags leave open: parse_recipe returns the Recipe of a text such
    # as "modern" or "modern,qk_norm=False". to_dict gives plain values, as in config.json.
    options = resolve_from_recipe(given_options, parse_recipe(given_options.recipe)).to_dict()
    if options["dtype"] == "auto":  # the device decides; `saved` has its decision
        options["dtype"] = saved["dtype"]
    if given_options.minutes is not None:  # `saved` has what --minutes chose
        # Compare only what flags and a --config file give, and data_dir, which `comparable` reads.
        given_flags = named_flags(expand_flags(flags))  # [("max_lr", "1e-3"), ("no_wandb", None)]
        given_names = {name.removeprefix("no_") for name, _ in given_flags} | {"data_dir"}
        saved = {name: value for name, value in saved.items() if name in given_names}
    # "grad_clip 1.0 (here 2.0)", or "" if all are equal
    return describe_differences(comparable(saved), comparable(options))


def comparable(options: dict) -> dict:
    """Return the options that a loss depends on, with the real paths of the folders of shards."""
    compared = {name: value for name, value in options.items() if name not in NOT_COMPARED}
    compared["data_dir"] = [os.path.realpath(folder) for folder in options["data_dir"]]
    return compared


def to_markdown(groups: list[str], losses: np.ndarray, metric: str) -> str:
    """Return a Markdown table of the last validation losses (groups, seeds), in nats per token or,
    if `metric` is "bits_per_byte", in bits per byte. The group with the lowest mean comes first.

    The last column is the mean difference to the best group over pairs of runs with the same seed,
    which read the same data in the same order.
    """
    num_seeds = losses.shape[1]
    ddof = min(1, num_seeds - 1)  # 1 for the sample std; 0 for a single seed, whose std is 0
    means = losses.mean(axis=1)  # (groups,)
    order = means.argsort()  # best group first, NaN last
    differences = losses - losses[order[0]]  # (groups, seeds)
    lines = [f"| run | validation {metric} | std of {num_seeds} | to the best |", "|---" * 4 + "|"]
    for i in order:
        cells = f"{means[i]:.4f} | {losses[i].std(ddof=ddof):.4f} | {differences[i].mean():+.4f}"
        lines.append(f"| {groups[i]} | {cells} |")
    return "\n".join(lines) + "\n"


def draw_groups(
    runs: list[LoggedRun], groups: list[str], losses: np.ndarray, metric: str, out: Path
) -> None:
    """Draw the validation losses of each group into the picture `out`: a line for the mean over
    seeds, and a band of one standard deviation on each side.

    `runs` has all seeds of the first group, then all seeds of the second, and so on. `losses`
    (groups, seeds) are the last validation losses of the runs; the legend is sorted by their means.
    """
    num_seeds = losses.shape[1]
    ddof = min(1, num_seeds - 1)  # as in the table
    picture, panels = make_panels([[metric]])  # a Figure with one panel
    axes = panels[metric]  # of "loss" or "bits_per_byte"
    # from blue for the best group to red for the worst
    colors = colormaps["turbo"](np.linspace(0.1, 0.9, len(groups)))
    for color, i in zip(colors, losses.mean(axis=1).argsort(), strict=True):
        # (training tokens, validation losses) of each seed of group i
        curves = [curve(run, "val", metric) for run in runs[num_seeds * i : num_seeds * (i + 1)]]
        train_tokens = curves[0][0]  # (validations,), the same for all seeds
        # without the untrained model, whose loss is far above the others; --eval_every 0 has none
        is_trained = train_tokens > 0
        train_tokens = train_tokens[is_trained]
        val_losses = np.array([curve_losses[is_trained] for _, curve_losses in curves])
        mean = val_losses.mean(axis=0)  # (seeds, validations) -> (validations,)
        std = val_losses.std(axis=0, ddof=ddof)
        # of the last validations: "recipe=gpt2: 3.2954 ± 0.0031"
        label = f"{groups[i]}: {losses[i].mean():.4f} ± {losses[i].std(ddof=ddof):.4f}"
        axes.plot(train_tokens, mean, color=color, label=label)
        axes.fill_between(train_tokens, mean - std, mean + std, color=color, alpha=0.2, lw=0)
    if num_seeds > 1:
        label = f"band: one standard deviation of {num_seeds} seeds above and below their mean"
        axes.plot([], [], " ", label=label)  # adds a legend entry, draws no line
    # tokens_per_step is None if the runs differ in it by over 5 %: then there is no axis of steps
    save_picture(picture, out, step_tokens=tokens_per_step(runs))


def main(options: SweepOptions) -> None:
    groups = list_groups(options.grid)
    # all seeds of the first group, then all seeds of the next, ...
    run_names = [f"{group} seed={seed}" for group in groups for seed in options.seeds]
    try:
        for group in groups:  # finds wrong flags before the first run trains
            plan(options, f"{group} seed={options.seeds[0]}")
        for run_name in run_names:
            train(options, run_name)
    except KeyboardInterrupt:
        print(f"the sweep continues with: python {shlex.join(sys.argv)}", flush=True)
        raise
    # LoggedRuns in the order of `run_names`; run.log is {"train": [...], "val": [{"loss": ...}]}
    runs = [read_run(folder_of(options, run_name)) for run_name in run_names]

    # "loss" (nats per token), or "bits_per_byte" if the groups' tokenizers differ
    metric = comparable_loss(runs)
    # NaN if the manifest of the shards lacks the size of their text: then there is no bits_per_byte
    last_losses = [run.log["val"][-1].get(metric, np.nan) for run in runs]
    losses = np.array(last_losses, float).reshape(len(groups), -1)  # (groups, seeds)
    # a row for each group: mean and deviation over its seeds, and difference to the best group
    table = to_markdown(groups, losses, metric)
    (options.out / "table.md").write_text(table, encoding="utf-8")
    print(table, end="")
    draw_groups(runs, groups, losses, metric, options.out / "sweep.png")
    print(f"wrote table.md and sweep.png in {options.out}")


if __name__ == "__main__":
    start_script(main, SweepOptions)
