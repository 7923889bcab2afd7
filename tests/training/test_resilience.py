"""Every way a run can die, and that it goes on as if it had not."""

import os
import random
import re
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
from conftest import (
    ROOT,
    free_port,
    gap,
    kill,
    losses,
    rows_written,
    run_until,
    same_run,
    slow,
    start,
    torchrun,
    train_args,
)
from hypothesis import given, settings

from model.formats.checkpoint import load_checkpoint, load_model
from utils.distributed import StopSignal

TORCHRUN = ("-m", "torch.distributed.run")
LAUNCH = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
LAUNCH |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
TWO = (*TORCHRUN, "--standalone", "--nproc_per_node=2")


def worker(torchrun, rank):
    """Return the process id of a rank that torchrun has started."""
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    for pid in children:
        if f"\0RANK={rank}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes():
            return int(pid)
    raise ProcessLookupError(rank)


def kill_often(shards, run, kills, variants, steps, seed, *extra):
    """Kill a run at random moments, each time starting it as the next of `variants`: (processes,
    --sharding). Every checkpoint must be whole every time; then it may end."""
    rng = random.Random(seed)
    flags = ("--save_every", rng.choice([2, 3]), "--keep_last", 3, "--micro_batch_size", 2)
    args = train_args(shards, run, steps, *flags, "--resume", "auto", *extra)
    for number in range(kills):
        processes, sharding = variants[number % len(variants)]
        rows = rows_written(run)
        launcher = TWO if processes == 2 else ()
        process = start(*launcher, *args, "--tensor_parallel", 1, "--sharding", *sharding.split())
        if rng.random() < 0.2:  # one in five is killed while it starts
            time.sleep(rng.uniform(0.5, 4))
        else:
            rows += rng.randint(0, 6)
            run_until(process, lambda rows=rows: rows_written(run) > rows)
            time.sleep(rng.uniform(0, 0.02))
        kill(process)
        for path in (run / "checkpoints").glob("*.pt"):
            load_model(path, float32=True)  # verifies checksums
    assert max(losses(run), default=0) < steps, "the last kill came after the end"
    processes, sharding = variants[kills % len(variants)]
    torchrun(processes, *args, "--tensor_parallel", 1, "--sharding", *sharding.split())


SHARED_BLOCKS = "zero2 --tensor_parallel 2"
MIXED = [(1, "none"), (2, "zero1"), (2, "none"), (2, SHARED_BLOCKS), (2, "zero3"), (2, "zero2")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "variants",
    [[(1, "none")], [(2, "none")], [(2, "zero2")], [(2, "zero3")], [(2, SHARED_BLOCKS)], MIXED],
)
def test_kills_at_random_moments_change_no_bit_and_other_slicing_only_rounding(
    shards, tmp_path, variants
):
    whole, run = tmp_path / "whole", tmp_path / "run"
    (processes, sharding), steps = variants[0], 120 * len(variants)
    # a rate at which rounding does not grow from step to step, as it does on the edge of stability
    flags = ("--max_lr", "3e-4", "--dropout", 0.1 if variants != MIXED else 0)
    args = ("--save_every", 0, "--micro_batch_size", 2, "--sharding", *sharding.split())
    torchrun(processes, *train_args(shards, whole, steps, *flags, *args))
    kill_often(shards, run, 5 * len(variants), variants, steps, 4, *flags)
    assert len(losses(run)) == steps and gap(run, whole) < 1e-4
    assert variants == MIXED or same_run(run, whole)


@pytest.mark.parametrize("rank", [1, slow(0)])
def test_under_torchrun_a_dead_process_restarts_all_and_sigterm_saves(
    shards, tmp_path, monkeypatch, rank
):
    """As train.sh starts it; without the variable the restart fails or hangs."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    whole, run, log = tmp_path / "whole", tmp_path / "run", tmp_path / "log"
    # a constant rate after warmup, so that the runs below agree whatever their length
    options = ("--micro_batch_size", 2, "--save_every", 4, "--eval_every", 0)
    options += ("--warmup_steps", 1, "--min_lr", 3e-3)
    args = train_args(shards, run, 10_000, *options, "--resume", "auto")
    process = start(*TWO, "--max_restarts=1", "--shutdown_timeout=110", *args, log=log)
    run_until(process, lambda: rows_written(run) >= 5)
    os.kill(worker(process, rank), signal.SIGKILL)
    run_until(process, lambda: "resumed at step" in log.read_text(), timeout=60)
    if rank == 1:
        assert "error on rank 0: another process has ended" in log.read_text()
    rows = max(losses(run))
    run_until(process, lambda: max(losses(run)) > rows)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(30) != 0
    step = load_checkpoint(run / "checkpoints/model_last.pt")["step"]
    assert step == max(losses(run))
    command = f"torchrun --standalone --nproc_per_node=2 train.py --resume {run}/checkpoints"
    saved = f"saved at step {step}: continue with {command}\n"
    for words in ("stopping soon, then saving", saved):
        assert words in log.read_text()

    # with the next two steps, it is the run that nothing has interrupted
    torchrun(2, *args, "--max_steps", step + 2)
    torchrun(2, *train_args(shards, whole, step + 2, *options))
    assert losses(run) == losses(whole)


@settings(deadline=None)  # a busy machine may pause for longer
@given(
    st.lists(st.sampled_from([signal.SIGTERM, signal.SIGINT, signal.SIGHUP]), min_size=1),
    st.sampled_from([{}, {"RANK": "0"} | LAUNCH, {"RANK": "1"} | LAUNCH]),
)
def test_a_repeated_signal_ends_nothing_but_a_second_ctrl_c_without_a_launcher(numbers, launcher):
    with patch("os.environ", launcher), patch("signal.signal"):  # pytest keeps its handlers
        stop = StopSignal()
        ends = signal.SIGINT in numbers[1:] and not launcher
        with pytest.raises(SystemExit) if ends else nullcontext():
            for number in numbers:
                stop.receive(number, None)
    assert stop.signal == numbers[0]


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["first", "second"])
def test_a_lost_machine_ends_the_others_within_a_minute(shards, tmp_path, monkeypatch, lost):
    """With two agents as scripts/train.slurm starts them; the first has torchrun's store."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    settings = re.findall(
        r"--(?:rdzv_b|rdzv_c|max|shut)\w+=\S+", (ROOT / "scripts/train.slurm").read_text()
    )
    assert "--rdzv_conf=join_timeout=50" in settings
    endpoint = f"--rdzv_endpoint=127.0.0.1:{free_port()}"
    args = train_args(shards, tmp_path, 10_000, "--resume", "auto")
    command = (*TORCHRUN, "--nnodes=2", "--nproc_per_node=1", endpoint, *settings, *args)
    first = start(*command, log=tmp_path / "first")
    second = start(*command, log=tmp_path / "second")
    run_until(first, lambda: rows_written(tmp_path) >= 10)
    dead, alive = (first, second) if lost == "first" else (second, first)
    kill(dead)  # with its worker
    try:
        assert alive.wait(60) != 0
    finally:
        kill(alive)
