"""Pictures: the curves of one or more runs, and the validation losses of a sweep."""

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # renders to files without a display

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import AutoLocator, EngFormatter, LogLocator, NullLocator, ScalarFormatter

from data.tokenizer import GPT2Tokenizer
from evaluation.tasks import VALIDATION, Published, find_tasks
from utils.errors import UserError
from utils.files import atomic_write
from utils.logger import read_metrics

Log = dict[str, list[dict]]  # rows by split, as read_metrics returns them
AXIS_LABELS = {"step": "step", "tokens": "training tokens", "hours": "hours of training steps"}
UNITS = {"loss": "nats per token", "bits_per_byte": "bits per byte"}
DASHES = ((6, 3), (1, 2), (6, 2, 1, 2), (3, 1))
TASKS = find_tasks()
MARKS = dict(zip(TASKS, cycle(zip("os^D", DASHES, strict=True)), strict=False))  # for each task


@dataclass(frozen=True)
class Run:
    """A run to draw; vocabulary and corpus are None for a log without a config.json."""

    label: str
    log: Log
    vocab_size: int | None = None
    corpus: str | None = None

    def curve(self, unit: str, split: str, key: str) -> tuple[np.ndarray, list[float]]:
        """Return x values in a unit of AXIS_LABELS, and the values of a metric after step 0."""
        rows = [r for r in self.log.get(split, []) if r["step"] > 0 and r.get(key) is not None]
        steps, train = [row["step"] for row in rows], self.log["train"]
        used = [row["ms" if unit == "hours" else unit] for row in train]
        used = np.cumsum(used) / 3.6e6 if unit == "hours" else used
        x = np.interp(steps, [0, *(row["step"] for row in train)], [0, *used])
        return x, [row[key] for row in rows]


def read_run(path: Path) -> Run:
    """Return the run of a metrics.jsonl or its folder, named after the folder above logs/."""
    folder = path if path.is_dir() else path.parent
    folder = folder / "logs" if (folder / "logs").is_dir() else folder
    about = {}
    with suppress(OSError, ValueError):
        about = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    log, whole = read_metrics(path), folder.resolve()
    if not log.get("train"):
        raise UserError(f"{path} has no training step yet")
    label = whole.parent.name if whole.name == "logs" else whole.name
    return Run(label, log, about.get("model_config", {}).get("vocab_size"), about.get("corpus"))


def line_style(i: int) -> dict[str, str]:
    """Return the line style and colour of run number `i`."""
    return {"ls": ("-", "--", "-.", ":")[i % 4], "color": f"C{i}"}


def draw(paths: list[Path], out: Path, size: str | None = None, unit: str = "tokens") -> None:
    """Draw the runs whose logs are at `paths` over each other into the picture `out`: their losses
    in bits per byte if their tokenizers differ. `size` (of SIZES) adds OpenAI's GPT-2."""
    runs = [read_run(path) for path in paths]
    if len({run.label for run in runs}) < len(runs):
        runs = [replace(run, label=str(path)) for run, path in zip(runs, paths, strict=True)]
    tasks = [name for name in TASKS if any(name in run.log for run in runs)]
    figure, panels = plt.subplot_mosaic(
        [["loss", "accuracy" if tasks else "loss"], ["rate", "speed"]],
        figsize=(12, 7),
        width_ratios=(3, 2) if tasks else (1, 1),
        height_ratios=(3, 2),
        layout="constrained",
    )
    key = "loss" if len({run.vocab_size for run in runs} - {None}) < 2 else "bits_per_byte"
    for i, run in enumerate(runs):
        draw_run(panels, run, unit, key, line_style(i))
    gpt2 = (GPT2Tokenizer.vocab_size, "FineWeb-Edu")
    if size and any((run.vocab_size, run.corpus) != gpt2 for run in runs):
        print("OpenAI's validation loss is not drawn: it is per GPT-2 token of FineWeb-Edu")
    else:
        draw_published(panels["loss"], VALIDATION, ("FineWeb-Edu", "loss", size), "val")
    scale_losses(panels["loss"], key)
    for name in tasks:
        task = TASKS[name]
        figure_key = (task.protocols[0], task.metric, size)
        draw_published(panels["accuracy"], task.published, figure_key, name)
    if tasks:
        panels["accuracy"].set(ylabel="accuracy", xlim=(0, None), title="benchmarks")
    panels["rate"].set(ylabel="learning rate")
    panels["speed"].set(ylabel="tokens per second", ylim=(0, None))
    panels["speed"].yaxis.set_major_formatter(EngFormatter(sep=""))
    save(figure, unit, out)


def draw_run(panels: dict[str, plt.Axes], run: Run, unit: str, key: str, style: dict) -> None:
    """Draw the curves of one run: validation loss as a thick line and, in nats per token (`key`
    "loss", not "bits_per_byte"), training loss as a thin one."""
    if key == "loss":
        panels["loss"].plot(*run.curve(unit, "train", "loss"), lw=0.6, alpha=0.45, **style)
    for panel, column in (("rate", "lr"), ("speed", "tokens_per_s")):
        panels[panel].plot(*run.curve(unit, "train", column), lw=1, **style)
    x, losses = run.curve(unit, "val", key)
    last = f"{losses[-1]:.3f} {UNITS[key]}" if losses else f"no validation in {UNITS[key]}"
    panels["loss"].plot(x, losses, lw=1.8, marker="o", ms=3, label=f"{run.label}: {last}", **style)
    for name, task in TASKS.items():
        x, accuracies = run.curve(unit, name, task.metric)
        if accuracies:
            marked = {"marker": MARKS[name][0], "ms": 4, "label": f"{name}, {run.label}"}
            panels["accuracy"].plot(x, accuracies, **marked, **style)


def draw_published(axes: plt.Axes, figures: Published, key: tuple, task: str) -> None:
    """Draw a figure of OpenAI's GPT-2 as a dashed horizontal line, if there is one."""
    if key in figures:
        value, source = figures[key]
        label = f"{task}, OpenAI {key[-1]}: {value:g}\n({source.split(',')[0]})"
        dashes = MARKS[task][1] if task in MARKS else DASHES[0]
        axes.axhline(value, color="black", ls=(0, dashes), lw=1, label=label)


def scale_losses(axes: plt.Axes, key: str) -> None:
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
    """Draw validation loss over tokens for groups of logs that differ in their seed alone: each
    group's mean, and the band between its minimum and maximum."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for i, (label, logs) in enumerate(groups.items()):
        curves = [Run(label, log).curve("tokens", "val", "loss") for log in logs]
        x, losses = curves[0][0], np.array([losses for _, losses in curves])
        name = f"{label}: {losses[:, -1].mean():.3f}"
        axes.plot(x, losses.mean(0), lw=1.5, marker="o", ms=4, label=name, **line_style(i))
        axes.fill_between(x, losses.min(0), losses.max(0), color=f"C{i}", alpha=0.2, lw=0)
    axes.set(ylabel="validation loss (nats per token)")
    save(figure, "tokens", out)


def save(figure: plt.Figure, unit: str, out: Path) -> None:
    """Style all panels, write the picture and close it."""
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
    finally:
        plt.close(figure)
