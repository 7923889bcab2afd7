import json
import warnings

import pytest
from conftest import script
from matplotlib.figure import Figure

from evaluation.figure import draw
from utils.errors import UserError


def write_run(folder, losses, rows=(), **config):
    """Write a log of 2,048 tokens a step with a validation at every step, and further rows."""
    folder.mkdir(parents=True)
    lines = []
    for step, loss in enumerate(losses, 1):
        train = {"lr": 1e-3 * step, "tokens": 2048 * step, "tokens_per_s": 9e3, "ms": 200.0}
        lines.append({"step": step, "split": "train", "loss": loss, **train})
        lines.append({"step": step, "split": "val", "loss": loss, "bits_per_byte": loss / 4})
    text = "".join(json.dumps(row) + "\n" for row in [*lines, *rows])
    (folder / "metrics.jsonl").write_text(text)
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def figures(monkeypatch):
    """The figures that were drawn. They are not rendered, which takes a second each."""
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, file, **options: drawn.append(self))
    return drawn


def panel(figure, ylabel):
    (axes,) = (axes for axes in figure.axes if axes.get_ylabel() == ylabel)
    return axes


def heights(axes):
    return [list(line.get_ydata()) for line in axes.lines]


def openai_lines(axes):
    return [text for text in axes.get_legend_handles_labels()[1] if "OpenAI" in text]


@pytest.mark.parametrize(
    ("first", "last", "steps", "unit"),
    [(5.5, 5.4999, 3, "hours"), (6, 6, 2, "step"), (11, 3.2, 99, "step"), (10, 0.02, 99, "tokens")],
)
def test_tick_labels_are_distinct_and_many_enough(tmp_path, figures, first, last, steps, unit):
    losses = [first * (last / first) ** (i / (steps - 1)) for i in range(steps)]
    draw([write_run(tmp_path / "run", losses)], tmp_path / "a.png", unit=unit)
    figures[0].draw_without_rendering()
    for axes in figures[0].axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
            labels = [tick.label1.get_text() for tick in ticks]
            assert len(labels) == len(set(labels)) >= 2, (axes.get_ylabel(), labels)


def test_runs_of_different_tokenizers_are_drawn_in_bits_per_byte(tmp_path, figures):
    a = write_run(tmp_path / "a", [4, 2], tokenizer="bytes")
    b = write_run(tmp_path / "b", [8, 7], tokenizer="tokenizer-00000001")
    draw([a, b], tmp_path / "mixed.png", "gpt2")
    draw([a], tmp_path / "bytes.png")
    mixed = panel(figures[0], "loss (bits per byte)")
    assert heights(mixed) == [[], [1, 0.5], [], [2, 1.75]] and not openai_lines(mixed)
    assert heights(panel(figures[1], "loss (nats per token)")) == [[4, 2], [4, 2]]


@pytest.mark.parametrize(
    ("tokenizer", "corpus", "num_lines"),
    [("gpt2", "FineWeb-Edu", 1), ("gpt2", "books", 0), ("bytes", "FineWeb-Edu", 0)],
)
def test_openai_s_loss_is_drawn_over_runs_on_gpt2_tokens_of_fineweb_edu_alone(
    tmp_path, figures, capsys, tokenizer, corpus, num_lines
):
    run = write_run(tmp_path / "run", [4, 3.5], tokenizer=tokenizer, corpus=corpus)
    draw([run], tmp_path / "a.png", "gpt2")
    assert len(openai_lines(figures[0].axes[0])) == num_lines
    assert ("OpenAI's validation loss is not drawn" in capsys.readouterr().out) == (num_lines == 0)


def test_benchmarks_are_drawn_beside_published_figures(tmp_path, figures):
    rows = [{"step": step, "split": "lambada", "acc": step / 10} for step in (1, 2)]
    draw([write_run(tmp_path / "run", [4, 2], rows)], tmp_path / "a.png", "gpt2")
    axes = panel(figures[0], "accuracy")
    assert heights(axes) == [[0.1, 0.2], [0.3256, 0.3256]]
    assert openai_lines(axes)[0].startswith("lambada, OpenAI gpt2: 0.3256")


def test_all_steps_and_speeds_stand_at_their_places(tmp_path, figures):
    rows = [{"step": 0, "split": "val", "loss": 5.5}]
    draw([write_run(tmp_path / "run", [4, 3], rows)], tmp_path / "a.png")
    axes = panel(figures[0], "loss (nats per token)")
    assert axes.get_xscale() == "linear" and heights(axes) == [[4, 3], [5.5, 4, 3]]
    assert [list(line.get_xdata()) for line in axes.lines] == [[2048, 4096], [0, 2048, 4096]]
    low, high = panel(figures[0], "tokens_per_s").get_ylim()
    assert low == 0 and high > 9e3


def test_a_run_of_grpo_shows_rewards_answers_lengths_and_samples(tmp_path, figures):
    rows = []
    for step, reward in ((1, 0.25), (2, 0.5)):
        train = {"tokens": step, "tokens_per_s": 9, "reward": reward, "loss": -0.1, "ms": 1}
        train["completion_tokens"] = 10 - step
        rows.append({"step": step, "split": "train", **train})
        rows.append({"step": step, "split": "held_out", "reward": reward / 2})
        rows.append({"step": step, "split": "answers", "n": 8, "exact": reward / 4})
    run = write_run(tmp_path / "run", [], rows)
    (run / "samples.txt").write_text("--- step 1\nold\n--- step 2\nprompt: 'a$b'\n1  '好'\n")
    draw([run], tmp_path / "a.png")
    drawn = {axes.get_ylabel(): heights(axes) for axes in figures[0].axes}
    assert drawn["mean reward"] == [[0.25, 0.5], [0.125, 0.25]]
    assert drawn["accuracy"] == [[0.0625, 0.125]] and drawn["completion_tokens"] == [[9, 8]]
    (sample,) = panel(figures[0], "").texts
    assert sample.get_text() == "--- step 2\nprompt: 'a$b'\n1  '好'"


def test_a_log_without_steps_is_named(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError, match=f"^{tmp_path}/empty.txt has no training step yet$"):
        draw([write_run(tmp_path / "run", [4, 2]), tmp_path / "empty.txt"], tmp_path / "a.png")


def test_drawing_needs_no_pytorch():
    script("-c", "import sys, evaluation.figure; assert 'torch' not in sys.modules")


def test_a_picture_that_cannot_be_written_is_a_sentence(tmp_path):
    run = write_run(tmp_path / "好", [4, 2])  # a character that the font lacks
    with warnings.catch_warnings(action="error"):
        draw([run], tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text().endswith("</svg>\n")
    for name in ("a.xyz", "a.svg/b.png"):
        with pytest.raises(UserError, match=f"{name} could not be written"):
            draw([run], tmp_path / name)
