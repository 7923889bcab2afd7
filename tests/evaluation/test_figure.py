import json
import math
import warnings

import numpy as np
import pytest
from conftest import script, user_error, write_rows
from matplotlib.figure import Figure

from evaluation.figure import draw, shorten


def train_row(step, **fields):
    """Return a row of training of a log, with other values in some fields."""
    row = {"step": step, "split": "train", "loss": 3, "lr": 1, "tokens": step, "tokens_per_s": 1}
    return row | fields


def write_run(folder, losses, rows=(), **config):
    """Write a log of 2,048 tokens a step with a validation at every step, and further rows."""
    folder.mkdir()
    lines = []
    for step, loss in enumerate(losses, 1):
        lines.append(train_row(step, loss=loss, tokens=2048 * step, ms=200.0))
        lines.append({"step": step, "split": "val", "loss": loss, "bits_per_byte": loss / 4})
    write_rows(folder / "metrics.jsonl", [*lines, *rows])
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def draw_panels(tmp_path, monkeypatch):
    """Draw runs; return the panels by their labels. They are not rendered, which takes a second."""
    pictures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, out, **options: pictures.append(self))

    def draw_panels(*runs, **options):
        draw(list(runs), tmp_path / "a.png", **options)
        pictures[-1].draw_without_rendering()
        return {axes.get_ylabel(): axes for axes in pictures[-1].axes}

    return draw_panels


def heights(axes):
    return [list(line.get_ydata()) for line in axes.lines if line.get_linestyle() != "None"]


def openai_labels(axes):
    return [text for text in axes.get_legend_handles_labels()[1] if "OpenAI" in text]


@pytest.mark.parametrize(
    "first, last, steps",
    [(6, 6, 1), (5.5, 5.4999, 3), (11, 3.2, 99)],
)
def test_tick_labels_are_distinct_and_many_enough(tmp_path, draw_panels, first, last, steps):
    losses = [first * (last / first) ** (i / steps) for i in range(steps)]
    for name, axes in draw_panels(write_run(tmp_path / "run", losses)).items():
        [steps_axis] = axes.child_axes
        for axis in (steps_axis.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
            labels = [tick.label1.get_text() for tick in ticks]
            assert len(labels) == len(set(labels)) >= 2, (name, labels)


def test_runs_of_different_tokenizers_are_drawn_in_bits_per_byte(tmp_path, draw_panels):
    a = write_run(tmp_path / "a", [4, 2], tokenizer="bytes")
    b = write_run(tmp_path / "b", [8, 7], tokenizer="tokenizer-00000001")
    assert heights(draw_panels(a, b)["loss (bits per byte)"]) == [[], [1, 0.5], [], [2, 1.75]]


@pytest.mark.parametrize(
    "tokenizer, corpus, labels",
    [("gpt2", "FineWeb-Edu", 1), ("gpt2", "books", 0), ("bytes", "FineWeb-Edu", 0)],
)
def test_openai_s_loss_is_drawn_over_runs_on_gpt2_tokens_of_fineweb_edu_alone(
    tmp_path, draw_panels, capsys, tokenizer, corpus, labels
):
    run = write_run(tmp_path / "run", [4, 3.5], tokenizer=tokenizer, corpus=corpus)
    panels = draw_panels(run, model_type="gpt2")
    assert len(openai_labels(panels["loss (nats per token)"])) == labels
    assert ("OpenAI's validation loss is not drawn" in capsys.readouterr().out) == (labels == 0)


def test_benchmarks_have_a_color_each_and_a_dashed_line_each(tmp_path, draw_panels):
    rows = []
    for step in (1, 2):
        rows.append({"step": step, "split": "lambada", "acc": step / 10})
        rows.append({"step": step, "split": "hellaswag", "acc_norm": step / 8})
    axes = draw_panels(write_run(tmp_path / "run", [4, 2], rows), model_type="gpt2")["accuracy"]
    assert heights(axes) == [[0.125, 0.25], [0.2955, 0.2955], [0.1, 0.2], [0.3256, 0.3256]]
    colors = [line.get_color() for line in axes.lines]
    assert colors[0] == colors[1] != colors[2] == colors[3]
    assert openai_labels(axes)[1] == "lambada, OpenAI gpt2: 0.3256"


@pytest.mark.parametrize("untrained, first, kept", [(10.8, 8, []), (4.4, 4, [4.4, 4])])
def test_losses_of_untrained_models_far_above_are_left_out(
    tmp_path, draw_panels, untrained, first, kept
):
    rows = [{"step": 0, "split": "val", "loss": untrained}]
    panels = draw_panels(write_run(tmp_path / "run", [first] + [3] * 39, rows))
    training, validation = heights(panels["loss (nats per token)"])
    assert training == kept[1:] + [3] * 39 and validation == kept + [3] * 39
    for axes in panels.values():
        assert axes.get_xlim()[0] == 0 and axes.lines[0].get_xdata()[-1] == 2048 * 40
    assert panels["tokens per second"].get_ylim()[0] == 0


def test_the_legend_stands_above_the_curves_with_the_lowest_loss(tmp_path, draw_panels):
    (tmp_path / ("long" * 30)).mkdir()
    diverged = {"step": 0, "split": "val", "loss": math.nan}  # is not the lowest
    a = write_run(tmp_path / ("long" * 30) / "a", [4, 3, 3.5], [diverged])
    b = write_run(tmp_path / "b", [], [train_row(1, loss=2)])  # has no validation
    axes = draw_panels(a, b)["loss (nats per token)"]
    np.testing.assert_equal(heights(axes), [[4, 3, 3.5], [math.nan, 4, 3, 3.5], [2]])
    assert axes.lines[2].get_marker() == "."  # one point makes no line
    legend = axes.get_legend()
    first, second, lines = [text.get_text() for text in legend.get_texts()]
    assert lines == "thin line: training, each step; dots: validation"
    assert first.endswith("longlonglong/a: lowest validation loss 3.000, at step 2")
    assert second.endswith("/b") and len(first) < 90
    assert legend.get_window_extent().y0 >= axes.bbox.y1


def test_a_run_of_grpo_shows_rewards_and_lengths(tmp_path, draw_panels):
    rows = [{"step": 0, "split": "held_out", "reward": 9}]
    for step in (1, 2):
        rows.append(train_row(step, reward=step, cut=0.5, completion_tokens=10 - step))
        rows.append({"step": step, "split": "held_out", "reward": step / 2})
    run = write_run(tmp_path / "run", [], rows)
    panels = draw_panels(run)
    assert len(panels) == 3  # none for kl, which is not logged
    reward = panels["mean reward"]
    assert heights(reward) == [[1, 2], [9, 0.5, 1]]
    assert heights(panels["completion length (tokens)"]) == [[9, 8]]


def test_steps_stand_below_and_tokens_above_unless_steps_differ(tmp_path, draw_panels):
    a, b = (write_run(tmp_path / name, [4, 3]) for name in "ab")
    axes = draw_panels(a, b)["loss (nats per token)"]
    [steps_axis] = axes.child_axes
    assert (axes.get_xlabel(), steps_axis.get_xlabel()) == ("training tokens", "step")
    assert np.divide(axes.get_xlim(), 2048) == pytest.approx(steps_axis.get_xlim())
    c = write_run(tmp_path / "c", [], [train_row(2, tokens=8192)])
    axes = draw_panels(a, c)["loss (nats per token)"]
    assert axes.get_xlabel() == "training tokens" and not axes.child_axes


def test_lower_panels_end_above_the_fastest_run_and_below_a_spike(tmp_path, draw_panels):
    def speeds(name, *values):
        rows = [train_row(step, tokens_per_s=value) for step, value in enumerate(values, 1)]
        return write_run(tmp_path / name, [], rows)

    slow, fast = speeds("slow", 1, 1), speeds("fast", 1, 9)
    assert draw_panels(slow, fast)["tokens per second"].get_ylim()[1] > 9
    spike = speeds("spike", *[1] * 99, 500)
    assert draw_panels(spike)["tokens per second"].get_ylim() == (0, 3)
    assert draw_panels(speeds("long", *[1] * 500), fast)["tokens per second"].get_ylim()[1] > 9


def test_what_is_no_run_is_skipped_unless_it_is_all(tmp_path, draw_panels, capsys):
    (tmp_path / "table.md").write_text("| run |\n")
    (tmp_path / "sweep.png").write_bytes(b"\x89PNG\n")
    write_run(tmp_path / "run", [])
    others = sorted(tmp_path.iterdir())
    with user_error("table.md is damaged or not the log of a run"):
        draw(others, tmp_path / "a.png")
    draw_panels(*others, write_run(tmp_path / "b", [4]))
    assert capsys.readouterr().out.count("skipped: ") == 2 + 3


def test_drawing_needs_no_pytorch():
    script("-c", "import sys, evaluation.figure; assert 'torch' not in sys.modules")


def test_a_picture_that_cannot_be_written_is_a_sentence(tmp_path):
    run = write_run(tmp_path / "好", [4, 2])  # a character that the font lacks
    with warnings.catch_warnings(action="error"):
        draw([run], tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text().endswith("</svg>\n")
    for name, message in (
        ("a.svg/b.png", ""),
        ("a.xyz", "supported formats: "),
        ("runs", "supported formats: "),  # no a.png, b.png elsewhere
        ("plots/curve", "supported formats: "),
    ):
        with user_error(f"{name} could not be written: .*{message}"):
            draw([run], tmp_path / name)
    assert not list(tmp_path.rglob("*.png"))


@pytest.mark.parametrize(
    "labels, expected",
    [
        (["runs/a", "runs/b"], ["runs/a", "runs/b"]),
        ([f"/home/user/gpt2/runs/{'long' * 9}/lr={x} seed=1" for x in (1, 2)], None),
        ([f"/{x}/{'long' * 20}/recipe=modern seed=1" for x in "ab"], None),
        ([f"runs/{'max_lr=2e-3 ' * 3}warmup={x} {'beta2=0.95 ' * 3}" for x in (5, 6)], None),
        (["/home/user/" + "long" * 20], ["/home/user/longlongl…longlonglonglonglong"]),
        (["a/" + "long" * 20, "b"], ["a/longlonglonglonglo…longlonglonglonglong", "b"]),
    ],
)
def test_different_runs_have_different_names_in_a_legend(labels, expected):
    short = shorten(labels)
    assert len(set(short)) == len(set(labels)) and max(map(len, short)) < 90
    assert expected in (None, short)
