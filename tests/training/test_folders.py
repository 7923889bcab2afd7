"""The folders that a run writes to: one run at a time, of one run."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import (
    bad,
    folders,
    kill,
    losses,
    rows_written,
    run_until,
    script,
    start,
    train_args,
    train_options,
)

from config import log_folder
from data.mixture import Mixture
from data.shards import read_manifest, write_manifest
from finetuning.options import FinetuneConfig
from training.checkpoint import load_checkpoint
from training.summary import data_order, warn_of_data


def test_a_second_run_in_the_same_folders_is_refused_and_a_dead_one_blocks_nobody(shards, tmp_path):
    args = train_args(shards, tmp_path, 3000, "--save_every", 5)
    process = start(*args)
    run_until(process, lambda: rows_written(tmp_path) >= 6)
    elsewhere = tmp_path / "elsewhere"
    for more in (["--overwrite"], ["--log_dir", elsewhere], ["--checkpoint_dir", elsewhere]):
        bad([*args, *more], "another process is writing to")
    kill(process)
    end = load_checkpoint(tmp_path / "checkpoints/model_last.pt")["step"] + 2
    script(*args, "--resume", "auto", "--max_steps", end)  # its lock died with it
    assert max(losses(tmp_path)) == end


def test_a_disk_without_room_for_three_checkpoints_is_found_at_the_start(
    shards, small_disk, tmp_path
):
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    (small_disk / "filler").write_bytes(b"\0" * (free - 400_000))
    bad(train_args(shards, tmp_path, 9, "--checkpoint_dir", small_disk), "saving this run needs")
    assert not rows_written(tmp_path)


def test_the_folders_of_another_run_are_refused(shards, trained, tmp_path):
    script(*train_args(shards, tmp_path / "b", 2))
    b = folders(tmp_path / "b")
    bad(train_args(shards, trained, 4), "holds the checkpoints of another run", trained)
    bad(train_args(shards, trained, 4, *b[:2]), "holds the checkpoints of another run", trained)
    new = ["--checkpoint_dir", tmp_path / "new"]
    bad(train_args(shards, trained, 4, *new), "logs holds the log of another run", trained)
    last = trained / "checkpoints/model_last.pt"
    bad(["train.py", "--resume", last, *b], "b/checkpoints holds the checkpoints of another run")
    again = ["train.py", "--resume", last, *folders(trained)[:2]]
    bad([*again, *b[2:]], "b/logs holds the log of another run", trained)
    # one that has lost all but its best checkpoint, too
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run/checkpoints/model_last.pt").unlink()
    bad(train_args(shards, tmp_path / "run", 4), "checkpoints of another run", tmp_path / "run")


def test_going_back_needs_another_folder_or_overwrites_what_came_later(shards, tmp_path):
    args = train_args(shards, tmp_path, 12, "--save_every", 4, "--keep_last", 9)
    script(*args, "--sample_every", 1)
    folder, text = tmp_path / "checkpoints", tmp_path / "logs" / "samples.txt"
    assert text.read_text().count("--- step") == 12
    back = [*args, "--resume", folder / "model_step_000008.pt", "--max_lr", 1e-3]
    bad(back, "checkpoints holds a checkpoint of step 12, after step 8", tmp_path)
    script(*back, "--overwrite", "--max_steps", 10)
    kept = {path.name: load_checkpoint(path) for path in folder.glob("*.pt")}
    assert {saved["step"] for saved in kept.values()} == {4, 8, 10}
    assert kept["model_last.pt"]["config"]["max_lr"] == 1e-3
    assert sorted(losses(tmp_path)) == list(range(1, 11))  # the rows before step 8 stay
    script(*train_args(shards, tmp_path, 3, "--overwrite"))  # another run
    assert {load_checkpoint(path)["step"] for path in folder.glob("*.pt")} == {3}
    assert sorted(losses(tmp_path)) == [1, 2, 3] and sorted(losses(tmp_path, "val")) == [0, 3]


@pytest.mark.parametrize(
    ("checkpoints", "logs"),
    [("checkpoints", "logs"), ("a/checkpoints", "a/logs"), ("/a/b", "/a/b/logs")],
)
def test_the_log_follows_the_checkpoints(checkpoints, logs):
    assert train_options(checkpoint_dir=Path(checkpoints)).log_dir == Path(logs)
    assert log_folder(FinetuneConfig.checkpoint_folder(["--method", "sft"])) == Path(
        "runs/sft/logs"
    )


@pytest.mark.parametrize("copied", ["checkpoints", "branch"])
def test_a_copy_and_a_branch_of_a_run_leave_its_log_alone(shards, tmp_path, copied):
    """They go on in their own place, with all rows up to the step at which they begin."""
    run, other = tmp_path / "run", tmp_path / "other"
    args = train_args(shards, run, 12, "--save_every", 4, "--keep_last", 9)
    script(*args)
    if copied == "checkpoints":
        (other / "checkpoints").mkdir(parents=True)
        shutil.copy(run / "checkpoints/model_step_000008.pt", other / "checkpoints")
        start_from = other
    else:
        start_from = run / "checkpoints/model_step_000008.pt"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    flags = ["--resume", start_from, "--checkpoint_dir", other / "checkpoints", "--max_steps", 10]
    script("train.py", *flags)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert sorted(losses(other)) == list(range(1, 11))
    assert sorted(losses(other, "val")) == [0, 10]
    assert json.loads((other / "logs/config.json").read_text())["config"]["max_steps"] == 10


def test_a_folder_without_a_checkpoint_is_said_before_anything_else(shards, tmp_path):
    args = train_args(shards, tmp_path, 2, "--resume", "auto", "--eval_every", 0)
    first, *rest = script(*args).stdout.splitlines()
    assert any("--warmup_steps 5 is more than half of the 2 steps" in line for line in rest)
    assert first == f"no checkpoint in {tmp_path / 'checkpoints'}: a new run"
    assert "a new run" not in script(*args, "--max_steps", 3).stdout


def test_a_damaged_checkpoint_blocks_neither_a_whole_one_nor_overwrite(shards, trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    last, best = run / "checkpoints/model_last.pt", run / "checkpoints/model_best.pt"
    last.write_bytes(last.read_bytes()[:-1000])
    args = train_args(shards, run, 22)
    bad([*args, "--resume", "auto"], "model_last.pt is damaged or not a checkpoint", run)
    bad(args, "holds the checkpoints of another run", run)
    script(*args, "--resume", best)
    assert load_checkpoint(last)["step"] == 22 and max(losses(run)) == 22
    last.write_bytes(b"damaged")
    script(*args, "--overwrite", "--max_steps", 3)
    assert load_checkpoint(last)["step"] == 3


def test_the_lowest_loss_is_known_after_a_resume_and_belongs_to_its_text(shards, trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    best, last = run / "checkpoints/model_best.pt", run / "checkpoints/model_last.pt"
    assert load_checkpoint(last)["best_loss"] == losses(run, "val")[20]
    # a model that a validation finds worse does not replace the best
    args = train_args(shards, run, 22, "--resume", "auto", "--max_lr", 1.0, "--min_lr", 1.0)
    script(*args)
    assert losses(run, "val")[22] > losses(run, "val")[20]
    assert load_checkpoint(best)["step"] == 20
    done = script(*args, "--max_steps", 23, "--val_tokens", 2048)
    assert "the validation text has changed: the lowest loss is counted anew" in done.stdout
    assert load_checkpoint(best)["step"] == 23


def test_the_weights_to_begin_from_are_not_overwritten(shards, trained, tmp_path):
    run, link = tmp_path / "run", tmp_path / "link"
    shutil.copytree(trained, run)
    link.symlink_to(run / "checkpoints")
    for source in (run, link, link / "model_best.pt"):
        args = train_args(shards, run, 3, "--init_from", source, "--overwrite")
        bad(args, "would remove the weights of --init_from", run)


def test_a_run_killed_before_its_first_checkpoint_begins_anew(shards, tmp_path):
    args = train_args(shards, tmp_path / "run", 60, "--eval_every", 0)
    process = start(*args)
    run_until(process, lambda: rows_written(tmp_path / "run") >= 3)
    kill(process)
    assert not list((tmp_path / "run/checkpoints").glob("*.pt"))
    bad(args, "holds the log of another run")
    script(*args, "--resume", "auto")
    script(*train_args(shards, tmp_path / "whole", 60, "--eval_every", 0))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    rows = (tmp_path / "run/logs/metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[0])["step"] == 1 and len(rows) == 61  # with the last validation


def test_another_order_of_the_folders_is_warned_of_and_another_place_is_not(
    shards, tmp_path, capsys
):
    first, second, moved = (tmp_path / name for name in ("first", "second", "moved"))
    for folder in (first, second, moved):
        shutil.copytree(shards, folder)
    manifest = read_manifest(second)
    (second / manifest["shards"].pop(0)["file"]).unlink()
    write_manifest(second, manifest)

    def warnings(*names):
        sizes = {"block_size": 32, "total_batch_size": 512, "max_steps": 10, "val_tokens": 1024}
        config = train_options(data_dir=names, **sizes)
        train, val = (Mixture(names, split, 32) for split in ("train", "val"))
        checkpoint = {"optimizer": {"": {}}, "data_order": data_order(config, original)}
        process = SimpleNamespace(print=print)
        warn_of_data(SimpleNamespace(config=config, process=process), checkpoint, train, val)
        return capsys.readouterr().out

    original = Mixture([first, second], "train", 32)
    assert not warnings(first, second) and not warnings(moved, second)
    assert "checksum of --data_dir" in warnings(second, first)


def test_what_changes_the_order_of_the_data_is_warned_of(shards, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    args = train_args(shards, tmp_path / "run", 22, "--resume", "auto")
    done = script(*args, "--total_batch_size", 1024, "--seed", 8)
    assert "total_batch_size: 512, is 1024 now: the data order changes" in done.stdout
    assert "seed: 7, is 8 now" in done.stdout and "checksum" not in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "run/logs/metrics.jsonl").open()]
    tokens = {row["step"]: row["tokens"] for row in rows if row["split"] == "train"}
    assert [tokens[s] for s in (20, 21, 22)] == [10_240, 11_264, 12_288]
