"""Draw the curves of one or more runs.

python plot.py --log logs runs/other/logs --sz 124M --out plots/log_plot.png
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws files, needs no screen

import matplotlib.pyplot as plt

from config import ConfigError, PlotConfig, run
from utils.logger import read_metrics

# Validation loss in nats per token of OpenAI's 124M on FineWeb-Edu's first shard, as build-nanogpt
# draws it (play.ipynb); comparable where the validation text is FineWeb-Edu in GPT-2 tokens.
GPT2_VAL_LOSS = {"124M": 3.2924}
STYLES = ("-", "--", "-.", ":")


def label_of(path: Path) -> str:
    """What tells a run from the others: the folder of its log, or the one above a plain logs/."""
    folder = path if path.is_dir() else path.parent
    return folder.resolve().parent.name if folder.name == "logs" else folder.name


def draw_loss(axes: plt.Axes, runs: dict[str, dict]) -> None:
    """Training loss thin, validation loss thick with points, against steps."""
    for (label, splits), style in zip(runs.items(), STYLES * len(runs), strict=False):
        train = splits.get("train", [])
        val = [row for row in splits.get("val", []) if row["step"] > 0]
        (line,) = axes.plot(
            [row["step"] for row in train],
            [row["loss"] for row in train],
            style,
            lw=0.7,
            alpha=0.5,
            label=f"{label}, train",
        )
        axes.plot(
            [row["step"] for row in val],
            [row["loss"] for row in val],
            style,
            marker="o",
            ms=3,
            lw=1.8,
            color=line.get_color(),
            label=f"{label}, validation",
        )
        if val:
            axes.annotate(
                f"{val[-1]['loss']:.3f}",
                (val[-1]["step"], val[-1]["loss"]),
                textcoords="offset points",
                xytext=(0, -14),
                ha="right",
            )
    axes.set(xlabel="step", ylabel="loss (nats per token)", yscale="log")
    axes.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%.1f"))
    axes.yaxis.set_minor_formatter(matplotlib.ticker.FormatStrFormatter("%.1f"))


def main(config: PlotConfig) -> None:
    kinds = plt.gcf().canvas.get_supported_filetypes()
    if config.out.suffix[1:] not in kinds:
        raise ConfigError(f"--out {config.out} must end in one of .{', .'.join(sorted(kinds))}")
    labels = [label_of(path) for path in config.log]
    if len(set(labels)) < len(labels):
        labels = list(map(str, config.log))
    runs = dict(zip(labels, map(read_metrics, config.log), strict=True))
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=(2, 1))
    draw_loss(left, runs)
    if config.sz in GPT2_VAL_LOSS:
        loss = GPT2_VAL_LOSS[config.sz]
        left.axhline(loss, color="black", ls="--", lw=1, label=f"OpenAI GPT-2 {config.sz}: {loss}")
    left.legend(frameon=False)
    for label, splits in runs.items():
        rows = splits.get("train", [])
        right.plot([row["step"] for row in rows], [row["lr"] for row in rows], label=label)
    right.set(xlabel="step", ylabel="learning rate")
    for axes in (left, right):
        axes.grid(alpha=0.25, which="both")
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    config.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(config.out, dpi=130)
    print(f"wrote {config.out}")


if __name__ == "__main__":
    run(main, PlotConfig)
