import shutil
import sys

import pytest
from conftest import script
from utils.log_files import read_metrics

from utils.errors import UserError
from utils.logger import Logger

ROW = {"loss": 1.0, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_s": 1.0, "ms": 1.0, "mfu": None}


def write(folder, start, steps, loss, **options):
    logger = Logger(folder, start=start, total=9, is_main=True, **options)
    for step in steps:
        logger.log_train({**ROW, "loss": loss}, step)
    logger.close()


def test_rows_of_steps_run_again_replace_the_old_ones(tmp_path):
    write(tmp_path, 0, range(1, 8), 1.0)
    write(tmp_path, 3, range(4, 6), 2.0)  # resumed at 3, stopped at 5: 6 and 7 never were
    rows = read_metrics(tmp_path)["train"]
    assert [(r["step"], r["loss"]) for r in rows] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)]


def test_half_a_row_left_by_a_kill_is_dropped(tmp_path):
    write(tmp_path, 0, range(1, 4), 1.0)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "spl')
    write(tmp_path, 3, range(4, 6), 2.0)
    assert [r["step"] for r in read_metrics(tmp_path)["train"]] == [1, 2, 3, 4, 5]


def test_overwrite_starts_the_file_anew_and_other_ranks_write_nothing(tmp_path):
    write(tmp_path, 0, range(1, 4), 1.0)
    (tmp_path / "log_plot.png").touch()
    write(tmp_path, 0, range(1, 2), 2.0, overwrite=True)
    assert not (tmp_path / "log_plot.png").exists()
    assert [r["loss"] for r in read_metrics(tmp_path)["train"]] == [2.0]
    silent = Logger(tmp_path / "none", start=0, total=1, is_main=False)
    silent.log_train(ROW, 1)
    silent.print("nothing")
    silent.close()
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "line",
    [
        *("nonsense", "[]", "[" * 100_000, '{"step": "1", "split": "train"}'),
        *('{"step": Infinity, "split": "train"}', '{"step": 1, "split": "train", "loss": "1"}'),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1, "split": "train"}}\n{line}\n')
    with pytest.raises(UserError, match="line 2"):
        read_metrics(tmp_path)


def test_a_row_that_is_being_written_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "split": "train"}\n{"step": 2, "spl')
    assert read_metrics(tmp_path) == {"train": [{"step": 1, "split": "train"}]}


def test_a_log_without_a_step_cannot_be_drawn(tmp_path):
    for text in ("", '{"step": 0, "split": "val", "loss": 5.5}\n'):
        (tmp_path / "metrics.jsonl").write_text(text)
        done = script("plot.py", "--log", tmp_path, "--out", tmp_path / "a.png", code=2)
        assert "has no training step yet" in done.stderr and not (tmp_path / "a.png").exists()


def test_plot_draws_runs_over_each_other(trained, tmp_path):
    out = tmp_path / "plots" / "a.png"
    script("plot.py", "--log", trained / "logs", trained / "logs" / "metrics.jsonl", "--out", out)
    assert out.read_bytes().startswith(b"\x89PNG") and out.stat().st_size > 10_000
    no_log = ["plot.py", "--log"]
    assert "there is no" in script(*no_log, tmp_path / "none", code=2).stderr
    bad = ["plot.py", "--log", trained / "logs", "--out"]
    assert "not supported" in script(*bad, tmp_path / "a.xyz", code=2).stderr
    assert "could not be written" in script(*bad, out / "a.png", code=2).stderr
    assert "a.png is not a metrics.jsonl; give the" in script(*no_log, out, code=2).stderr
    (tmp_path / "sweep" / "a" / "logs").mkdir(parents=True)
    shutil.copy(trained / "logs" / "metrics.jsonl", tmp_path / "sweep" / "a" / "logs")
    sweep = script(*no_log, tmp_path / "sweep", code=2)
    assert f"or its folder: {tmp_path}/sweep/*/logs has 1" in sweep.stderr
    folder = script(*bad, out.parent, code=2)
    assert f"error: {out.parent} is a folder; give a file" in folder.stderr


def test_the_picture_is_redrawn_after_validations_between_start_and_end(tmp_path):
    class Plot:
        drawn, closed = 0, False

        def redraw(self):
            self.drawn += 1

        def close(self):
            self.closed = True

    plot, other = Plot(), Plot()
    for is_main, given in ((True, plot), (False, other)):
        logger = Logger(tmp_path, start=0, total=9, is_main=is_main, plot=given)
        for step in (0, 3, 6, 9):
            logger.log_validation({"loss": 1.0}, step)
        logger.close()
    assert (plot.drawn, plot.closed, other.drawn) == (2, True, 0)


def test_tensorboard_gets_every_number(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, 0, range(1, 4), 1.5, tensorboard=True)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (s, 1.5) for s in (1, 2, 3)
    ]
    assert "train/mfu" not in events.Tags()["scalars"]


def test_an_absent_package_is_a_sentence_with_the_line_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UserError, match="pip install wandb"):
        write(tmp_path, 0, [], 1.0, wandb={})
    with pytest.raises(UserError, match="pip install tensorboard"):
        write(tmp_path, 0, [], 1.0, tensorboard=True)


def test_a_log_that_cannot_be_written_says_how_to_begin_or_to_go_on(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match="make it writable, or give another --log_dir$"):
        write(tmp_path, 0, [], 1.0)
    (tmp_path / "metrics.jsonl").rmdir()
    logger = Logger(tmp_path, start=0, total=9, is_main=True)
    logger.file.close()
    logger.file = open("/dev/full", "w", buffering=1)
    with pytest.raises(UserError, match="No space left .* and continue with --resume auto"):
        logger.log_train(ROW, 1)
