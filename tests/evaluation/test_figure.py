import json
import warnings

import pytest
from conftest import script
from matplotlib.figure import Figure

from evaluation import figure
from evaluation.figure import draw, draw_sweep, read_metrics
from utils.errors import UserError


def write_run(folder, losses, **config):
    """A log of 2,048 tokens a step and a validation at every step, and a config.json if given."""
    folder.mkdir(parents=True)
    rows = []
    for step, loss in enumerate(losses, 1):
        train = {"lr": 1e-3 * step, "tokens": 2048 * step, "tokens_per_s": 9e3, "ms": 200.0}
        rows.append({"step": step, "split": "train", "loss": loss, **train})
        rows.append({"step": step, "split": "val", "loss": loss, "bits_per_byte": loss / 4})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def about(tokenizer, corpus="books"):
    return {"tokenizer": tokenizer, "corpus": corpus}


BYTES, EDU = about("bytes"), about("gpt2", "FineWeb-Edu")


@pytest.fixture
def figures(monkeypatch):
    """The figures that were drawn."""
    drawn = []

    def make(**options):
        drawn.append(Figure(**options))
        return drawn[-1]

    monkeypatch.setattr(figure, "Figure", make)
    return drawn


def tick_labels(axis):
    """The labels that a reader sees."""
    low, high = sorted(axis.get_view_interval())
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    texts = [tick.label1.get_text() for tick in ticks if low <= tick.get_loc() <= high]
    return [text for text in texts if text]


def openai_lines(axes):
    return [text for text in axes.get_legend_handles_labels()[1] if "OpenAI" in text]


@pytest.mark.parametrize(
    ("first", "last", "steps", "unit"),
    [
        (5.62, 5.48, 5, "tokens"),
        (5.5, 5.4999, 3, "hours"),
        (6, 6, 2, "step"),
        (11, 3.2, 300, "step"),
        (10, 0.02, 1000, "hours"),
    ],
)
def test_tick_labels_are_distinct_and_many_enough(tmp_path, figures, first, last, steps, unit):
    losses = [first * (last / first) ** (i / (steps - 1)) for i in range(steps)]
    draw([write_run(tmp_path / "run", losses)], tmp_path / "a.png", unit=unit)
    figures[0].draw_without_rendering()
    for axes in figures[0].axes:
        for axis in (axes.xaxis, axes.yaxis):
            labels = tick_labels(axis)
            assert len(labels) == len(set(labels)) >= 2, (axes.get_ylabel(), labels)


def test_runs_of_different_tokenizers_are_drawn_in_bits_per_byte(tmp_path, figures):
    # also where the vocabularies have the same size
    shape = {"model_config": {"vocab_size": 257}}
    a = write_run(tmp_path / "a", [4, 2], **BYTES, **shape)
    b = write_run(tmp_path / "b", [8, 7], **about("tokenizer-00000001"), **shape)
    draw([a, b], tmp_path / "mixed.png", "gpt2")
    draw([a], tmp_path / "bytes.png")
    mixed, same = (found.axes[0] for found in figures)
    assert "bits per byte" in mixed.get_ylabel() and "nats per token" in same.get_ylabel()
    assert [list(line.get_ydata()) for line in mixed.lines] == [[], [1, 0.5], [], [2, 1.75]]
    assert [2, 1.75] not in [list(line.get_ydata()) for line in same.lines]
    assert not openai_lines(mixed)


def test_openai_s_loss_is_drawn_over_runs_on_gpt2_tokens_of_fineweb_edu_alone(
    tmp_path, figures, capsys
):
    other = about("bytes", "FineWeb-Edu")
    runs = {"edu": EDU, "books": about("gpt2"), "bytes": other, "alone": {}}
    folders = [write_run(tmp_path / name, [4, 3.5], **config) for name, config in runs.items()]
    for paths in (*([folder] for folder in folders), folders[:2]):
        draw(paths, tmp_path / "a.png", "gpt2")
    drawn = [bool(openai_lines(found.axes[0])) for found in figures]
    assert drawn == [True, False, False, False, False]
    assert capsys.readouterr().out.count("OpenAI's validation loss is not drawn") == 4


def test_benchmarks_are_drawn_beside_published_figures(tmp_path, figures):
    run = write_run(tmp_path / "run", [4, 2])
    add_rows(run, *({"step": step, "split": "lambada", "acc": step / 10} for step in (1, 2)))
    draw([run], tmp_path / "a.png", "gpt2")
    (panel,) = (axes for axes in figures[0].axes if axes.get_ylabel() == "accuracy")
    assert [list(line.get_ydata()) for line in panel.lines] == [[0.1, 0.2], [0.3256, 0.3256]]
    assert openai_lines(panel)[0].startswith("lambada, OpenAI gpt2: 0.3256")


def add_rows(run, *rows):
    with (run / "metrics.jsonl").open("a") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


def test_steps_0_and_1_stand_at_their_places(tmp_path, figures):
    run = write_run(tmp_path / "run", [4, 3])
    add_rows(run, {"step": 0, "split": "val", "loss": 5.5})
    draw([run], tmp_path / "a.png")
    axes = figures[0].axes[0]
    assert axes.get_xscale() == "linear"
    training, validation = (
        list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in axes.lines
    )
    assert training == [(2048, 4), (4096, 3)]
    assert validation == [(0, 5.5), *training]


def test_all_speeds_are_seen(tmp_path, figures):
    draw([write_run(tmp_path / "run", [4, 2])], tmp_path / "a.png")
    (panel,) = (axes for axes in figures[0].axes if axes.get_ylabel() == "tokens per second")
    low, high = panel.get_ylim()
    assert low == 0 and high > 9e3


def test_a_run_of_grpo_shows_rewards_answers_lengths_and_samples(tmp_path, figures):
    run = write_run(tmp_path / "run", [0.1, -0.1])
    for step, reward in ((1, 0.25), (2, 0.5)):
        train = {"lr": 1, "tokens": step, "tokens_per_s": 9, "reward": reward, "loss": -0.1}
        train |= {"completion_tokens": 10 - step, "ms": 1}
        add_rows(
            run,
            {"step": step, "split": "train", **train},
            {"step": step, "split": "held_out", "reward": reward / 2},
            {"step": step, "split": "answers", "n": 8, "exact": reward / 4},
        )
    (run / "samples.txt").write_text("--- step 1\nold\n--- step 2\nprompt: 'a$b'\n1  '好'\n")
    with warnings.catch_warnings(action="error"):
        draw([run], tmp_path / "a.png", unit="step")
    (run / "samples.txt").unlink()
    draw([run], tmp_path / "a.png")
    panels = {axes.get_ylabel(): axes for axes in figures[0].axes}
    drawn = {name: [list(line.get_ydata()) for line in x.lines] for name, x in panels.items()}
    assert drawn["reward"] == [[0.25, 0.5], [0.125, 0.25]]
    assert drawn["accuracy"] == [[0.0625, 0.125]]
    assert drawn["tokens per completion"] == [[9, 8]]
    assert [text.get_text() for text in panels[""].texts] == ["--- step 2\nprompt: 'a$b'\n1  '好'"]
    assert not any(name.startswith("loss") for name in panels)


def test_columns_are_drawn_and_one_that_no_row_has_is_named(tmp_path, figures):
    run = write_run(tmp_path / "run", [4, 2])
    draw([run], tmp_path / "a.png", columns=("ms", "loss"))
    assert [axes.get_ylabel() for axes in figures[0].axes][-2:] == ["ms", "loss"]
    draw([run], tmp_path / "a.png", columns=("lr",))  # is there already
    message = "^--columns has no foo; the logs have loss, lr, ms, tokens, tokens_per_s$"
    with pytest.raises(UserError, match=message):
        draw([run], tmp_path / "b.png", columns=("ms", "foo"))
    assert not (tmp_path / "b.png").exists()


def test_a_log_without_steps_is_named(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError, match=f"^{tmp_path}/empty.txt has no training step yet$"):
        draw([write_run(tmp_path / "run", [4, 2]), tmp_path / "empty.txt"], tmp_path / "a.png")


def test_drawing_needs_no_pytorch():
    script("-c", "import sys, evaluation.figure; assert 'torch' not in sys.modules")


def test_a_picture_that_cannot_be_drawn_leaves_the_one_before(tmp_path, monkeypatch):
    out, run = tmp_path / "a.png", write_run(tmp_path / "run", [4, 2])
    draw([run], out)
    before = out.read_bytes()

    def fail(self, file, **options):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(UserError, match="disk full"):
        draw([run], out)
    assert out.read_bytes() == before and sorted(tmp_path.iterdir()) == [out, run]


def test_a_sweep_of_one_seed_is_drawn_without_nan(tmp_path, figures):
    log = read_metrics(write_run(tmp_path / "run", [4, 2]))
    draw_sweep({"max_lr=1": [log], "max_lr=2": [log, log]}, "loss", tmp_path / "a.png")
    draw_sweep({"bytes": [log]}, "bits_per_byte", tmp_path / "a.png")
    (nats,), (bits,) = (drawn.axes for drawn in figures)
    assert nats.get_legend_handles_labels()[1] == ["max_lr=1: 2.000", "max_lr=2: 2.000"]
    assert bits.get_legend_handles_labels()[1] == ["bytes: 0.500"]
    assert "bits per byte" in bits.get_ylabel()
