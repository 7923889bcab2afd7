import signal
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, SMALL, environment, run_until, script

from scripts import sweep
from scripts.sweep import SweepConfig, main, to_markdown
from utils.errors import UserError

# in place of train.py: fails, or waits for a signal at its first start, as max_lr says
STAND_IN = """
import json, signal, sys
from pathlib import Path

options = dict(x[2:].split("=") for x in sys.argv if "=" in x and x.startswith("--"))
logs = Path(sys.argv[-1]).with_name("logs")
logs.mkdir(parents=True, exist_ok=True)
if options["max_lr"] == "fails" and options["seed"] == "2":
    sys.exit("error: no rate")
is_first = not (logs / "config.json").exists()
(logs / "config.json").write_text(json.dumps({"command": sys.argv}))
rows = [{"step": 9, "split": "train"}, {"step": 9, "split": "val", "loss": 2.0}]
(logs / "metrics.jsonl").write_text("".join(json.dumps(row) + chr(10) for row in rows))
if options["max_lr"] == "slow" and is_first:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    (logs / "ready").touch()
    signal.sigwait([signal.SIGTERM])
    (logs / "saved").touch()
    sys.exit(143)
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    path = tmp_path / "stand_in.py"
    path.write_text(STAND_IN)
    monkeypatch.setattr(sweep, "TRAIN", path)
    before = signal.getsignal(signal.SIGTERM)
    yield path
    signal.signal(signal.SIGTERM, before)


def test_a_sweep_that_is_killed_ends_its_run_and_goes_on(stand_in, tmp_path, capfd):
    out = tmp_path / "out"
    code = f"from scripts import sweep; sweep.TRAIN = {str(stand_in)!r}; "
    code += "sweep.start_script(sweep.main, sweep.SweepConfig)"
    args = ["--out", out, "--grid", "max_lr slow", "--seeds", "1"]
    process = subprocess.Popen([sys.executable, "-c", code, *args], cwd=ROOT, env=environment())
    logs = out / "max_lr=slow seed=1" / "logs"
    run_until(process, (logs / "ready").exists)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) != 0 and (logs / "saved").exists()
    assert not (out / "table.md").exists()
    main(SweepConfig(("max_lr slow",), seeds=(1,), out=out))
    table = (out / "table.md").read_text()
    assert "| max_lr=slow | 2.0000 | nan | +0.0000 | 1 |" in table
    assert table in capfd.readouterr().out


def test_a_run_with_other_options_is_not_compared(stand_in, tmp_path):
    main(SweepConfig(("max_lr a/b",), seeds=(1,), out=tmp_path))
    with pytest.raises(UserError, match="max_lr=a/b seed=1 has a run with other options"):
        main(SweepConfig(("max_lr a/b",), fixed=("max_steps 3",), seeds=(1,), out=tmp_path))


def test_an_option_without_values_is_named(tmp_path):
    with pytest.raises(UserError, match="max_lr has no values"):
        main(SweepConfig(("recipe gpt2", "max_lr"), out=tmp_path))


def test_a_run_that_fails_is_named_and_the_others_are_compared(stand_in, tmp_path, capfd):
    with pytest.raises(UserError, match="these runs failed: max_lr=fails seed=2$"):
        main(SweepConfig(("max_lr fails",), seeds=(1, 2, 3), out=tmp_path))
    printed = capfd.readouterr()
    assert "| max_lr=fails | 2.0000 | 0.0000 | +0.0000 | 2 |" in printed.out
    assert "error: no rate" in printed.err


def test_a_sweep_trains_with_train_py(shards, tmp_path):
    flags = ["--data_dir", shards, "--max_steps", 2, *SMALL[2:-2]]  # without n_layer and seed
    fixed = [f"{name[2:]} {x}" for name, x in zip(flags[::2], flags[1::2], strict=True)]
    args = ["scripts/sweep.py", "--out", tmp_path / "out", "--seeds", 1, "--fixed", *fixed]
    first, again = [script(*args, "--grid", "n_layer 1").stdout for _ in range(2)]
    assert "| n_layer=1 |" in first and "step 1/2" not in again
    assert first.splitlines()[-1] == again.splitlines()[-1]


def test_differences_are_of_runs_of_the_same_seed():
    losses = [[2.0, 2.4, 2.8, np.nan], [np.nan, 2.5, 2.9, np.nan], [np.nan, np.nan, np.nan, 3.0]]
    lines = to_markdown(["a", "b", "c"], np.array(losses), "bits_per_byte").splitlines()
    assert "| validation bits_per_byte |" in lines[0]
    assert lines[2:] == [
        "| a | 2.4000 | 0.4000 | +0.0000 | 3 |",
        "| b | 2.7000 | 0.2828 | +0.1000 | 2 |",
        "| c | 3.0000 | nan | +nan | 1 |",
    ]
