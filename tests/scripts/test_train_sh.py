"""train.sh with a python that logs what it is asked to run; the plan of a dry run is a real one."""

import shutil
import signal
import subprocess

import pytest
from conftest import ROOT, script, write_commands

PYTHON = """
case "$*" in
  -c*sys.prefix*) dirname "$0" ;;
  -c*) echo 0 ;;
  "-m pip"*) ;;
  "train.py --dry_run"*"--max_lr fast"*) exit 2 ;;
  "train.py --dry_run"*) cat plan ;;
  *) echo "$*" >>log ;;
esac
"""
TORCHRUN = 'echo "torchrun $TORCH_DISABLE_SHARE_RDZV_TCP_STORE $*" >>log'


@pytest.fixture(scope="module")
def plan():
    """What a dry run prints where the shards are not there yet."""
    return script("train.py", "--dry_run", "--device", "cpu").stdout


@pytest.fixture
def train_sh(tmp_path, plan):
    """Run a copy of train.sh; return its output and the commands that it started."""
    clone = tmp_path / "clone"
    (clone / "scripts").mkdir(parents=True)
    for name in ("train.sh", "scripts/env.sh", "scripts/chat_demo.sh", "requirements.txt"):
        shutil.copy(ROOT / name, clone / name)
    (clone / "plan").write_text(plan)
    env = write_commands(tmp_path, python=PYTHON, torchrun=TORCHRUN, uv=":")
    env["VIRTUAL_ENV"] = str(tmp_path)
    log = clone / "log"

    def run(*flags, code=0, cwd=clone, **variables):
        log.unlink(missing_ok=True)
        command = ["bash", clone / "train.sh", *flags]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, cwd=cwd, env=env | variables, timeout=60, **streams)
        assert done.returncode == code, done.stdout
        return done.stdout, log.read_text().splitlines() if log.exists() else []

    run.clone = clone
    return run


def test_the_default_folder_is_sharded_once_the_settings_are_checked(train_sh):
    out, started = train_sh("--yes")
    assert started == ["data/fineweb-edu.py", "train.py --resume auto"]
    assert "20 GB of shards" in out
    assert "relative paths" not in out and "This was a dry run" not in out
    out, started = train_sh("--dry_run")  # on a machine without a GPU
    assert "This was a dry run" in out and "\nnext: bash train.sh demo" in out and not started
    out, _ = train_sh("--dry_run", "--yes")
    assert out.endswith("\nnext: the same command without --dry_run\n")
    assert train_sh("--max_lr", "fast", code=2)[1] == []


@pytest.mark.parametrize(
    "words, message",
    [
        ("", ' days): type "bash train.sh demo"'),
        ("dmeo", 'error: there is no "dmeo": type bash train.sh demo, bash train.sh chat_demo, or'),
        ("chat_demo two", "error: two is no SEED, a number: bash train.sh chat_demo 2"),
    ],
)
def test_a_misspelt_word_and_days_on_a_cpu_start_nothing(train_sh, words, message):
    out, started = train_sh(*words.split(), code=2)
    assert message in out and not started


@pytest.mark.parametrize("line", ["data_dir: elsewhere\n", ""])  # another GPU's plan has none
def test_other_folders_are_not_sharded(train_sh, plan, line):
    default = "data_dir: data/edu_fineweb10B\n"
    assert default in plan
    (train_sh.clone / "plan").write_text(plan.replace(default, line))
    assert train_sh("--data_dir", "x")[1] == ["train.py --resume auto --data_dir x"]


@pytest.mark.parametrize(
    "flags, restarts, hangup",
    [
        (["--seed", "3"], 1, signal.SIG_DFL),
        (["--resume", "auto"], 1, signal.SIG_DFL),
        (["--overwrite"], 0, signal.SIG_IGN),
    ],
)
def test_several_processes_restart_unless_that_would_begin_anew(train_sh, flags, restarts, hangup):
    before = signal.signal(signal.SIGHUP, hangup)  # train.sh inherits it, as under nohup
    *_, started = train_sh("--yes", *flags, NPROC="2")[1]
    signal.signal(signal.SIGHUP, before)
    assert ("SIGHUP" in started) == (hangup == signal.SIG_DFL)
    assert started.startswith(f"torchrun 1 --standalone --max_restarts={restarts} ")
    assert "--shutdown_timeout=110 --nproc_per_node=2 train.py " in started
    assert "NPROC=two" in train_sh(*flags, code=2, NPROC="two")[0]


@pytest.mark.parametrize("flags", [["--seed", "3"], ["--overwrite"], ["--resume=auto"]])
def test_the_demo_goes_on_unless_it_is_told_to_begin_anew(train_sh, tmp_path, flags):
    out, started = train_sh("demo", *flags, cwd=tmp_path)
    scripts = [line.split()[0] for line in started]
    sharding = ["data/train_tokenizer.py", "data/fineweb-edu.py"]
    assert scripts == [*sharding, "train.py", "plot.py", "sample.py"]
    resumed = "--resume auto " if "--seed" in flags else ""
    assert started[2].endswith(f"--sample_every 0 {resumed}{' '.join(flags)}")
    assert f"note: relative paths begin at {train_sh.clone}" in out
    assert f"\ncd {train_sh.clone}\npython sample.py --checkpoint runs/demo" in out


def test_the_demo_plans_helps_and_refuses_other_folders_without_work(train_sh):
    out, started = train_sh("demo", "--dry_run")
    assert "This was a dry run" in out and not started
    assert "fineweb-edu.py" not in out and out.endswith(
        "next: the same command without --dry_run\n"
    )
    out, started = train_sh("demo", "--seed", "3", "-h")
    assert out.startswith("bash train.sh demo ") and not started
    out, started = train_sh("chat_demo", "--help")
    assert "\n  bash train.sh chat_demo [SEED]\n" in out and not started
    helped = subprocess.run(["bash", ROOT / "tests/run.sh", "--help"], capture_output=True)
    assert helped.stdout.startswith(b"The tests: ")
    for flag in ("--run_dir", "--checkpoint_dir", "--log-dir", "--data_dir=x"):
        out, started = train_sh("demo", flag, "x", code=2)
        assert "uses runs/demo and data/stdlib; --overwrite replaces" in out and not started
