"""Pictures: the curves of one or more runs, and the validation losses of a sweep."""

import warnings
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import AutoLocator, EngFormatter, LogLocator, NullLocator, ScalarFormatter

from evaluation.published import VALIDATION, Published
from evaluation.tasks import find_tasks
from utils.errors import UserError
from utils.files import atomic_write
from utils.logger import SAMPLES, logged_run, read_metrics

Log = dict[str, list[dict]]  # rows by split, as read_metrics returns them
AXIS_LABELS = {"step": "step", "tokens": "training tokens", "hours": "hours of training steps"}
UNITS = {"loss": "nats per token", "bits_per_byte": "bits per byte", "reward": "reward"}
TITLES = {
    "loss": "validation (thick) and training loss",
    "bits_per_byte": "validation loss",
    "reward": "mean reward: held out (thick) and sampled",
}
COLUMN_LABELS = {
    "lr": "learning rate",
    "tokens_per_s": "tokens per second",
    "completion_tokens": "tokens per completion",
}
LINES = ("-", "--", "-.", ":")  # of runs
TASKS = find_tasks()
SHARES = {name: task.metric for name, task in TASKS.items()}  # metric that is drawn, by split
SHARES["answers"] = "exact"  # of finetune.py --questions
MARKERS = dict(zip(SHARES, cycle("os^D"), strict=False))
# of published figures, by task
DASHES = dict(zip(SHARES, cycle([(6, 3), (1, 2), (6, 2, 1, 2), (3, 1)]), strict=False))
SAMPLE_LINES, SAMPLE_WIDTH = 10, 150  # of the newest text of samples.txt that is shown


@dataclass(frozen=True)
class Run:
    """A run to draw; tokenizer and corpus are None for a log without a config.json."""

    label: str
    folder: Path
    log: Log
    tokenizer: str | None
    corpus: str | None


def read_run(path: Path) -> Run:
    """Return the run of a metrics.jsonl or its folder, named after the folder above logs/."""
    folder = path if path.is_dir() else path.parent
    folder = (folder / "logs" if (folder / "logs").is_dir() else folder).resolve()
    log, config = read_metrics(path), logged_run(folder) or {}
    if not log.get("train"):
        raise UserError(f"{path} has no training step yet")
    label = folder.parent.name if folder.name == "logs" else folder.name
    return Run(label, folder, log, config.get("tokenizer"), config.get("corpus"))


def curve(log: Log, unit: str, split: str, key: str) -> tuple[np.ndarray, list[float]]:
    """Return x values in a unit of AXIS_LABELS, and the values of a metric."""
    rows = [row for row in log.get(split, []) if row.get(key) is not None]
    steps = [row["step"] for row in log["train"]]
    used = [row["ms" if unit == "hours" else unit] for row in log["train"]]
    used = np.cumsum(used) / 3.6e6 if unit == "hours" else used
    # step 0, before training, has no row
    x = np.interp([row["step"] for row in rows], [0, *steps], [0, *used])
    return x, [row[key] for row in rows]


def check_columns(runs: list[Run], columns: tuple[str, ...]) -> None:
    """Raise UserError for a column that no training row has."""
    names = {name for run in runs for row in run.log["train"] for name in row}
    names -= {"split", "step"}
    for column in columns:
        if column not in names:
            raise UserError(f"--columns has no {column}; the logs have {', '.join(sorted(names))}")


def draw(
    paths: list[Path],
    out: Path,
    size: str | None = None,
    unit: str = "tokens",
    columns: tuple[str, ...] = (),
) -> None:
    """Draw the runs whose logs are at `paths` over each other into the picture `out`: their losses,
    in bits per byte if their tokenizers differ, or the rewards of runs of GRPO, whose loss says
    nothing. `size` (of SIZES) adds OpenAI's GPT-2, `columns` further scalars of training rows."""
    runs = [read_run(path) for path in paths]
    if len({run.label for run in runs}) < len(runs):
        runs = [replace(run, label=str(path)) for run, path in zip(runs, paths, strict=True)]
    check_columns(runs, columns)
    key = "loss"
    if len({run.tokenizer for run in runs} - {None}) > 1:
        key = "bits_per_byte"
    if all("reward" in run.log["train"][-1] for run in runs):
        key = "reward"
    lower = ["completion_tokens" if key == "reward" else "lr", "tokens_per_s"]
    more = [column for column in columns if column not in lower]
    has_shares = any(name in run.log for run in runs for name in SHARES)
    figure, panels = make_panels(key, lower, more, has_shares)
    for i, run in enumerate(runs):
        style = {"ls": LINES[i % 4], "color": f"C{i}"}
        draw_main(panels["main"], run, unit, key, style)
        for column in (*lower, *more):
            panels[column].plot(*curve(run.log, unit, "train", column), lw=1, **style)
        for name, metric in SHARES.items():
            x, shares = curve(run.log, unit, name, metric)
            if shares:
                label = f"{name}, {run.label}: {shares[-1]:.3f}"
                marks = {"marker": MARKERS[name], "ms": 4, "label": label}
                panels["shares"].plot(x, shares, **marks, **style)
    if key == "reward":
        show_sample(panels["samples"], runs[-1])
    else:
        draw_published_loss(panels["main"], runs, size)
        scale_losses(panels["main"])
    for name, task in TASKS.items():
        if any(name in run.log for run in runs):
            figures = (task.protocols[0], task.metric, size)
            draw_published(panels["shares"], task.published, figures, name)
    panels["tokens_per_s"].set_ylim(0, None)
    save(figure, unit, out)


def make_panels(
    key: str, lower: list[str], more: list[str], has_shares: bool
) -> tuple[Figure, dict[str, Axes]]:
    """Return a figure and its panels by name: "main" for `key`, "shares" of right answers beside it
    if there are some, one for each column of training rows in `lower`, side by side, and in `more`,
    and "samples" if `key` is "reward"."""
    grid = [["main", "shares" if has_shares else "main"], lower]
    grid += [[column, column] for column in more]
    if key == "reward":
        grid.append(["samples", "samples"])
    widths = (3, 2) if has_shares else (1, 1)
    heights = (3, *[2] * (len(grid) - 1))
    figure = Figure(figsize=(12, 1.4 * sum(heights)), layout="constrained")
    panels = figure.subplot_mosaic(grid, width_ratios=widths, height_ratios=heights)
    for column in (*lower, *more):
        panels[column].set(ylabel=COLUMN_LABELS.get(column, column))
    panels["tokens_per_s"].yaxis.set_major_formatter(EngFormatter(sep=""))
    if has_shares:
        panels["shares"].set(ylabel="accuracy", title="benchmarks and questions")
    panels["main"].set(ylabel=UNITS[key], title=TITLES[key])
    return figure, panels


def draw_main(axes: Axes, run: Run, unit: str, key: str, style: dict) -> None:
    """Draw losses or rewards: of validation as a thick line, of training as a thin one, which there
    is none of in bits per byte."""
    axes.plot(*curve(run.log, unit, "train", key), lw=0.8, alpha=0.6, **style)
    x, values = curve(run.log, unit, "held_out" if key == "reward" else "val", key)
    last = f"{values[-1]:.3f}" if values else "no validation"
    label = f"{run.label}: {last}"
    axes.plot(x, values, lw=1.8, marker="o", ms=3, label=label, **style)


def show_sample(axes: Axes, run: Run) -> None:
    """Show the beginning of the newest text in a run's samples.txt."""
    axes.set_axis_off()
    path = run.folder / SAMPLES
    if not path.exists():
        return  # a log that was copied alone
    text = path.read_text(encoding="utf-8")
    newest = text[text.rfind("--- step ") :].splitlines()
    lines = [line[:SAMPLE_WIDTH] for line in newest[:SAMPLE_LINES]]
    style = {"family": "monospace", "fontsize": 8, "va": "top", "parse_math": False}
    axes.text(0, 1, "\n".join(lines), transform=axes.transAxes, **style)


def draw_published_loss(axes: Axes, runs: list[Run], size: str | None) -> None:
    """Draw the loss of OpenAI's GPT-2 where it is one of the same tokens and text."""
    if size and any((run.tokenizer, run.corpus) != ("gpt2", "FineWeb-Edu") for run in runs):
        print("OpenAI's validation loss is not drawn: it is per GPT-2 token of FineWeb-Edu")
    else:
        draw_published(axes, VALIDATION, ("FineWeb-Edu", "loss", size), "val")


def draw_published(axes: Axes, figures: Published, key: tuple, task: str) -> None:
    """Draw a figure of OpenAI's GPT-2 as a dashed horizontal line, if there is one."""
    if key in figures:
        value, source = figures[key]
        label = f"{task}, OpenAI {key[-1]}: {value:g}\n({source.split(',')[0]})"
        dashes = DASHES.get(task, (6, 3))
        axes.axhline(value, color="black", ls=(0, dashes), lw=1, label=label)


def scale_losses(axes: Axes) -> None:
    """Set a logarithmic scale of the losses, whose tick labels are enough and have enough digits to
    differ. Steps have a linear one, on which step 0 has a place and the last ones have most."""
    axes.set_yscale("log")
    low, high = axes.yaxis.get_view_interval()
    locator = AutoLocator() if high < 20 * low else LogLocator(subs=(1, 2, 5))
    axes.yaxis.set(major_locator=locator, minor_locator=NullLocator())
    axes.yaxis.set_major_formatter(ScalarFormatter(useOffset=False))
    axes.yaxis.get_major_formatter().set_scientific(False)


def draw_sweep(groups: dict[str, list[Log]], key: str, out: Path) -> None:
    """Draw mean and deviation of the validation losses, `key` of UNITS, of groups of logs that
    differ in their seed; that of step 0, before training, is left out."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for i, (label, logs) in enumerate(groups.items()):
        curves = [curve(log, "tokens", "val", key) for log in logs]
        x, losses = curves[0][0], np.array([losses for _, losses in curves])
        style = {"ls": LINES[i % 4], "color": f"C{i}", "marker": "o", "ms": 4, "capsize": 3}
        label = f"{label}: {losses[:, -1].mean():.3f}"
        x, losses = x[x > 0], losses[:, x > 0]
        axes.errorbar(x, losses.mean(0), losses.std(0), label=label, lw=1.5, **style)
    axes.set(ylabel=f"validation loss ({UNITS[key]})")
    save(figure, "tokens", out)


def save(figure: Figure, unit: str, out: Path) -> None:
    """Style all panels and write the picture."""
    for axes in figure.axes:
        axes.set_xlabel(AXIS_LABELS[unit])
        if unit != "hours":
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(alpha=0.25, which="both")
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(out) as file, warnings.catch_warnings():
            # characters of a sample or a folder that the font lacks are drawn as boxes
            warnings.filterwarnings("ignore", "Glyph")
            figure.savefig(file, format=out.suffix[1:] or None, dpi=130)
    except Exception as error:  # also a file type that matplotlib does not know
        raise UserError(f"{out} could not be written: {error}") from error
