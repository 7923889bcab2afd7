import errno
import gzip
import hashlib
import importlib
import io
import os
import shutil
import sys
import tracemalloc
from functools import partial
from itertools import product

import hub
import numpy as np
import pyarrow as pa
import pytest
from conftest import documents, environment, script, user_error, write_texts
from pyarrow import parquet
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from data import sharder, verify
from data import source as data_source
from data.manifest import read_manifest, write_manifest
from data.shards import TokenStream, open_folder
from data.tokenizer import load_tokenizer, read_tokenizer_spec
from utils.errors import UserError
from utils.files import lock_folder

fineweb_edu = importlib.import_module("data.fineweb-edu")
OPTIONS = {"tokenizer": "bytes", "shard_size": 20_001, "val_fraction": 0.1}


def shard(inputs, folder, **options):
    """Run data/fineweb-edu.py in this process; return the manifest."""
    paths = inputs if isinstance(inputs, list) else [inputs]
    options = {**OPTIONS, **options}
    config = fineweb_edu.ShardOptions(folder, input=tuple(map(str, paths)), **options)
    fineweb_edu.main(config)
    return read_manifest(folder)


def digests(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.glob("*_*")}


def assert_continued_equals(whole, inputs, folder, *max_shards, **options):
    """Shard in several runs, each with another --max_shards and the last one without; compare with
    the folder `whole`."""
    for count in (*max_shards, None):
        manifest = shard(inputs, folder, max_shards=count, **options)
    assert manifest == read_manifest(whole) and digests(folder) == digests(whole)


def texts_in(folder, split):
    shards = open_folder(folder, split).shards
    tokens = np.concatenate([x.read(0, x.num_tokens) for x in shards])
    starts = np.flatnonzero(tokens == 256)
    assert starts[0] == 0  # each document is preceded by end of text
    return [bytes(text[1:].astype(np.uint8)).decode() for text in np.split(tokens, starts[1:])]


@pytest.fixture(scope="module")
def plain(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    shard(corpus, folder, num_workers=1)
    return folder


def test_every_document_stands_once_in_order_on_one_side_and_the_manifest_counts_it(plain):
    train, val = (texts_in(plain, split) for split in ("train", "val"))
    assert sorted(train + val) == sorted(documents())
    assert [text for text in documents() if text in set(train)] == train
    assert 30 < len(val) < 95 and not set(train) & set(val)  # 600 x 0.1, 4 standard deviations
    manifest = read_manifest(plain)
    assert manifest.complete and manifest.documents == 600
    assert (manifest.tokenizer, manifest.vocab_size, manifest.eot) == ("bytes", 257, 256)
    assert {s.file: s.sha256 for s in manifest.shards} == digests(plain)
    assert sum(s.tokens for s in manifest.shards) == sum(len(t) + 1 for t in documents())
    assert manifest.bytes == {"train": len("".join(train)), "val": len("".join(val))}


def test_stopped_at_max_shards_and_continued_equals_never_stopped(corpus, plain, tmp_path, capsys):
    for count in (1, 5):
        stopped = shard(corpus, tmp_path, max_shards=count, num_workers=1)
        assert stopped == shard(corpus, tmp_path / "again", max_shards=count, num_workers=4)
        assert "stopped at --max_shards" in capsys.readouterr().out
        assert len(list(tmp_path.glob("train_*.npy"))) == count
    assert_continued_equals(plain, corpus, tmp_path, num_workers=4)
    assert_continued_equals(plain, corpus, tmp_path)
    assert "\nnothing to do" in capsys.readouterr().out


def test_other_settings_or_files_foreign_or_locked_shards_are_refused(corpus, tmp_path):
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    shutil.copy(corpus, source / "a.jsonl")
    shard(source, out, max_shards=1)
    before = digests(out)

    def refused(message, **options):
        with user_error(message):
            shard(source, out, **options)

    refused("holds shards of shard_size 20001; give another folder", shard_size=1000)
    refused("holds shards of dataset 'HuggingFaceFW/fineweb-edu'", dataset="HuggingFaceFW/fineweb")
    (source / "b.txt").write_text("a new file")
    refused(r"holds shards of files \['.*a.jsonl'\]; give another folder")
    (source / "b.txt").unlink()
    (source / "a.jsonl").write_text("other")
    refused(r"holds shards of sizes \[\d+\]; give another folder")
    shutil.copy(corpus, source / "a.jsonl")
    lock = lock_folder(out, "sharding into")
    refused("another process is sharding")
    os.close(lock)
    assert digests(out) == before
    (out / "manifest.json").unlink()
    refused("holds shards without a manifest")


@pytest.mark.parametrize("max_shards", [2, None])
@pytest.mark.parametrize("suffix", ["jsonl", "txt.gz"])
def test_a_file_that_is_edited_to_the_same_size_is_refused_and_a_touched_one_is_not(
    corpus, tmp_path, suffix, max_shards
):
    path, out = tmp_path / f"a.{suffix}", tmp_path / "out"
    content = corpus.read_bytes()
    if suffix == "txt.gz":
        content = gzip.compress(content * 2, mtime=0)
    path.write_bytes(content)
    shard(path, out, max_shards=max_shards)
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    before = digests(out)
    path.write_bytes(content[:-20] + bytes(20))
    os.utime(path, ns=times)  # as `cp -p` and `rsync -t` do
    with user_error(f"out holds shards of .*a.{suffix}, which has changed since then; give"):
        shard(path, out)
    assert digests(out) == before
    path.write_bytes(content)
    shard(path, out)


def test_a_listed_shard_keeps_its_name_and_first_tokens_while_sharding_goes_on(
    corpus, tmp_path, monkeypatch
):
    shard(corpus, tmp_path, max_shards=2)
    before = TokenStream([open_folder(tmp_path, "val")])
    tokens = before.read(0, len(before))

    def check_then_write(*args):
        for stream in (before, TokenStream([open_folder(tmp_path, "val")])):
            assert (stream.read(0, len(tokens)) == tokens).all()
        write_manifest(*args)

    monkeypatch.setattr(sharder, "write_manifest", check_then_write)
    for max_shards in (4, None):
        manifest = shard(corpus, tmp_path, max_shards=max_shards)
    assert len(manifest.shards) == len(digests(tmp_path))


def test_a_shard_is_on_disk_before_it_has_its_name(corpus, tmp_path, monkeypatch):
    """A power cut after the rename would else leave zeros under it."""
    on_disk = {}  # content by inode, at its last fsync
    fsync, replace = os.fsync, os.replace

    def record(descriptor):
        fsync(descriptor)
        path = f"/proc/self/fd/{descriptor}"
        if os.path.isfile(path):
            with open(path, "rb") as file:
                on_disk[os.fstat(descriptor).st_ino] = file.read()

    def check_then_replace(source, target):
        with open(source, "rb") as file:
            assert on_disk[os.stat(source).st_ino] == file.read(), target
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(os, "replace", check_then_replace)
    for max_shards in (1, None):  # continued with a copy of the open shard
        shard(corpus, tmp_path, max_shards=max_shards)


@pytest.mark.parametrize("count", [1, 3])
def test_where_no_text_is_hashed_into_a_split_spans_of_the_last_are_held_out(tmp_path, count):
    files = [tmp_path / f"{i}.txt" for i in range(count)]
    for i, path in enumerate(files):
        path.write_text("\n".join(documents()[i::count]))
    options = {"val_fraction": 1e-9, "shard_size": 9_001}
    whole, last = shard(files, tmp_path / "whole", **options), files[-1].read_text()
    train, val = (texts_in(tmp_path / "whole", split) for split in ("train", "val"))
    # the ends of ten spans of the last text, spread over all of it
    spans = list(zip(train[count - 1 :], val, strict=True))
    assert len(spans) == 10 and "".join(map("".join, spans)) == last
    assert all(len(a + b) - len(last) // 10 in (0, 1) for a, b in spans)
    assert whole.held_out == (1 + len(last)) // 10
    assert {len(end) for _, end in spans} == {whole.held_out // 10}
    assert whole.bytes["val"] == pytest.approx(len("".join(val)), rel=0.01)
    num_full = sum(entry.tokens == 9_001 for entry in whole.shards)
    # also within the last text
    assert_continued_equals(
        tmp_path / "whole", files, tmp_path / "stopped", 1, num_full - 2, **options
    )


@pytest.mark.parametrize(
    "sizes, val_fraction, num_held_out",
    [([90] * 40, 1e-9, 12), ([700, 20, 900, 300], 1e-9, 2), ([100] * 300, 0.02, 10)],
)
def test_rows_are_held_out_whole_where_they_make_up_what_validation_needs(
    tmp_path, sizes, val_fraction, num_held_out
):
    """Also where hashes give validation some rows, and for a run that was stopped."""
    texts = [f"{i} {'word ' * 200}"[:size] for i, size in enumerate(sizes)]
    rows = write_texts(tmp_path / "a.jsonl", texts)
    options = {"val_fraction": val_fraction, "shard_size": 4_100}
    whole = shard(rows, tmp_path / "x", **options)
    train, val = (texts_in(tmp_path / "x", split) for split in ("train", "val"))
    assert set(texts[-num_held_out:]) <= set(val) and sorted(train + val) == sorted(texts)
    assert whole.held_out == sum(sizes[-num_held_out:]) + num_held_out
    assert whole.documents == len(texts) and sum(whole.bytes.values()) == sum(sizes)
    assert_continued_equals(tmp_path / "x", rows, tmp_path / "y", 2, 5, num_workers=3, **options)


def test_a_short_text_after_a_book_leaves_the_book_enough_for_validation(tmp_path):
    files = [tmp_path / "book.txt", tmp_path / "note.txt"]
    files[0].write_text("\n".join(documents()))
    files[1].write_text(documents()[1][:100])
    assert shard(files, tmp_path / "x", shard_size=10**6, val_fraction=1e-9).bytes["val"] > 1_000


def test_workers_take_every_nth_file_and_need_all_names_to_stay(tmp_path):
    parts = tmp_path / "parts"
    parts.mkdir()
    for i in range(4):
        write_texts(parts / f"{i}.jsonl", documents()[150 * i : 150 * (i + 1)])
    options = {"worker_index": 1, "worker_count": 2}
    for max_shards in (1, None):
        shard(parts, tmp_path / "1", max_shards=max_shards, **options)
    texts = texts_in(tmp_path / "1", "train") + texts_in(tmp_path / "1", "val")
    assert sorted(texts) == sorted(documents()[150:300] + documents()[450:])
    assert not shard(parts, tmp_path / "2", val_fraction=1e-9, **options).held_out
    with user_error("holds shards of worker_index 1"):
        shard(parts, tmp_path / "1")
    (parts / "9.txt").write_text("the other worker's now")
    with user_error("holds shards of files"):
        shard(parts, tmp_path / "1", **options)


def test_workers_stream_a_hub_dataset_and_continue_at_the_same_commit(tmp_path):
    readme = b"---\nconfigs:\n- config_name: default\n  data_files: other.parquet\n"
    readme += b"- config_name: sample-10BT\n  data_files: sample*\n---\n"
    files = {"README.md": readme, "other.parquet": b"not this one"}
    for i in range(4):
        table = pa.table({"text": documents()[150 * i : 150 * (i + 1)], "id": range(150)})
        parquet.write_table(table, buffer := io.BytesIO(), row_group_size=40)
        files[f"sample{i}.parquet"] = buffer.getvalue()
    args = ["data/fineweb-edu.py", "--dataset", "me/corpus", "--tokenizer", "bytes", "--local_dir"]
    worker = ["--shard_size", 20_001, "--worker_count", 3, "--val_fraction", 0]
    with hub.serve(files) as (address, handler):
        env = {**environment(), "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": address}
        env["HF_HOME"] = str(tmp_path / "home")
        script(*args, tmp_path / "0", *worker, "--max_shards", 2, env=env)
        handler.asked.clear()
        script(*args, tmp_path / "0", *worker, env=env)
        assert all(hub.COMMIT in path for path in handler.asked if "me/corpus" in path)
    assert texts_in(tmp_path / "0", "train") == documents()[:150] + documents()[450:]


def test_without_a_network_the_dataset_is_named(tmp_path):
    done = script("data/fineweb-edu.py", "--local_dir", tmp_path, "--tokenizer", "bytes", code=2)
    assert "fineweb-edu cannot be read (OfflineMode" in done.stderr
    assert "files of your own" in done.stderr


def test_an_option_that_nothing_can_be_made_with_is_refused_at_once(corpus, tmp_path):
    # a shard of a format that cannot count its tokens
    with user_error("--shard_size of --format bin must be at most 2,147,483,647"):
        shard(corpus, tmp_path, format="bin", shard_size=2**31)
    with user_error("--tokenizer byte is neither gpt2 nor bytes, nor a file"):
        shard(corpus, tmp_path, tokenizer="byte")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("owner", [data_source.LongText, sharder.TokenFile, sharder.ShardWriter])
def test_a_full_disk_names_the_folder_and_how_to_continue(tmp_path, monkeypatch, owner, code):
    (tmp_path / "a.txt").write_text("\n".join(documents()[:90]))

    def fail(*_):
        raise OSError(code, os.strerror(code))

    small_pieces(monkeypatch)
    with monkeypatch.context() as full:
        full.setattr(owner, "append", fail)
        with user_error(
            f"x: {os.strerror(code)}; make room there, then the same command continues"
        ):
            shard(tmp_path / "a.txt", tmp_path / "x")
    assert shard(tmp_path / "a.txt", tmp_path / "x").complete


@pytest.mark.skipif(sys.platform == "darwin", reason="names are UTF-8 there")
def test_a_name_that_is_not_utf8_is_printed(tmp_path, capsys):
    path, folder = tmp_path / os.fsdecode(b"na\xefve.txt"), tmp_path / os.fsdecode(b"na\xefve")
    path.write_text("long enough " * 1_000)
    shard(path, folder)
    verify.main(verify.VerifyOptions((folder,)))
    said = capsys.readouterr().out
    assert r"na\xefve: complete" in said and r"na\xefve: 1," in said
    assert list(read_manifest(folder).ledger) == [str(path)]


def test_shards_that_hold_no_context_are_told_when_they_are_made(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("twenty characters...")
    shard(tmp_path / "a.txt", tmp_path / "x")
    assert "train.py needs --block_size below 20" in capsys.readouterr().out
    (tmp_path / "b.txt").write_text("long enough " * 1_000)
    shard(tmp_path / "b.txt", tmp_path / "y")
    assert "block_size" not in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["missing", "shorter", "other tokens", "cut", "none"])
@pytest.mark.parametrize("is_killed", [True, False])
def test_a_shard_that_is_continued_holds_what_the_manifest_counts(
    corpus, plain, tmp_path, damage, is_killed
):
    manifest = shard(corpus, tmp_path, max_shards=3)
    path = tmp_path / "val_000000.npy"
    if is_killed:  # before the end gave the open shard its name
        path = path.rename(f"{path}.tmp")
        manifest.shards.pop()
    if damage == "cut":
        path = tmp_path / "train_000000.npy"
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage in ("shorter", "cut"):
        path.write_bytes(path.read_bytes()[:-2])
    elif damage == "other tokens":
        path.write_bytes(path.read_bytes()[:-2] + b"xy")
    write_manifest(tmp_path, manifest)
    refused = pytest.raises((UserError, FileNotFoundError), match=path.name.removesuffix(".tmp"))
    if damage != "none":
        with refused:
            shard(corpus, tmp_path)
        path.write_bytes(content)  # the message says: put it back
    assert_continued_equals(plain, corpus, tmp_path)
    if damage == "cut":  # also in a complete folder
        path.unlink()
        with refused:
            shard(corpus, tmp_path)


def test_each_row_is_in_the_shards_or_counted_under_its_file_and_reason(tmp_path, monkeypatch):
    """Also by a run that was killed after any of its saves."""
    binary = pa.array([b"good", b"\xff", None], pa.binary())
    validity, *buffers = binary.buffers()
    unchecked = pa.StringArray.from_buffers(3, *buffers, validity)
    for name, column in (("0", unchecked), ("3", binary)):
        parquet.write_table(pa.table({"text": column}), tmp_path / f"{name}.parquet")
    write_texts(tmp_path / "1.jsonl", ["ü", " ", "", "a\0b", 7, "\ud800"])
    (tmp_path / "2.csv").write_text("id,text\n1,a,b\n2,c\n")
    files = sorted(tmp_path.iterdir())
    options = {"val_fraction": 0, "shard_size": 3}
    whole = shard(files, tmp_path / "whole", **options)
    assert texts_in(tmp_path / "whole", "train") == ["good", "ü", "c", "good"]
    assert whole.documents == 4
    bad = "not UTF-8, or half of a surrogate pair"
    of_parquet = (3, 1, 4, {bad: 1, "without text": 1})
    assert [(x.rows, x.texts, x.bytes, x.skipped) for x in whole.ledger.values()] == [
        of_parquet,
        (6, 1, 2, {"empty": 2, "with U+0000": 1, "without text": 1, bad: 1}),
        (2, 1, 1, {"wider than the header": 1}),
        of_parquet,
    ]
    assert whole.skipped[bad] == 3 and sum(whole.skipped.values()) == 10

    def write_or_die(*args):
        nonlocal saves_left
        saves_left -= 1
        if saves_left < 0:
            raise KeyboardInterrupt
        write_manifest(*args)

    monkeypatch.setattr(sharder, "write_manifest", write_or_die)
    for num_saves in range(1, 5):
        saves_left = num_saves
        with pytest.raises(KeyboardInterrupt):
            shard(files, tmp_path / f"{num_saves}", **options)
        saves_left = 99
        assert_continued_equals(tmp_path / "whole", files, tmp_path / f"{num_saves}", **options)


def small_pieces(monkeypatch, factor=1):
    """Make a text of 2,000 characters a long one, or of `factor` times as many."""
    for module, name, value in (
        (data_source, "LONG_CHARACTERS", 2_000),
        (data_source, "PIECE_CHARACTERS", 500),
        (fineweb_edu, "CHUNK", 500),
        (fineweb_edu, "MARGIN", 50),
        (fineweb_edu, "MANY_CHUNKS", 9),
        (fineweb_edu, "PENDING_BYTES", 3_000),
        (sharder, "TOKENS_AT_ONCE", 700),
    ):
        monkeypatch.setattr(module, name, value * factor)


@pytest.mark.parametrize("val_fraction", [0.3, 1e-9])
def test_texts_read_in_pieces_have_the_shards_of_whole_ones(tmp_path, monkeypatch, val_fraction):
    folder, text = tmp_path / "in", "\n".join(documents())
    folder.mkdir()
    (folder / "a.txt.gz").write_bytes(gzip.compress(text[:30_000].encode()))
    (folder / "b.txt").write_bytes(b"\xef\xbb\xbf" + text[:9_000].encode() + b"\x92" + b" " * 5_000)
    (folder / "c.txt").write_text("\0" + text)
    (folder / "d.txt").write_text(" " * 9_000)
    (folder / "e.txt").write_text("no_place_to_cut" * 999)
    write_texts(folder / "f.jsonl", [*documents()[:90], text[:5_000], 7, "é"])
    (folder / "f.txt").write_text("[SEP]".join([*documents()[:30], text[:5_000]]))
    (folder / "g.txt").write_text(text + "\u3000" * 3_000 + "naïve\r\n")
    options = {"val_fraction": val_fraction, "shard_size": 9_001, "separator": "[SEP]"}
    whole = shard(folder, tmp_path / "whole", **options)
    assert whole.documents == 126 and len(whole.skipped) == 4
    small_pieces(monkeypatch)
    counts = (1, 3, 5, len(whole.shards) - 9)
    assert_continued_equals(tmp_path / "whole", folder, tmp_path / "pieces", *counts, **options)


def test_no_stage_holds_a_whole_document(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("\n".join(documents() * 20))
    small_pieces(monkeypatch, 20)
    tracemalloc.start()
    shard(tmp_path / "a.txt", tmp_path / "x", shard_size=10**6)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < (tmp_path / "a.txt").stat().st_size // 2


MODELS = {
    models.BPE(unk_token="<unk>"): trainers.BpeTrainer,
    models.Unigram(): partial(trainers.UnigramTrainer, unk_token="<unk>"),
}
NORMALIZERS = [
    normalizers.Sequence([]),
    normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),  # Llama 2
    normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()]),
]
PRE_TOKENIZERS = [
    pre_tokenizers.Sequence([]),
    pre_tokenizers.ByteLevel(add_prefix_space=True),
    pre_tokenizers.Metaspace(split=False),
    pre_tokenizers.Split(Regex(r"\s?\w+\s?|\W"), "isolated"),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_chunks_of_a_long_text_have_the_ids_of_the_whole(tmp_path, monkeypatch, model):
    lines = ["一二三，四五。六七", "a" * 500, " two  spaces\t\u3000x", "naïve\u0301 \ufb01"]
    text = "\n".join([*documents()[:10], *lines * 2, *documents()[10:20]])
    monkeypatch.setattr(fineweb_edu, "CHUNK", 200)
    monkeypatch.setattr(fineweb_edu, "MARGIN", 50)
    num_chunks = []
    for normalizer, pre_tokenizer in product(NORMALIZERS, PRE_TOKENIZERS):
        backend = Backend(model)
        backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizer
        trainer = MODELS[model](
            vocab_size=300, special_tokens=["</s>", "<unk>"], show_progress=False
        )
        backend.train_from_iterator(documents()[:10], trainer)
        backend.save(str(tmp_path / "tokenizer.json"))
        tokenizer = load_tokenizer(read_tokenizer_spec(tmp_path / "tokenizer.json"))
        num_chunks.append(len(list(fineweb_edu.split_text(tokenizer, text))))
        document = fineweb_edu.tokenize(tokenizer, 0.5, text, tmp_path)
        assert (
            document.read(0, document.num_tokens).tolist()
            == tokenizer.encode_document(text).tolist()
        )
    assert max(num_chunks) > 20
