import json
import warnings

import pytest
from conftest import script
from matplotlib.figure import Figure

from evaluation.figure import draw
from utils.errors import UserError


def write_run(folder, losses, rows=(), **config):
    """Write a log of 2,048 tokens a step with a validation at every step, and further rows."""
    folder.mkdir()
    lines = []
    for step, loss in enumerate(losses, 1):
        train = {"lr": 1e-3 * step, "tokens": 2048 * step, "tokens_per_s": 9e3, "ms": 200.0}
        lines.append({"step": step, "split": "train", "loss": loss, **train})
        lines.append({"step": step, "split": "val", "loss": loss, "bits_per_byte": loss / 4})
    lines = [json.dumps(row) + "\n" for row in [*lines, *rows]]
    (folder / "metrics.jsonl").write_text("".join(lines))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def draw_panels(tmp_path, monkeypatch):
    """Draw runs; return the panels by their labels. They are not rendered, which takes a second."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, out, **options: figures.append(self))

    def draw_panels(*runs, **options):
        draw(list(runs), tmp_path / "a.png", **options)
        figures[-1].draw_without_rendering()
        return {axes.get_ylabel(): axes for axes in figures[-1].axes}

    return draw_panels


def heights(axes):
    return [list(line.get_ydata()) for line in axes.lines]


def openai_labels(axes):
    return [text for text in axes.get_legend_handles_labels()[1] if "OpenAI" in text]


@pytest.mark.parametrize(
    ("first", "last", "steps"), [(5.5, 5.4999, 3), (6, 6, 2), (11, 3.2, 99), (10, 0.02, 99)]
)
def test_tick_labels_are_distinct_and_many_enough(tmp_path, draw_panels, first, last, steps):
    losses = [first * (last / first) ** (i / (steps - 1)) for i in range(steps)]
    for name, axes in draw_panels(write_run(tmp_path / "run", losses)).items():
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
            labels = [tick.label1.get_text() for tick in ticks]
            assert len(labels) == len(set(labels)) >= 2, (name, labels)


def test_runs_of_different_tokenizers_are_drawn_in_bits_per_byte(tmp_path, draw_panels):
    a = write_run(tmp_path / "a", [4, 2], tokenizer="bytes")
    b = write_run(tmp_path / "b", [8, 7], tokenizer="tokenizer-00000001")
    assert heights(draw_panels(a, b)["loss (bits per byte)"]) == [[], [1, 0.5], [], [2, 1.75]]


@pytest.mark.parametrize(
    ("tokenizer", "corpus", "labels"),
    [("gpt2", "FineWeb-Edu", 1), ("gpt2", "books", 0), ("bytes", "FineWeb-Edu", 0)],
)
def test_openai_s_loss_is_drawn_over_runs_on_gpt2_tokens_of_fineweb_edu_alone(
    tmp_path, draw_panels, capsys, tokenizer, corpus, labels
):
    run = write_run(tmp_path / "run", [4, 3.5], tokenizer=tokenizer, corpus=corpus)
    panels = draw_panels(run, size="gpt2")
    assert len(openai_labels(panels["loss (nats per token)"])) == labels
    assert ("OpenAI's validation loss is not drawn" in capsys.readouterr().out) == (labels == 0)


def test_benchmarks_are_drawn_beside_published_figures(tmp_path, draw_panels):
    rows = [{"step": step, "split": "lambada", "acc": step / 10} for step in (1, 2)]
    axes = draw_panels(write_run(tmp_path / "run", [4, 2], rows), size="gpt2")["accuracy"]
    assert heights(axes) == [[0.1, 0.2], [0.3256, 0.3256]]
    assert openai_labels(axes)[0].startswith("lambada, OpenAI gpt2: 0.3256")


def test_all_steps_and_speeds_stand_at_their_places(tmp_path, draw_panels):
    rows = [{"step": 0, "split": "val", "loss": 5.5}]
    panels = draw_panels(write_run(tmp_path / "run", [4, 3], rows))
    axes = panels["loss (nats per token)"]
    assert heights(axes) == [[4, 3], [5.5, 4, 3]]
    assert [list(line.get_xdata()) for line in axes.lines] == [[2048, 4096], [0, 2048, 4096]]
    assert axes.get_xscale() == "linear" and panels["tokens_per_s"].get_ylim()[0] == 0


def test_a_run_of_grpo_shows_rewards_lengths_and_samples(tmp_path, draw_panels):
    rows = []
    for step in (1, 2):
        train = {"tokens": step, "tokens_per_s": 9, "reward": step, "loss": -0.1, "ms": 1}
        rows.append({"step": step, "split": "train", "completion_tokens": 10 - step, **train})
        rows.append({"step": step, "split": "held_out", "reward": step / 2})
    run = write_run(tmp_path / "run", [], rows)
    (run / "samples.txt").write_text("--- step 1\nold\n--- step 2\nprompt: 'a$b'\n1  'c'\n")
    panels = draw_panels(run)
    assert heights(panels["mean reward"]) == [[1, 2], [0.5, 1]]
    assert heights(panels["completion_tokens"]) == [[9, 8]]
    assert panels[""].texts[0].get_text() == "--- step 2\nprompt: 'a$b'\n1  'c'"


def test_a_log_without_steps_is_named(tmp_path):
    with pytest.raises(UserError, match="run has no training step yet$"):
        draw([write_run(tmp_path / "run", [])], tmp_path / "a.png")


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
