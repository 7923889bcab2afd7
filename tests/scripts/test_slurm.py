"""scripts/train.slurm with a SLURM that is played by three small scripts.

Who gets which signal, and what SLURM does afterwards, is as seen on Slurm 22.05 with two nodes.
"""

import os
import signal
import subprocess
import time

import pytest
from conftest import ROOT, write_commands

FAKES = {
    # the step: torchrun on the nodes, which takes a second to save when told to end
    "srun": "trap 'sleep 1; echo saved >> \"$LOG\"; exit $CODE' TERM\n"
    'echo "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE $@" > "$LOG"\n'
    'echo $$ > "$LOG.pid"\nfor i in $(seq $STEPS); do sleep 0.05; done\nexit $CODE',
    "scancel": 'echo "scancel $@" >> "$LOG"; kill -TERM $(cat "$LOG.pid")',
    "scontrol": 'case "$1 $2" in "show hostnames") echo node0 ;;\n'
    '"show job") echo "PreemptEligibleTime=2026-11-26T04:27:01 PreemptTime=$PREEMPT_TIME" ;;\n'
    '*) echo "$@" >> "$LOG" ;; esac',
}


@pytest.mark.parametrize(
    "signals, preempt_time, code, events",
    [
        # before the time limit; by a person, too
        ("USR1 shell", "None", 1, "scancel --signal=TERM 42, saved, requeue 42"),
        ("USR1 shell, USR1 shell", "None", 1, "scancel --signal=TERM 42, saved, requeue 42"),
        # scancel; also scontrol requeue and pre-emption, after which SLURM itself queues the job
        ("TERM step, TERM shell", "None", 1, "saved"),
        ("TERM step", "None", 1, "saved"),  # scancel --signal=TERM
        ("TERM step", "2026-11-26T04:27:03", 1, "saved, requeue 42"),  # a grace time begins
        ("TERM step, TERM shell", "2026-11-26T04:27:03", 0, "saved"),  # after the last step
        ("", "None", 0, ""),
        ("", "None", 7, ""),
    ],
)
def test_a_signal_saves_and_the_job_is_queued_again_where_slurm_does_not_do_it(
    tmp_path, signals, preempt_time, code, events
):
    log, pid = tmp_path / "log", tmp_path / "log.pid"
    env = write_commands(tmp_path, **FAKES) | {
        "LOG": str(log), "CODE": str(code),
        "PREEMPT_TIME": preempt_time, "STEPS": "200" if signals else "0", "SLURM_JOB_ID": "42",
        "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NNODES": "2", "SLURM_CPUS_PER_TASK": "64",
    }  # fmt: skip
    process = subprocess.Popen(
        ["bash", ROOT / "scripts/train.slurm", "--sharding", "zero2"], env=env
    )
    while not pid.exists() or not pid.read_text():
        time.sleep(0.02)
    for event in signals.split(", ") if signals else []:
        name, receiver = event.split()
        target = process.pid if receiver == "shell" else int(pid.read_text())
        os.kill(target, signal.Signals[f"SIG{name}"])
        time.sleep(0.3)
    assert process.wait(20) == code  # that of srun, also where a signal has interrupted `wait`
    command, *lines = log.read_text().splitlines()
    assert ", ".join(lines) == events
    assert command.endswith("train.py --resume auto --sharding zero2")
    assert command.startswith("1 --cpus-per-task=64 torchrun ")
    assert "--nnodes=2 --nproc_per_node=8" in command and "node0:29500" in command
