"""Picture of the curves of one or more runs.

The data of a run comes from the folder of its log, so a picture can be drawn on any machine and
while a run goes on. Nothing here imports PyTorch: drawing takes a second.
"""

import itertools
import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from evaluation.benchmarks import BENCHMARKS
from evaluation.table import PUBLIC_RUN, PUBLISHED, TOKENS_OF_PUBLIC_STEP
from utils.errors import UserError, writing
from utils.logger import find_metrics, read_logged_config, read_metrics

# logged metric -> label of the y axis of its panel
LABELS = {
    "loss": "loss (nats per token)",
    "bits_per_byte": "loss (bits per byte)",
    "reward": "mean reward",
    "accuracy": "accuracy",
    "lr": "learning rate",
    "tokens_per_s": "tokens per second",
    "completion_tokens": "completion length (tokens)",
    "cut": "share of completions cut",
    "kl": "KL divergence (nats)",
}
MARKERS = "os^Dv"  # Matplotlib's signs for the runs of a benchmark, repeated after the fifth
# Width of a picture in inches. GitHub shows pictures 830 pixels wide, which is 92 pixels per inch:
# letters of 8 points are 10 pixels high.
WIDTH = 9


@dataclass(frozen=True)
class LoggedRun:
    """A run to draw."""

    label: str
    """Path of the run as the user gave it, without /logs; read_runs shortens it."""
    log: dict[str, list[dict]]
    """Return value of read_metrics: for each split the metrics of each logged step, sorted by step,
    as in {"train": [{"step": 1, "loss": 10.9, ...}, ...]}. A split is "train", "val", "held_out",
    "skipped" or the name of a benchmark."""
    logged_config: dict
    """Content of the config.json beside the log, {"tokenizer": "gpt2", "corpus": "FineWeb-Edu",
    ...}; {} if there is no config.json."""


def read_run(path: Path) -> LoggedRun:
    """Read the run of a metrics.jsonl file, of its folder, or of a folder with logs/ in it. Raise
    UserError if the run has no training step yet."""
    log = read_metrics(path)
    if not log.get("train"):
        raise UserError(f"{path} has no training step yet")
    label = str(path).removesuffix("/logs")  # "runs/a" for runs/a and runs/a/logs
    # read_logged_config returns None if the log file has another name than metrics.jsonl
    return LoggedRun(label, log, read_logged_config(find_metrics(path).parent) or {})


def read_runs(paths: list[Path]) -> list[LoggedRun]:
    """Read the runs of several paths, and shorten their labels. A path without a run, such as the
    table beside the runs of a sweep, is named and skipped. Raise UserError if no path has a run."""
    runs: list[LoggedRun] = []
    for path in paths:
        try:
            runs.append(read_run(path))
        except UserError as error:
            if not runs and path == paths[-1]:  # no path has a run
                raise
            print(f"skipped: {error}")
    labels = shorten([run.label for run in runs])
    return [replace(run, label=label) for run, label in zip(runs, labels, strict=True)]


def shorten(labels: list[str], width: int = 41) -> list[str]:
    """Return labels of at most `width` characters, or as many more as it takes to tell them apart.
    Long paths lose the folder that they have in common, and then their middle."""
    common_folder = os.path.commonprefix(labels).rpartition("/")[0]  # "runs" of runs/a1 and runs/a2
    short_labels: list[str] = []
    for label in labels:
        if common_folder and len(labels) > 1 and len(label) > width:
            label = "…" + label.removeprefix(common_folder)
        if len(label) > width:  # both ends stay: the folder, and a sweep's options and seed
            label = f"{label[: width // 2]}…{label[-(width // 2) :]}"
        short_labels.append(label)
    if len(set(short_labels)) < len(set(labels)):
        return shorten(labels, width + 10)
    return short_labels


def comparable_loss(runs: list[LoggedRun]) -> str:
    """Return the metric to compare runs by: "loss" if they have one tokenizer, else
    "bits_per_byte". A token of one tokenizer holds more text than a token of another, so losses per
    token are not comparable."""
    # None for a run without config.json, as when metrics.jsonl was copied alone
    tokenizers = {run.logged_config.get("tokenizer") for run in runs}  # {"gpt2", "bytes"}
    if len(tokenizers - {None}) > 1:
        return "bits_per_byte"
    return "loss"


def curve(run: LoggedRun, split: str, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a curve as two arrays: x in training tokens, y the values of a metric of a split. Both
    arrays are empty if the split never logs this metric."""
    # Step 0, the validation before training, has no entry in "train".
    train_steps = [0]
    train_tokens = [0]
    for metrics in run.log["train"]:
        train_steps.append(metrics["step"])
        train_tokens.append(metrics["tokens"])  # all tokens of the run up to this step
    # bits_per_byte is missing if the manifest of the shards lacks the size of their text
    rows_with_metric = [metrics for metrics in run.log.get(split, []) if metric in metrics]
    steps = [metrics["step"] for metrics in rows_with_metric]
    # a run that diverged logs null, which becomes NaN
    metric_values = np.array([metrics[metric] for metrics in rows_with_metric], float)
    # only "train" logs "tokens": interpolate them at the steps of the other splits
    return np.interp(steps, train_steps, train_tokens), metric_values


def tokens_per_step(runs: list[LoggedRun]) -> float | None:
    """Return the number of tokens per training step for the axis of steps. Return None if it
    differs between or within runs, so that one axis of steps cannot fit all curves."""
    # tokens per step, up to the first and up to the last step of each run
    mean_tokens: list[float] = []
    for run in runs:
        for metrics in (run.log["train"][0], run.log["train"][-1]):
            mean_tokens.append(metrics["tokens"] / metrics["step"])  # both from the run's start
    if max(mean_tokens) > 1.05 * min(mean_tokens):  # within 5 %: steps of GRPO vary by some percent
        return None
    return mean_tokens[-1]  # exact at the end of a single run


def choose_metrics(runs: list[LoggedRun]) -> tuple[str, list[str]]:
    """Return the metric of the panel at the top, and the metrics of training for the panels at the
    bottom."""
    # of each run's last training step: {"step": 19073, "loss": 3.05, "lr": 6e-05, ...}
    last_metrics = [run.log["train"][-1] for run in runs]
    if not all("reward" in metrics for metrics in last_metrics):  # only GRPO logs a reward
        return comparable_loss(runs), ["lr", "tokens_per_s"]
    bottom_metrics = ["completion_tokens", "cut"]
    if any("kl" in metrics for metrics in last_metrics):  # absent with --kl 0
        bottom_metrics.append("kl")
    return "reward", bottom_metrics  # the loss of GRPO does not tell how good the texts are


def draw(paths: list[Path], out: Path, model_type: str | None = None) -> None:
    """Draw the runs whose logs are at `paths` over each other into the picture `out`.

    `model_type`, a key of model.config.GPT2_SIZES, adds the published values of this size of
    OpenAI's GPT-2. Raise UserError if no path has a run.
    """
    runs = read_runs(paths)
    top_metric, bottom_metrics = choose_metrics(runs)  # such as "loss", ["lr", "tokens_per_s"]
    panel_names = [[top_metric], bottom_metrics]  # a list for each row of panels, from the top
    # the log has a benchmark's scores as a split with the benchmark's name
    if any(run.log.keys() & BENCHMARKS.keys() for run in runs):
        panel_names.insert(1, ["accuracy"])
    figure, panels = make_panels(panel_names)  # panels: {"loss": Axes, "lr": Axes, ...}

    for i, run in enumerate(runs):
        color = f"C{i}"
        draw_main(panels[top_metric], run, top_metric, color)
        for metric in bottom_metrics:
            panels[metric].plot(*curve(run, "train", metric), lw=1, color=color)  # over tokens
    # after all runs, because a fixed limit does not grow with later curves
    for metric in bottom_metrics:
        panels[metric].set_ylim(0, upper_limit(panels[metric]))  # None: Matplotlib chooses the end
    if top_metric != "bits_per_byte":  # training steps do not log it: there is no thin line
        explanation = "thin line: training, each step; dots: validation"
        panels[top_metric].plot([], [], " ", label=explanation)  # adds a legend entry, no line
    if "accuracy" in panels:
        draw_accuracies(panels["accuracy"], runs, model_type)
    if model_type:
        # a mixture has the names of all its corpora as "corpus"
        trained_on = {
            (run.logged_config.get("tokenizer"), run.logged_config.get("corpus")) for run in runs
        }
        if trained_on != {("gpt2", "FineWeb-Edu")}:
            print("OpenAI's validation loss is not drawn: it is per GPT-2 token of FineWeb-Edu")
        elif model_type == "gpt2":  # no loss of a larger size is published
            draw_losses_of_gpt2(panels[top_metric])
    save_picture(figure, out, step_tokens=tokens_per_step(runs))  # None: no axis of steps


def make_panels(panel_names: list[list[str]]) -> tuple[Figure, dict[str, Axes]]:
    """Return an empty figure, and its panels by name. Each list of `panel_names` becomes a row of
    panels; it has one, two or three keys of LABELS."""
    # subplot_mosaic merges neighboring cells with one name into a wide panel. 6 cells per row
    # divide into 1, 2 or 3 equally wide panels.
    # [["loss", "loss", ...], ["lr", "lr", "lr", "tokens_per_s", ...]]
    grid = [np.repeat(names, 6 // len(names)).tolist() for names in panel_names]
    figure = Figure(figsize=(WIDTH, 2.6 * len(panel_names)), layout="constrained")  # inches
    panels = figure.subplot_mosaic(grid)
    for name, axes in panels.items():
        axes.set_ylabel(LABELS[name])
    return figure, panels


def draw_main(axes: Axes, run: LoggedRun, metric: str, color: str) -> None:
    """Draw the loss or reward of a run: training as a thin line, validation as a thick line with
    its best value in the legend."""
    split = "val"
    min_or_max = min  # a reward takes `max` below
    best_label = "lowest validation loss"
    if metric == "reward":
        split = "held_out"
        min_or_max = max
        best_label = "highest held-out reward"
    # Arrays (n,) each: training tokens, and losses or rewards. `train_curve` is empty for
    # bits_per_byte, which training steps do not log.
    train_curve = curve(run, "train", metric)
    val_curve = curve(run, split, metric)
    if metric != "reward":  # a reward has no high start: it begins near its later values
        train_curve = without_start(*train_curve)
        val_curve = without_start(*val_curve)
    [labelled_line] = axes.plot(*train_curve, lw=0.8, alpha=0.6, color=color)
    label = run.label
    # the metrics of each validation with a finite value: a step may lack the metric, and a run that
    # diverged logs null (both are None, which becomes NaN)
    finite_metrics = [
        metrics
        for metrics in run.log.get(split, [])
        if np.isfinite(np.float64(metrics.get(metric)))
    ]
    if finite_metrics:
        # the label goes to this line instead: the legend names each run once
        [labelled_line] = axes.plot(*val_curve, lw=1.8, marker="o", ms=3, color=color)
        best_metrics = min_or_max(finite_metrics, key=lambda metrics: metrics[metric])
        # "gpt2: lowest validation loss 3.295, at step 19,073"
        label += f": {best_label} {best_metrics[metric]:.3f}, at step {best_metrics['step']:,}"
    labelled_line.set_label(label)


def without_start(x: np.ndarray, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a curve of losses over training tokens `x` without its high start. The losses of an
    untrained model are far above the last loss, and would press all other losses into a strip at
    the bottom."""
    # the first 5 % of the tokens; [-1:] instead of [-1] because a curve may be empty
    is_start = (x < 0.05 * x[-1:]) & (losses > 1.5 * losses[-1:])
    return x[~is_start], losses[~is_start]


def upper_limit(axes: Axes) -> float | None:
    """Return the end of the y axis: it lies above all curves, except for outliers far above the
    other values of their curve. Outliers would press the rest into a strip at the bottom. Return
    None if no value is above 0."""
    limits: list[float] = []
    for line in axes.lines:
        y_values = np.asarray(line.get_ydata())
        y_values = y_values[np.isfinite(y_values)]
        if y_values.size:
            limit = 1.05 * y_values.max()
            percentile_98 = np.percentile(y_values, 98)  # outliers are at most 2 % of a curve
            if percentile_98 > 0:  # 0 means that all other values are 0: then outliers count
                limit = min(limit, 3 * percentile_98)
            limits.append(limit)
    return max(limits, default=0) or None


def draw_accuracies(axes: Axes, runs: list[LoggedRun], model_type: str | None) -> None:
    """Draw the accuracies of benchmarks, with the published values of `model_type`, a size of
    OpenAI's GPT-2. Each benchmark has a color, each of its runs a marker."""
    for i, benchmark in enumerate(BENCHMARKS.values(), start=1):
        runs_with_scores = [run for run in runs if benchmark.name in run.log]
        if not runs_with_scores:
            continue
        color = f"C{i}"  # Matplotlib's colors; C0 belongs to the loss of the first run
        for run, marker in zip(runs_with_scores, itertools.cycle(MARKERS), strict=False):
            # arrays (n,): training tokens, and for HellaSwag "acc_norm", from 0 to 1. "centered"
            # of CORE is below 0 for less than guessing.
            tokens, accuracies = curve(run, benchmark.name, benchmark.metric)
            label = f"{benchmark.name}, {run.label}: {accuracies[-1]:.3f}"
            axes.plot(tokens, accuracies, marker=marker, ms=3, color=color, label=label)
        if benchmark.metric == "centered":
            axes.set_ylabel("accuracy (CORE: centered)")
        # train.py logs the first protocol only
        published = PUBLISHED.get((benchmark.name, benchmark.protocols[0], benchmark.metric))
        if published and model_type in published.by_model_type:
            value = published.by_model_type[model_type]
            label = f"{benchmark.name}, OpenAI {model_type}: {value:g}"
            axes.axhline(value, color=color, ls="--", lw=1, label=label)


def draw_losses_of_gpt2(axes: Axes) -> None:
    """Draw the loss of OpenAI's smallest GPT-2, and the losses of a public run of this size."""
    value = PUBLISHED["val", "FineWeb-Edu", "loss"].by_model_type["gpt2"]
    axes.axhline(value, color="black", ls="--", lw=1, label=f"val, OpenAI gpt2: {value:g}")
    # PUBLIC_RUN is {250: 6.167, ...}, losses by step; the x axis is training tokens
    tokens = [step * TOKENS_OF_PUBLIC_STEP for step in PUBLIC_RUN]
    losses = list(PUBLIC_RUN.values())
    label = f"a public run of 124M, 10B tokens: {losses[-1]:.3f}"
    axes.plot(tokens, losses, color="black", ls=":", lw=1, label=label)


def draw_steps(axes: Axes, step_tokens: float) -> None:
    """Move the x axis of tokens above the panel, and add an x axis of steps below it. A step has
    `step_tokens` tokens."""
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    # conversion from tokens to steps, and back
    functions = (lambda x: np.divide(x, step_tokens), lambda x: np.multiply(x, step_tokens))
    steps_axis = axes.secondary_xaxis("bottom", functions=functions)
    axes.grid(False, axis="x")  # its vertical lines would stand at round tokens, not round steps
    steps_axis.set_xlabel("step")
    steps_axis.xaxis.set_major_formatter(EngFormatter(sep=""))


def save_picture(
    figure: Figure, out: Path, x_label: str = "training tokens", step_tokens: float | None = None
) -> None:
    """Label and style all panels, and write the picture in the format of the suffix of `out`.

    The x axis is `x_label`. If `step_tokens`, the tokens per step, is given, the panels have steps
    below them, and the panel at the top has training tokens above it.
    """
    for axes in figure.axes:
        axes.set_xlabel(x_label)
        axes.set_xlim(0, None)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 2M instead of 2000000
        axes.grid(alpha=0.25)
        # bottom edge of the legend in fractions of the panel's height: 1.0 is the panel's top edge
        legend_bottom = 1.0
        if step_tokens is not None:
            draw_steps(axes, step_tokens)
            if axes is figure.axes[0]:  # the panel at the top
                # Above the axis of tokens, which takes 0.42 inches of a panel 2 inches high. The
                # picture grows by as much, so that the panel keeps its size.
                legend_bottom = 1.21
                figure.set_figheight(figure.get_figheight() + 0.42)
            else:
                axes.xaxis.set_visible(False)
        for line in axes.lines:
            if np.size(line.get_xdata()) == 1:  # a single point would be invisible as a line
                line.set_marker(".")
        _, legend_labels = axes.get_legend_handles_labels()
        if legend_labels:  # Matplotlib warns about a legend without entries
            # above the panel, because curves may run everywhere inside it
            legend_corner = (0, legend_bottom)
            axes.legend(loc="lower left", bbox_to_anchor=legend_corner, frameon=False, fontsize=8)
            # The constrained layout of `figure` takes the legend's room from the panels. The
            # picture grows by 0.17 inches per line of the legend, so they keep their size.
            figure.set_figheight(figure.get_figheight() + 0.17 * len(legend_labels))
    with writing(out):  # turns errors into UserError, also a file type unknown to Matplotlib
        out.parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            # Matplotlib draws a box for a character of a folder's name that the font lacks
            warnings.filterwarnings("ignore", "Glyph")
            # Twice the pixels that GitHub shows. Without a format Matplotlib adds .png to `out`.
            figure.savefig(out, dpi=180, format=out.suffix[1:])
