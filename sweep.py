"""Several training runs from a grid, each with every seed: one table, one picture.

python sweep.py --out runs/rates --grid "recipe gpt2 modern" "max_lr 1e-3 2e-3" --seeds 1 2 3 \\
  --fixed "data_dir data/novels" "max_steps 500"

Killed and started again it goes on; with another grid, the table has all runs of the folder.
"""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, median, stdev
from typing import NoReturn

from config import ConfigError, SweepConfig
from evaluation.figure import draw_sweep
from utils.cli import run
from utils.files import atomic_write
from utils.logger import read_metrics

ROOT = Path(__file__).resolve().parent
running: list[subprocess.Popen] = []


def flags(settings: tuple[str, ...]) -> dict[str, list[str]]:
    """Names and values of settings "NAME VALUE VALUE ..."."""
    found: dict[str, list[str]] = {}
    for setting in settings:
        name, *values = setting.split() or [""]
        name = name.lstrip("-")
        if name in ("", "seed", "resume", "checkpoint_dir", "log_dir", *found):
            raise ConfigError(
                f'"{setting}": each setting has a name and is there once; seeds go to '
                "--seeds, and the folders are those of the sweep"
            )
        found[name] = values
    return found


def points(config: SweepConfig) -> list[dict[str, str]]:
    """Every combination of the grid's values and the seeds."""
    axes = flags(config.grid)
    if empty := [name for name, values in axes.items() if not values]:
        raise ConfigError(f'--grid "{empty[0]}" has no values; write "NAME VALUE VALUE ..."')
    if config.jobs < 1 or not config.seeds:
        raise ConfigError("--jobs must be at least 1, and --seeds at least one number")
    axes["seed"] = list(map(str, config.seeds))
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def name_of(point: dict[str, str]) -> str:
    """The folder of a run."""
    return " ".join(f"{name}={value}" for name, value in point.items()).replace("/", "_")


def log_of(folder: Path) -> dict[str, list[dict]] | None:
    """The rows of a run by split, the last of "val" that of its end; None if it has not ended."""
    if not (folder / "logs" / "config.json").exists():
        return None
    log = read_metrics(folder / "logs")
    settings = json.loads((folder / "logs" / "config.json").read_text())["train_config"]
    rows = log.get("val", [])
    return log if rows and rows[-1]["step"] == settings["max_steps"] else None


def train(config: SweepConfig, point: dict[str, str]) -> str | None:
    """One run, or the rest of it; the sentence it ended with if it failed."""
    folder = config.out / name_of(point)
    if log_of(folder) is not None:
        return None
    command = [sys.executable, str(ROOT / "train.py"), "--resume", "auto"]
    command += ["--checkpoint_dir", str(folder / "checkpoints"), "--log_dir", str(folder / "logs")]
    single = {name: [value] for name, value in point.items()}
    for name, values in (flags(config.fixed) | single).items():
        command += [f"--{name}", *values]
    threads = max(1, (os.cpu_count() or 1) // config.jobs)
    env = {"OMP_NUM_THREADS": str(threads), **os.environ} if config.jobs > 1 else None
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=env, **pipes) as process:
        running.append(process)
        errors = process.communicate()[1]
    log = log_of(folder) if process.returncode == 0 else None
    loss = f"{log['val'][-1]['loss']:.4f}" if log else "failed"
    print(f"{name_of(point)}: {loss}", flush=True)
    return None if log else f"{name_of(point)}: {errors.strip()[-300:]}"


def stop(*_) -> NoReturn:
    """SIGTERM goes on to the runs, which save; started again, the sweep continues them."""
    for process in running:
        process.terminate()
    os._exit(128 + signal.SIGTERM)


def collect(out: Path) -> dict[str, list[dict]]:
    """The logs of a folder's runs that have ended, by what they have but their seed."""
    found = defaultdict(list)
    for folder in sorted(path for path in out.iterdir() if path.is_dir()):
        if log := log_of(folder):
            found[folder.name.rpartition(" seed=")[0] or "all"].append(log)
    return dict(found)


def table(runs: dict[str, list[dict]]) -> list[dict]:
    """A row for each point, best first: mean and standard deviation of the last validation loss."""
    rows = []
    for name, logs in runs.items():
        losses = [log["val"][-1]["loss"] for log in logs]
        rows.append(
            {
                "run": name,
                "loss": fmean(losses),
                "std": stdev(losses) if len(losses) > 1 else math.nan,
                "seeds": len(losses),
                "tokens": logs[0]["train"][-1]["tokens"],
                "tokens_per_s": median(row["tokens_per_s"] for log in logs for row in log["train"]),
            }
        )
    return sorted(rows, key=lambda row: row["loss"])


def markdown(rows: list[dict]) -> str:
    lines = [
        "| run | validation loss | std | seeds | tokens | tokens/s |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['run']} | {row['loss']:.4f} | {row['std']:.4f} | {row['seeds']} "
            f"| {row['tokens']:,} | {row['tokens_per_s']:,.0f} |"
        )
    return "\n".join(lines) + "\n"


def main(config: SweepConfig) -> None:
    work, fixed = points(config), flags(config.fixed)
    kept = config.out / "fixed.json"
    if kept.exists() and json.loads(kept.read_text()) != fixed:
        raise ConfigError(f"{config.out} has runs with other --fixed settings; give another --out")
    config.out.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(fixed, indent=1))
    signal.signal(signal.SIGTERM, stop)
    with ThreadPoolExecutor(config.jobs) as pool:
        failed = [text for text in pool.map(lambda point: train(config, point), work) if text]
    runs = collect(config.out)
    if runs:
        rows = table(runs)
        with atomic_write(config.out / "table.md") as file:
            file.write(markdown(rows).encode())
        draw_sweep(runs, config.out / "sweep.png")
        print(markdown(rows) + f"wrote {config.out / 'table.md'} and {config.out / 'sweep.png'}")
    if failed:
        raise ConfigError(f"{len(failed)} of {len(work)} runs failed; the first: {failed[0]}")


if __name__ == "__main__":
    run(main, SweepConfig)
