"""Every way a run can die, and that it goes on as if it had not."""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from conftest import (
    gap,
    kill,
    losses,
    rows_written,
    run_until,
    same_run,
    script,
    start,
    torchrun,
    train_args,
)

from training.checkpoint import load_checkpoint

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


def worker(torchrun, rank):
    """Return the process id of a rank."""
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    own = f"\0RANK={rank}\0".encode()
    (found,) = [int(p) for p in children if own in Path(f"/proc/{p}/environ").read_bytes()]
    return found


def kill_often(shards, run, kills, kinds, steps, seed, *extra):
    """Kill a run at random moments, each time starting it as the next of `kinds`: (processes,
    sharding). Every checkpoint must be whole every time; then it may end."""
    rng = random.Random(seed)
    args = train_args(
        shards, run, steps, "--save_every", rng.choice([2, 3]), "--keep_last", 3,
        "--micro_batch_size", 2, "--resume", "auto", *extra,
    )  # fmt: skip
    for number in range(kills):
        processes, sharding = kinds[number % len(kinds)]
        before = rows_written(run)
        process = start(*(TORCHRUN[: 4 * (processes - 1)]), *args, "--sharding", sharding)
        if rng.random() < 0.2:  # one in five is killed while it starts
            end = time.monotonic() + rng.uniform(0.5, 4)
            run_until(
                process, lambda t=end, n=before: time.monotonic() > t or rows_written(run) > n
            )
        else:
            enough = before + rng.randint(0, 6)
            run_until(process, lambda n=enough: rows_written(run) > n)
            time.sleep(rng.uniform(0, 0.1))
        kill(process)
        for path in (run / "checkpoints").glob("*.pt"):
            load_checkpoint(path)
    assert max(losses(run), default=0) < steps, "the last kill came after the end"
    processes, sharding = kinds[kills % len(kinds)]
    torchrun(processes, *args, "--sharding", sharding)


def test_kills_at_random_moments_change_nothing(shards, tmp_path):
    whole, run = tmp_path / "whole", tmp_path / "run"
    script(*train_args(shards, whole, 400, "--save_every", 0, "--micro_batch_size", 2))
    kill_often(shards, run, 4, [(1, "none")], 400, 5)
    assert same_run(run, whole)
    assert len(list((run / "checkpoints").glob("model_step_*.pt"))) == 3


@pytest.mark.slow
def test_thirty_kills_across_world_sizes_and_shardings_keep_the_curve(shards, tmp_path):
    whole, run = tmp_path / "whole", tmp_path / "run"
    # a rate at which rounding does not grow from step to step, as it does on the edge of stability
    args = ("--save_every", 0, "--micro_batch_size", 2, "--max_lr", "3e-4")
    script(*train_args(shards, whole, 600, *args))
    kinds = [(1, "none"), (2, "zero1"), (2, "none"), (1, "none"), (2, "zero3"), (2, "zero2")]
    kill_often(shards, run, 30, kinds, 600, 1, "--max_lr", "3e-4")
    assert gap(run, whole) < 1e-4 and len(losses(run)) == 600


@pytest.mark.parametrize(
    ("sharding", "kills"),
    [("zero2", 1), *(pytest.param(s, 5, marks=pytest.mark.slow) for s in ("none", "zero3"))],
)
def test_kills_under_torchrun_change_no_bit(shards, tmp_path, sharding, kills):
    whole, run, steps = tmp_path / "whole", tmp_path / "run", 30 * kills
    args = ("--save_every", 0, "--micro_batch_size", 2, "--sharding", sharding)
    torchrun(2, *train_args(shards, whole, steps, *args))
    kill_often(shards, run, kills, [(2, sharding)], steps, 4)
    assert same_run(run, whole)


def test_sigterm_to_torchrun_saves_once_and_resumes_at_the_next_step(shards, tmp_path):
    args = train_args(shards, tmp_path, 300, "--sharding", "zero1", "--micro_batch_size", 2)
    process = start(*TORCHRUN, *args, log=tmp_path / "log")
    run_until(process, lambda: rows_written(tmp_path) >= 7)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(30) != 0
    step = load_checkpoint(tmp_path / "checkpoints/model_last.pt")["step"]
    assert step == max(losses(tmp_path)) >= 7
    assert f"saved at step {step}: continue with --resume auto" in (tmp_path / "log").read_text()
    more = train_args(shards, tmp_path, step + 2, "--resume", "auto", "--micro_batch_size", 2)
    torchrun(2, *more)
    assert sorted(losses(tmp_path)) == list(range(1, step + 3))


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_process_that_dies_ends_the_others_which_restart_and_go_on(
    shards, tmp_path, monkeypatch, rank
):
    """As train.sh and train.slurm start it; without the variable the restart fails or hangs."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    args = train_args(shards, tmp_path, 300, "--micro_batch_size", 2, "--save_every", 20)
    head = (*TORCHRUN, "--max_restarts=1", "--shutdown_timeout=110")
    process = start(*head, *args, "--resume", "auto", log=tmp_path / "log")
    run_until(process, lambda: rows_written(tmp_path) >= 30)
    os.kill(worker(process, rank), signal.SIGKILL)
    assert process.wait(60) == 0
    said = (tmp_path / "log").read_text()
    assert f"error on rank {1 - rank}: another process has ended" in said or rank == 0
    assert "; resumed at step " in said and sorted(losses(tmp_path)) == list(range(1, 301))


def fill(folder, but):
    """Leave `but` bytes free on a disk."""
    (folder / "filler").write_bytes(bytes(shutil.disk_usage(folder).free - but))


def test_a_disk_too_full_for_a_checkpoint_keeps_the_one_before(shards, small_disk, tmp_path):
    args = train_args(shards, tmp_path, 20, "--save_every", 0, "--checkpoint_dir", small_disk)
    last = small_disk / "model_last.pt"
    script(*args, "--max_steps", 10)
    fill(small_disk, but=100_000)
    done = script(*args, "--resume", "auto", code=2)  # found before the first step
    assert "saving this run needs" in done.stderr and max(losses(tmp_path)) == 10
    (small_disk / "filler").unlink()
    process = start(*args, "--resume", "auto", "--max_steps", 3000, log=tmp_path / "log")
    run_until(process, lambda: rows_written(tmp_path) >= 12)
    fill(small_disk, but=100_000)  # while it runs
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60) == 2 and "is untouched" in (tmp_path / "log").read_text()
    assert load_checkpoint(last)["step"] == 10
    (small_disk / "filler").unlink()
    script(*args, "--resume", "auto")
    assert load_checkpoint(last)["step"] == 20 == max(losses(tmp_path))


def test_a_disk_too_full_for_the_log_ends_in_a_sentence_and_resumes(shards, small_disk, tmp_path):
    args = train_args(shards, tmp_path, 30, "--save_every", 5, "--log_dir", small_disk)
    script(*args, "--max_steps", 10)
    before = (small_disk / "metrics.jsonl").read_bytes()
    fill(small_disk, but=0)
    done = script(*args, "--resume", "auto", code=2)
    assert "No space left" in done.stderr and "Traceback" not in done.stderr
    assert (small_disk / "metrics.jsonl").read_bytes().startswith(before)
    (small_disk / "filler").unlink()
    script(*args, "--resume", "auto")
    assert load_checkpoint(tmp_path / "checkpoints/model_last.pt")["step"] == 30
