import errno
import json
import os
import shutil
from dataclasses import replace

import pytest
from conftest import script
from test_fineweb_edu import digests, fill, fineweb_edu, shard, texts_in

from config import DataConfig
from data import merge as module
from data.merge import merge
from data.sharder import Sharder, locked
from data.shards import find_shards, is_interrupted
from utils.errors import UserError


def begin(parts, folder, *extra):
    """Shards as workers 0 and 1 of 2; their folders, the later worker's first."""
    folders = [folder / "worker1", folder / "worker0"]
    for i, out in enumerate(reversed(folders)):
        shard(parts, out, "--worker_index", i, "--worker_count", 2, *extra)
    return folders


def edit(folder, **changes):
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture(scope="module")
def workers(parts, tmp_path_factory):
    return begin(parts, tmp_path_factory.mktemp("workers"))


@pytest.fixture
def copies(workers, tmp_path):
    """The workers' folders, to be spoiled."""
    return [shutil.copytree(folder, tmp_path / folder.name) for folder in workers]


def run(folders, out, code=0):
    return script("data/fineweb-edu.py", "--merge", *folders, "--local_dir", out, code=code)


def test_merged_workers_hold_what_an_unsplit_run_holds(parts, workers, tmp_path):
    shard(parts, tmp_path / "all")
    assert "complete" in run(workers, tmp_path / "out").stdout
    sums = []
    for split in ("train", "val"):
        merged, whole = (texts_in(tmp_path / name, split) for name in ("out", "all"))
        first, second = (texts_in(folder, split) for folder in reversed(workers))
        assert sorted(merged) == sorted(whole) and merged == first + second
    for name in ("out", "all"):
        manifest = json.loads((tmp_path / name / "manifest.json").read_text())
        sums.append((manifest["documents"], sum(s["tokens"] for s in manifest["shards"])))
    assert sums[0] == sums[1]


def test_the_loader_verifies_a_merged_folder(workers, tmp_path):
    run(workers, tmp_path)
    done = script("data/verify.py", "--data_dir", tmp_path, "--block_size", 64)
    shards = len(list(tmp_path.glob("*.npy")))
    assert f"ids and {shards} checksums in order" in done.stdout


def no_link(source, target):
    raise OSError(errno.EXDEV, "another disk")


@pytest.mark.parametrize("links", [True, False])
def test_killed_at_any_shard_and_run_again_ends_the_same(workers, tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(os, "link", no_link)
    expected = merge(tuple(workers), tmp_path / "whole")
    first = tmp_path / "whole" / "train_000000.npy"
    assert first.samefile(workers[1] / first.name) == links
    real = module.link_or_copy
    for kill in range(len(expected["shards"])):
        out, left = tmp_path / str(kill), iter(range(kill))

        def link_or_copy(*args, left=left):
            next(left)  # StopIteration where the kill is
            real(*args)

        monkeypatch.setattr(module, "link_or_copy", link_or_copy)
        with pytest.raises(StopIteration):
            merge(tuple(workers), out)
        assert is_interrupted(out)
        monkeypatch.setattr(module, "link_or_copy", real)
        assert merge(tuple(workers), out) == merge(tuple(workers), out) == expected
        assert digests(out) == digests(tmp_path / "whole")
        assert {s["file"]: s["sha256"] for s in expected["shards"]} == digests(out)


def test_a_part_of_a_killed_merge_is_refused(parts, workers, tmp_path, monkeypatch):
    real, linked = module.link_or_copy, []

    def link_or_copy(source, target, full):  # one shard of each split, then the kill
        if len({path.name.partition("_")[0] for path in linked}) == 2:
            raise KeyboardInterrupt
        real(source, target, full)
        linked.append(target)

    monkeypatch.setattr(module, "link_or_copy", link_or_copy)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        merge(tuple(workers), out)
    with pytest.raises(UserError, match="--merge was interrupted: run the same command again"):
        [find_shards(out, split) for split in ("train", "val")]
    verified = script("data/verify.py", "--data_dir", out, "--block_size", 64, code=2)
    assert "run the same command again" in verified.stderr
    assert "cannot be continued" in shard(parts, out, code=2).stderr


def test_a_worker_that_goes_on_leaves_the_merged_folder_as_it_was(parts, tmp_path):
    folders = begin(parts, tmp_path, "--max_shards", 2)
    out = tmp_path / "out"
    assert "stopped at --max_shards" in run(folders, out).stdout
    before = digests(out)
    begin(parts, tmp_path)
    assert digests(out) == before
    assert "holds other shards" in run(folders, out, code=2).stderr and digests(out) == before


def test_a_merged_folder_cannot_go_on_but_a_complete_one_need_not(parts, workers, tmp_path):
    run(begin(parts, tmp_path, "--max_shards", 2), tmp_path / "part")
    before = digests(tmp_path / "part")
    for extra in ([], ["--max_shards", 9]):
        done = shard(parts, tmp_path / "part", *extra, code=2)
        assert "merged from 2 workers' folders and cannot be continued" in done.stderr
    run(workers, tmp_path / "whole")
    assert "complete; 0 tokens" in shard(parts, tmp_path / "whole").stdout
    other = ["--worker_index", 1, "--worker_count", 2]
    assert "worker_index 0, not 1" in shard(parts, tmp_path / "whole", *other, code=2).stderr
    assert digests(tmp_path / "part") == before


def test_a_folder_whose_run_has_not_ended_is_refused(copies, tmp_path):
    edit(copies[0], complete=False)
    assert "worker1 is unfinished" in run(copies, tmp_path / "out", code=2).stderr
    edit(copies[0], complete=True)
    with locked(copies[1]), pytest.raises(UserError, match="another process"):
        merge(tuple(copies), tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_a_stopped_worker_that_has_begun_again_is_half_done(parts, tmp_path, monkeypatch):
    def die(*args):
        raise KeyboardInterrupt

    shard(parts, tmp_path / "a", "--max_shards", 1)
    monkeypatch.setattr(Sharder, "write", die)
    config = DataConfig(tmp_path / "a", input=(str(parts),), tokenizer="bytes")
    with pytest.raises(KeyboardInterrupt):
        fineweb_edu.main(replace(config, shard_size=20_001, val_fraction=0.1))
    with pytest.raises(UserError, match="a is unfinished"):
        merge((tmp_path / "a",), tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"worker_index": 1}, "--worker_index 1 1; name one folder"),
        ({"worker_count": 3}, r"worker0 was made with worker_count 3, but .* with 2"),
        ({"tokenizer": "gpt2"}, "made with tokenizer gpt2"),
        ({"val_fraction": 0.2}, "made with val_fraction 0.2"),
        ({"shard_size": 7}, "made with shard_size 7"),
        ({"source": ["other"]}, "made with source"),
        ({"files_digest": "0"}, "made with files_digest"),
    ],
)
def test_folders_that_are_not_of_one_run_are_refused(copies, tmp_path, changes, message):
    edit(copies[1], **changes)
    with pytest.raises(UserError, match=message):
        merge(tuple(copies), tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_several_commits_of_a_dataset_are_refused(copies, tmp_path):
    for folder, commit in zip(copies, ("beef", "c0ffee"), strict=True):
        edit(folder, state={"source": {"revision": commit, "place": None}})
    with pytest.raises(UserError, match="several commits of the dataset .beef, c0ffee."):
        merge(tuple(copies), tmp_path / "out")


def test_missing_workers_and_shards_are_named(copies, workers, tmp_path):
    out = tmp_path / "out"
    assert "--worker_index 1; name one" in run(copies[:1], out, code=2).stderr
    done = run([*copies, workers[0]], out, code=2)
    assert "--worker_index 0 1 1; name one folder" in done.stderr
    assert "none holds no manifest.json" in run([*copies, tmp_path / "none"], out, code=2).stderr
    assert "twice" in run([*copies, copies[0]], out, code=2).stderr
    assert "name different folders" in run(copies, copies[0], code=2).stderr
    (copies[0] / "train_000001.npy").unlink()
    assert "train_000001.npy is missing" in run(copies, out, code=2).stderr
    (copies[0] / "manifest.json").unlink()
    assert "holds no manifest.json" in run(copies, out, code=2).stderr


def test_other_shards_in_the_folder_are_left_alone(workers, tmp_path):
    for name in ("edufineweb_train_000001.npy", "train_000000.npy"):
        out = tmp_path / name
        out.mkdir()
        (out / name).write_bytes(b"mine")
        with pytest.raises(UserError, match="merge into an empty folder"):
            merge(tuple(workers), out)
        assert (out / name).read_bytes() == b"mine" and len(list(out.iterdir())) == 1


def test_copies_without_room_are_a_sentence_and_can_be_made_later(workers, tmp_path, small_disk):
    merge(tuple(workers), tmp_path / "whole")
    fill(small_disk, 100_000)
    done = run(workers, small_disk / "out", code=2)
    assert "train_000002.npy needs 40.1 kB" in done.stderr and "Traceback" not in done.stderr
    (small_disk / "filler").unlink()
    run(workers, small_disk / "out")
    assert digests(small_disk / "out") == digests(tmp_path / "whole")
