"""Pictures: the curves of one or more runs, and the validation losses of a sweep."""

from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import AutoLocator, EngFormatter, LogLocator, NullLocator, ScalarFormatter

from data.tokenizer import GPT2Tokenizer
from evaluation.published import VALIDATION, Published
from evaluation.tasks import find_tasks
from utils.errors import UserError
from utils.files import atomic_write
from utils.logger import logged_run
from utils.metrics import read_metrics

Log = dict[str, list[dict]]  # rows by split, as read_metrics returns them
AXIS_LABELS = {"step": "step", "tokens": "training tokens", "hours": "hours of training steps"}
UNITS = {"loss": "nats per token", "bits_per_byte": "bits per byte"}
LINES = ("-", "--", "-.", ":")  # of runs
DASHES = ((6, 3), (1, 2), (6, 2, 1, 2), (3, 1))  # of published figures
TASKS = find_tasks()
MARKS = dict(zip(TASKS, cycle(zip("os^D", DASHES, strict=True)), strict=False))


class Run(NamedTuple):
    """A run to draw; vocabulary and corpus are None for a log without a config.json."""

    label: str
    log: Log
    vocab_size: int | None
    corpus: str | None


def read_run(path: Path) -> Run:
    """Return the run of a metrics.jsonl or its folder, named after the folder above logs/."""
    folder = path if path.is_dir() else path.parent
    folder = (folder / "logs" if (folder / "logs").is_dir() else folder).resolve()
    log, about = read_metrics(path), logged_run(folder) or {}
    if not log.get("train"):
        raise UserError(f"{path} has no training step yet")
    label = folder.parent.name if folder.name == "logs" else folder.name
    return Run(label, log, about.get("model_config", {}).get("vocab_size"), about.get("corpus"))


def curve(log: Log, unit: str, split: str, key: str) -> tuple[np.ndarray, list[float]]:
    """Return x values in a unit of AXIS_LABELS, and the values of a metric; what was measured at
    step 0 stands at the first step, as a logarithmic axis has no 0."""
    rows = [row for row in log.get(split, []) if row.get(key) is not None]
    steps = [row["step"] for row in log["train"]]
    used = [row["ms" if unit == "hours" else unit] for row in log["train"]]
    used = np.cumsum(used) / 3.6e6 if unit == "hours" else used
    x = np.interp([row["step"] for row in rows], steps, used)
    return x, [row[key] for row in rows]


def draw(
    paths: list[Path],
    out: Path,
    size: str | None = None,
    unit: str = "tokens",
    columns: tuple[str, ...] = (),
) -> None:
    """Draw the runs whose logs are at `paths` over each other into the picture `out`: their losses
    in bits per byte if their tokenizers differ. `size` (of SIZES) adds OpenAI's GPT-2, `columns`
    further scalars of training rows."""
    runs = [read_run(path) for path in paths]
    if len({run.label for run in runs}) < len(runs):
        runs = [run._replace(label=str(path)) for run, path in zip(runs, paths, strict=True)]
    tasks = [name for name in TASKS if any(name in run.log for run in runs)]
    grid = [["loss", "accuracy" if tasks else "loss"], ["rate", "speed"]]
    grid += [[column, column] for column in columns]
    widths, heights = (3, 2) if tasks else (1, 1), (3, *[2] * (len(grid) - 1))
    figure = Figure(figsize=(12, 1.4 * sum(heights)), layout="constrained")
    panels = figure.subplot_mosaic(grid, width_ratios=widths, height_ratios=heights)
    key = "loss" if len({run.vocab_size for run in runs} - {None}) < 2 else "bits_per_byte"
    for i, run in enumerate(runs):
        style = {"ls": LINES[i % 4], "color": f"C{i}"}
        draw_run(panels, run, unit, key, style)
        for column in columns:
            panels[column].plot(*curve(run.log, unit, "train", column), lw=1, **style)
            panels[column].set(ylabel=column)
    gpt2 = (GPT2Tokenizer.vocab_size, "FineWeb-Edu")
    if size and any((run.vocab_size, run.corpus) != gpt2 for run in runs):
        print("OpenAI's validation loss is not drawn: it is per GPT-2 token of FineWeb-Edu")
    else:
        draw_published(panels["loss"], VALIDATION, ("FineWeb-Edu", "loss", size), "val")
    scale_losses(panels["loss"], key)
    for name in tasks:
        task = TASKS[name]
        key = (task.protocols[0], task.metric, size)
        draw_published(panels["accuracy"], task.published, key, name)
    if tasks:
        panels["accuracy"].set(ylabel="accuracy", xlim=(0, None), title="benchmarks")
    panels["rate"].set(ylabel="learning rate")
    panels["speed"].set(ylabel="tokens per second", ylim=(0, None))
    panels["speed"].yaxis.set_major_formatter(EngFormatter(sep=""))
    save(figure, unit, out)


def draw_run(panels: dict[str, Axes], run: Run, unit: str, key: str, style: dict) -> None:
    """Draw the curves of one run: validation loss as a thick line and, in nats per token (`key`
    "loss", not "bits_per_byte"), training loss as a thin one."""
    if key == "loss":
        panels["loss"].plot(*curve(run.log, unit, "train", "loss"), lw=0.6, alpha=0.45, **style)
    for panel, column in (("rate", "lr"), ("speed", "tokens_per_s")):
        panels[panel].plot(*curve(run.log, unit, "train", column), lw=1, **style)
    x, losses = curve(run.log, unit, "val", key)
    last = f"{losses[-1]:.3f} {UNITS[key]}" if losses else f"no validation in {UNITS[key]}"
    panels["loss"].plot(x, losses, lw=1.8, marker="o", ms=3, label=f"{run.label}: {last}", **style)
    for name, task in TASKS.items():
        x, accuracies = curve(run.log, unit, name, task.metric)
        if accuracies:
            marked = {"marker": MARKS[name][0], "ms": 4, "label": f"{name}, {run.label}"}
            panels["accuracy"].plot(x, accuracies, **marked, **style)


def draw_published(axes: Axes, figures: Published, key: tuple, task: str) -> None:
    """Draw a figure of OpenAI's GPT-2 as a dashed horizontal line, if there is one."""
    if key in figures:
        value, source = figures[key]
        label = f"{task}, OpenAI {key[-1]}: {value:g}\n({source.split(',')[0]})"
        _, dashes = MARKS.get(task, ("", DASHES[0]))
        axes.axhline(value, color="black", ls=(0, dashes), lw=1, label=label)


def scale_losses(axes: Axes, key: str) -> None:
    """Set logarithmic scales, whose tick labels are enough and have enough digits to differ."""
    title = "validation (thick) and training loss" if key == "loss" else "validation loss"
    axes.set(ylabel=f"loss ({UNITS[key]})", xscale="log", yscale="log", title=title)
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        if axis is axes.yaxis or high < 20 * low:
            locator = AutoLocator() if high < 20 * low else LogLocator(subs=(1, 2, 5))
            axis.set(major_locator=locator, minor_locator=NullLocator())
            axis.set_major_formatter(ScalarFormatter(useOffset=False))
            axis.get_major_formatter().set_scientific(False)


def draw_sweep(groups: dict[str, list[Log]], out: Path) -> None:
    """Draw mean and deviation of validation losses of groups of logs that differ in their seed."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for i, (label, logs) in enumerate(groups.items()):
        curves = [curve(log, "tokens", "val", "loss") for log in logs]
        x, losses = curves[0][0], np.array([losses for _, losses in curves])
        style = {"ls": LINES[i % 4], "color": f"C{i}", "marker": "o", "ms": 4, "capsize": 3}
        label = f"{label}: {losses[:, -1].mean():.3f}"
        axes.errorbar(x, losses.mean(0), losses.std(0), label=label, lw=1.5, **style)
    axes.set(ylabel="validation loss (nats per token)")
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
        with atomic_write(out) as file:
            figure.savefig(file, format=out.suffix[1:] or None, dpi=130)
    except Exception as error:  # also a file type that matplotlib does not know
        raise UserError(f"{out} could not be written: {error}") from error
