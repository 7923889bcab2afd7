"""Train with every combination of a grid and every seed: one table, one picture.

python scripts/sweep.py --out runs/rates --grid "recipe gpt2 modern" "max_lr 2e-3 4e-3" \\
  --seeds 1 2 3 --fixed "data_dir data/books"

Each run is a process of train.py with a folder of its own, named after its options: all that a
sweep knows lies in these folders. So a sweep that was killed continues when started again, and the
table covers all runs of --out. Every combination is checked by `train.py --dry_run` before the
first run.
"""

import itertools
import json
import math
import signal
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Python puts scripts/ there instead

from evaluation.figure import METRIC_LABELS, Run, comparable_loss, draw_sweep, read_run
from utils.cli import start_script
from utils.errors import UserError

TRAIN = Path(__file__).resolve().parents[1] / "train.py"
Point = dict[str, str]  # a value for each option of the grid, and the seed
Groups = dict[str, dict[str, Run]]  # finished runs by the options that differ, then by seed


@dataclass(frozen=True)
class SweepConfig:
    """Train with every combination of options and every seed."""

    grid: tuple[str, ...]
    """Options of train.py with their values: "recipe gpt2 modern" "max_lr 1e-3 2e-3"."""
    fixed: tuple[str, ...] = ()
    """Options that are equal in every run: "data_dir data/books" "use_torch_compile"."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seeds to train each combination with."""
    out: Path = Path("runs/sweep")
    """Folder for the runs, table.md and sweep.png."""


def grid_points(config: SweepConfig) -> list[Point]:
    """Return every combination of the grid's values and the seeds."""
    names = []
    values = []
    for option in config.grid:
        name, *option_values = option.split()
        if not option_values:
            raise UserError(f'{name} has no values; write --grid "NAME VALUE VALUE ..."')
        names.append(name)
        values.append(option_values)
    names.append("seed")  # last, as `collect` reads it from the end of the folder's name
    values.append([str(seed) for seed in config.seeds])
    return [dict(zip(names, point, strict=True)) for point in itertools.product(*values)]


def run_folder(out: Path, point: Point) -> Path:
    """Return the folder "NAME=VALUE ... seed=1" of a run; a value may be a path."""
    return out / " ".join(f"{name}={value}" for name, value in point.items()).replace("/", "%2F")


def run_train(config: SweepConfig, point: Point, *flags: str) -> str | None:
    """Run train.py with the options of a point and further flags, from its newest checkpoint if it
    has one. Return None, or the end of its error message if it fails."""
    folder = run_folder(config.out, point)
    command = [sys.executable, TRAIN]
    for option in config.fixed:
        name, *values = option.split()
        command += [f"--{name}", *values]
    for name, value in point.items():
        command += [f"--{name}", value]
    # The last flag wins: the folder is that of the point, whatever --fixed says.
    command += ["--checkpoint_dir", folder / "checkpoints", "--log_dir", folder / "logs"]
    command += ["--resume", "auto", *flags]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            _, errors = process.communicate()
        except BaseException:  # a signal ends the sweep: so does it the run, which saves first
            process.terminate()
            raise
    if process.returncode == 0:
        return None
    # its end, as a traceback names the error in its last line
    return f"{folder.name}: {errors.strip().removeprefix('error: ')[-600:]}"


def stop(number: int, _: object) -> NoReturn:
    """End the sweep at a signal."""
    raise SystemExit(128 + number)


def finished_run(folder: Path) -> Run | None:
    """Return the run in a folder if it was validated at its last step, None for any other one."""
    try:
        run = read_run(folder / "logs")
    except UserError:  # no step yet
        return None
    validated_steps = [row["step"] for row in run.log.get("val", [])]
    if run.config["config"]["max_steps"] in validated_steps:
        return run
    return None  # was interrupted, or has failed


def collect(out: Path) -> Groups:
    """Return the finished runs in a folder."""
    groups: Groups = defaultdict(dict)
    for folder in sorted(out.iterdir()):
        run = finished_run(folder)
        if run:
            # "recipe=gpt2 max_lr=1e-3 seed=1" is seed "1" of the group "recipe=gpt2 max_lr=1e-3"
            options, _, seed = folder.name.rpartition("seed=")
            groups[options.strip() or "all"][seed] = run
    return groups


def mean_and_error(differences: list[float]) -> str:
    """Return the mean of differences and, of several, its standard error."""
    if not differences:
        return "-"
    text = f"{fmean(differences):+.4f}"
    if len(differences) > 1:
        text += f" ± {stdev(differences) / len(differences) ** 0.5:.4f}"
    return text


def to_markdown(groups: Groups, metric: str) -> str:
    """Return a Markdown table of groups, best first: mean and deviation of their last losses, and
    the mean difference to the best group. That is over the seeds that both have: runs of one seed
    read the same data in the same order, so that pairs differ less than losses do."""
    losses: dict[str, dict[str, float]] = {}  # by group and seed
    for name, runs in groups.items():
        losses[name] = {}
        for seed, run in runs.items():
            # NaN: of shards made elsewhere, the size of the text, and so bits per byte, is unknown
            losses[name][seed] = run.log["val"][-1].get(metric, math.nan)
    # best first, by the mean over all seeds of a group
    names = sorted(groups, key=lambda name: fmean(losses[name].values()))
    best_losses = losses[names[0]]

    title = f"validation {METRIC_LABELS[metric]}"
    lines = [f"| run | {title} | std | to the best | seeds | tokens | tokens/s |", "|---" * 7 + "|"]
    for name in names:
        values = list(losses[name].values())
        deviation = "-"
        if len(values) > 1:
            deviation = f"{stdev(values):.4f}"
        shared_seeds = [seed for seed in losses[name] if seed in best_losses]
        differences = [losses[name][seed] - best_losses[seed] for seed in shared_seeds]
        # Runs of a group differ in their seed alone: one number of tokens holds for all. The
        # median of the speeds leaves out steps that compile or wait for a disk.
        train_rows = []
        for run in groups[name].values():
            train_rows += run.log["train"]
        tokens = train_rows[-1]["tokens"]
        speed = median(row["tokens_per_s"] for row in train_rows)
        lines.append(
            f"| {name} | {fmean(values):.4f} | {deviation} | {mean_and_error(differences)} "
            f"| {len(values)} | {tokens:,} | {speed:,.0f} |"
        )
    return "\n".join(lines) + "\n"


def main(config: SweepConfig) -> None:
    signal.signal(signal.SIGTERM, stop)  # SIGINT raises KeyboardInterrupt by itself
    # Finished runs are not trained again: a sweep may be started again, or with more values.
    points = []
    for point in grid_points(config):
        if not finished_run(run_folder(config.out, point)):
            points.append(point)

    # Refuse a wrong option now, not after the hours that the runs before it take.
    for point in points:
        if point["seed"] == str(config.seeds[0]):
            error = run_train(config, point, "--dry_run")
            if error:
                raise UserError(f"no run was started, as train.py refuses {error}")
    # The folders' names do not tell the fixed options: runs of others would be compared.
    fixed_path = config.out / "fixed.json"
    if fixed_path.exists() and json.loads(fixed_path.read_text()) != list(config.fixed):
        raise UserError(f"{config.out} has runs with other --fixed options; give another --out")
    config.out.mkdir(parents=True, exist_ok=True)
    fixed_path.write_text(json.dumps(config.fixed))

    # A run that fails does not end the sweep: the others are compared.
    errors = []
    for number, point in enumerate(points, 1):
        folder = run_folder(config.out, point)
        error = run_train(config, point)
        loss = "failed"
        if error:
            errors.append(error)
        else:
            loss = finished_run(folder).log["val"][-1]["loss"]
        print(f"run {number} of {len(points)}, {folder.name}: {loss}", flush=True)

    # The table has all runs of the folder, also of earlier grids.
    groups = collect(config.out)
    if groups:
        runs = []
        for by_seed in groups.values():
            runs += by_seed.values()
        metric = comparable_loss(runs)
        table = to_markdown(groups, metric)
        (config.out / "table.md").write_text(table, encoding="utf-8")
        draw_sweep(groups, metric, config.out / "sweep.png")
        print(f"{table}wrote {config.out / 'table.md'} and {config.out / 'sweep.png'}")
    if errors:
        raise UserError(f"{len(errors)} of {len(points)} runs failed; the first: {errors[0]}")


if __name__ == "__main__":
    start_script(main, SweepConfig)
