import json
import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, documents, environment

from scripts import shakespeare

# dry runs are real; what else train.sh would start is logged
PYTHON = f"""#!/usr/bin/env bash
case "$*" in
  -c*sys.prefix*) dirname "$0" ;;
  -c*) echo 0 ;;
  "train.py --dry_run"*) exec {sys.executable} "$@" ;;
  "-m pip"*) ;;
  *) echo "$*" >>"$LOG" ;;
esac
"""
TORCHRUN = """#!/usr/bin/env bash
echo "torchrun $TORCH_DISABLE_SHARE_RDZV_TCP_STORE $*" >>"$LOG"
"""


def run_train_sh(folder, flags, code=0, cwd=ROOT, **variables):
    """Run train.sh; return its output, standard error included, and the commands it started."""
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    (folder / "python").write_text(PYTHON)
    (folder / "python").chmod(0o755)
    (folder / "torchrun").write_text(TORCHRUN)
    (folder / "torchrun").chmod(0o755)
    env = {**environment(), "LOG": str(folder / "log"), "VIRTUAL_ENV": str(folder), **variables}
    env["PATH"] = f"{folder}{os.pathsep}{env['PATH']}"
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = ["bash", ROOT / "train.sh", *flags]
    done = subprocess.run(command, cwd=cwd, env=env, timeout=120, **streams)
    assert done.returncode == code, done.stdout
    log = folder / "log"
    return done.stdout, log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize(
    ("flags", "started"),
    [
        ([], ["data/fineweb-edu.py", "train.py --resume auto"]),
        (["--data_dir", "elsewhere"], ["train.py --resume auto --data_dir elsewhere"]),
        (["--dry_run"], []),
        (["--device", "h100"], ["train.py --resume auto --device h100"]),  # which is an error
        (["--max_lr", "fast"], []),
    ],
)
def test_train_sh_shards_for_the_default_folder_once_the_settings_are_checked(
    tmp_path, flags, started
):
    folders = ["--checkpoint_dir", str(tmp_path / "c"), "--log_dir", str(tmp_path / "l")]
    out, found = run_train_sh(tmp_path, [*flags, *folders], 2 if "fast" in flags else 0)
    assert [line.removesuffix(" " + " ".join(folders)) for line in found] == started
    assert ("This was a dry run" in out) == ("--dry_run" in flags)
    assert "relative paths" not in out


@pytest.mark.parametrize(("flag", "restarts"), [("--seed", 1), ("--overwrite", 0)])
def test_several_processes_restart_unless_that_would_begin_anew(tmp_path, flag, restarts):
    flags = ["--data_dir", "x", "--checkpoint_dir", str(tmp_path / "c"), flag]
    flags += ["3"] if flag == "--seed" else []
    _, (started,) = run_train_sh(tmp_path, flags, NPROC="2")
    assert started.startswith(f"torchrun 1 --standalone --max_restarts={restarts} ")
    assert "--shutdown_timeout=110 --nproc_per_node=2 train.py " in started


@pytest.mark.parametrize("flags", [["--seed", "3"], ["--overwrite"], ["--resume=auto"]])
def test_the_demo_goes_on_unless_it_is_told_to_begin_anew(tmp_path, flags):
    out, started = run_train_sh(tmp_path, ["demo", *flags], cwd=tmp_path)
    assert [line.split()[0] for line in started] == [
        "data/fineweb-edu.py", "train.py", "plot.py", "sample.py"
    ]  # fmt: skip
    resumed = "--resume auto " if "--seed" in flags else ""
    assert started[1].endswith(f"--sample_every 0 {resumed}{' '.join(flags)}")
    assert f"note: relative paths begin at {ROOT}" in out


def test_the_demo_plans_helps_and_refuses_other_folders_without_work(tmp_path):
    out, started = run_train_sh(tmp_path, ["demo", "--dry_run"])
    assert "1,100 steps" in out and not started
    assert run_train_sh(tmp_path, ["demo", "--seed", "3", "-h"])[1] == ["train.py --help"]
    for flag in ("--checkpoint_dir", "--log-dir", "--data_dir=x"):
        out, started = run_train_sh(tmp_path, ["demo", flag, "x"], 2)
        assert (
            out
            == "error: the demo uses runs/demo and data/stdlib; for other folders run train.py\n"
        )
        assert len(started) == 1


def test_the_shakespeare_race_replaces_neither_a_race_nor_the_shards_of_another_text(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(shakespeare, "RUN", tmp_path / "run")
    small = "--max_steps 2 --n_layer 1 --n_embd 16 --dtype float32".split()

    def race(name, *flags):
        monkeypatch.setattr(sys, "argv", ["shakespeare.py", "0", str(tmp_path / name), *flags])
        shakespeare.main()
        return capfd.readouterr().out.splitlines()[-1]

    for name in ("a", "b"):
        (tmp_path / name).write_text(name + "".join(documents()))
    assert "nats_per_character" in json.loads(race("a", *small))
    with pytest.raises(SystemExit):
        race("b", *small)
    assert "or --overwrite it" in capfd.readouterr().err
    assert len(list((tmp_path / "run").glob("data-????????/train_000000.npy"))) == 2
