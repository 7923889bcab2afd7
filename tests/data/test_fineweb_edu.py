import hashlib
import importlib
import io
import json
import os
import shutil
import time
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace

import hub
import numpy as np
import pyarrow as pa
import pytest
from conftest import documents, environment, kill, script, start
from pyarrow import parquet

from data.shards import TokenStream, open_folder
from utils.cli import parse, user_message
from utils.errors import UserError
from utils.files import lock_folder

fineweb_edu = importlib.import_module("data.fineweb-edu")
README = b"""---
configs:
- {config_name: default, data_files: [{split: train, path: data/*/*}]}
- {config_name: sample-10BT, data_files: [{split: train, path: sample/10BT/*}]}
---
"""
BYTES = ["--tokenizer", "bytes", "--shard_size", 20_001, "--val_fraction", 0.1]


def shard(source, folder, *extra, code=0):
    """Run data/fineweb-edu.py in this process; return what it prints."""
    sources = source if isinstance(source, list) else [source]
    args = ["--input", *sources, "--local_dir", folder, *BYTES, *extra]
    config = parse(fineweb_edu.DataConfig, [str(arg) for arg in args])
    message = None
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            fineweb_edu.main(config)
        except (UserError, OSError) as error:
            message = user_message(error)
    assert (message is not None) == bool(code), message  # code 2: refused in a sentence
    return SimpleNamespace(stdout=out.getvalue(), stderr=f"{err.getvalue()}{message}")


def digests(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.glob("*_*")}


def texts_in(folder, split):
    tokens = np.concatenate([s.read() for s in open_folder(folder, split).shards])
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
    for split in ("train", "val"):
        assert manifest["bytes"][split] == sum(len(t.encode()) for t in texts_in(plain, split))


def test_a_column_that_holds_no_text_is_refused(tmp_path):
    parquet.write_table(pa.table({"ids": [[97] * 100, None, [98]]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="holds no text .* skipped: 3 without text"):
        prepare(tmp_path / "a.parquet", tmp_path / "none", text_column="ids")


def test_stopped_at_max_shards_and_continued_equals_never_stopped(corpus, plain, tmp_path):
    assert "stopped at --max_shards" in shard(corpus, tmp_path, "--max_shards", 3).stdout
    assert len(list(tmp_path.glob("train_*.npy"))) == 3 and open_folder(tmp_path, "val").shards
    shard(corpus, tmp_path, "--max_shards", 5)
    assert len(list(tmp_path.glob("train_*.npy"))) == 5
    shard(corpus, tmp_path, "--num_workers", 4)
    assert digests(tmp_path) == digests(plain)
    sizes = [json.loads((x / "manifest.json").read_text())["bytes"] for x in (tmp_path, plain)]
    assert sizes[0] == sizes[1]
    assert "\n0 new tokens" in shard(corpus, tmp_path).stdout


def test_kills_while_shards_are_written_leave_the_same_shards(tmp_path):
    source, whole, killed = tmp_path / "t.jsonl", tmp_path / "whole", tmp_path / "killed"
    source.write_text("".join(json.dumps({"text": t * 20}) + "\n" for t in documents()))
    big = ["--shard_size", 200_001]
    shard(source, whole, *big)
    for num_shards in (1, 3, 5):  # killed while the next one is written
        args = ["--input", source, "--local_dir", killed, *BYTES, *big]
        process = start("data/fineweb-edu.py", *args)
        while len(list(killed.glob("train_*.npy"))) < num_shards:
            assert process.poll() is None
            time.sleep(0.01)
        kill(process)
    shard(source, killed, *big)
    assert digests(killed) == digests(whole)


def test_killed_between_rename_and_manifest_continues(corpus, plain, tmp_path):
    shard(corpus, tmp_path, "--max_shards", 2)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    full = [entry for entry in manifest["shards"] if entry["tokens"] == 20_001]
    manifest |= {"shards": full, "stopped": False}  # as when it goes on to the end ...
    shard(corpus, tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))  # ... but never hears of it
    shard(corpus, tmp_path)
    assert digests(tmp_path) == digests(plain)


def test_shards_of_other_settings_or_files_foreign_or_damaged_ones_are_refused(corpus, tmp_path):
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    shutil.copy(corpus, source / "a.jsonl")
    shard(source, out, "--max_shards", 1)
    before = digests(out)

    def refused(*extra):
        return shard(source, out, *extra, code=2).stderr

    expected = "holds shards of shard_size 20001; give another --local_dir"
    assert expected in refused("--shard_size", 1000)
    (source / "b.txt").write_text("more")
    assert "holds shards of files {" in refused()
    (source / "b.txt").unlink()
    assert digests(out) == before
    path = out / "train_000000.npy"
    path.write_bytes(path.read_bytes()[:2000])
    assert f"{path} is damaged" in refused()
    (out / "manifest.json").unlink()
    assert "holds shards without a manifest" in refused()


def prepare(source, out, **options):
    """Shard in this process as `shard` does."""
    options = {"shard_size": 20_001, "val_fraction": 0.1, "num_workers": 2, **options}
    config = fineweb_edu.DataConfig(input=(str(source),), tokenizer="bytes", **options)
    return fineweb_edu.prepare(config, out)[0]


@pytest.mark.parametrize("count", [1, 3])
def test_where_no_text_is_hashed_into_a_split_pieces_of_the_last_are_held_out(tmp_path, count):
    source, options = tmp_path / "in", {"val_fraction": 1e-9}
    source.mkdir()
    for i in range(count):
        (source / f"{i}.txt").write_text("\n".join(documents()[i::count]))

    def tokens(folder):
        found = (TokenStream([open_folder(folder, split)]) for split in ("train", "val"))
        return [stream.tokens(0, len(stream)).tolist() for stream in found]

    whole = prepare(source, tmp_path / "a", **options)
    held_out, expected = whole["held_out"], tokens(tmp_path / "a")
    num_bytes = sum(file.stat().st_size for file in source.iterdir())
    assert sum(whole["bytes"].values()) == pytest.approx(num_bytes, abs=2)
    assert whole["bytes"]["val"] == pytest.approx(held_out, rel=0.01)
    assert len(expected[1]) == 10 + held_out // 10 * 10 and expected[1].count(256) == 10
    last = (source / f"{count - 1}.txt").read_text()
    assert held_out == (1 + len(last.encode())) // 10
    train, val = (texts_in(tmp_path / "a", split) for split in ("train", "val"))
    pieces = zip(train[count - 1 :], val, strict=True)
    assert "".join(x for piece in pieces for x in piece) == last
    options["shard_size"] = 9_001
    prepare(source, tmp_path / "b", **options)
    assert tokens(tmp_path / "b") == expected
    shards = max(int(p.stem[6:]) for p in (tmp_path / "b").glob("train_*.npy"))
    for stop in (1, shards - 1, shards, shards + 1):  # also within the last text, and continued
        manifest = prepare(source, tmp_path / str(stop), max_shards=stop, **options)
        written = sum(entry["tokens"] for entry in manifest["shards"])
        assert sum(manifest["bytes"].values()) == pytest.approx(written, abs=count + 20)
        manifest = prepare(source, tmp_path / str(stop), **options)
        assert tokens(tmp_path / str(stop)) == expected
        assert manifest["bytes"] == pytest.approx(whole["bytes"], abs=2)


def test_what_is_held_out_of_one_text_is_of_all_its_parts(tmp_path):
    text = "".join(documents()[:100])
    halves = [text.upper(), text.lower()]  # as two languages
    (tmp_path / "a.txt").write_text("".join(halves))
    manifest = prepare(tmp_path / "a.txt", tmp_path / "out", val_fraction=1e-9)
    val = texts_in(tmp_path / "out", "val")
    assert len(val) == 10 and all(piece[:50] in halves[i // 5] for i, piece in enumerate(val))
    assert manifest["held_out"] and not manifest["skipped"]


def test_skipped_documents_are_counted_once_by_a_run_that_was_stopped(tmp_path):
    source = tmp_path / "a.jsonl"
    rows = [{"text": t} for text in documents()[:40] for t in (text, None, " ")]
    source.write_text("\n".join(map(json.dumps, rows)))
    for shards in (*range(1, 9), None):
        manifest = prepare(source, tmp_path / "out", shard_size=1000, max_shards=shards)
    assert manifest["complete"] and manifest["documents"] == 40
    assert manifest["skipped"] == {"without text": 40, "empty": 40}
    source.write_text(" \n")
    assert (
        "holds no text for this worker; skipped: none"
        in shard(source, tmp_path / "none", code=2).stderr
    )


def test_two_processes_do_not_shard_into_one_folder(corpus, tmp_path):
    lock = lock_folder(tmp_path, "sharding into")
    assert "another process is sharding" in shard(corpus, tmp_path, code=2).stderr
    os.close(lock)
    assert not digests(tmp_path)


def test_a_disk_that_fills_while_a_shard_is_written_is_a_sentence(corpus, tmp_path, small_disk):
    half = ["--shard_size", 50_001, "--val_fraction", 0.5]
    shard(corpus, tmp_path / "whole", *half)
    size = shutil.disk_usage(small_disk).free - 150_000
    (small_disk / "filler").write_bytes(bytes(size))  # room for one shard of 100,002 bytes, not two
    done = shard(corpus, small_disk / "out", *half, code=2)
    assert "No space left on device" in done.stderr
    (small_disk / "filler").unlink()
    shard(corpus, small_disk / "out", *half)
    assert digests(small_disk / "out") == digests(tmp_path / "whole")


def test_workers_take_every_nth_file_and_are_read_as_one_stream(parts, tmp_path):
    shard(parts, tmp_path / "all")
    folders = [tmp_path / str(i) for i in range(2)]
    for i, out in enumerate(folders):
        worker = ["--worker_index", i, "--worker_count", 2]
        shard(parts, out, *worker, "--max_shards", 1)
        shard(parts, out, *worker)
    for split in ("train", "val"):
        whole = texts_in(tmp_path / "all", split)
        first, second = (texts_in(out, split) for out in folders)
        assert sorted(first + second) == sorted(whole)
        stream = TokenStream([open_folder(folder, split) for folder in folders])
        joined = bytes(t for t in stream.tokens(0, len(stream)) if t < 256).decode()
        assert joined == "".join(first + second)
    assert [t for t in documents()[120:240] if t in set(second)] == [
        t for t in second if t in set(documents()[120:240])
    ]
    assert "holds shards of worker_index 1" in shard(parts, out, code=2).stderr


@pytest.fixture
def served(tmp_path):
    """The environment and the handler of a hub whose dataset has two configurations."""
    files = {"README.md": README}
    for i in range(4):
        table = pa.table({"text": documents()[150 * i : 150 * (i + 1)], "id": range(150)})
        parquet.write_table(table, buffer := io.BytesIO(), row_group_size=40)
        files[f"sample/10BT/{i:03d}_00000.parquet"] = buffer.getvalue()
        files[f"data/CC-MAIN/{i:03d}_00000.parquet"] = b"not this one"
    with hub.serve(files) as (address, handler):
        about = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home")}
        yield environment() | about, handler


def test_a_hub_dataset_is_streamed_and_continued_at_the_same_commit(served, plain, tmp_path):
    env, handler = served
    args = ["data/fineweb-edu.py", *BYTES, "--local_dir", tmp_path / "out", "--dataset"]
    script(*args, "me/corpus", "--max_shards", 2, env=env)
    handler.failures, handler.newest = 1, hub.LATER  # which has no files
    script(*args, "me/corpus", env=env)
    assert not handler.failures and digests(tmp_path / "out") == digests(plain)
    assert not any("CC-MAIN/0" in path for path in handler.asked)
    args[args.index(tmp_path / "out")] = tmp_path / "none"
    done = script(*args, "me/nothing", env=env, code=2)
    assert "me/nothing is damaged or cannot be read" in done.stderr


def test_workers_share_the_files_of_a_hub_dataset(served, tmp_path):
    args = ["data/fineweb-edu.py", "--dataset", "me/corpus", *BYTES, "--val_fraction", 0]
    worker = ["--local_dir", tmp_path / "0", "--worker_index", 0, "--worker_count", 3]
    script(*args, *worker, env=served[0])
    assert texts_in(tmp_path / "0", "train") == documents()[:150] + documents()[450:]
    worker = ["--local_dir", tmp_path / "none", "--worker_index", 4, "--worker_count", 5]
    done = script(*args, *worker, env=served[0], code=2)
    assert "--worker_count must be at most the 4 files" in done.stderr


def test_without_a_network_the_dataset_is_named(tmp_path):
    done = script("data/fineweb-edu.py", "--local_dir", tmp_path, "--tokenizer", "bytes", code=2)
    assert "HuggingFaceFW/fineweb-edu is damaged or cannot be read (Offline" in done.stderr
