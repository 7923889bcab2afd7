import json
import signal

import pytest
from conftest import SMALL, losses, rows_written, run_until, script, start

from scripts.sweep import to_markdown


def sweep_args(shards, out, steps, grid):
    """The command line of a sweep of small runs with seed 1."""
    flags = ["--data_dir", shards, "--max_steps", steps, *SMALL]
    pairs = zip(flags[::2], flags[1::2], strict=True)
    fixed = [f"{name[2:]} {value}" for name, value in pairs if name != "--seed"]
    return ["scripts/sweep.py", "--out", out, "--fixed", *fixed, "--grid", grid, "--seeds", 1]


def test_a_sweep_that_is_killed_goes_on_and_trains_each_run_once(shards, tmp_path):
    command = [*sweep_args(shards, tmp_path, 200, "recipe modern"), 2]
    runs = [tmp_path / f"recipe=modern seed={seed}" for seed in (1, 2)]
    process = start(*command, fork=False)
    run_until(process, lambda: rows_written(runs[0]) > 5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 128 + signal.SIGTERM
    done = script(*command)
    assert '"resume"' in (runs[0] / "logs" / "metrics.jsonl").read_text()
    assert all(list(losses(run)) == list(range(1, 201)) for run in runs)
    table = (tmp_path / "table.md").read_text()
    assert table in done.stdout and "| 2 | 102,400 |" in table
    assert (tmp_path / "sweep.png").stat().st_size > 10_000
    again = script(*command)
    assert "seed=1:" not in again.stdout and table in again.stdout
    other = script(*sweep_args(shards, tmp_path, 6, "recipe modern"), code=2)
    assert "has runs with other --fixed options" in other.stderr


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("max_lrr 1", "max_lrr=1 seed=1"),
        ("recipe gpt2 modren", "recipe=modren seed=1"),
        ("n_head 2 5", "n_embd 32 does not divide by n_head 5"),
        ("config nowhere/a.toml", "config=nowhere%2Fa.toml seed=1: "),
        ("recipe", "recipe has no values"),
    ],
)
def test_what_train_py_refuses_is_told_before_the_first_run(shards, tmp_path, grid, message):
    done = script(*sweep_args(shards, tmp_path / "out", 6, grid), code=2)
    assert message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_run_that_fails_is_told(shards, tmp_path):
    folder = tmp_path / "max_lr=1e-3 seed=1"
    folder.mkdir()
    (folder / "logs").write_text("no folder")
    done = script(*sweep_args(shards, tmp_path, 6, "max_lr 1e-3 2e-3"), code=2)
    assert "1 of 2 runs failed; the first: max_lr=1e-3 seed=1: error: " in done.stderr
    assert "| max_lr=2e-3 |" in done.stdout


def log_of(loss):
    train = {"step": 9, "tokens": 512, "tokens_per_s": 100.0}
    return {"train": [train], "val": [{"step": 9, "loss": loss}]}


def test_differences_are_of_runs_of_the_same_seed():
    groups = {
        "a": {"1": log_of(2.0), "2": log_of(2.4), "3": log_of(2.8)},
        "b": {"2": log_of(2.5), "3": log_of(2.9)},  # seed 1 failed
        "c": {"4": log_of(3.0)},
    }
    lines = to_markdown(groups, "loss").splitlines()
    assert lines[3] == "| b | 2.7000 | 0.2828 | +0.1000 ± 0.0000 | 2 | 512 | 100 |"
    assert lines[4] == "| c | 3.0000 | - | - | 1 | 512 | 100 |"


def test_the_table_has_means_and_compares_tokenizers_by_bits_per_byte(tmp_path):
    runs = {
        "data_dir=gpt2 seed=1": {"loss": 5.0, "bits_per_byte": 1.9},
        "data_dir=gpt2 seed=2": {"loss": 5.1, "bits_per_byte": 1.94},
        "data_dir=bytes seed=1": {"loss": 2.0, "bits_per_byte": 2.9},
    }
    for name, scores in runs.items():
        (tmp_path / name / "logs").mkdir(parents=True)
        speed = {"tokens": 512, "tokens_per_s": 100.0, "ms": 5120.0}
        rows = [{"split": "train", "step": 9, **speed}, {"split": "val", "step": 9, **scores}]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name / "logs" / "metrics.jsonl").write_text(text)
        (tmp_path / name / "logs" / "config.json").write_text('{"config": {"max_steps": 9}}')
    done = script("scripts/sweep.py", "--out", tmp_path, "--grid", "data_dir gpt2", "--seeds", 1, 2)
    title, _, first, second, _ = done.stdout.splitlines()
    assert "| validation loss (bits per byte) |" in title
    assert first == "| data_dir=gpt2 | 1.9200 | 0.0283 | +0.0000 ± 0.0000 | 2 | 512 | 100 |"
    assert second == "| data_dir=bytes | 2.9000 | - | +1.0000 | 1 | 512 | 100 |"
