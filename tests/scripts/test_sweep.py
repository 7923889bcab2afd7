import signal
import subprocess
import sys

import pytest
from conftest import ROOT, SMALL, environment, run_until, script

from evaluation.figure import Run
from scripts import sweep
from scripts.sweep import SweepConfig, main, to_markdown
from utils.errors import UserError

# in place of train.py: refuses, fails, or waits for a signal at its first start, as max_lr says
STAND_IN = """
import json, signal, sys
from pathlib import Path

options = {x[2:]: y for x, y in zip(sys.argv, sys.argv[1:] + [""]) if x.startswith("--")}
rate, logs = options["max_lr"], Path(options["log_dir"])
if "dry_run" in options:
    sys.exit("error: a wrong rate" if rate == "a/wrong" else 0)
logs.mkdir(parents=True, exist_ok=True)
with (logs / "starts").open("a") as file:
    file.write("start ")
if rate == "fails" and options["seed"] == "2":
    sys.exit("error: no rate")
if rate == "slow" and (logs / "starts").read_text() == "start ":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    (logs / "ready").touch()
    signal.sigwait([signal.SIGTERM])
    (logs / "saved").touch()
    sys.exit(143)
rows = [{"step": 9, "split": "train", "loss": 2, "tokens": 512, "tokens_per_s": 100.0, "ms": 1.0}]
rows.append({"step": 9, "split": "val", "loss": 2.0})
(logs / "metrics.jsonl").write_text("".join(json.dumps(row) + chr(10) for row in rows))
(logs / "config.json").write_text('{"config": {"max_steps": 9}}')
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    path = tmp_path / "stand_in.py"
    path.write_text(STAND_IN)
    monkeypatch.setattr(sweep, "TRAIN", path)
    before = signal.getsignal(signal.SIGTERM)
    yield path
    signal.signal(signal.SIGTERM, before)


def test_a_sweep_that_is_killed_goes_on_and_trains_each_run_once(stand_in, tmp_path, capsys):
    out = tmp_path / "out"
    code = f"from scripts import sweep; sweep.TRAIN = {str(stand_in)!r}; "
    code += "sweep.start_script(sweep.main, sweep.SweepConfig)"
    command = [sys.executable, "-c", code, "--out", out, "--grid", "max_lr slow", "--seeds", "1"]
    process = subprocess.Popen([*command, "2"], cwd=ROOT, env=environment())
    logs = [out / f"max_lr=slow seed={seed}" / "logs" for seed in (1, 2)]
    run_until(process, (logs[0] / "ready").exists)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 128 + signal.SIGTERM
    assert (logs[0] / "saved").exists() and not logs[1].exists()

    logs[1].mkdir(parents=True)
    (logs[1] / "starts").write_text("once ")  # so that it does not wait
    config = SweepConfig(("max_lr slow",), seeds=(1, 2), out=out)
    for _ in range(2):
        main(config)
    starts = [(folder / "starts").read_text() for folder in logs]
    assert starts == ["start start ", "once start "]
    table = (out / "table.md").read_text()
    assert table in capsys.readouterr().out and "| max_lr=slow | 2.0000 | 0.0000 |" in table
    assert (out / "sweep.png").stat().st_size > 10_000
    with pytest.raises(UserError, match="has runs with other --fixed options"):
        main(SweepConfig(("max_lr slow",), fixed=("max_steps 3",), seeds=(3,), out=out))


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("max_lr 1 a/wrong", "no run was started, as .* refuses max_lr=a%2Fwrong seed=1: a wrong"),
        ("max_lr", "max_lr has no values"),
    ],
)
def test_what_train_py_refuses_is_told_before_the_first_run(stand_in, tmp_path, grid, message):
    with pytest.raises(UserError, match=message):
        main(SweepConfig((grid,), out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_run_that_fails_is_told_and_the_others_are_compared(stand_in, tmp_path, capsys):
    config = SweepConfig(("max_lr fails",), seeds=(1, 2, 3), out=tmp_path / "out")
    with pytest.raises(UserError, match="1 of 3 runs failed; the first: .* seed=2: no rate"):
        main(config)
    assert "| max_lr=fails | 2.0000 | 0.0000 | +0.0000 ± 0.0000 | 2 |" in capsys.readouterr().out


def test_a_sweep_trains_with_train_py(shards, tmp_path):
    flags = ["--data_dir", shards, "--max_steps", 2, *SMALL[2:-2]]  # without n_layer and seed
    fixed = [f"{name[2:]} {x}" for name, x in zip(flags[::2], flags[1::2], strict=True)]
    args = ["scripts/sweep.py", "--out", tmp_path / "out", "--seeds", 1, "--fixed", *fixed]
    assert "| n_layer=1 |" in script(*args, "--grid", "n_layer 1").stdout


def run_of(loss):
    train = {"step": 9, "tokens": 512, "tokens_per_s": 100.0}
    log = {"train": [train], "val": [{"step": 9, "loss": loss, "bits_per_byte": loss / 2}]}
    return Run("run", ROOT, log, {})


def test_differences_are_of_runs_of_the_same_seed():
    groups = {
        "a": {"1": run_of(2.0), "2": run_of(2.4), "3": run_of(2.8)},
        "b": {"2": run_of(2.5), "3": run_of(2.9)},  # seed 1 failed
        "c": {"4": run_of(3.0)},
    }
    lines = to_markdown(groups, "loss").splitlines()
    assert lines[3] == "| b | 2.7000 | 0.2828 | +0.1000 ± 0.0000 | 2 | 512 | 100 |"
    assert lines[4] == "| c | 3.0000 | - | - | 1 | 512 | 100 |"
    title, _, first, *_ = to_markdown(groups, "bits_per_byte").splitlines()
    assert "| validation loss (bits per byte) |" in title and first.startswith("| a | 1.2000 |")
