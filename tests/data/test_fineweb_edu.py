import gzip
import hashlib
import http.server
import importlib
import io
import json
import random
import shutil
import threading
import time

import hub
import numpy as np
import pyarrow as pa
import pytest
from conftest import SHARED, documents, environment, kill, script, start
from pyarrow import parquet

from config import DataConfig
from data.sharder import locked
from data.shards import find_shards
from data.tokenizer import load_tokenizer
from utils.errors import UserError

fineweb_edu = importlib.import_module("data.fineweb-edu")
README = b"""---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*/*
- config_name: sample-10BT
  data_files:
  - split: train
    path: sample/10BT/*
---
"""
BYTES = ["--tokenizer", "bytes", "--shard_size", 20_001, "--val_fraction", 0.1]


def shard(source, folder, *extra, **options):
    args = ["--input", source, "--local_dir", folder, *BYTES, *extra]
    return script("data/fineweb-edu.py", *args, **options)


def digests(folder):
    return {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest()
        for p in folder.iterdir()
        if p.name != "manifest.json"
    }


def texts_in(folder, split):
    tokens = np.concatenate([s.open() for s in find_shards(folder, split)])
    starts = np.flatnonzero(tokens == 256)
    assert starts[0] == 0  # each document is preceded by end of text
    return [bytes(part[1:].astype(np.uint8)).decode() for part in np.split(tokens, starts[1:])]


@pytest.fixture(scope="module")
def plain(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    shard(corpus, folder, "--num_workers", 1)
    return folder


def test_every_document_stands_once_in_order_on_one_side(plain):
    train, val = texts_in(plain, "train"), texts_in(plain, "val")
    assert sorted(train + val) == sorted(documents())
    assert [text for text in documents() if text in set(train)] == train
    assert 30 < len(val) < 95 and not set(train) & set(val)  # 600 x 0.1, 4 standard deviations


def test_the_manifest_tells_what_is_there(plain):
    manifest = json.loads((plain / "manifest.json").read_text())
    assert manifest["complete"] and manifest["documents"] == 600
    assert (manifest["tokenizer"], manifest["vocab_size"], manifest["eot"]) == ("bytes", 257, 256)
    assert {s["file"]: s["sha256"] for s in manifest["shards"]} == digests(plain)
    assert sum(s["tokens"] for s in manifest["shards"]) == sum(len(t) + 1 for t in documents())


@pytest.mark.parametrize("workers", [2, 4])
def test_the_number_of_workers_changes_nothing(corpus, plain, tmp_path, workers):
    shard(corpus, tmp_path, "--num_workers", workers)
    assert digests(tmp_path) == digests(plain)


def test_stopped_at_max_shards_and_continued_equals_never_stopped(corpus, plain, tmp_path):
    done = shard(corpus, tmp_path, "--max_shards", 3)
    assert "stopped at --max_shards" in done.stdout
    assert len(list(tmp_path.glob("train_*.npy"))) == 3 and find_shards(tmp_path, "val")
    shard(corpus, tmp_path, "--max_shards", 5)
    assert len(list(tmp_path.glob("train_*.npy"))) == 5
    shard(corpus, tmp_path)
    assert digests(tmp_path) == digests(plain)
    assert "complete; 0 tokens" in shard(corpus, tmp_path).stdout


def test_ten_kills_at_random_moments_leave_the_same_shards(tmp_path):
    source, whole, killed = tmp_path / "t.jsonl", tmp_path / "whole", tmp_path / "killed"
    source.write_text("".join(json.dumps({"text": t * 20}) + "\n" for t in documents()))
    big = ["--shard_size", 200_001]
    began = time.monotonic()
    shard(source, whole, *big)
    took = time.monotonic() - began
    rng = random.Random(3)
    for _ in range(10):
        args = ["--input", source, "--local_dir", killed, *BYTES, *big]
        process = start("data/fineweb-edu.py", *args)
        time.sleep(rng.uniform(0.3, 1.0) * took)
        kill(process)
    shard(source, killed, *big)
    assert digests(killed) == digests(whole)


def test_killed_between_rename_and_manifest_continues(corpus, plain, tmp_path):
    shard(corpus, tmp_path, "--max_shards", 2)
    manifest = (tmp_path / "manifest.json").read_text()
    shard(corpus, tmp_path)  # goes on to the end ...
    (tmp_path / "manifest.json").write_text(manifest)  # ... but the manifest never hears of it
    shard(corpus, tmp_path)
    assert digests(tmp_path) == digests(plain)


def test_killed_while_ending_at_max_shards_still_gets_its_val_shard(corpus, plain, tmp_path):
    shard(corpus, tmp_path, "--max_shards", 3)
    whole = digests(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (val,) = [s for s in manifest["shards"] if s["split"] == "val" and s["tokens"] < 20_001]
    manifest["shards"].remove(val)  # as after a kill between the last shard and the end
    manifest["stopped"] = False
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / val["file"]).rename(tmp_path / (val["file"] + ".tmp"))
    shard(corpus, tmp_path, "--max_shards", 3)
    assert digests(tmp_path) == whole
    shard(corpus, tmp_path, "--max_shards", 2)  # fewer than there are: nothing to do
    assert digests(tmp_path) == whole


def test_shards_of_another_origin_are_not_mixed_with_ours(corpus, tmp_path):
    np.save(tmp_path / "edufineweb_train_000001.npy", np.zeros(10, np.uint16))
    done = shard(corpus, tmp_path, code=2)
    assert "another origin" in done.stderr and len(list(tmp_path.iterdir())) == 1


def test_bin_holds_the_same_tokens(corpus, plain, tmp_path):
    shard(corpus, tmp_path, "--format", "bin")
    assert texts_in(tmp_path, "train") == texts_in(plain, "train")


def test_a_document_longer_than_a_shard_spans_several(tmp_path):
    source = tmp_path / "long.txt"
    source.write_text("word " * 30_000)
    shard(source, tmp_path / "out", "--val_fraction", 0)
    assert texts_in(tmp_path / "out", "train") == ["word " * 30_000]
    assert len(list((tmp_path / "out").glob("train_*.npy"))) == 8


def test_folders_of_several_kinds_are_read_in_order_and_blanks_skipped(tmp_path):
    source = tmp_path / "in"
    (source / "sub").mkdir(parents=True)
    (source / ".hidden").mkdir()
    (source / "a.txt").write_text("first")
    (source / "b.py").write_text("second = 2")
    (source / "c.jsonl").write_text('{"text": "third", "n": 1}\n{"text": null}\n{"text": "  "}\n')
    (source / "sub" / "d.txt").write_text("fourth")
    (source / ".hidden" / "e.txt").write_text("never")
    (source / "f.bin").write_bytes(b"never")
    done = shard(source, tmp_path / "out", "--val_fraction", 0)
    assert texts_in(tmp_path / "out", "train") == ["first", "second = 2", "third", "fourth"]
    assert "skipped: 1 without text, 1 empty" in done.stdout
    assert (
        "c.jsonl: 1 rows without text are skipped; the first: line 2: 'text' is null" in done.stderr
    )
    assert "left out: 1 .bin" in done.stderr


def test_long_documents_cut_in_pieces_give_the_same_tokens(monkeypatch):
    text = " ".join(documents()[:20]) + "\n\n  \t end" + "x" * 500 + "   "
    monkeypatch.setattr(fineweb_edu, "PIECE_CHARS", 37)
    parts = list(fineweb_edu.split_text(text))
    assert "".join(parts) == text and len(parts) > 50
    try:
        tokenizer = load_tokenizer("gpt2")
    except ValueError as error:
        pytest.skip(str(error))
    assert np.concatenate([tokenizer.encode(p) for p in parts]).tolist() == (
        tokenizer.encode(text).tolist()
    )


def test_other_settings_in_the_same_folder_are_refused(corpus, plain):
    before = digests(plain)
    done = shard(corpus, plain, "--shard_size", 1000, code=2)
    assert "shard_size 20001, not 1000" in done.stderr and digests(plain) == before


def test_missing_input_is_a_sentence_and_writes_nothing(tmp_path):
    done = shard(tmp_path / "none.parquet", tmp_path / "out", code=2)
    assert "does not exist" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_without_a_terminal_lines_tell_how_far_it_is(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fineweb_edu, "SECONDS_PER_LINE", -1)
    fineweb_edu.prepare(DataConfig(tmp_path / "out", input=(str(corpus),), tokenizer="bytes"))
    lines = [line for line in capsys.readouterr().out.splitlines() if " documents, " in line]
    assert len(lines) > 3 and lines[0].endswith(" tokens")


def test_a_file_in_the_place_of_the_folder_is_a_sentence(corpus, tmp_path):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "x"):
        args = ["--input", corpus, "--tokenizer", "bytes", "--local_dir", out]
        assert "is a file; give a folder" in script("data/fineweb-edu.py", *args, code=2).stderr


def test_broken_parquet_is_a_sentence(tmp_path):
    (tmp_path / "bad.parquet").write_bytes(b"not parquet")
    done = shard(tmp_path / "bad.parquet", tmp_path / "out", code=2)
    assert "bad.parquet cannot be read" in done.stderr and "Traceback" not in done.stderr


@pytest.fixture
def small_batches(monkeypatch):
    """Let a read run ahead of the shards by a few documents only."""
    monkeypatch.setattr("data.source.BATCH_TEXTS", 5)


def prepare(*inputs, out, **options):
    """Shard in this process as `shard` does."""
    settings = {"tokenizer": "bytes", "shard_size": 20_001, "val_fraction": 0.1, **options}
    settings |= {"num_workers": 1}
    return fineweb_edu.prepare(DataConfig(out, input=tuple(map(str, inputs)), **settings))


def test_input_that_changed_is_not_mixed_with_what_it_was(corpus, tmp_path):
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    rows = corpus.read_bytes()
    (source / "a.jsonl").write_bytes(rows)
    (source / "b.txt").write_text("of the end")
    prepare(source, out=out, max_shards=2)
    before = digests(out)
    (source / "a.jsonl").write_bytes(rows.replace(b"text", b"TEXT", 1))
    with pytest.raises(UserError, match="not those of --input, or were changed since; restore"):
        prepare(source, out=out)
    (source / "a.jsonl").write_bytes(rows)
    (source / "0.txt").write_text("before what was read")
    with pytest.raises(UserError, match="not those of --input"):
        prepare(source, out=out)
    (source / "0.txt").unlink()
    assert digests(out) == before
    prepare(source, out=out)
    (source / "c.txt").write_text("after the end")
    with pytest.raises(UserError, match="not those of --input"):
        prepare(source, out=out)


@pytest.mark.parametrize("remedy", ["repair", "remove", "replace"])
def test_a_damaged_file_that_is_repaired_or_removed_costs_no_shard(tmp_path, small_batches, remedy):
    source, out, whole = tmp_path / "in", tmp_path / "out", tmp_path / "whole"
    source.mkdir()
    rows = [json.dumps({"text": text}) + "\n" for text in documents()]
    for i in range(6):
        (source / f"{i}.jsonl.gz").write_bytes(gzip.compress("".join(rows[i::6]).encode()))
    good = (source / "4.jsonl.gz").read_bytes()
    (source / "4.jsonl.gz").write_bytes(good[:80])
    with pytest.raises(UserError, match="4.jsonl.gz cannot be read .*; repair or remove it"):
        prepare(source, out=out)
    kept = {path.name: path.stat().st_mtime_ns for path in out.glob("*_??????.npy")}
    assert len(kept) > 3
    if remedy == "remove":
        (source / "4.jsonl.gz").unlink()
        (source / "5.jsonl.gz").rename(source / "6.jsonl.gz")
    else:
        (source / "4.jsonl.gz").write_bytes(good if remedy == "repair" else gzip.compress(b""))
    prepare(*sorted(source.iterdir()), out=out)  # as a shell lists them
    prepare(source, out=whole)
    assert digests(out) == digests(whole)
    assert all((out / name).stat().st_mtime_ns == at for name, at in kept.items())


def test_a_file_that_is_partly_in_shards_may_only_be_repaired_behind_these(tmp_path, small_batches):
    source, out, whole = tmp_path / "a.jsonl.gz", tmp_path / "out", tmp_path / "whole"
    rows = [json.dumps({"text": text}) + "\n" for text in documents()]
    good = gzip.compress("".join(rows).encode())
    source.write_bytes(good[: len(good) // 2])
    with pytest.raises(UserError, match="cannot be read .* are in shards already: repair it so"):
        prepare(source, out=out)
    shards = len(list(out.glob("train_??????.npy")))
    source.write_bytes(gzip.compress("".join(["{}\n", *rows[1:]]).encode()))
    with pytest.raises(UserError, match="were changed since; restore"):
        prepare(source, out=out)
    source.write_bytes(good)
    for limit in (shards + 1, None):
        prepare(source, out=out, max_shards=limit)
    prepare(source, out=whole)
    assert digests(out) == digests(whole)


def test_the_same_folder_may_be_spelled_in_another_way(parts, tmp_path, monkeypatch):
    prepare(f"{parts}/", out=tmp_path / "out", max_shards=2)
    prepare(parts, out=tmp_path / "out", max_shards=3)
    monkeypatch.chdir(parts)
    prepare(".", out=tmp_path / "out")
    prepare(parts, out=tmp_path / "whole")
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
    assert prepare(f"{parts}/.", out=tmp_path / "out")[1] == 0


def test_a_manifest_from_before_it_told_what_was_read_is_continued(corpus, plain, tmp_path):
    prepare(corpus, out=tmp_path, max_shards=2)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    del manifest["share_digest"], manifest["state"]["read"]
    del manifest["state"]["source"]["place"]["checksum"]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    prepare(corpus, out=tmp_path, max_shards=3)
    prepare(corpus, out=tmp_path)
    assert digests(tmp_path) == digests(plain)


def test_a_file_that_changes_while_it_is_read_is_named(corpus, tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(corpus.read_bytes())
    written = fineweb_edu.write_shards

    def write_shards(*args):
        with (tmp_path / "a.jsonl").open("a") as file:
            file.write('{"text": "late"}\n')
        return written(*args)

    monkeypatch.setattr(fineweb_edu, "write_shards", write_shards)
    with pytest.raises(UserError, match="a.jsonl was changed while it was read; once nothing"):
        in_process(monkeypatch, str(tmp_path / "a.jsonl"), tmp_path / "out", [])
    assert not json.loads((tmp_path / "out" / "manifest.json").read_text())["complete"]


def test_text_that_the_tokenizer_gives_up_on_is_skipped(tmp_path):
    try:
        load_tokenizer("gpt2")
    except ValueError as error:
        pytest.skip(str(error))
    rows = ["fine", "table" + " " * 1_000_000 + "end", "\ud800", "\ud800", "fine too"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in rows))
    args = ["--input", tmp_path / "a.jsonl", "--local_dir", tmp_path / "out", "--val_fraction", 0]
    done = script("data/fineweb-edu.py", *args)
    assert "skipped: 1 not tokenizable, 2 not valid Unicode" in done.stdout
    for row, reason in ((2, "not tokenizable"), (3, "not valid Unicode")):
        assert f"a.jsonl, row {row}: a text that is {reason} is skipped; further" in done.stderr
    assert "row 4" not in done.stderr
    assert sum(len(s.open()) for s in find_shards(tmp_path / "out", "train")) == 2 + 3


def test_two_processes_do_not_shard_into_one_folder(corpus, tmp_path):
    with locked(tmp_path):
        assert "another process is sharding" in shard(corpus, tmp_path, code=2).stderr
    assert not list(tmp_path.iterdir())


def fill(folder, free):
    """Leaves `free` bytes of a disk, by a file that stands beside what is sharded."""
    size = shutil.disk_usage(folder).free - free
    (folder / "filler").write_bytes(b"\0" * size)


def test_no_shard_is_begun_without_room_for_it(corpus, plain, small_disk):
    out = small_disk / "out"
    shard(corpus, out, "--max_shards", 2)
    fill(small_disk, 60_000)  # bytes: a shard is 40,002
    done = shard(corpus, out, code=2)
    assert "needs 40.0 kB" in done.stderr and "kB free" in done.stderr
    assert "Traceback" not in done.stderr and texts_in(out, "train")
    (small_disk / "filler").unlink()
    shard(corpus, out)
    assert digests(out) == digests(plain)


def test_what_a_killed_run_had_begun_does_not_take_the_room_twice(tmp_path, small_disk):
    (tmp_path / "a.txt").write_text("word " * 3000)
    (small_disk / "out").mkdir()
    (small_disk / "out" / "train_000000.npy.tmp").write_bytes(b"\0" * 40_000)
    fill(small_disk, 30_000)  # bytes, of the 40,002 of a shard
    shard(tmp_path / "a.txt", small_disk / "out", "--val_fraction", 0)
    assert texts_in(small_disk / "out", "train") == ["word " * 3000]


def test_a_disk_that_fills_while_a_shard_is_written_is_a_sentence(corpus, tmp_path, small_disk):
    half = ["--shard_size", 50_001, "--val_fraction", 0.5]
    shard(corpus, tmp_path / "whole", *half)
    fill(small_disk, 150_000)  # room for either split's first shard, of 100,002 bytes, not for both
    done = shard(corpus, small_disk / "out", *half, code=2)
    assert "failed (No space left on device)" in done.stderr and "Traceback" not in done.stderr
    (small_disk / "filler").unlink()
    shard(corpus, small_disk / "out", *half)
    assert digests(small_disk / "out") == digests(tmp_path / "whole")


def test_what_does_not_fit_as_a_whole_is_not_begun(corpus, small_disk):
    out = small_disk / "out"
    done = shard(corpus, out, "--max_shards", 53, code=2)  # of 40,002 bytes; the disk has 2,097,152
    assert "needs 2.1 MB" in done.stderr and not digests(out)
    shard(corpus, out, "--max_shards", 3)
    whole = digests(out)
    assert "needs 2.0 MB" in shard(corpus, out, "--max_shards", 53, code=2).stderr
    assert digests(out) == whole and texts_in(out, "val")
    shard(corpus, out, "--max_shards", 51)  # what is there does not count again; the source ends
    hub = ["--local_dir", small_disk / "hub", "--tokenizer", "bytes"]
    done = script("data/fineweb-edu.py", *hub, code=2)
    assert "sharding 10,000,000,000 tokens needs 20.0 GB" in done.stderr


def test_workers_take_every_nth_file_and_sides_do_not_change(parts, tmp_path):
    shard(parts, tmp_path / "all")
    whole = {split: texts_in(tmp_path / "all", split) for split in ("train", "val")}
    seen = {"train": [], "val": []}
    for i in range(2):
        out = tmp_path / str(i)
        shard(parts, out, "--worker_index", i, "--worker_count", 2)
        for split in seen:
            seen[split].append(texts_in(out, split))
    third = [t for t in documents()[360:480] if t in whole["train"]]
    assert seen["train"][1] == [t for t in documents()[120:240] if t in whole["train"]] + third
    for split in seen:
        assert sorted(sum(seen[split], [])) == sorted(whole[split])


def test_a_worker_stopped_and_killed_and_continued_ends_with_the_same_bytes(parts, tmp_path):
    worker = ["--worker_index", 0, "--worker_count", 2]
    shard(parts, tmp_path / "whole", *worker)
    shard(parts, tmp_path / "out", *worker, "--max_shards", 1)
    manifest = (tmp_path / "out" / "manifest.json").read_text()
    shard(parts, tmp_path / "out", *worker)
    (tmp_path / "out" / "manifest.json").write_text(manifest)  # killed before it was written
    shard(parts, tmp_path / "out", *worker)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_a_folder_begun_as_one_worker_is_not_continued_as_another(parts, tmp_path):
    shard(parts, tmp_path, "--worker_index", 1, "--worker_count", 2)
    before = digests(tmp_path)
    for other, message in (
        (["--worker_index", 0, "--worker_count", 2], "worker_index 1, not 0"),
        (["--worker_index", 1, "--worker_count", 3], "worker_count 2, not 3"),
        ([], "worker_index 1, not 0"),
    ):
        assert message in shard(parts, tmp_path, *other, code=2).stderr
    assert digests(tmp_path) == before


def test_a_manifest_from_before_there_were_workers_is_continued(corpus, plain, tmp_path):
    shard(corpus, tmp_path, "--max_shards", 2)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    del manifest["worker_index"], manifest["worker_count"]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    shard(corpus, tmp_path)
    assert digests(tmp_path) == digests(plain)


def test_a_worker_without_a_file_is_told_so_and_writes_nothing(parts, tmp_path):
    out = tmp_path / "out"
    done = shard(parts, out, "--worker_index", 5, "--worker_count", 6, code=2)
    assert "is 5 files; lower --worker_count to 5" in done.stderr and not out.exists()
    for index, count in ((2, 2), (-1, 2), (0, 0)):
        args = ["--worker_index", index, "--worker_count", count]
        assert "below --worker_count" in shard(parts, out, *args, code=2).stderr


@pytest.fixture
def hub_files():
    """A dataset laid out as FineWeb-Edu is: two configurations, several parquet files each."""
    files = {"README.md": README}
    for i in range(4):
        table = pa.table({"text": documents()[150 * i : 150 * (i + 1)], "id": range(150)})
        parquet.write_table(table, buffer := io.BytesIO(), row_group_size=40)
        files[f"sample/10BT/{i:03d}_00000.parquet"] = buffer.getvalue()
        files[f"data/CC-MAIN/{i:03d}_00000.parquet"] = b"not this one"
    return files


def test_a_hub_dataset_is_streamed_and_continued_at_the_same_commit(hub_files, plain, tmp_path):
    with hub.serve(hub_files) as (address, handler):
        env = {**environment(), "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": address}
        env["HF_HOME"] = str(tmp_path / "home")
        args = ["--dataset", "me/corpus", "--local_dir", tmp_path / "out", *BYTES]
        script("data/fineweb-edu.py", *args, "--max_shards", 2, env=env)
        handler.failures, handler.newest = 1, hub.LATER  # which has no files
        done = script("data/fineweb-edu.py", *args, env=env)
        assert "read failed" in done.stderr
        assert digests(tmp_path / "out") == digests(plain)
        assert not any("CC-MAIN/0" in path for path in handler.asked)
        manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
        assert manifest["state"]["source"]["revision"] == hub.COMMIT
        args[1], args[3] = "me/nothing", tmp_path / "none"
        done = script("data/fineweb-edu.py", *args, env=env, code=2)
        assert "me/nothing" in done.stderr and "Traceback" not in done.stderr


def test_workers_share_the_files_of_a_hub_dataset(hub_files, tmp_path):
    with hub.serve(hub_files) as (address, _):
        env = {**environment(), "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": address}
        env["HF_HOME"] = str(tmp_path / "home")
        args = ["--dataset", "me/corpus", *BYTES, "--val_fraction", 0, "--worker_count", 3]
        for i, first in enumerate((0, 150, 300)):
            out = ["--local_dir", tmp_path / str(i), "--worker_index", i]
            script("data/fineweb-edu.py", *args, *out, "--max_shards", 1, env=env)
            script("data/fineweb-edu.py", *args, *out, env=env)
            expected = documents()[first : first + 150] + (documents()[450:] if i == 0 else [])
            assert texts_in(tmp_path / str(i), "train") == expected
        args[-1] = 5
        out = ["--local_dir", tmp_path / "none", "--worker_index", 4]
        done = script("data/fineweb-edu.py", *args, *out, env=env, code=2)
        assert "is 4 files; lower --worker_count to 4" in done.stderr
        args[-1], out[-1] = 4, 3  # and so, in the same folder
        script("data/fineweb-edu.py", *args, *out, env=env)
        assert texts_in(tmp_path / "none", "train") == documents()[450:]


class Flaky(http.server.SimpleHTTPRequestHandler):
    """Serves a file, after it has failed a number of times."""

    failures = 0

    def do_GET(self):
        if type(self).failures:
            type(self).failures -= 1
            self.send_error(503)
        else:
            super().do_GET()

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture
def server(corpus):
    def handler(*args):
        return Flaky(*args, directory=str(corpus.parent))

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}/text.jsonl"
        httpd.shutdown()


def in_process(monkeypatch, url, folder, waits):
    config = fineweb_edu.DataConfig(
        local_dir=folder, input=(url,), tokenizer="bytes", shard_size=20_001, val_fraction=0.1
    )
    monkeypatch.setattr(fineweb_edu.time, "sleep", waits.append)
    fineweb_edu.main(config)


def test_failed_downloads_are_tried_again(server, plain, tmp_path, monkeypatch):
    waits = []
    Flaky.failures = 4
    in_process(monkeypatch, server, tmp_path, waits)
    assert digests(tmp_path) == digests(plain) and [w for w in waits if w >= 1]


def test_a_server_that_stays_away_ends_in_a_sentence(server, tmp_path, monkeypatch):
    Flaky.failures = 10**6
    waits = []
    with pytest.raises(UserError, match="run the same command again to continue"):
        in_process(monkeypatch, server, tmp_path, waits)
    Flaky.failures = 0
    assert {1, 2, 4, 8, 16, 32} <= set(waits)


def test_a_damaged_download_ends_at_once(server, corpus, tmp_path, monkeypatch):
    (corpus.parent / "bad.txt.gz").write_bytes(b"not compressed")
    waits = []
    with pytest.raises(UserError, match="bad.txt.gz cannot be read .BadGzipFile"):
        in_process(monkeypatch, server.replace("text.jsonl", "bad.txt.gz"), tmp_path, waits)
    assert not [w for w in waits if w >= 1]


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data/novels-*.parquet")
def test_parquet_through_gpt2_gives_every_token(tmp_path):
    novels = sorted((SHARED / "data").glob("novels-*.parquet"))
    try:
        load_tokenizer("gpt2")
    except ValueError as error:
        pytest.skip(str(error))
    args = ["--input", *novels, "--local_dir", tmp_path, "--shard_size", 1_000_000]
    script("data/fineweb-edu.py", *args)
    tokens = [s.open() for split in ("train", "val") for s in find_shards(tmp_path, split)]
    assert sum(map(len, tokens)) == 11_617_125 + 8_577
    assert sum(int((t == 50256).sum()) for t in tokens) == 8_577
