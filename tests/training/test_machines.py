"""Two machines, as two network namespaces joined by a cable (a veth pair) that can be cut."""

import os
import shutil
import subprocess
import sys
import time

import pytest
from conftest import ROOT, environment, losses, train_args

NAMES, ADDRESSES, PORT = ("gpt2a", "gpt2b"), ("10.77.0.1", "10.77.0.2"), 29411


def ip(*args):
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)


@pytest.fixture
def machines():
    if os.name != "posix" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2 for network namespaces")
    for name in NAMES:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ip("link", "add", NAMES[0], "type", "veth", "peer", "name", NAMES[1])
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            ip("link", "set", name, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
            for device in (name, "lo"):
                ip("-n", name, "link", "set", device, "up")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    yield
    for name in NAMES:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def launch(number, args, log):
    """The torchrun of one machine, as docs/SCALING.md tells it."""
    command = [
        *("ip", "netns", "exec", NAMES[number], sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", "--rdzv_id=test"),
        *(f"--rdzv_endpoint={ADDRESSES[0]}:{PORT}", f"--local_addr={ADDRESSES[number]}"),
        f"--rdzv_conf=is_host={int(number == 0)}",  # namespaces share a host name: it cannot tell
        *map(str, args),
    ]
    env = environment() | {"GLOO_SOCKET_IFNAME": NAMES[number]}
    return subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )


def both(args, logs):
    return [launch(number, args, open(log, "w")) for number, log in enumerate(logs)]


@pytest.mark.slow
def test_a_cut_cable_ends_both_machines_and_starting_again_resumes(machines, shards, tmp_path):
    whole, run = tmp_path / "whole", tmp_path / "run"
    logs = [tmp_path / "a.log", tmp_path / "b.log"]
    extra = ("--micro_batch_size", 2, "--save_every", 5, "--resume", "auto", "--sharding", "zero2")
    assert [p.wait(180) for p in both(train_args(shards, whole, 400, *extra), logs)] == [0, 0]

    processes = both(train_args(shards, run, 400, *extra), logs)
    metrics = run / "logs" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count('"train"') > 20):
        assert all(p.poll() is None for p in processes), logs[0].read_text() + logs[1].read_text()
        time.sleep(0.02)
    ip("-n", NAMES[0], "link", "set", NAMES[0], "down")
    cut = time.monotonic()
    codes = [p.wait(180) for p in processes]
    print("ended after", time.monotonic() - cut, codes)
    assert all(codes)
    assert "no heartbeat from rank 1" in logs[0].read_text()
    assert "the machine of rank 0 (10.77.0.1" in logs[1].read_text()
    assert len(losses(run)) < 400

    ip("-n", NAMES[0], "link", "set", NAMES[0], "up")
    assert [p.wait(180) for p in both(train_args(shards, run, 400, *extra), logs)] == [0, 0]
    assert losses(run) == losses(whole)
