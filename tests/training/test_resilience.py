"""Every way a run can die, and that it goes on as if it had not."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import (
    ROOT,
    environment,
    kill,
    losses,
    rows_written,
    run_until,
    script,
    start,
    torchrun,
    train_args,
    weights,
)

from training.checkpoint import load_checkpoint

TORCHRUN = ("-m", "torch.distributed.run", "--standalone")


def worker(torchrun, rank):
    """The process id of a rank."""
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    own = f"\0RANK={rank}\0".encode()
    (found,) = [int(p) for p in children if own in Path(f"/proc/{p}/environ").read_bytes()]
    return found


def launch(args, processes, **options):
    """One process alone, or several under torchrun, to be killed together."""
    head = () if processes == 1 else (*TORCHRUN, f"--nproc_per_node={processes}")
    return start(*head, *args, **options)


def killed_often(shards, run, kills, kinds, steps, seed, *extra):
    """Kills a run `kills` times at random moments, each time starting it as the next of `kinds`:
    (processes, sharding). Every checkpoint must be whole every time; then it may end."""
    rng = random.Random(seed)
    every = rng.choice([2, 3])
    args = train_args(
        shards, run, steps, "--save_every", every, "--keep_last", 3, "--micro_batch_size", 2,
        "--resume", "auto", *extra,
    )  # fmt: skip
    for number in range(kills):
        processes, sharding = kinds[number % len(kinds)]
        before = rows_written(run)
        process = launch([*args, "--sharding", sharding], processes)
        # one in five is killed while it starts
        if rng.random() < 0.2:
            time.sleep(rng.uniform(0.5, 4))
        else:
            enough = before + rng.randint(0, 6)
            run_until(process, lambda n=enough: rows_written(run) > n)
            time.sleep(rng.uniform(0, 0.1))
        kill(process)
        for path in (run / "checkpoints").glob("*.pt"):
            load_checkpoint(path)
    assert max(losses(run), default=0) < steps, "the last kill came after the end"
    processes, sharding = kinds[kills % len(kinds)]
    args += ["--sharding", sharding]
    script(*args) if processes == 1 else torchrun(processes, *args)


@pytest.mark.slow
def test_fifty_kills_across_world_sizes_and_shardings_keep_the_curve(shards, tmp_path):
    whole, run = tmp_path / "whole", tmp_path / "run"
    # a rate at which rounding does not grow from step to step, as it does on the edge of stability
    args = ("--save_every", 0, "--micro_batch_size", 2, "--max_lr", "3e-4")
    script(*train_args(shards, whole, 300, *args))
    kinds = [(1, "none"), (2, "zero1"), (2, "none"), (1, "none"), (2, "zero3"), (2, "zero2")]
    killed_often(shards, run, 50, kinds, 300, 1, "--max_lr", "3e-4")
    a, b = losses(run), losses(whole)
    assert set(a) == set(b) and max(abs(a[s] - b[s]) for s in b) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", [(2, "none"), (2, "zero3")])
def test_kills_of_one_kind_of_run_change_no_bit(shards, tmp_path, kind):
    whole, run = tmp_path / "whole", tmp_path / "run"
    processes, sharding = kind
    args = ("--save_every", 0, "--micro_batch_size", 2, "--sharding", sharding)
    torchrun(processes, *train_args(shards, whole, 200, *args))
    killed_often(shards, run, 10, [kind], 200, 2)
    assert losses(run) == losses(whole)
    a, b = weights(run), weights(whole)
    assert all(torch.equal(a[name], b[name]) for name in b)


def test_a_kill_under_torchrun_and_sharding_changes_no_bit(shards, tmp_path):
    whole, run = tmp_path / "whole", tmp_path / "run"
    args = ("--save_every", 0, "--micro_batch_size", 2, "--sharding", "zero2")
    torchrun(2, *train_args(shards, whole, 30, *args))
    killed_often(shards, run, 1, [(2, "zero2")], 30, 4)
    assert losses(run) == losses(whole)
    a, b = weights(run), weights(whole)
    assert all(torch.equal(a[name], b[name]) for name in b)


def test_sigterm_to_torchrun_saves_once_and_resumes_at_the_next_step(shards, tmp_path):
    args = train_args(shards, tmp_path, 300, "--sharding", "zero1", "--micro_batch_size", 2)
    command = [sys.executable, *TORCHRUN, "--nproc_per_node=2", *map(str, args)]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=log, stderr=log, start_new_session=True
        )
        run_until(process, lambda: rows_written(tmp_path) >= 7)
        os.kill(process.pid, signal.SIGTERM)
        began = time.monotonic()
        assert process.wait(60) != 0
    assert time.monotonic() - began < 30
    step = load_checkpoint(tmp_path / "checkpoints/model_last.pt")["step"]
    assert step == max(losses(tmp_path)) >= 7
    assert f"saved at step {step}: continue" in (tmp_path / "log").read_text()
    resumed = train_args(shards, tmp_path, step + 2, "--resume", "auto", "--micro_batch_size", 2)
    torchrun(2, *resumed)
    assert sorted(losses(tmp_path)) == list(range(1, step + 3))


def test_a_process_that_dies_ends_the_others_within_a_minute(shards, tmp_path):
    args = train_args(shards, tmp_path, 100_000, "--micro_batch_size", 2)
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, *TORCHRUN, "--nproc_per_node=2", *map(str, args)],
            cwd=ROOT, env=environment(), stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        run_until(process, lambda: rows_written(tmp_path) >= 3)
        os.kill(worker(process, rank=1), signal.SIGKILL)
        began = time.monotonic()
        assert process.wait(60) != 0
    text = (tmp_path / "log").read_text()
    assert "error on rank 0: a collective failed: no heartbeat from rank 1" in text
    print("ended after", time.monotonic() - began)


def fill(folder, but):
    """Leaves `but` bytes free on a disk."""
    (folder / "filler").write_bytes(bytes(shutil.disk_usage(folder).free - but))


def test_a_disk_too_full_for_a_checkpoint_keeps_the_one_before(shards, small_disk, tmp_path):
    args = train_args(shards, tmp_path, 20, "--save_every", 0, "--checkpoint_dir", small_disk)
    script(*args, "--max_steps", 10, "--overwrite")
    whole = load_checkpoint(small_disk / "model_last.pt")["step"]
    fill(small_disk, but=100_000)
    done = script(*args, "--resume", "auto", code=2)  # found before the first step
    assert "saving this run needs" in done.stderr and max(losses(tmp_path)) == 10
    (small_disk / "filler").unlink()
    process = start(*args, "--resume", "auto", "--max_steps", 300)
    run_until(process, lambda: rows_written(tmp_path) >= 12)
    fill(small_disk, but=100_000)  # while it runs
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60) == 2
    assert load_checkpoint(small_disk / "model_last.pt")["step"] == whole == 10
    (small_disk / "filler").unlink()
    script(*args, "--resume", "auto", "--log_dir", tmp_path / "again")
    assert load_checkpoint(small_disk / "model_last.pt")["step"] == 20


def test_a_disk_too_full_for_the_log_ends_in_a_sentence_and_resumes(shards, small_disk, tmp_path):
    args = train_args(shards, tmp_path, 30, "--save_every", 5, "--log_dir", small_disk)
    script(*args, "--max_steps", 10, "--overwrite")
    before = (small_disk / "metrics.jsonl").read_bytes()
    fill(small_disk, but=0)
    done = script(*args, "--resume", "auto", code=2)
    assert "No space left" in done.stderr and "Traceback" not in done.stderr
    assert (small_disk / "metrics.jsonl").read_bytes().startswith(before)
    (small_disk / "filler").unlink()
    script(*args, "--resume", "auto")
    assert load_checkpoint(tmp_path / "checkpoints/model_last.pt")["step"] == 30


@pytest.mark.slow
def test_a_process_that_hangs_is_named_when_the_collective_times_out(shards, tmp_path):
    args = train_args(shards, tmp_path, 100, "--micro_batch_size", 2)[1:]
    env = {**environment(), "PYTHONPATH": str(ROOT), "FAULTS": "1:41", "HANG": "1"}
    done = torchrun(2, "tests/faulty_train.py", *args, env=env, code=1, timeout=100)
    assert "a collective failed: rank 1 is alive but behind" in done.stderr


@pytest.mark.slow
def test_torchrun_with_restarts_goes_on_by_itself(shards, tmp_path):
    run, whole = tmp_path / "run", tmp_path / "whole"
    extra = ("--micro_batch_size", 2, "--save_every", 5, "--resume", "auto")
    torchrun(2, *train_args(shards, whole, 120, *extra))
    command = [sys.executable, *TORCHRUN, "--nproc_per_node=2", "--max_restarts=1"]
    command += map(str, train_args(shards, run, 120, *extra))
    env = environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True
        )
        run_until(process, lambda: rows_written(run) >= 12)
        os.kill(worker(process, rank=1), signal.SIGKILL)
        assert process.wait(180) == 0, (tmp_path / "log").read_text()
    assert losses(run) == losses(whole)
