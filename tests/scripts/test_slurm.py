"""scripts/train.slurm with a SLURM that is played by three small scripts."""

import os
import shutil
import signal
import subprocess
import time

import pytest
from conftest import ROOT

FAKES = {
    # the step: torchrun on the nodes, which takes a second to save when told to end
    "srun": "trap 'sleep 1; echo saved >> \"$LOG\"; exit 143' TERM\n"
    'echo "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE $@" > "$LOG"\n'
    'echo $$ > "$LOG.pid"\nfor i in $(seq 200); do [ -z "$FAIL" ] || exit 7; sleep 0.05; done',
    "scancel": 'echo "scancel $@" >> "$LOG"; kill -TERM $(cat "$LOG.pid")',
    "scontrol": '[ "$1" = requeue ] && echo "requeue $2" >> "$LOG" || echo node0',
}


@pytest.fixture
def job(tmp_path):
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    for name, body in FAKES.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)

    def start(fail=""):
        env = os.environ | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(tmp_path / "log"), "FAIL": fail,
            "SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NNODES": "2",
            "SLURM_CPUS_PER_TASK": "64",
        }  # fmt: skip
        command = ["bash", ROOT / "scripts/train.slurm", "--sharding", "zero2"]
        return subprocess.Popen(command, env=env)

    return start, tmp_path / "log"


def lines(log):
    return log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize("signals", [("SIGUSR1",), ("SIGTERM",), ("SIGUSR1", "SIGTERM")])
def test_a_warning_saves_and_then_queues_the_job_again(job, signals):
    start, log = job
    process = start()
    while not (log.parent / "log.pid").exists() or not lines(log):
        time.sleep(0.02)
    for name in signals:
        process.send_signal(getattr(signal, name))
        time.sleep(0.3)
    assert process.wait(20) == 143
    command, *after = lines(log)
    assert after == ["scancel --signal=TERM 42", "saved", "requeue 42"]
    assert command.endswith("train.py --resume auto --sharding zero2")
    assert command.startswith("1 --cpus-per-task=64 torchrun ")
    assert "--nnodes=2 --nproc_per_node=8" in command and "node0:29500" in command


def test_a_job_that_fails_by_itself_is_not_queued_again(job):
    start, log = job
    assert start(fail="yes").wait(20) == 7
    assert len(lines(log)) == 1
