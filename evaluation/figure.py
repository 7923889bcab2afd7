"""Picture of the curves of one or more runs.

Everything is read from the runs' logs (utils/logger.py writes them), so that a picture can be drawn
on any machine and while a run goes on. Without PyTorch: drawing takes a second.
"""

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    AutoLocator,
    EngFormatter,
    LogLocator,
    NullLocator,
    ScalarFormatter,
)

from evaluation.benchmarks import BENCHMARKS
from evaluation.table import PUBLISHED
from utils.errors import UserError
from utils.logger import SAMPLES, logged_run, read_metrics

Log = dict[str, list[dict]]  # rows by split, as read_metrics returns them

METRIC_LABELS = {  # of the main panel
    "loss": "loss (nats per token)",
    "bits_per_byte": "loss (bits per byte)",
    "reward": "mean reward",
}
MARKERS = "os^Dv"  # of the benchmarks in turn: circle, square, triangle, diamond, triangle down


@dataclass(frozen=True)
class Run:
    """A run to draw."""

    label: str  # its path, as the user gave it
    folder: Path  # of the log
    log: Log
    record: dict  # content of the config.json beside the log; {} without one


def read_run(path: Path) -> Run:
    """Return the run of a metrics.jsonl, of its folder, or of the folder with logs/ in it. Raise
    UserError if it has no training step yet."""
    log = read_metrics(path)
    if not log.get("train"):
        raise UserError(f"{path} has no training step yet")
    folder = path
    if path.is_file():
        folder = path.parent
    elif (path / "logs").is_dir():
        folder = path / "logs"
    return Run(str(path), folder, log, logged_run(folder) or {})


def comparable_loss(runs: list[Run]) -> str:
    """Return the loss by which runs are compared: "bits_per_byte" if their tokenizers differ, as a
    token of one stands for more text than a token of another, else "loss"."""
    # None: without a config.json, as beside a metrics.jsonl that was copied alone
    tokenizers = {run.record.get("tokenizer") for run in runs}
    if len(tokenizers - {None}) > 1:
        return "bits_per_byte"
    return "loss"


def curve(run: Run, split: str, metric: str) -> tuple[np.ndarray, list[float]]:
    """Return x values in training tokens, and the values of a metric of a split."""
    # Step 0, the validation before training, has no training row.
    train_steps = [0]
    train_tokens = [0]
    for row in run.log["train"]:
        train_steps.append(row["step"])
        train_tokens.append(row["tokens"])

    steps: list[int] = []
    values: list[float] = []
    for row in run.log.get(split, []):
        if metric in row:  # as bits_per_byte where the shards tell the size of their text
            steps.append(row["step"])
            values.append(row[metric])
    # rows of other splits have no tokens: these follow from their step
    return np.interp(steps, train_steps, train_tokens), values


def draw(paths: list[Path], out: Path, size: str | None = None) -> None:
    """Draw the runs whose logs are at `paths` over each other into the picture `out`. `size`, a key
    of model.config.SIZES, adds figures of OpenAI's GPT-2."""
    runs = [read_run(path) for path in paths]
    metric = comparable_loss(runs)
    validation_split = "val"
    columns = ["lr", "tokens_per_s"]  # of training rows, in two panels side by side
    is_grpo = all("reward" in run.log["train"][-1] for run in runs)
    if is_grpo:  # its loss does not tell how good the texts are
        metric = "reward"
        validation_split = "held_out"
        columns = ["completion_tokens", "tokens_per_s"]

    # from above; a name that stands twice in a row is one wide panel
    grid = [["main", "main"], columns]
    if any(run.log.keys() & BENCHMARKS.keys() for run in runs):
        grid[0] = ["main", "accuracy"]
    if is_grpo:
        grid.append(["samples", "samples"])
    figure = Figure(figsize=(12, 3 * len(grid)), layout="constrained")
    panels = figure.subplot_mosaic(grid)

    main_panel = panels["main"]
    main_panel.set_ylabel(METRIC_LABELS[metric])
    main_panel.set_title("thin: training, thick: validation", loc="left", fontsize=8)
    for i, run in enumerate(runs):
        color = f"C{i}"  # the i-th of Matplotlib's ten colors, the same in all panels
        # Training has a thin line, validation a thick one.
        x, values = curve(run, "train", metric)  # no training row has bits per byte
        main_panel.plot(x, values, lw=0.8, alpha=0.6, color=color)
        x, values = curve(run, validation_split, metric)
        label = run.label
        if values:  # a run is drawn before its first validation, too
            label += f": {values[-1]:.3f}"
        main_panel.plot(x, values, lw=1.8, marker="o", ms=3, color=color, label=label)
        for column in columns:
            x, values = curve(run, "train", column)
            panels[column].plot(x, values, lw=1, color=color)
            panels[column].set_ylabel(column)
        if "accuracy" in panels:
            draw_accuracies(panels["accuracy"], run, color)
    panels["tokens_per_s"].set_ylim(0, None)  # otherwise 1 % of noise fills the panel

    if is_grpo:
        show_sample(panels["samples"], runs[-1])
    else:
        scale_losses(main_panel)
    if size:  # last, so that the lines do not change the scale that scale_losses looks at
        draw_published(panels, runs, size)
    save(figure, out)


def draw_accuracies(axes: Axes, run: Run, color: str) -> None:
    """Draw the accuracies of a run's benchmarks."""
    axes.set_ylabel("accuracy")
    for i, task in enumerate(BENCHMARKS.values()):
        marker = MARKERS[i % len(MARKERS)]
        # the benchmark's rows are a split of the log
        x, accuracies = curve(run, task.name, task.metric)
        if accuracies:  # otherwise the run was not scored by this benchmark
            label = f"{task.name}, {run.label}: {accuracies[-1]:.3f}"
            axes.plot(x, accuracies, marker=marker, ms=4, color=color, label=label)


def draw_published(panels: dict[str, Axes], runs: list[Run], size: str) -> None:
    """Draw figures of OpenAI's GPT-2 as dashed lines where they are comparable."""
    # The loss per token depends on tokens and text; the benchmarks' accuracies do not.
    texts = {(run.record.get("tokenizer"), run.record.get("corpus")) for run in runs}
    if texts == {("gpt2", "FineWeb-Edu")}:
        draw_line(panels["main"], ("val", "FineWeb-Edu", "loss"), size)
    else:
        print("OpenAI's validation loss is not drawn: it is per GPT-2 token of FineWeb-Edu")
    for task in BENCHMARKS.values():
        if any(task.name in run.log for run in runs):
            draw_line(panels["accuracy"], (task.name, task.protocols[0], task.metric), size)


def draw_line(axes: Axes, key: tuple[str, str, str], size: str) -> None:
    """Draw the figure of a size of OpenAI's GPT-2 if there is one; `key` is one of PUBLISHED."""
    published = PUBLISHED.get(key)
    if published and size in published.values:
        value = published.values[size]
        task, _, _ = key
        label = f"{task}, OpenAI {size}: {value:g}\n({published.source})"
        axes.axhline(value, color="black", ls="--", lw=1, label=label)


def scale_losses(axes: Axes) -> None:
    """Set a logarithmic scale of the losses, so that the slow progress late in a run is seen. Ticks
    of such a scale are at powers of ten by default, mostly none for losses of 3 to 11."""
    axes.set_yscale("log")
    low, high = axes.yaxis.get_view_interval()
    locator = AutoLocator()  # equal distances: 3, 4, 5, ...
    if high > 20 * low:
        locator = LogLocator(subs=(1, 2, 5))  # 0.1, 0.2, 0.5, 1, ...
    formatter = ScalarFormatter(useOffset=False)
    formatter.set_scientific(False)  # 0.05, not 5e-2
    axes.yaxis.set_major_locator(locator)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(formatter)


def show_sample(axes: Axes, run: Run) -> None:
    """Show the beginning of the newest text in a run's samples.txt, if that lies beside the log."""
    axes.set_axis_off()
    path = run.folder / SAMPLES
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8")
    start = text.rfind("--- step ")  # the line that Logger.log_sample puts before each text
    axes.text(
        0,  # the upper left corner of the panel
        1,
        text[start:].rstrip(),
        va="top",
        family="monospace",
        fontsize=8,
        parse_math=False,  # a dollar of a text begins no formula
        clip_on=True,  # a long text ends at the border of the panel
    )


def save(figure: Figure, out: Path) -> None:
    """Label and style all panels, and write the picture as the type that its suffix names."""
    for axes in figure.axes:
        axes.set_xlabel("training tokens")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 2M instead of 2000000
        axes.grid(alpha=0.25)
        _, labels = axes.get_legend_handles_labels()
        if labels:  # Matplotlib warns of a legend without entries
            axes.legend(frameon=False, fontsize=8)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            # characters of a sample or a folder that the font lacks are drawn as boxes
            warnings.filterwarnings("ignore", "Glyph")
            figure.savefig(out, dpi=130)
    except Exception as error:  # also a file type that Matplotlib does not know
        raise UserError(f"{out} could not be written: {error}") from error
