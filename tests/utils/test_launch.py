"""The processes that a launcher starts: their variables, how they meet, and how they end."""

import subprocess
import sys

import pytest
from conftest import ROOT, environment, free_port, kill, run_ranks, run_until, start, user_error

from utils.launch import Launch, read_launch

ENVIRONMENT = environment() | {"PYTHONPATH": str(ROOT)}
LAUNCH = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "29500",
}
# Ranks 0 and 1 are on one machine, rank 2 is on another one, which may have lost its GPU.
MACHINES = """
import os, sys, torch
from utils import cli, distributed

if os.environ["RANK"] == "2":
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    if sys.argv[1] == "lost":
        distributed.pick_device = lambda *_: torch.device("cpu")
elif sys.argv[1] == "lost":
    distributed.pick_device = lambda *_: torch.device("cuda:0")
    torch.cuda.set_device = lambda device: None

def main():
    process = distributed.start("auto", "float32")
    print(process.replicas, process.processes_per_machine)

cli.call_and_exit(main)
"""


@pytest.mark.parametrize(
    "changes",
    [{"RANK": "4"}, {"LOCAL_RANK": "2"}, {"LOCAL_WORLD_SIZE": "5"}, {"WORLD_SIZE": "four"}]
    + [{name: ""} for name in LAUNCH],
)
def test_the_variables_of_a_launch_are_all_there_and_consistent_or_named(monkeypatch, changes):
    for name, value in LAUNCH.items():
        monkeypatch.setenv(name, value)
    assert read_launch() == Launch(3, 4, 1, 2, "host0:29500")
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    with user_error("the environment has .*=.* no launch of torchrun: .* type: unset [A-Z_ ]+$"):
        read_launch()


def test_a_variable_that_is_left_over_is_named_and_an_address_alone_does_no_harm(monkeypatch):
    for name in LAUNCH:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "host0")
    assert read_launch() == Launch()
    monkeypatch.setenv("LOCAL_RANK", "0")
    with user_error("has LOCAL_RANK=0 MASTER_ADDR=host0, .* unset LOCAL_RANK MASTER_ADDR$"):
        read_launch()


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "machines.py"
    path.write_text(MACHINES)
    return path


def test_a_process_that_is_alone_says_whom_it_waits_for(tmp_path, program):
    port = str(free_port())
    places = {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    log = tmp_path / "log"
    env = ENVIRONMENT | LAUNCH | {"RANK": "0"} | places
    process = start(program, "alone", log=log, env=env)
    run_until(process, lambda: f"waiting for 4 processes at 127.0.0.1:{port}" in log.read_text())
    kill(process)


@pytest.mark.parametrize("case", ["different", "lost"])
def test_machines_agree_on_a_mesh_and_on_the_kind_of_device(program, case):
    code = 2 if case == "lost" else 0
    finished = run_ranks([[program, case]] * 3, code=code, env=ENVIRONMENT)
    for process in finished:
        if case == "lost":
            assert "some processes found no GPU, such as rank 2, and others did" in process.stderr
        else:
            assert process.stdout.endswith("1 1\n")  # one copy, divided among all


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
def test_a_process_ends_when_torchrun_is_killed():
    worker = "from utils.launch import end_with_launcher as end; end(); print(1); input()"
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {worker!r}])"
    env = environment() | {"TORCHELASTIC_RUN_ID": "none", "PYTHONUNBUFFERED": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", launcher], cwd=ROOT, env=env, **pipes)
    assert process.stdout.readline() == b"1\n"
    process.kill()
    assert process.stdout.read() == b""  # the pipe closes when its last writer ends
