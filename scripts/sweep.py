"""Train with every combination of a grid and every seed; write one table of the last losses.

python scripts/sweep.py --out runs/rates --grid "recipe gpt2 modern" "max_lr 2e-3 4e-3" \\
  --seeds 1 2 3 --fixed "data_dir data/books"

Each run is a process of train.py with a folder of its own under --out, named after its options. A
sweep that was killed continues when it is started again: each run goes on from its newest
checkpoint, and one that is finished ends after a validation. `plot.py --log` draws the runs over
each other.
"""

import signal
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Python puts scripts/ there instead

from evaluation.figure import Run, comparable_loss, read_run
from utils.cli import start_script
from utils.errors import UserError
from utils.logger import logged_run

TRAIN = Path(__file__).resolve().parents[1] / "train.py"


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
    """Folder for the runs and table.md."""


def list_groups(grid: tuple[str, ...]) -> list[str]:
    """Return every combination of the grid's values, such as "recipe=gpt2 max_lr=2e-3".

    The runs of a group differ in their seed alone.
    """
    groups = [""]
    for option in grid:
        name, *values = option.split()
        if not values:  # --grid max_lr 1e-3 without quotes: the shell makes two options of it
            raise UserError(f'{name} has no values; write --grid "NAME VALUE VALUE ..."')
        # each combination of the options before, continued by each value of this one
        longer_groups: list[str] = []
        for group in groups:
            longer_groups += [f"{group} {name}={value}".strip() for value in values]
        groups = longer_groups
    return groups


def train_flags(config: SweepConfig, name: str) -> list[str]:
    """Return the flags of train.py for the run "recipe=gpt2 max_lr=2e-3 seed=1". Raises UserError
    if its folder has a run with other options."""
    folder = config.out / name
    # Of two flags of one name the last one wins: so a --fixed seed or rate changes nothing.
    options = list(config.fixed) + name.split()
    # split: a fixed option has its values after spaces, as in "data_dir data/a:0.7 data/b:0.3"
    flags = " ".join(f"--{option}" for option in options).split()
    # The log goes to folder / "logs", beside the checkpoints. Without any, "auto" is a new run.
    flags += ["--resume", "auto", "--checkpoint_dir", str(folder / "checkpoints")]

    # The folder's name does not tell --fixed: without this check the table would compare a run of
    # an earlier sweep, on other data or of another length, with new ones.
    earlier = logged_run(folder / "logs")  # its config.json
    # without train.py, the first word, and without the last one, as --out may have another spelling
    if earlier and earlier["command"][1:-1] != flags[:-1]:
        raise UserError(f"{folder} has a run with other options; give another --out")
    return flags


def train(config: SweepConfig, name: str) -> Run | None:
    """Train a run, or the steps that it lacks; return it, None if it fails."""
    flags = train_flags(config, name)
    print(f"--- {name}", flush=True)  # flush: before what train.py prints
    # A session of its own keeps Ctrl-C from the run: a second signal would end it without saving.
    process = subprocess.Popen([sys.executable, TRAIN, *flags], start_new_session=True)
    try:
        exit_code = process.wait()
    except KeyboardInterrupt:  # end the run with the sweep; it saves a checkpoint first
        process.terminate()
        process.wait()
        raise
    if exit_code != 0:  # its error stands above
        return None
    return read_run(config.out / name)


def to_markdown(groups: list[str], losses: np.ndarray, metric: str) -> str:
    """Return a Markdown table of losses (groups, seeds), the lowest mean first.

    NaN stands for a run that has failed. The difference to the best group is the mean over the
    seeds that both have: runs of one seed read the same data in the same order, so that such a
    pair differs less than losses do.
    """
    warnings.simplefilter("ignore", RuntimeWarning)  # of NumPy: the mean of no losses is NaN
    means = np.nanmean(losses, axis=1)
    deviations = np.nanstd(losses, axis=1, ddof=1)  # of a sample: NaN for one seed
    order = means.argsort()  # a group whose runs have all failed comes last
    best = losses[order[0]]
    differences = np.nanmean(losses - best, axis=1)  # NaN - x is NaN, and left out
    num_seeds = np.isfinite(losses).sum(axis=1)  # whose runs have not failed
    lines = [f"| run | validation {metric} | std | to the best | seeds |", "|---" * 5 + "|"]
    for i in order:
        numbers = f"{means[i]:.4f} | {deviations[i]:.4f} | {differences[i]:+.4f} | {num_seeds[i]}"
        lines.append(f"| {groups[i]} | {numbers} |")
    return "\n".join(lines) + "\n"


def main(config: SweepConfig) -> None:
    # these raise KeyboardInterrupt, as Ctrl-C does; by default the run would outlive the sweep
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    groups = list_groups(config.grid)
    config.out.mkdir(parents=True, exist_ok=True)
    names: list[str] = []  # of all runs, group by group
    for group in groups:
        names += [f"{group} seed={seed}" for seed in config.seeds]
    for name in names:
        train_flags(config, name)  # refuses a folder of others now, not hours later
    runs = [train(config, name) for name in names]  # None has failed

    # nats per token, or bits per byte where the tokenizers of the groups differ
    metric = comparable_loss([run for run in runs if run])
    losses: list[float] = []
    for run in runs:
        loss = np.nan
        if run:  # NaN also for shards made elsewhere, which do not tell the bytes of their text
            loss = run.log["val"][-1].get(metric, np.nan)
        losses.append(loss)
    table = to_markdown(groups, np.reshape(losses, (len(groups), -1)), metric)
    (config.out / "table.md").write_text(table, encoding="utf-8")
    print(table, end="")
    failed_names = [name for name, run in zip(names, runs, strict=True) if run is None]
    if failed_names:
        raise UserError(f"with errors above, these runs failed: {', '.join(failed_names)}")


if __name__ == "__main__":
    start_script(main, SweepConfig)
