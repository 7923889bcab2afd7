import resource
import sys
import time
from functools import partial
from unittest.mock import MagicMock, call

import pytest
from conftest import bad, train_options, user_error

from training.weights_and_biases import open_wandb
from utils.logger import Logger, read_logged_config, read_metrics
from utils.network import ask

ROW = {"loss": 1.0, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_s": 1.0, "ms": 1.0, "mfu": None}
OPEN_WANDB = partial(open_wandb, train_options(), "run")


def write(folder, start, steps, loss, **options):
    with Logger(folder, steps_done=start, last_step=9, is_main=True, **options) as logger:
        for step in steps:
            logger.log_train({**ROW, "loss": loss}, step)


def test_rows_of_steps_run_again_replace_the_old_ones(tmp_path):
    write(tmp_path, 0, range(1, 8), 1.0)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 8, "spl')  # left by a kill
    write(tmp_path, 3, range(4, 6), 2.0)  # resumed at 3, stopped at 5: 6 and 7 never were
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "spl')  # is being written
    rows = read_metrics(tmp_path)["train"]
    assert [(r["step"], r["loss"]) for r in rows] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)]


@pytest.mark.parametrize("line", ["nonsense", "[]", '{"split": "train"}'])
def test_a_file_with_other_lines_is_named(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1, "split": "train"}}\n{line}\n')
    with user_error("metrics.jsonl is damaged or not the log of a run"):
        read_metrics(tmp_path)


def test_a_log_is_found_in_the_folder_of_the_run_or_named(tmp_path):
    write(tmp_path / "run" / "logs", 0, [1], 1.0)
    path = tmp_path / "run" / "logs" / "metrics.jsonl"
    assert read_metrics(tmp_path / "run") == read_metrics(path)
    assert read_logged_config(tmp_path) is None
    bad(["plot.py", "--log", tmp_path, "--out", tmp_path / "a.png"], "holds no metrics.jsonl")


@pytest.fixture
def wandb(monkeypatch):
    wandb = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return wandb


def test_wandb_gets_every_number_also_of_steps_that_are_done_again(tmp_path, monkeypatch, wandb):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    for start in (0, 1):
        write(tmp_path, start, range(start + 1, 3), 1.5, open_wandb=OPEN_WANDB)
    run, options = wandb.init.return_value, wandb.init.call_args.kwargs
    # wandb's own `step`, a second argument, only grows: it would lose steps that are done again
    rows = [row for (row,), _ in run.log.call_args_list if "train/loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 2] and "train/mfu" not in rows[0]
    assert (options["project"], options["resume"]) == ("mine", "allow")
    assert options["config"]["max_steps"] == 19_073 and run.finish.call_count == 2
    assert run.define_metric.call_args_list[:2] == [call("step"), call("*", step_metric="step")]


def test_wandb_writes_where_it_is_told_and_its_silence_ends(tmp_path, monkeypatch, capsys, wandb):
    def ask_briefly(url, request, limit):
        return ask(url, request, limit=0.1)

    monkeypatch.setattr("training.weights_and_biases.ask", ask_briefly)
    monkeypatch.setenv("WANDB_DIR", "elsewhere")
    monkeypatch.setenv("WANDB_BASE_URL", "https://own.server/api")
    wandb.init.side_effect = lambda **options: time.sleep(5)
    write(tmp_path, 0, [1, 2], 1.5, open_wandb=OPEN_WANDB)
    assert wandb.init.call_args.kwargs["dir"] == "elsewhere"
    assert "without Weights & Biases (own.server has not answered" in capsys.readouterr().out
    monkeypatch.delenv("WANDB_DIR")
    write(tmp_path, 0, [1, 2], 1.5, open_wandb=OPEN_WANDB)
    assert wandb.init.call_args.kwargs["dir"] == "logs"


@pytest.mark.parametrize(
    "call_that_fails", ["init", "init.return_value.log", "init.return_value.finish"]
)
def test_a_run_outlives_wandb(tmp_path, capsys, wandb, call_that_fails):
    """Without a login, or after its helper process has died."""
    wandb.configure_mock(**{f"{call_that_fails}.side_effect": ConnectionResetError})
    write(tmp_path, 0, [1, 2], 1.5, open_wandb=OPEN_WANDB)
    assert len(read_metrics(tmp_path)["train"]) == 2
    assert capsys.readouterr().out.count("goes on without Weights & Biases") == 1


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_time_left_is_shown_after_some_steps_of_a_start(
    tmp_path, monkeypatch, capsys, is_terminal
):
    monkeypatch.setattr("utils.logger.SECONDS_PER_LINE", 0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with Logger(tmp_path, steps_done=100, last_step=200, is_main=True) as logger:
        for step in range(101, 113):
            logger.log_train(ROW | {"ms": 500.0}, step)
            if step == 111:
                time.sleep(0.3)  # a validation, whose time is not that of a step
            shown = str(logger.bar) if is_terminal else capsys.readouterr().out
            time_left = f"{(200 - step) // 2 // 60:02}:{(200 - step) // 2 % 60:02} left"
            assert (time_left in shown) == ("left" in shown) == (step >= 110)


def test_a_full_disk_ends_the_run_and_keeps_the_rows_before(tmp_path):
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        logger = Logger(tmp_path, steps_done=0, last_step=9, is_main=True)
        with pytest.raises(OSError), logger:
            logger.log_train(ROW, 1)
            resource.setrlimit(resource.RLIMIT_FSIZE, (10, unlimited[1]))
            logger.log_train(ROW, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert [row["step"] for row in read_metrics(tmp_path)["train"]] == [1]


def test_a_console_that_is_gone_ends_nothing(tmp_path, monkeypatch):
    def gone(*_, **__):
        raise BrokenPipeError

    with Logger(tmp_path, steps_done=0, last_step=9, is_main=True) as logger:
        monkeypatch.setattr(logger.bar, "write", gone)
        monkeypatch.setattr("sys.stdout", None)  # which print replaces
        logger.log_train(ROW, 1)
    assert len(read_metrics(tmp_path)["train"]) == 1


def test_overwrite_starts_the_file_anew_and_other_ranks_write_nothing(tmp_path):
    write(tmp_path, 0, range(1, 4), 1.0)
    write(tmp_path, 0, range(1, 2), 2.0, begins_empty=True)
    assert [r["loss"] for r in read_metrics(tmp_path)["train"]] == [2.0]
    with Logger(tmp_path / "none", steps_done=0, last_step=1, is_main=False) as silent:
        silent.log_train(ROW, 1)
        silent.print("nothing")
    assert not (tmp_path / "none").exists()
