"""The folders that a run writes to: one run at a time, of one run."""

import shlex
import shutil
from pathlib import Path

import pytest
import torch
from conftest import (
    bad,
    contents,
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

from config import TrainOptions, log_folder
from data.manifest import read_manifest, write_manifest
from finetuning.options import FinetuneOptions
from model.formats.checkpoint import load_checkpoint
from training.options import read_options, resolve_options
from utils.logger import read_logged_config, read_metrics


def test_a_second_run_in_the_same_folders_is_refused(shards, tmp_path):
    args = train_args(shards, tmp_path, 10_000)
    process = start(*args)
    run_until(process, lambda: rows_written(tmp_path) >= 1)
    for folder in ("--log_dir", "--checkpoint_dir"):  # the other one is enough
        bad([*args, "--overwrite", folder, tmp_path / "new"], "another process is writing to")
    kill(process)


@pytest.fixture(scope="module")
def numbered(shards, tmp_path_factory):
    """A run of 12 steps that keeps every fourth."""
    run = tmp_path_factory.mktemp("numbered")
    script(*train_args(shards, run, 12, "--save_every", 4, "--keep_last", 9))
    return run


def test_the_folders_of_another_run_are_refused(shards, trained, numbered, tmp_path):
    other = folders(numbered)
    last = trained / "checkpoints/model_last.pt"
    new = train_args(shards, trained, 4)
    resumed = ["train.py", "--resume", last]
    for args, refusal in (
        ([*new, *other[2:]], "checkpoints holds the checkpoints"),
        ([*new, "--checkpoint_dir", tmp_path / "new"], "logs holds the log"),
        ([*resumed, *other], f"{numbered.name}/checkpoints holds the checkpoints"),
        ([*resumed, *folders(trained)[:2], *other[2:]], f"{numbered.name}/logs holds the log"),
    ):
        bad(args, f"{refusal} of another run", trained)
    # a branch is another run, also where a copy of the run that it leaves lies
    copy = shutil.copytree(trained, tmp_path / "copy")
    bad([*resumed, *folders(copy)], "copy/checkpoints holds the checkpoints of another run", copy)
    # of a run that has lost all but its best checkpoint, too
    (copy / "checkpoints/model_last.pt").unlink()
    bad(train_args(shards, copy, 4), "checkpoints of another run")


def test_going_back_needs_another_folder_or_overwrites_what_came_later(shards, numbered, tmp_path):
    shutil.copytree(numbered, tmp_path, dirs_exist_ok=True)
    args = train_args(shards, tmp_path, 12, "--save_every", 4, "--keep_last", 9)
    folder = tmp_path / "checkpoints"
    back = [*args, "--resume", folder / "model_step_000008.pt", "--max_lr", 1e-3]
    bad(back, "checkpoints holds a checkpoint of step 12, after step 8", tmp_path)
    script(*back, "--overwrite", "--max_steps", 10)
    checkpoints = {path.name: load_checkpoint(path) for path in folder.glob("*.pt")}
    assert {saved["step"] for saved in checkpoints.values()} == {4, 8, 10}
    assert checkpoints["model_last.pt"]["config"]["max_lr"] == 1e-3
    assert sorted(losses(tmp_path)) == list(range(1, 11))  # the rows before step 8 stay


def test_a_damaged_checkpoint_is_named_and_overwritten_with_its_run_on_demand_alone(
    shards, numbered, tmp_path
):
    run = shutil.copytree(numbered, tmp_path / "run")
    last = run / "checkpoints/model_last.pt"
    last.write_bytes(last.read_bytes()[:-1000])
    args = train_args(shards, run, 3)
    for flags in ([], ["--resume", "auto"]):
        bad([*args, *flags], "model_last.pt is damaged or not a checkpoint", run)
    script(*args, "--overwrite")
    assert {load_checkpoint(path)["step"] for path in last.parent.glob("*.pt")} == {3}
    assert sorted(losses(run)) == [1, 2, 3] and sorted(losses(run, "val")) == [0, 3]


def test_the_log_follows_the_checkpoints():
    assert train_options().log_dir == Path("logs")
    assert train_options(checkpoint_dir=Path("a/checkpoints")).log_dir == Path("a/logs")
    assert train_options(checkpoint_dir=Path("/a/b")).log_dir == Path("/a/b/logs")
    folder = FinetuneOptions.checkpoint_folder(["--method", "sft"])
    assert log_folder(folder) == Path("runs/sft/logs")


@pytest.mark.parametrize("log", ["run/logs", "elsewhere/log", "run/checkpoints"])
def test_a_resumed_run_logs_where_it_did_unless_it_was_moved_or_branches_off(
    trained, tmp_path, monkeypatch, log
):
    """From whichever folder it is started, and however its checkpoint is named."""
    run, moved, link = (tmp_path / name for name in ("run", "moved", "link"))
    folder = run / "checkpoints"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    saved = load_checkpoint(trained / "checkpoints/model_last.pt")
    began = TrainOptions(checkpoint_dir=Path("run/checkpoints"), log_dir=Path(log)).to_dict()
    saved["config"] |= {name: began[name] for name in ("checkpoint_dir", "log_dir")}
    torch.save(saved, folder / "model_last.pt")
    shutil.copytree(run, moved)
    link.symlink_to(run)

    def log_dir(cwd, *words):
        monkeypatch.chdir(cwd)
        options, derived, checkpoint = read_options(TrainOptions, "train.py", [*map(str, words)])
        return resolve_options(options, derived, checkpoint)[0].log_dir.resolve()

    for cwd, resume in (
        (tmp_path, "link/checkpoints/model_last.pt"),
        (run, "."),
        (folder, "."),
    ):
        assert log_dir(cwd, "--resume", resume) == tmp_path / log
    assert log_dir(run, "--resume", ".", "--log_dir", "new") == run / "new"
    branch = ("--resume", ".", "--run_dir", tmp_path / "branch")
    assert log_dir(run, *branch) == tmp_path / "branch/logs"
    assert log_dir(moved / "checkpoints", "--resume", ".") == moved / "logs"
    assert log_dir(folder, "--checkpoint_dir", ".") == run / "logs"  # a new run


def check_continued(run, last_step):
    """Check that a run of its own place went two steps on, by its checkpoints and by a log that
    begins there. Return the run's id."""
    assert sorted(losses(run)) == [last_step - 1, last_step]
    assert sorted(losses(run, "val")) == [last_step]
    logged = read_logged_config(run / "logs")
    assert logged["config"]["max_steps"] == last_step
    saved = [load_checkpoint(path) for path in (run / "checkpoints").glob("*.pt")]
    (run_id,) = {content["run_id"] for content in [logged, *saved]}
    # the best of the run that it leaves is not in the folder
    best = load_checkpoint(run / "checkpoints/model_best.pt")
    assert best["best_loss"] == losses(run, "val")[last_step]
    return run_id


def test_a_copy_goes_on_in_its_own_place(numbered, tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    middle = shutil.copy(numbered / "checkpoints/model_step_000008.pt", folder)
    before = contents(numbered)
    script("train.py", "--resume", tmp_path, "--checkpoint_dir", folder, "--max_steps", 10)
    assert check_continued(tmp_path, 10) == load_checkpoint(middle)["run_id"]
    assert contents(numbered) == before


def test_a_branch_goes_on_by_the_command_that_began_it(numbered, tmp_path):
    branch = tmp_path / "branch"
    fourth, eighth = (numbered / f"checkpoints/model_step_00000{step}.pt" for step in (4, 8))
    last = branch / "checkpoints/model_last.pt"
    before = contents(numbered)
    command = ["train.py", "--resume", fourth, "--run_dir", branch, "--max_steps"]
    script(*command, 6)
    run_id, parent = check_continued(branch, 6), load_checkpoint(last)["parent"]
    assert parent == {"run_id": load_checkpoint(fourth)["run_id"], "step": 4}
    assert run_id != parent["run_id"]
    assert "holds this branch of" in script(*command, 9).stdout
    assert sorted(losses(branch)) == [5, 6, 7, 8, 9]
    ended = read_logged_config(branch / "logs")
    assert (ended["run_id"], ended["parent"]) == (run_id, parent)
    assert contents(numbered) == before
    # of another checkpoint it would be another run
    of_another = [*command[:2], eighth, *command[3:]]
    bad([*of_another, 10], "checkpoints of another run", branch)
    script(*command, 5, "--overwrite")
    assert load_checkpoint(last)["step"] == 5
    assert load_checkpoint(last)["run_id"] != run_id


def test_run_dir_is_short_for_the_folder_of_checkpoints(tmp_path):
    (tmp_path / "a.toml").write_text("run_dir = 'a'\nlog_dir = 'c'")
    for options_class, flags, folders_of_run in (
        (TrainOptions, "--run_dir a", ("a/checkpoints", None)),
        (TrainOptions, "--checkpoint_dir b --run_dir a", ("b", None)),  # the longer word wins
        (TrainOptions, f"--run_dir b --config {tmp_path}/a.toml", ("b/checkpoints", "c")),
        (
            FinetuneOptions,
            "--run_dir a --method sft --data x --init_from y",
            ("a/checkpoints", None),
        ),
    ):
        options, _, _ = read_options(options_class, "train.py", flags.split())
        checkpoint_dir, log_dir = folders_of_run
        assert options.checkpoint_dir == Path(checkpoint_dir)
        assert options.log_dir == (log_dir and Path(log_dir))
        assert "run_dir" not in options.to_dict()  # nor in checkpoints


def test_a_run_that_is_killed_in_its_first_steps_keeps_options_id_and_log(shards, tmp_path):
    run, log = tmp_path / "a run", tmp_path / "log"
    args = train_args(shards, run, 10_000, "--eval_every", 0, "--seed", 3, "--log_dir", log)
    process = start(*args)
    last = run / "checkpoints/model_last.pt"
    run_until(process, lambda: last.exists() and "train" in read_metrics(log))
    kill(process)
    assert load_checkpoint(last)["step"] == 0
    before = read_logged_config(log)
    rows = (log / "metrics.jsonl").read_bytes()
    command = f"python train.py --resume '{run}/checkpoints'"
    bad(args, f"of another run; continue it by: {command}; or give another --run_dir")
    script(*shlex.split(command)[1:], "--max_steps", 2)
    again = read_logged_config(log)
    assert again["run_id"] == before["run_id"]
    assert again["config"] == before["config"] | {"max_steps": 2, "min_lr": pytest.approx(3e-4)}
    assert (log / "metrics.jsonl").read_bytes().startswith(rows)
    assert [row["step"] for row in read_metrics(log)["train"]] == [1, 2]


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the run of 20 steps."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def test_files_of_others_are_kept_in_a_folder_that_is_resumed(shards, run):
    content = load_checkpoint(run / "checkpoints/model_last.pt") | {"run_id": "of another run"}
    torch.save(content, run / "checkpoints/model_best.pt")
    args = train_args(shards, run, 22, "--resume", "auto")
    bad(args, "holds the checkpoints of another run", run)


def test_the_lowest_loss_is_known_after_a_resume_and_belongs_to_its_text(shards, run):
    best = run / "checkpoints/model_best.pt"
    # a model that a validation finds worse does not replace the best
    args = train_args(shards, run, 22, "--resume", "auto", "--max_lr", 1.0, "--min_lr", 1.0)
    script(*args)
    assert losses(run, "val")[22] > losses(run, "val")[20]
    assert load_checkpoint(best)["step"] == 20
    script(*args, "--max_steps", 23, "--val_tokens", 2048)
    assert load_checkpoint(best)["step"] == 23


def test_the_weights_to_begin_from_are_not_overwritten(shards, run, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(run / "checkpoints")
    for source in (run, link / "model_best.pt"):
        args = train_args(shards, run, 3, "--init_from", source, "--overwrite")
        bad(args, "would remove the weights of --init_from", run)


def test_unfinished_data_and_another_order_are_warned_of(shards, tmp_path):
    first, second, moved = (tmp_path / name for name in ("first", "second", "moved"))
    for folder in (first, second, moved):
        shutil.copytree(shards, folder)
    manifest = read_manifest(second)
    manifest.complete = False  # interrupted
    (second / manifest.shards.pop(0).file).unlink()
    write_manifest(second, manifest)
    args = train_args(first, tmp_path, 2, "--eval_every", 0, "--data_dir")
    begun = script(*args, first, second).stdout
    assert "second holds only a part of its text: run the sharding to its end" in begun
    args[-1:] = ["--resume", "auto", "--data_dir"]
    same = script(*args, moved, second, "--max_steps", 3).stdout
    assert "data order" not in same
    changes = ("--max_steps", 4, "--total_batch_size", 1024, "--seed", 8)
    other = script(*args, second, first, *changes).stdout
    assert "the data order changes: seed 7 (here 8)" in other
    rows = read_metrics(tmp_path)["train"]
    assert [row["tokens"] for row in rows] == [512, 1024, 1536, 2560]
