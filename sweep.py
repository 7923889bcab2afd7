"""Train with every combination of a grid and every seed: one table, one picture.

python sweep.py --out runs/rates --grid "recipe gpt2 modern" "max_lr 1e-3 2e-3" --seeds 1 2 3 \\
  --fixed "data_dir data/novels" "max_steps 500"

All settings are checked before the first run. A sweep that was killed continues when started
again. With another grid and the same --out, the table covers all runs of the folder.
"""

import contextlib
import io
import itertools
import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median, stdev
from types import NoneType
from typing import NoReturn, get_args, get_type_hints

from training.checkpoint_folder import LAST
from training.options import parse_options
from training.resume import check_extras
from utils.log_files import METRICS, read_metrics

from config import TrainConfig
from data.loader import TokenStream
from data.shards import find_shards
from evaluation.figure import draw_sweep
from utils.cli import expand_home, run
from utils.errors import UserError, did_you_mean

ROOT = Path(__file__).resolve().parent
RESERVED = ("seed", "checkpoint_dir", "log_dir", "resume", "overwrite", "dry_run")
VALUES = {bool: "no value", int: "a whole number", float: "a number", Path: "a path", str: "a text"}
processes: list[subprocess.Popen] = []


@dataclass
class SweepConfig:
    """Train with every combination of options and every seed."""

    grid: tuple[str, ...]
    """Options of train.py with their values: "recipe gpt2 modern" "max_lr 1e-3 2e-3"."""
    fixed: tuple[str, ...] = ()
    """Options that are equal in every run: "data_dir data/novels" "use_torch_compile"."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seeds to train each combination with."""
    jobs: int = 1
    """Runs at a time; they divide the processor's cores."""
    out: Path = Path("runs/sweep")
    """Folder for the runs, table.md and sweep.png."""


def parse_settings(texts: tuple[str, ...]) -> dict[str, list[str]]:
    """Return the values of each option in texts of the form "NAME VALUE VALUE ..."."""
    options: dict[str, list[str]] = {}
    for text in texts:
        name, *values = text.split() or [""]
        name = name.lstrip("-").replace("-", "_")
        if name in RESERVED:
            raise UserError(
                f'"{text}": the sweep sets this; seeds go to --seeds, and --out has the folders'
            )
        if name in options or not name.isidentifier():
            raise UserError(f'"{text}": name each option once, as "NAME VALUE VALUE ..."')
        options[name] = values
    return options


def to_args(options: dict[str, list[str]]) -> list[str]:
    """Return options as the command line of train.py."""
    return [part for name, values in options.items() for part in (f"--{name}", *values)]


def parse_silently(options: dict[str, list[str]]) -> TrainConfig | None:
    """Return what train.py makes of options, None for one that is unknown or of a wrong type."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            return parse_options(to_args(options))[0]
        except SystemExit:
            return None


def explain_refusal(name: str, values: list[str]) -> str:
    """Return a sentence on an option that train.py's parser refuses."""
    given, kinds = " ".join([name, *values]), get_type_hints(TrainConfig)
    if name not in kinds:
        return f'"{given}": train.py has no option {name}{did_you_mean(name, list(kinds))}'

    def flatten(kind: object) -> list:  # members of a union, values of a Literal
        return [x for part in get_args(kind) for x in flatten(part)] or [VALUES.get(kind, kind)]

    allowed = " or ".join(x for x in flatten(kinds[name]) if x is not NoneType)
    return f'"{given}": {name} takes {allowed}'


def check_run(name: str, options: dict[str, list[str]]) -> None:
    """Raise UserError naming the first option that train.py would refuse in the run `name`."""
    try:
        config, given = parse_silently(options), {}
        for option, values in options.items() if config is None else ():
            given[option] = values
            if parse_silently(given) is None:
                raise UserError(explain_refusal(option, values))
        config.check()
        check_extras(config)
        config.model_config(vocab_size=1)
        find_shards(config.data_dir, "train")
        micro = 1 if config.micro_batch_size == "auto" else config.micro_batch_size
        replace(config, micro_batch_size=micro).sequences_per_step(world_size=1)
    except UserError as error:
        raise UserError(f"{name} cannot be trained, so no run was started: {error}") from error


def read_json(path: Path) -> dict:
    """Return what a file of the sweep holds; raise UserError if it is damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        found = None
    if type(found) is not dict:
        raise UserError(f"{path} is damaged; remove it, or give another --out")
    return found


def check_same_data(out: Path, points: list[dict[str, str]], fixed: dict[str, list[str]]) -> None:
    """Raise UserError if a folder of shards holds other tokens than when the sweep began."""
    options = {" ".join(fixed.get("data_dir", ())), *(p.get("data_dir", "") for p in points)} - {""}
    folders = {name: expand_home(Path(name)) for name in sorted(options)}
    found = {name: TokenStream(folder, "train").checksum for name, folder in folders.items()}
    path = out / "data.json"
    before = read_json(path) if path.exists() else {}
    if changed := [name for name in found if before.get(name, found[name]) != found[name]]:
        raise UserError(
            f"{changed[0]} holds other tokens than for earlier runs; give another --out"
        )
    path.write_text(json.dumps(before | found, indent=1))


def folder_name(point: dict[str, str]) -> str:
    """Return "NAME=VALUE ... seed=1", the name of a run's folder."""
    return " ".join(f"{key}={value}" for key, value in point.items()).replace("/", "%2F")


def grid_points(config: SweepConfig) -> list[dict[str, str]]:
    """Return every combination of the grid's values and the seeds, as options of train.py."""
    axes = parse_settings(config.grid)
    if empty := [name for name, values in axes.items() if not values]:
        raise UserError(f'--grid "{empty[0]}" has no values; write "NAME VALUE VALUE ..."')
    if config.jobs < 1 or not config.seeds:
        raise UserError("--jobs must be at least 1, and --seeds at least one number")
    if repeated := [seed for seed in config.seeds if config.seeds.count(seed) > 1]:
        raise UserError(f"--seeds has {repeated[0]} twice")
    axes["seed"] = list(map(str, config.seeds))
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def finished_log(folder: Path) -> dict[str, list[dict]] | None:
    """Return a run's rows by split if its last validation was at its last step, else None; raise
    UserError if it has saved steps that its log lacks."""
    logs = folder / "logs"
    log = read_metrics(logs) if (logs / METRICS).exists() else {}
    if (folder / "checkpoints" / LAST).exists() and not log.keys() & {"train", "skipped"}:
        raise UserError(
            f"{logs / METRICS} has lost the training steps; remove {folder} to train that run again"
        )
    if not (logs / "config.json").exists():
        return None
    last_step = read_json(logs / "config.json").get("train_config", {}).get("max_steps")
    return log if log.get("val") and log["val"][-1]["step"] == last_step else None


def train(config: SweepConfig, point: dict[str, str]) -> str | None:
    """Train one run, or the rest of it, in a folder of its own; return its error message if it
    failed."""
    name = folder_name(point)
    folder = config.out / name
    folders = {"checkpoint_dir": [folder / "checkpoints"], "log_dir": [folder / "logs"]}
    options = parse_settings(config.fixed) | {key: [value] for key, value in point.items()}
    command = [sys.executable, ROOT / "train.py", "--resume", "auto", *to_args(folders | options)]
    threads = max(1, (os.cpu_count() or 1) // config.jobs)
    env = {"OMP_NUM_THREADS": str(threads), **os.environ} if config.jobs > 1 else None
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=env, **pipes) as process:
        processes.append(process)
        errors = process.communicate()[1]
    log = finished_log(folder) if process.returncode == 0 else None
    print(f"{name}: {log['val'][-1]['loss']:.4f}" if log else f"{name}: failed", flush=True)
    return None if log else f"{name}: {errors.strip()[-300:]}"


def stop(*_) -> NoReturn:
    """Pass SIGTERM on to the runs, which save and exit, and exit."""
    for process in processes:
        process.terminate()
    os._exit(128 + signal.SIGTERM)


def collect(out: Path) -> dict[str, list[dict]]:
    """Return the logs of a folder's finished runs, grouped by their options without the seed."""
    groups = defaultdict(list)
    for folder in sorted(path for path in out.iterdir() if path.is_dir()):
        if log := finished_log(folder):
            groups[folder.name.rpartition(" seed=")[0] or "all"].append(log)
    return dict(groups)


def to_markdown(groups: dict[str, list[dict]]) -> str:
    """Return a Markdown table of groups, best first: mean and deviation of their last losses."""
    last = [log["val"][-1] for logs in groups.values() for log in logs]
    key, title = "loss", "validation loss"
    ratios = [row["loss"] / row["bits_per_byte"] for row in last if row.get("bits_per_byte")]
    if len(ratios) == len(last) and max(ratios) > 1.01 * min(ratios):  # other tokenizers or texts
        key, title = "bits_per_byte", "bits per byte"
    losses = {name: [log["val"][-1][key] for log in logs] for name, logs in groups.items()}
    lines = [f"| run | {title} | std | seeds | tokens | tokens/s |", "|---" * 6 + "|"]
    for name in sorted(groups, key=lambda name: fmean(losses[name])):
        std = f"{stdev(losses[name]):.4f}" if len(losses[name]) > 1 else "-"
        tokens = groups[name][0]["train"][-1]["tokens"]
        speed = median(row["tokens_per_s"] for log in groups[name] for row in log["train"])
        lines.append(
            f"| {name} | {fmean(losses[name]):.4f} | {std} | {len(losses[name])} "
            f"| {tokens:,} | {speed:,.0f} |"
        )
    return "\n".join(lines) + "\n"


def main(config: SweepConfig) -> None:
    points, fixed = grid_points(config), parse_settings(config.fixed)
    if both := sorted(fixed.keys() & points[0].keys()):
        raise UserError(f"{both[0]} is in --grid and in --fixed: give it once")
    points = [p for p in points if finished_log(config.out / folder_name(p)) is None]
    for point in points:
        check_run(folder_name(point), fixed | {key: [value] for key, value in point.items()})
    kept = config.out / "fixed.json"
    if kept.exists() and read_json(kept) != fixed:
        raise UserError(f"{config.out} has runs with other --fixed options; give another --out")
    try:
        config.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {config.out} is no folder and cannot be made one") from error
    check_same_data(config.out, points, fixed)
    kept.write_text(json.dumps(fixed, indent=1))
    signal.signal(signal.SIGTERM, stop)
    with ThreadPoolExecutor(config.jobs) as pool:
        failed = [text for text in pool.map(lambda point: train(config, point), points) if text]
    if groups := collect(config.out):
        table, picture = config.out / "table.md", config.out / "sweep.png"
        text = to_markdown(groups)
        table.write_text(text, encoding="utf-8")
        draw_sweep(groups, picture)
        print(text + f"wrote {table} and {picture}")
    if failed:
        raise UserError(f"{len(failed)} of {len(points)} runs failed; the first: {failed[0]}")


if __name__ == "__main__":
    run(main, SweepConfig)
