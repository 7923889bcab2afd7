"""The curves of one or more runs as one picture: loss, accuracies, learning rate, throughput."""

from itertools import cycle
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws files, needs no screen

import matplotlib.pyplot as plt
import numpy as np

from evaluation.published import PUBLISHED
from utils.logger import LogError, read_metrics

STYLES = ("-", "--", "-.", ":")  # tell runs apart in grey too
DASHES = (0, (6, 3))
UNITS = {"step": "step", "tokens": "training tokens", "hours": "hours of training steps"}
ACCURACIES = {
    "hellaswag": ("acc_norm", "HellaSwag", "build-nanogpt"),
    "lambada": ("acc", "LAMBADA", "lm-eval"),
}


def labels_of(paths: list[Path]) -> list[str]:
    """What tells runs apart: the folder of the log, or the one above a plain logs/; the path where
    that is not enough."""
    folders = [path if path.is_dir() else path.parent for path in paths]
    names = [f.resolve().parent.name if f.name == "logs" else f.name for f in folders]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def places(splits: dict[str, list[dict]], unit: str, steps: list[int]) -> np.ndarray:
    """Where steps stand on an axis of that unit; time is that of the training steps alone."""
    if unit == "step":
        return np.array(steps)
    rows = splits.get("train", [])
    known = [0, *(row["step"] for row in rows)]
    key = "tokens" if unit == "tokens" else "ms"
    if any(row.get(key) is None for row in rows):
        raise LogError(f"rows of training have no {key} to draw by; draw by another --x")
    there = [0, *(row[key] for row in rows)]
    if unit == "hours":
        there = np.cumsum(there) / 3.6e6
    return np.interp(steps, known, there)


def curve(axes: plt.Axes, splits: dict, unit: str, split: str, key: str, **style) -> bool:
    """One line; False where the run has no such rows."""
    rows = [r for r in splits.get(split, []) if r["step"] > 0 and r.get(key) is not None]
    if rows:
        x = places(splits, unit, [row["step"] for row in rows])
        axes.plot(x, [row[key] for row in rows], **style)
    return bool(rows)


def dashed(
    axes: plt.Axes, key: tuple[str, str, str], size: str | None, name: str, ls: tuple | str
) -> None:
    """OpenAI's GPT-2 as a horizontal line with its source, where somebody published the figure."""
    if size in PUBLISHED[key]:
        value, source = PUBLISHED[key][size]
        label = f"OpenAI {size}{name}: {value:g}\n({source.split(',')[0]})"
        axes.axhline(value, color="black", ls=ls, lw=1, label=label)


def draw_loss(axes: plt.Axes, runs: dict[str, dict], unit: str) -> None:
    """Training loss thin, validation loss thick with points."""
    for i, ((label, splits), ls) in enumerate(zip(runs.items(), cycle(STYLES), strict=False)):
        style = {"ls": ls, "color": f"C{i}"}
        curve(axes, splits, unit, "train", "loss", lw=0.6, alpha=0.45, **style)
        rows = [r for r in splits.get("val", []) if r["step"] > 0 and r.get("loss") is not None]
        last = [row["loss"] for row in rows][-1:]
        name = f"{label}: {last[0]:.3f} at the end" if last else f"{label}, training"
        found = curve(
            axes, splits, unit, "val", "loss", lw=1.8, marker="o", ms=3, label=name, **style
        )
        if not found:
            axes.plot([], [], label=name, **style)
    axes.set(ylabel="loss (nats per token)", xscale="log", yscale="log")
    axes.set_title("validation (thick) and training loss", fontsize=10)
    for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatter(matplotlib.ticker.FormatStrFormatter("%.2g"))


def draw_accuracies(axes: plt.Axes, runs: dict[str, dict], unit: str, size: str | None) -> None:
    """HellaSwag and LAMBADA, as far as the runs have them."""
    found = set()
    for i, ((label, splits), ls) in enumerate(zip(runs.items(), cycle(STYLES), strict=False)):
        for (task, (key, name, _)), marker in zip(ACCURACIES.items(), "os", strict=True):
            style = {"ls": ls, "color": f"C{i}", "marker": marker, "ms": 4}
            if curve(axes, splits, unit, task, key, label=f"{name}, {label}", **style):
                found.add(task)
    for task, ls in (("hellaswag", DASHES), ("lambada", (0, (1, 2)))):
        key, name, protocol = ACCURACIES[task]
        if task in found:
            dashed(axes, (task, protocol, key), size, f", {name}", ls)
    axes.set(ylabel="accuracy", xlim=(0, None))
    axes.set_title("benchmarks", fontsize=10)


def draw_sweep(runs: dict[str, list[dict]], out: Path) -> None:
    """Validation loss over tokens of groups of logs that differ in their seed alone: each group's
    mean, between its least and its most."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for i, ((label, logs), ls) in enumerate(zip(runs.items(), cycle(STYLES), strict=False)):
        steps = [row["step"] for row in logs[0]["val"] if row["step"] > 0]
        losses = np.array([[r["loss"] for r in log["val"] if r["step"] > 0] for log in logs])
        x = places(logs[0], "tokens", steps)
        name = f"{label}: {losses[:, -1].mean():.3f}"
        axes.plot(x, losses.mean(0), ls=ls, color=f"C{i}", lw=1.5, marker="o", ms=4, label=name)
        axes.fill_between(x, losses.min(0), losses.max(0), color=f"C{i}", alpha=0.2, lw=0)
    axes.set(ylabel="validation loss (nats per token)")
    axes.legend(frameon=False, fontsize=8)
    dress(axes, "tokens")
    write(figure, out)


def dress(axes: plt.Axes, unit: str) -> None:
    """What all panels have alike: the axis of `unit`, a grid, no box."""
    axes.set_xlabel(UNITS[unit])
    if unit != "hours":
        axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    axes.grid(alpha=0.25, which="both")
    axes.spines[["top", "right"]].set_visible(False)


def write(figure: plt.Figure, out: Path) -> None:
    """Writes a picture and lets go of it. Raises LogError if it cannot be written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=130)
    except (OSError, ValueError) as error:  # ValueError: matplotlib knows no such kind of file
        raise LogError(f"{out} could not be written: {error}") from error
    finally:
        plt.close(figure)


def draw_if_possible(paths: list[Path], out: Path, size: str | None) -> None:
    """Draws; where that fails, says why."""
    try:
        draw(paths, out, size)
    except LogError as error:
        print(error)


def draw(paths: list[Path], out: Path, size: str | None = None, unit: str = "tokens") -> None:
    """Draws the runs whose logs are at `paths` over each other into the picture `out`.

    `size` (a name of model.config.SIZES) adds OpenAI's GPT-2. Raises LogError for a log that cannot
    be read or a picture that cannot be written.
    """
    runs = dict(zip(labels_of(paths), map(read_metrics, paths), strict=True))
    scored = any(splits.get(task) for splits in runs.values() for task in ACCURACIES)
    figure, panels = plt.subplot_mosaic(
        [["loss", "accuracy" if scored else "loss"], ["rate", "speed"]],
        figsize=(12, 7),
        width_ratios=(3, 2) if scored else (1, 1),
        height_ratios=(3, 2),
        layout="constrained",
    )
    loss, rate, speed = panels["loss"], panels["rate"], panels["speed"]
    draw_loss(loss, runs, unit)
    dashed(loss, ("val", "FineWeb-Edu", "loss"), size, "", DASHES)
    if scored:
        draw_accuracies(panels["accuracy"], runs, unit, size)
    for i, ((label, splits), ls) in enumerate(zip(runs.items(), cycle(STYLES), strict=False)):
        style = {"ls": ls, "color": f"C{i}", "lw": 1, "label": label}
        curve(rate, splits, unit, "train", "lr", **style)
        curve(speed, splits, unit, "train", "tokens_per_s", **style)
    rate.set(ylabel="learning rate")
    speed.set(ylabel="tokens per second", ylim=(0, None))
    speed.yaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    for axes in panels.values():
        dress(axes, unit)
    for name in panels.keys() & {"loss", "accuracy"}:
        if panels[name].get_legend_handles_labels()[0]:
            panels[name].legend(frameon=False, fontsize=8)
    write(figure, out)
