"""Picture of the curves of one or more runs.

Everything is read from the runs' logs (utils/logger.py writes them), so that a picture can be drawn
on any machine and while a run goes on. Nothing here imports PyTorch: drawing takes a second.
"""

import itertools
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from evaluation.benchmarks import BENCHMARKS
from evaluation.table import PUBLIC_RUN, PUBLISHED, TOKENS_OF_PUBLIC_STEP
from utils.errors import UserError, writing
from utils.logger import find_metrics, logged_run, read_metrics

# Label of a panel's y axis, by the name of the logged value.
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
MARKERS = "os^Dv"  # the runs take them in turn
# GitHub shows pictures 830 pixels wide: 92 pixels an inch, so that letters of 8 points are 10
# pixels high.
WIDTH = 9  # inches


@dataclass(frozen=True)
class LoggedRun:
    """A run to draw."""

    label: str
    """Its path, as the user gave it, without /logs; the middle of a long one is left out."""
    log: dict[str, list[dict]]
    """By split, the metrics of each logged step, sorted by step: what read_metrics returns. A split
    is "train", "val", "held_out" or a benchmark's name."""
    logged_config: dict
    """Content of the config.json beside the log; {} without one."""


def read_run(path: Path) -> LoggedRun:
    """Return the run of a metrics.jsonl, of its folder, or of the folder with logs/ in it. Raise
    UserError if it has no training step yet."""
    log = read_metrics(path)
    if not log.get("train"):
        raise UserError(f"{path} has no training step yet")
    label = str(path).removesuffix("/logs")
    if len(label) > 41:  # keeps both ends: the folder, and options and seed of a sweep
        label = f"{label[:20]}…{label[-20:]}"
    # logged_run returns None if the file has another name than metrics.jsonl
    return LoggedRun(label, log, logged_run(find_metrics(path).parent) or {})


def comparable_loss(runs: list[LoggedRun]) -> str:
    """Return the loss by which runs are compared: "bits_per_byte" if their tokenizers differ, as a
    token of one stands for more text than a token of another, else "loss"."""
    # None without a config.json, as for a metrics.jsonl that was copied alone
    tokenizers = {run.logged_config.get("tokenizer") for run in runs}
    if len(tokenizers - {None}) > 1:
        return "bits_per_byte"
    return "loss"


def curve(run: LoggedRun, split: str, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Return x values in training tokens, and the values of a metric of a split; both are empty if
    the split never has that metric."""
    # Step 0, the validation before training, has no metrics of training.
    train_steps = [0]
    train_tokens = [0]
    for metrics in run.log["train"]:
        train_steps.append(metrics["step"])
        train_tokens.append(metrics["tokens"])  # of the run so far
    # bits_per_byte is missing where the shards do not tell the size of their text
    with_metric = [metrics for metrics in run.log.get(split, []) if metric in metrics]
    steps = [metrics["step"] for metrics in with_metric]
    values = np.array([metrics[metric] for metrics in with_metric], float)  # null becomes NaN
    # other splits log no "tokens", which are interpolated by step
    return np.interp(steps, train_steps, train_tokens), values


def tokens_per_step(runs: list[LoggedRun]) -> float | None:
    """Return the tokens of a training step if they are about the same in all runs, else None."""
    means = []  # tokens per step since the start, at the first and the last step of each run
    for run in runs:
        for metrics in (run.log["train"][0], run.log["train"][-1]):
            means.append(metrics["tokens"] / metrics["step"])
    if max(means) > 1.05 * min(means):  # steps of grpo differ by some percent
        return None
    return means[-1]  # exact at the end of a single run


def draw(paths: list[Path], out: Path, model_type: str | None = None) -> None:
    """Draw the runs whose logs are at `paths` over each other into the picture `out`. With
    `model_type`, a key of model.config.GPT2_SIZES, published values of that GPT-2 of OpenAI are
    added. A path without a run, such as the table beside the runs of a sweep, is named and skipped;
    raise UserError if there is no run at all."""
    runs = []
    for path in paths:
        try:
            runs.append(read_run(path))
        except UserError as error:
            if not runs and path == paths[-1]:  # none of the paths has a run
                raise
            print(f"skipped: {error}")
    last_metrics = [run.log["train"][-1] for run in runs]
    metric = comparable_loss(runs)  # drawn in the first panel
    columns = ["lr", "tokens_per_s"]  # training metrics, in panels side by side
    is_grpo = all("reward" in metrics for metrics in last_metrics)  # no other method logs a reward
    if is_grpo:  # its loss does not tell how good the texts are
        metric = "reward"
        columns = ["completion_tokens", "cut"]
        if any("kl" in metrics for metrics in last_metrics):  # not with --kl 0
            columns.append("kl")
    panel_names = [[metric], columns]  # from top to bottom, and from left to right
    # the log has the scores of a benchmark as a split of that name
    if any(run.log.keys() & BENCHMARKS.keys() for run in runs):
        panel_names.insert(1, ["accuracy"])
    figure, panels = make_panels(panel_names)

    for i, run in enumerate(runs):
        color = f"C{i}"
        draw_main(panels[metric], run, metric, color)
        for name in columns:
            panels[name].plot(*curve(run, "train", name), lw=1, color=color)
    for name in columns:  # after all runs, as a limit that is set is not widened again
        panels[name].set_ylim(0, upper_limit(panels[name]))  # None leaves the end to Matplotlib
    if metric != "bits_per_byte":  # which training does not log
        explanation = "thin line: training, each step; dots: validation"
        panels[metric].plot([], [], " ", label=explanation)  # draws nothing but a legend entry
    if "accuracy" in panels:
        draw_accuracies(panels["accuracy"], runs, model_type)
    if model_type:
        draw_published_loss(panels[metric], runs, model_type)
    save(figure, out, step_tokens=tokens_per_step(runs))


def make_panels(panel_names: list[list[str]]) -> tuple[Figure, dict[str, Axes]]:
    """Return an empty figure with a row of panels for each list of `panel_names`, which has one,
    two or three keys of LABELS, and the panels by name."""
    # subplot_mosaic makes one wide panel of equal names side by side. 6 cells in each row are
    # enough for 1, 2 or 3 equally wide panels.
    grid = [np.repeat(names, 6 // len(names)).tolist() for names in panel_names]
    figure = Figure(figsize=(WIDTH, 2.6 * len(panel_names)), layout="constrained")
    panels = figure.subplot_mosaic(grid)
    for name, axes in panels.items():
        axes.set_ylabel(LABELS[name])
    return figure, panels


def draw_main(axes: Axes, run: LoggedRun, metric: str, color: str) -> None:
    """Draw the loss or reward of training as a thin line, and that of validation as a thick one,
    with its best value in the legend."""
    split = "val"
    best = min  # replaced by `max` for a reward
    best_label = "lowest validation loss"
    if metric == "reward":
        split = "held_out"
        best = max
        best_label = "highest held-out reward"
    # empty for bits per byte, which training does not log
    training = curve(run, "train", metric)
    validation = curve(run, split, metric)
    if metric != "reward":  # a reward begins near its later values
        training = without_start(*training)
        validation = without_start(*validation)
    [line] = axes.plot(*training, lw=0.8, alpha=0.6, color=color)
    label = run.label
    # skips steps without the metric, and the null of a run that diverged: None becomes NaN
    finite = [
        metrics
        for metrics in run.log.get(split, [])
        if np.isfinite(np.float64(metrics.get(metric)))
    ]
    if finite:
        # this line takes the label: with one on both, the legend would name the run twice
        [line] = axes.plot(*validation, lw=1.8, marker="o", ms=3, color=color)
        best_metrics = best(finite, key=lambda metrics: metrics[metric])
        label += f": {best_label} {best_metrics[metric]:.3f}, at step {best_metrics['step']:,}"
    line.set_label(label)


def without_start(x: np.ndarray, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a curve of losses over training tokens `x` without its first losses, if they are far
    above the last one, as those of an untrained model are: they would press all others into a strip
    at the bottom."""
    # in the first 5 % of the tokens; [-1:] instead of [-1], as a curve may be empty
    is_start = (x < 0.05 * x[-1:]) & (losses > 1.5 * losses[-1:])
    return x[~is_start], losses[~is_start]


def upper_limit(axes: Axes) -> float | None:
    """Return the end of the y axis, above all curves but for single values far above the others of
    their curve, which would press the rest into a strip at the bottom; None without values."""
    limits = []
    for line in axes.lines:
        values = np.asarray(line.get_ydata())
        values = values[np.isfinite(values)]
        if values.size:
            limit = 1.05 * values.max()
            usual = np.percentile(values, 98)  # single values are at most 2 % of a curve
            if usual > 0:  # else the curve is 0 but for single values, which then count
                limit = min(limit, 3 * usual)
            limits.append(limit)
    return max(limits, default=0) or None


def draw_accuracies(axes: Axes, runs: list[LoggedRun], model_type: str | None) -> None:
    """Draw the accuracies of benchmarks, each in a color of its own, with those of OpenAI's GPT-2.
    Runs differ by their markers."""
    for i, benchmark in enumerate(BENCHMARKS.values(), start=1):
        color = f"C{i}"  # C0 is the loss of the first run
        runs_with_scores = [run for run in runs if benchmark.name in run.log]
        if not runs_with_scores:
            continue
        for run, marker in zip(runs_with_scores, itertools.cycle(MARKERS), strict=False):
            x, accuracies = curve(run, benchmark.name, benchmark.metric)
            label = f"{benchmark.name}, {run.label}: {accuracies[-1]:.3f}"
            axes.plot(x, accuracies, marker=marker, ms=3, color=color, label=label)
        if benchmark.metric == "centered":
            axes.set_ylabel("accuracy (CORE: centered)")
        # train.py logs the first protocol
        key = (benchmark.name, benchmark.protocols[0], benchmark.metric)
        draw_published(axes, key, model_type, color)


def draw_published_loss(axes: Axes, runs: list[LoggedRun], model_type: str) -> None:
    """Draw the loss of OpenAI's GPT-2 if it is comparable: it depends on tokens and text."""
    # (tokenizer, corpus) of each run; one of several corpora has all of their names as "corpus"
    trained_on = set()
    for run in runs:
        trained_on.add((run.logged_config.get("tokenizer"), run.logged_config.get("corpus")))
    if trained_on == {("gpt2", "FineWeb-Edu")}:
        draw_published(axes, ("val", "FineWeb-Edu", "loss"), model_type, "black")
        if model_type == "gpt2":
            tokens = [step * TOKENS_OF_PUBLIC_STEP for step in PUBLIC_RUN]
            losses = list(PUBLIC_RUN.values())
            label = f"a public run of 124M, 10B tokens: {losses[-1]:.3f}"
            axes.plot(tokens, losses, color="black", ls=":", lw=1, label=label)
    else:
        print("OpenAI's validation loss is not drawn: it is per GPT-2 token of FineWeb-Edu")


def draw_published(
    axes: Axes, key: tuple[str, str, str], model_type: str | None, color: str
) -> None:
    """Draw what is published for a type of OpenAI's GPT-2, if there is something, as a dashed line;
    `key`, a key of PUBLISHED, is task, protocol and metric."""
    published = PUBLISHED.get(key)
    if published and model_type in published.by_model_type:
        value = published.by_model_type[model_type]
        label = f"{key[0]}, OpenAI {model_type}: {value:g}"
        axes.axhline(value, color=color, ls="--", lw=1, label=label)


def draw_steps(axes: Axes, step_tokens: float) -> None:
    """Move the tokens of the x axis above the panel, and draw steps below it, of `step_tokens`
    tokens each."""
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    # from tokens to steps, and back
    functions = (lambda x: np.divide(x, step_tokens), lambda x: np.multiply(x, step_tokens))
    steps_axis = axes.secondary_xaxis("bottom", functions=functions)
    axes.grid(False, axis="x")  # its lines would stand at the tokens
    steps_axis.set_xlabel("step")
    steps_axis.xaxis.set_major_formatter(EngFormatter(sep=""))


def save(
    figure: Figure, out: Path, x_label: str = "training tokens", step_tokens: float | None = None
) -> None:
    """Label and style all panels, and write the picture as the type that its suffix names. With
    `step_tokens`, the tokens of a step, steps stand below the panels, and above the first one
    training tokens, the unit of the curves."""
    for axes in figure.axes:
        axes.set_xlabel(x_label)
        axes.set_xlim(0, None)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 2M instead of 2000000
        axes.grid(alpha=0.25)
        legend_bottom = 1.0  # in heights of the panel
        if step_tokens is not None:
            draw_steps(axes, step_tokens)
            if axes is figure.axes[0]:  # the top one
                # above the tokens, which take 0.42 inches; the panel is 2 inches high
                legend_bottom = 1.21
                figure.set_figheight(figure.get_figheight() + 0.42)
            else:
                axes.xaxis.set_visible(False)
        for line in axes.lines:
            if np.size(line.get_xdata()) == 1:  # one point makes no line
                line.set_marker(".")
        _, labels = axes.get_legend_handles_labels()
        if labels:  # Matplotlib warns of a legend without entries
            # above the panel, as curves may run everywhere inside it
            corner = (0, legend_bottom)
            axes.legend(loc="lower left", bbox_to_anchor=corner, frameon=False, fontsize=8)
            # 0.17 inches for a line of the legend, so that the panels keep their size
            figure.set_figheight(figure.get_figheight() + 0.17 * len(labels))
    with writing(out):  # UserError, also for a file type that Matplotlib does not know
        out.parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            # characters of a folder's name that the font lacks are drawn as boxes
            warnings.filterwarnings("ignore", "Glyph")
            figure.savefig(out, dpi=180)  # twice the pixels that GitHub shows
