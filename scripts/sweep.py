"""Train with every combination of a grid and every seed: one table, one picture.

python scripts/sweep.py --out runs/rates --grid "recipe gpt2 modern" "max_lr 2e-3 4e-3" \\
  --seeds 1 2 3 --fixed "data_dir data/books"

Every combination is checked by `train.py --dry_run` before the first run. A sweep that was killed
continues when started again. The table covers all runs of the folder.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Python puts scripts/ there instead

from evaluation.figure import UNITS, draw_sweep
from utils.cli import start_script
from utils.errors import UserError
from utils.logger import CONFIG, METRICS, read_metrics

ROOT = Path(__file__).resolve().parents[1]
Point = dict[str, str]  # a value for each option of the grid and the seed
Log = dict[str, list[dict]]  # rows by split, as read_metrics returns them
processes: list[subprocess.Popen] = []


@dataclass
class SweepConfig:
    """Train with every combination of options and every seed."""

    grid: tuple[str, ...]
    """Options of train.py with their values: "recipe gpt2 modern" "max_lr 1e-3 2e-3"."""
    fixed: tuple[str, ...] = ()
    """Options that are equal in every run: "data_dir data/books" "use_torch_compile"."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seeds to train each combination with."""
    jobs: int = 1
    """Runs at a time; they divide the processor's cores."""
    out: Path = Path("runs/sweep")
    """Folder for the runs, table.md and sweep.png."""


def grid_points(config: SweepConfig) -> list[Point]:
    """Return every combination of the grid's values and the seeds."""
    axes = {name: values for name, *values in map(str.split, config.grid)}
    axes["seed"] = list(map(str, config.seeds))
    if missing := [name for name, values in axes.items() if not values]:
        raise UserError(f'{missing[0]} has no values; write --grid "NAME VALUE VALUE ..."')
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def run_folder(out: Path, point: Point) -> Path:
    """Return the folder "NAME=VALUE ... seed=1" of a run."""
    return out / " ".join(f"{key}={value}" for key, value in point.items()).replace("/", "%2F")


def start_run(config: SweepConfig, point: Point, *flags: str) -> subprocess.Popen:
    """Start train.py with the options of a point and further flags."""
    folder = run_folder(config.out, point)
    command = [sys.executable, ROOT / "train.py"]
    for option in (*config.fixed, *map(" ".join, point.items())):
        name, *values = option.split()
        command += [f"--{name}", *values]
    command += ["--checkpoint_dir", folder / "checkpoints", "--log_dir", folder / "logs"]
    threads = max(1, (os.cpu_count() or 1) // config.jobs)
    env = {"OMP_NUM_THREADS": str(threads), **os.environ} if config.jobs > 1 else None
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*command, *flags], env=env, **pipes)
    processes.append(process)
    return process


def check_point(config: SweepConfig, point: Point) -> str | None:
    """Return what train.py says against a point, None if it can be trained."""
    process = start_run(config, point, "--dry_run", "--resume", "auto")
    errors = process.communicate()[1].strip().removeprefix("error: ")
    return f"{run_folder(config.out, point).name}: {errors}" if process.returncode else None


def train_point(config: SweepConfig, point: Point) -> str | None:
    """Train a point, or the rest of it; return the end of its error message if it failed."""
    process, folder = start_run(config, point, "--resume", "auto"), run_folder(config.out, point)
    errors = process.communicate()[1].strip()
    log = finished_log(folder) if process.returncode == 0 else None
    done = len(list(config.out.glob("*/logs/log_plot.png")))  # drawn at the end of each run
    print(f"{folder.name}: {log['val'][-1]['loss'] if log else 'failed'} ({done} done)", flush=True)
    return None if log else f"{folder.name}: {errors[-300:]}"


def finished_log(folder: Path) -> Log | None:
    """Return the rows of a run that was validated at its last step, None for any other folder."""
    logs = folder / "logs"
    if not (logs / METRICS).exists():
        return None
    log, options = read_metrics(logs), json.loads((logs / CONFIG).read_text())["config"]
    return log if log.get("val") and log["val"][-1]["step"] == options["max_steps"] else None


def stop(number: int, _: object) -> NoReturn:
    """Pass the end of the sweep on to its runs, which save and exit."""
    for process in processes:
        process.terminate()
    os._exit(128 + number)


def collect(out: Path) -> dict[str, dict[str, Log]]:
    """Return the logs of a folder's finished runs by seed, grouped by their other options."""
    groups = defaultdict(dict)
    for folder in sorted(path for path in out.iterdir() if path.is_dir()):
        if log := finished_log(folder):
            options, _, seed = folder.name.rpartition("seed=")
            groups[options.strip() or "all"][seed] = log
    return dict(groups)


def comparable_loss(groups: dict[str, dict[str, Log]]) -> str:
    """Return the loss to compare by, a key of UNITS: bits per byte where tokenizers or texts
    differ and all runs have it."""
    last = [log["val"][-1] for logs in groups.values() for log in logs.values()]
    ratios = [row["loss"] / row["bits_per_byte"] for row in last if row.get("bits_per_byte")]
    differ = len(ratios) == len(last) and max(ratios) > 1.01 * min(ratios)
    return "bits_per_byte" if differ else "loss"


def to_markdown(groups: dict[str, dict[str, Log]], key: str) -> str:
    """Return a Markdown table of groups, best first: mean and deviation of their last losses, `key`
    of UNITS, and the mean difference to the best with its standard error, over the seeds that both
    have."""
    losses = {
        name: {seed: log["val"][-1][key] for seed, log in logs.items()}
        for name, logs in groups.items()
    }
    title = f"validation loss ({UNITS[key]})"
    lines = [f"| run | {title} | std | to the best | seeds | tokens | tokens/s |", "|---" * 7 + "|"]
    names = sorted(groups, key=lambda name: fmean(losses[name].values()))
    best = losses[names[0]]
    for name in names:
        values = list(losses[name].values())
        std = f"{stdev(values):.4f}" if len(values) > 1 else "-"
        pairs = [loss - best[seed] for seed, loss in losses[name].items() if seed in best]
        difference = f"{fmean(pairs):+.4f}" if pairs else "-"
        if len(pairs) > 1:
            difference += f" ± {stdev(pairs) / len(pairs) ** 0.5:.4f}"
        logs = list(groups[name].values())
        tokens = logs[0]["train"][-1]["tokens"]
        speed = median(row["tokens_per_s"] for log in logs for row in log["train"])
        lines.append(
            f"| {name} | {fmean(values):.4f} | {std} | {difference} | {len(values)} "
            f"| {tokens:,} | {speed:,.0f} |"
        )
    return "\n".join(lines) + "\n"


def main(config: SweepConfig) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    points = [p for p in grid_points(config) if not finished_log(run_folder(config.out, p))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        refused = [text for text in pool.map(lambda p: check_point(config, p), points) if text]
    if refused:
        raise UserError(f"no run was started, as train.py refuses {refused[0]}")
    kept = config.out / "fixed.json"
    if kept.exists() and json.loads(kept.read_text()) != list(config.fixed):
        raise UserError(f"{config.out} has runs with other --fixed options; give another --out")
    config.out.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(config.fixed))
    with ThreadPoolExecutor(config.jobs) as pool:
        failed = [text for text in pool.map(lambda p: train_point(config, p), points) if text]
    if groups := collect(config.out):
        key = comparable_loss(groups)
        table = to_markdown(groups, key)
        (config.out / "table.md").write_text(table, encoding="utf-8")
        logs = {name: list(by_seed.values()) for name, by_seed in groups.items()}
        draw_sweep(logs, key, config.out / "sweep.png")
        print(f"{table}wrote {config.out / 'table.md'} and {config.out / 'sweep.png'}")
    if failed:
        raise UserError(f"{len(failed)} of {len(points)} runs failed; the first: {failed[0]}")


if __name__ == "__main__":
    start_script(main, SweepConfig)
