"""The folders that a run writes to: one run at a time, and found wanting before the first step."""

import json
import os
import shutil
import signal
import time

import numpy as np
import pytest
import torch
from conftest import kill, losses, rows_written, run_until, script, start, train_args

from training.checkpoint import load_checkpoint


def test_a_second_run_in_the_same_folders_is_refused_and_a_dead_one_blocks_nobody(shards, tmp_path):
    args = train_args(shards, tmp_path, 3000, "--save_every", 5)
    process = start(*args)
    run_until(process, lambda: rows_written(tmp_path) >= 6)
    elsewhere = tmp_path / "elsewhere"
    for other in (
        args,
        [*args, "--resume", "auto"],
        [*args, "--overwrite"],
        [*args, "--resume", "auto", "--log_dir", elsewhere],
        [*train_args(shards, elsewhere, 9), "--log_dir", tmp_path / "logs"],
    ):
        done = script(*other, code=2)
        assert "Traceback" not in done.stderr
        told = "another process is" in done.stderr or "of another run" in done.stderr
        assert told, done.stderr
    assert "another process is" in script(*args, "--resume", "auto", code=2).stderr
    kill(process)
    script(*args, "--resume", "auto", "--max_steps", 300)  # its lock died with it
    steps = [json.loads(row)["step"] for row in (tmp_path / "logs/metrics.jsonl").open()]
    assert max(losses(tmp_path)) == 300 and len(steps) > 300


def test_a_folder_or_disk_that_cannot_take_the_checkpoints_is_found_at_the_start(
    shards, small_disk, tmp_path
):
    (tmp_path / "file").touch()
    done = script(
        *train_args(shards, tmp_path, 9), "--checkpoint_dir", tmp_path / "file" / "x", code=2
    )
    assert "cannot be written: Not a directory" in done.stderr and not rows_written(tmp_path)
    done = script(*train_args(shards, tmp_path, 9, "--checkpoint_dir", tmp_path / "file"), code=2)
    assert f"--checkpoint_dir {tmp_path / 'file'} is a file; give a folder" in done.stderr
    folder = os.fsencode(tmp_path / "caf") + b"\xe9"
    done = script(*train_args(shards, tmp_path, 9, "--checkpoint_dir"), folder, code=2)
    assert "is not valid UTF-8" in done.stderr and not os.path.exists(folder)
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    (small_disk / "filler").write_bytes(b"\0" * (free - 400_000))
    args = train_args(shards, tmp_path, 9, "--checkpoint_dir", small_disk)
    done = script(*args, code=2)  # room for one file, not for three
    assert "saving this run needs" in done.stderr and not rows_written(tmp_path)


def flip(path, name, part="model"):
    """Flips one bit of a weight inside a checkpoint."""
    tensor = torch.load(path, weights_only=True, mmap=True)[part][name]
    needle = tensor.flatten()[:64].view(torch.uint8).numpy().tobytes()
    data = bytearray(path.read_bytes())
    at = data.index(needle) + 37
    data[at] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("part", ["model", "model_low"])
def test_a_flipped_bit_is_found_by_all_that_read_it(shards, trained, tmp_path, part):
    path = tmp_path / "model_last.pt"
    path.write_bytes((trained / "checkpoints/model_last.pt").read_bytes())
    flip(path, "transformer.h.1.mlp.c_fc.weight", part)
    commands = [
        train_args(shards, tmp_path, 30, "--resume", path),
        train_args(shards, tmp_path / "x", 30, "--init_from", path),
        ["convert.py", "--checkpoint", path, "--out", tmp_path / "out"],
        ["evaluate.py", "--checkpoint", path, "--tasks", "val", "--device", "cpu"],
    ]
    for command in commands:
        done = script(*command, code=2)
        assert f"tensors of '{part}' do not have their checksum" in done.stderr
    bfloat16 = ["sample.py", "--checkpoint", path, "--dtype", "bfloat16", "--max_new_tokens", 2]
    script(*bfloat16, code=2 if part == "model" else 0)  # which reads the first half alone


def test_a_flipped_bit_of_the_optimizer_is_found_and_older_files_pass(shards, trained, tmp_path):
    state = load_checkpoint(trained / "checkpoints/model_last.pt")
    assert set(state["checksums"]) == {"model", "model_low", "optimizer"}
    args = train_args(shards, tmp_path, 21, "--resume", tmp_path / "x.pt")
    state["optimizer"]["transformer.wte.weight"]["exp_avg"] = state["optimizer"][
        "transformer.wte.weight"
    ]["exp_avg"].clone()
    state["optimizer"]["transformer.wte.weight"]["exp_avg"][3, 5] += 1e-3
    torch.save(state, tmp_path / "x.pt")
    assert "tensors of 'optimizer' do not" in script(*args, code=2).stderr
    del state["checksums"]
    torch.save(state, tmp_path / "x.pt")
    script(*args)


def test_samples_of_steps_that_are_run_again_are_not_repeated(shards, tmp_path):
    args = train_args(shards, tmp_path, 9, "--save_every", 4, "--keep_last", 3)
    script(*args, "--sample_every", 1)
    text = tmp_path / "logs" / "samples.txt"
    assert text.read_text().count("--- step") == 9
    fourth = tmp_path / "checkpoints/model_step_000004.pt"
    script(*args, "--sample_every", 1, "--resume", fourth, "--max_steps", 6)
    steps = [line for line in text.read_text().splitlines() if line.startswith("--- step")]
    assert steps == [f"--- step {n}" for n in range(1, 7)]


def test_what_a_signal_does_is_said_at_once(shards, tmp_path):
    import subprocess
    import sys

    from conftest import ROOT, environment

    args = [sys.executable, *map(str, train_args(shards, tmp_path, 3000))]
    log = open(tmp_path / "err", "wb")
    process = subprocess.Popen(args, cwd=ROOT, env=environment(), stdout=log, stderr=log)
    try:
        run_until(process, lambda: rows_written(tmp_path) >= 3)
        process.send_signal(signal.SIGSTOP)  # as in a long step
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGCONT)
        began = time.monotonic()
        while b"finishing this step, then saving" not in (tmp_path / "err").read_bytes():
            assert time.monotonic() - began < 10
            time.sleep(0.02)
        assert process.wait(60) == 128 + signal.SIGINT
    finally:
        process.kill()
        log.close()


def test_a_copy_of_a_run_does_not_write_over_the_original(shards, trained, tmp_path):
    for name in ("run", "copy"):
        shutil.copytree(trained, tmp_path / name)
    run, copy = tmp_path / "run", tmp_path / "copy"
    args = train_args(shards, run, 22, "--save_every", 1)
    script(*args, "--resume", "auto")  # given both folders, it is the run of this folder
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with_copy = ["train.py", "--resume", copy / "checkpoints", "--max_steps", 23]
    done = script(*with_copy, code=2)
    assert "where its run wrote: give --checkpoint_dir" in done.stderr
    done = script(*with_copy, "--checkpoint_dir", copy / "checkpoints", code=2)
    assert "where its run wrote: give --log_dir" in done.stderr
    done = script(*with_copy, *args[3:7], code=2)  # the folders of the run that has gone on
    assert "is at step 22" in done.stderr and "at step 20" in done.stderr
    folders = ["--checkpoint_dir", copy / "checkpoints", "--log_dir", copy / "logs"]
    assert all(path.read_bytes() == data for path, data in before.items())
    script(*with_copy, *folders)
    assert all(path.read_bytes() == data for path, data in before.items())
    assert max(losses(copy)) == 23


def test_the_config_of_a_copied_run_does_not_lead_into_the_original(shards, tmp_path):
    run, copy = tmp_path / "run", tmp_path / "copy"
    script(*train_args(shards, run, 4))
    shutil.copytree(run, copy)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    args = ["train.py", "--config", copy / "logs/config.json", "--max_steps", 5, "--resume"]
    done = script(*args, "auto", code=2)
    assert f"is not in {run}/logs, where its run wrote: give --checkpoint_dir" in done.stderr
    done = script(*args, "auto", "--log_dir", copy / "logs", code=2)
    assert "give --checkpoint_dir" in done.stderr
    done = script(*args, copy, code=2)
    assert f"is not in {run}/checkpoints, where its run wrote: give --" in done.stderr
    assert all(path.read_bytes() == data for path, data in before.items())
    folders = ["--checkpoint_dir", copy / "checkpoints", "--log_dir", copy / "logs"]
    script(*args, "auto", *folders)
    script("train.py", "--config", run / "logs/config.json", "--max_steps", 6, "--resume", "auto")
    assert max(losses(copy)) == 5 and max(losses(run)) == 6


def test_the_log_of_another_run_is_refused_when_resuming(shards, trained, tmp_path):
    script(*train_args(shards, tmp_path / "b", 2, "--seed", 7))
    shutil.copytree(trained, tmp_path / "a")
    folders = ["--checkpoint_dir", tmp_path / "a/checkpoints", "--log_dir", tmp_path / "b/logs"]
    done = script("train.py", "--resume", "auto", *folders, code=2)
    assert "b/logs holds the log of another run; give another --log_dir\n" in done.stderr
    (tmp_path / "a/logs/config.json").unlink()  # moved, and nothing says whose log it is
    done = script("train.py", "--resume", "auto", *folders[:3], tmp_path / "a/logs", code=2)
    missing = f"{tmp_path}/a/logs/config.json is missing, which says what run the log beside it is"
    assert f"{missing} of; restore it, or give another --log_dir\n" in done.stderr
    (tmp_path / "a/logs/config.json").write_text("{")
    done = script("train.py", "--resume", "auto", *folders[:3], tmp_path / "a/logs", code=2)
    assert "a/logs/config.json is damaged, which says" in done.stderr


def test_going_back_keeps_the_later_checkpoint_and_the_better_one(shards, tmp_path):
    args = train_args(shards, tmp_path, 12, "--keep_last", 9, "--save_every", 4, "--eval_every", 4)
    script(*args)
    folder = tmp_path / "checkpoints"
    best = (folder / "model_best.pt").read_bytes()
    back = [*args, "--keep_last", 0, "--resume", folder / "model_step_000004.pt", "--max_lr", 1]
    (folder / "model_step_000012.pt").unlink()
    done = script(*back, "--max_steps", 8)
    assert "model_last.pt is kept as model_kept_000012.pt" in done.stdout
    assert ", model_best.pt, of step 12, stays until there is a lower loss\n" in done.stdout
    assert " at step 12, see " in done.stdout
    kept = (folder / "model_kept_000012.pt").read_bytes()
    assert load_checkpoint(folder / "model_last.pt")["step"] == 8
    assert (folder / "model_best.pt").read_bytes() == best
    script(*back, "--max_steps", 12, "--keep_last", 9)
    done = script(*back, "--max_steps", 12)
    assert "kept as model_kept_000012_2.pt" in done.stdout
    assert (folder / "model_kept_000012.pt").read_bytes() == kept
    assert "model_step_000008.pt is kept as model_kept_000008" in done.stdout
    other = (folder / "model_last.pt").read_bytes()
    script(*args, "--resume", folder / "model_best.pt")  # the same step as the last, other weights
    assert other in [path.read_bytes() for path in folder.glob("model_kept_*")]
    script(*back, "--max_steps", 7)  # another branch, and forward to the first one again
    branch = (folder / "model_last.pt").read_bytes()
    done = script(*args, "--resume", folder / "model_kept_000012.pt", "--max_steps", 14)
    assert "model_last.pt is kept as model_kept_000007.pt" in done.stdout
    assert "rows of the log before step 12 stay" in done.stdout
    assert (folder / "model_kept_000007.pt").read_bytes() == branch
    script(*args, "--resume", "auto", "--max_steps", 15)
    assert losses(tmp_path)[15] < 7


def test_a_run_that_is_made_longer_keeps_its_best_checkpoint(shards, tmp_path):
    args = train_args(shards, tmp_path, 10, "--eval_every", 0)
    done = script(*args)  # validated once, after model_last.pt was written
    assert f" at step 10, see {tmp_path}/checkpoints\n" in done.stdout
    best = (tmp_path / "checkpoints/model_best.pt").read_bytes()
    done = script(*args, "--resume", "auto")
    assert "; it was already at step 10 of 10: give a larger --max_steps\n" in done.stdout
    script(*args, "--resume", "auto", "--max_steps", 14, "--max_lr", 5)
    assert (tmp_path / "checkpoints/model_best.pt").read_bytes() == best


def test_the_best_loss_is_not_compared_between_validation_texts(shards, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    shutil.copytree(shards, tmp_path / "data")
    for path in (tmp_path / "data").glob("val_*"):
        tokens = np.load(path)
        np.save(path, tokens[::-1])
    args = train_args(tmp_path / "data", tmp_path / "run", 22, "--resume", "auto", "--max_lr", 5)
    done = script(*args)
    assert "the validation text is another one" in done.stdout
    last, best = (
        load_checkpoint(tmp_path / "run/checkpoints" / name)["val_checksum"]
        for name in ("model_last.pt", "model_best.pt")
    )
    before = load_checkpoint(trained / "checkpoints/model_best.pt")["val_checksum"]
    assert last == best != before


def test_the_best_loss_is_not_compared_between_numbers_of_validation_tokens(
    trained, shards, tmp_path
):
    run, old = tmp_path / "run", load_checkpoint(trained / "checkpoints/model_best.pt")["best_loss"]
    best = run / "checkpoints/model_best.pt"
    shutil.copytree(trained, run)
    args = train_args(shards, run, 21, "--resume", "auto", "--max_lr", 5, "--eval_every", 0)
    done = script(*args, "--val_tokens", 4097)  # the same sequences
    assert "starts anew" not in done.stdout and load_checkpoint(best)["best_loss"] == old
    for steps in (22, 23):
        done = script(*args, "--val_tokens", 64, "--max_steps", steps)
        assert ("more or less of it: the best loss starts anew" in done.stdout) == (steps == 22)
        assert load_checkpoint(best)["best_loss"] > old
        shutil.copy(trained / "checkpoints/model_best.pt", best)  # as before a validation
