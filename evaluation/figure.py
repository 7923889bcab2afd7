"""The curves of one or more runs as one picture: loss, accuracies, learning rate, throughput."""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # renders to files without a display

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import AutoLocator, EngFormatter, LogLocator, NullLocator, ScalarFormatter

from data.shards import corpus_name
from data.tokenizer import GPT2Tokenizer
from evaluation.published import PUBLISHED
from utils.errors import UserError
from utils.files import atomic_write
from utils.log_files import read_metrics

Log = dict[str, list[dict]]  # rows by split, as read_metrics returns them
LINE_STYLES = ("-", "--", "-.", ":")  # distinguish runs without colour too
AXIS_LABELS = {"step": "step", "tokens": "training tokens", "hours": "hours of training steps"}
UNITS = {"loss": "nats per token", "bits_per_byte": "bits per byte"}
VAL_LOSS = ("val", "FineWeb-Edu", "loss")  # task, protocol and metric in PUBLISHED
DASHES = (0, (6, 3))
# task: (metric, title, marker of a run; protocol and line style of the published figure)
ACCURACIES = {
    "hellaswag": ("acc_norm", "HellaSwag", "o", "build-nanogpt", DASHES),
    "lambada": ("acc", "LAMBADA", "s", "lm-eval", (0, (1, 2))),
}


@dataclass(frozen=True)
class Run:
    """A run to draw; old logs do not say its vocabulary and corpus."""

    label: str
    log: Log
    vocab_size: int | None = None
    corpus: str | None = None


def read_run(path: Path, label: str) -> Run:
    """Return the run of a metrics.jsonl or its folder. Raises UserError if it cannot be read; a
    config.json beside it that is missing or damaged is no error."""
    log, config = read_metrics(path), (path if path.is_dir() else path.parent) / "config.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError, UserError):
        run = json.loads(config.read_text(encoding="utf-8"))
        vocab_size = run["model_config"]["vocab_size"]
        corpus = run.get("corpus") or corpus_name(Path(run["train_config"]["data_dir"]))
        return Run(label, log, vocab_size if type(vocab_size) is int else None, corpus)
    return Run(label, log)


def why_not_comparable(runs: list[Run], size: str) -> str | None:
    """Return why the validation loss of OpenAI's GPT-2 is not on the scale of the runs, None if it
    is: nats per GPT-2 token of FineWeb-Edu."""
    if (*VAL_LOSS, size) not in PUBLISHED:
        return f"none of {size} on FineWeb-Edu is known"
    wanted = (GPT2Tokenizer.vocab_size, "FineWeb-Edu")
    others = [run.label for run in runs if (run.vocab_size, run.corpus) != wanted]
    if others:
        return f"it is per GPT-2 token of FineWeb-Edu, not known to be the data of {others[0]}"
    return None


def run_labels(paths: list[Path]) -> list[str]:
    """Return a label for each log: its folder, or the folder above a logs/; paths if these tie."""
    folders = [path if path.is_dir() else path.parent for path in paths]
    names = [f.resolve().parent.name if f.name == "logs" else f.name for f in folders]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def x_values(log: Log, unit: str, steps: list[int]) -> np.ndarray:
    """Return the tokens or the hours of training that a run had used at `steps`; raise UserError if
    its rows of training do not record them."""
    if unit == "step":
        return np.array(steps)
    rows = log.get("train", [])
    key = "tokens" if unit == "tokens" else "ms"
    if any(row.get(key) is None for row in rows):
        raise UserError(f"the training rows of the log have no {key}; choose another --x")
    values = [0, *(row[key] for row in rows)]
    if unit == "hours":
        values = np.cumsum(values) / 3.6e6
    return np.interp(steps, [0, *(row["step"] for row in rows)], values)


def curve(log: Log, unit: str, split: str, key: str) -> tuple[np.ndarray, list[float]]:
    """Return x values and values of one metric after step 0."""
    rows = [r for r in log.get(split, []) if r["step"] > 0 and r.get(key) is not None]
    return x_values(log, unit, [row["step"] for row in rows]), [row[key] for row in rows]


def plot_published(
    axes: plt.Axes, metric: tuple[str, str, str], size: str | None, name: str, line_style: tuple
) -> None:
    """Draw the figure of OpenAI's GPT-2 as a horizontal line, if one was published."""
    if (*metric, size) in PUBLISHED:
        value, source = PUBLISHED[(*metric, size)]
        label = f"OpenAI {size}{name}: {value:g}\n({source.split(',')[0]})"
        axes.axhline(value, color="black", ls=line_style, lw=1, label=label)


def run_style(i: int) -> dict[str, str]:
    """Return the line style and colour of run number `i`."""
    return {"ls": LINE_STYLES[i % len(LINE_STYLES)], "color": f"C{i}"}


def draw_run(panels: dict[str, plt.Axes], run: Run, unit: str, style: dict, key: str) -> None:
    """Draw the curves of one run: validation loss as a thick line and, in nats per token (`key`
    "loss", not "bits_per_byte"), training loss as a thin one."""
    log, label = run.log, run.label
    if key == "loss":
        panels["loss"].plot(*curve(log, unit, "train", key), lw=0.6, alpha=0.45, **style)
    panels["rate"].plot(*curve(log, unit, "train", "lr"), lw=1, **style)
    panels["speed"].plot(*curve(log, unit, "train", "tokens_per_s"), lw=1, **style)
    x, losses = curve(log, unit, "val", key)
    last = (
        f"{losses[-1]:.3f} at the last validation" if losses else f"no validation in {UNITS[key]}"
    )
    name = f"{label}: {last}"
    panels["loss"].plot(x, losses, lw=1.8, marker="o", ms=3, label=name, **style)
    for task, (key, title, marker, *_) in ACCURACIES.items():
        x, accuracies = curve(log, unit, task, key)
        if accuracies:
            name = f"{title}, {label}"
            panels["accuracy"].plot(x, accuracies, marker=marker, ms=4, label=name, **style)


def draw_sweep(groups: dict[str, list[Log]], out: Path) -> None:
    """Draw validation loss over tokens for groups of logs that differ in their seed alone: each
    group's mean, and the band between its minimum and maximum."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for i, (label, logs) in enumerate(groups.items()):
        x, _ = curve(logs[0], "tokens", "val", "loss")
        losses = np.array([curve(log, "tokens", "val", "loss")[1] for log in logs])
        name = f"{label}: {losses[:, -1].mean():.3f}"
        axes.plot(x, losses.mean(0), lw=1.5, marker="o", ms=4, label=name, **run_style(i))
        axes.fill_between(x, losses.min(0), losses.max(0), color=f"C{i}", alpha=0.2, lw=0)
    axes.set(ylabel="validation loss (nats per token)")
    save_figure(figure, "tokens", out)


def save_figure(figure: plt.Figure, unit: str, out: Path) -> None:
    """Style all panels, write the picture and close it; raise UserError if it cannot be written."""
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
    except IsADirectoryError as error:
        raise UserError(f"{out} is a folder; give a file, as {out / 'log_plot.png'}") from error
    except OSError as error:
        raise UserError(f"{out} could not be written: {error.strerror or error}") from error
    except ValueError as error:  # a file type unknown to matplotlib
        raise UserError(f"{out} could not be written: {error}") from error
    finally:
        plt.close(figure)


def draw_if_possible(paths: list[Path], out: Path, size: str | None) -> None:
    """Draw a picture, or print why that failed."""
    try:
        draw(paths, out, size)
    except UserError as error:
        print(error)


def draw(paths: list[Path], out: Path, size: str | None = None, unit: str = "tokens") -> str | None:
    """Draw the runs whose logs are at `paths` over each other into the picture `out`: their losses
    in bits per byte if their tokenizers differ.

    `size` (a name of model.config.SIZES) adds OpenAI's GPT-2; returns why its validation loss was
    left out, if it was. Raises UserError for a log that cannot be read or a picture that cannot be
    written.
    """
    runs = [read_run(*pair) for pair in zip(paths, run_labels(paths), strict=True)]
    if empty := [path for path, run in zip(paths, runs, strict=True) if not run.log.get("train")]:
        raise UserError(f"{empty[0]} has no training step yet")
    scored = any(run.log.get(task) for run in runs for task in ACCURACIES)
    figure, panels = plt.subplot_mosaic(
        [["loss", "accuracy" if scored else "loss"], ["rate", "speed"]],
        figsize=(12, 7),
        width_ratios=(3, 2) if scored else (1, 1),
        height_ratios=(3, 2),
        layout="constrained",
    )
    same_tokenizer = len({run.vocab_size for run in runs} - {None}) < 2
    key = "loss" if same_tokenizer else "bits_per_byte"
    for i, run in enumerate(runs):
        draw_run(panels, run, unit, run_style(i), key)
    reason = why_not_comparable(runs, size) if size else None
    if not reason:
        plot_published(panels["loss"], VAL_LOSS, size, "", DASHES)
    style_loss(panels["loss"], key)
    if scored:
        for task, (metric, title, _, protocol, line_style) in ACCURACIES.items():
            if any(curve(run.log, unit, task, metric)[1] for run in runs):
                published = (task, protocol, metric)
                plot_published(panels["accuracy"], published, size, f", {title}", line_style)
        panels["accuracy"].set(ylabel="accuracy", xlim=(0, None))
        panels["accuracy"].set_title("benchmarks", fontsize=10)
    panels["rate"].set(ylabel="learning rate")
    panels["speed"].set(ylabel="tokens per second", ylim=(0, None))
    panels["speed"].yaxis.set_major_formatter(EngFormatter(sep=""))
    save_figure(figure, unit, out)
    return reason


def style_loss(axes: plt.Axes, key: str) -> None:
    """Set scales, title and ticks of the loss panel; tick labels have enough digits to differ."""
    axes.set(ylabel=f"loss ({UNITS[key]})", xscale="log", yscale="log")
    title = "validation (thick) and training loss" if key == "loss" else "validation loss"
    axes.set_title(title, fontsize=10)
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        if axis is axes.yaxis or high < 20 * low:
            locator = AutoLocator() if high < 20 * low else LogLocator(subs=(1, 2, 5))
            axis.set(major_locator=locator, minor_locator=NullLocator())
            axis.set_major_formatter(ScalarFormatter(useOffset=False))
            axis.get_major_formatter().set_scientific(False)
