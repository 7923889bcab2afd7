import json
import shutil

import numpy as np
import pytest

from data.loader import TokenStream
from data.shard_writer import ShardWriter
from data.shards import find_shards, header, inspect_shard, split_of, write_manifest
from utils.errors import UserError
from utils.files import check_space, format_bytes


def write(folder, split, index, tokens, suffix=".npy"):
    writer = ShardWriter(folder, split, index, suffix)
    writer.append(np.asarray(tokens, np.uint16))
    return writer.finish()


def test_npy_shards_are_what_numpy_reads(tmp_path):
    entry = write(tmp_path, "train", 0, range(1000))
    array = np.load(tmp_path / entry["file"], mmap_mode="r")
    assert array.dtype == np.uint16 and array.shape == (1000,) and array[999] == 999
    assert (inspect_shard(tmp_path / entry["file"]).open() == array).all()


def test_bin_shards_are_llm_c_format(tmp_path):
    entry = write(tmp_path, "val", 3, [5, 6, 50256], ".bin")
    assert entry["file"] == "val_000003.bin"
    raw = (tmp_path / entry["file"]).read_bytes()
    assert np.frombuffer(raw[:12], "<i4").tolist() == [20240520, 1, 3] and len(raw) == 1024 + 6
    assert inspect_shard(tmp_path / entry["file"]).open().tolist() == [5, 6, 50256]


@pytest.mark.parametrize("suffix", [".npy", ".bin"])
def test_a_continued_shard_equals_one_written_at_once(tmp_path, suffix):
    whole = write(tmp_path, "train", 0, range(100), suffix)
    first = ShardWriter(tmp_path, "train", 1, suffix)
    first.append(np.arange(70, dtype=np.uint16))
    first.sync()  # 40 of these 70 are in the manifest; then a kill
    second = ShardWriter(tmp_path, "train", 1, suffix, start=40)
    second.append(np.arange(40, 100, dtype=np.uint16))
    assert second.finish()["sha256"] == whole["sha256"]


def test_an_unfinished_shard_is_not_seen(tmp_path):
    write(tmp_path, "train", 0, range(10))
    ShardWriter(tmp_path, "train", 1, ".npy").append(np.arange(5, dtype=np.uint16))
    assert [s.path.name for s in find_shards(tmp_path, "train")] == ["train_000000.npy"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train_0.npy", b"", "is not a .npy file"),
        ("train_0.npy", b"not numpy at all", "is not a .npy file"),
        ("train_0.npy", header(".npy", 9).replace(b"}", b"("), "is not a .npy file"),
        ("train_0.npy", header(".npy", 100) + b"\0" * 199, "promises 100 tokens"),
        ("train_0.bin", header(".bin", 100) + b"\0" * 202, "promises 100 tokens"),
        ("train_0.bin", b"\0" * 4096, "header of llm.c's"),
        ("train_0.bin", b"short", "header of llm.c's"),
    ],
)
def test_a_broken_shard_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        find_shards(tmp_path, "train")
    assert name in str(error.value)


@pytest.mark.parametrize("array", [np.zeros(4, np.int32), np.zeros((2, 2), np.uint16)])
def test_a_shard_of_another_dtype_or_shape_is_refused(tmp_path, array):
    np.save(tmp_path / "train_0.npy", array)
    with pytest.raises(UserError, match="1-D uint16 array"):
        find_shards(tmp_path, "train")


def test_missing_and_empty_folders_say_what_to_do(tmp_path):
    with pytest.raises(UserError, match="python data/fineweb-edu.py"):
        find_shards(tmp_path / "nothing", "train")
    with pytest.raises(UserError, match="holds no val shards"):
        find_shards(tmp_path, "val")


def test_a_shard_that_the_manifest_lists_may_not_be_missing(tmp_path):
    entries = [write(tmp_path, "train", i, range(10)) for i in range(2)]
    manifest = {"tokenizer": "gpt2", "vocab_size": 50257, "eot": 50256, "shards": entries}
    write_manifest(tmp_path, manifest)
    (tmp_path / "train_000001.npy").unlink()
    with pytest.raises(UserError, match="train_000001.npy is missing"):
        find_shards(tmp_path, "train")


WHOLE = {"tokenizer": "gpt2", "vocab_size": 50257, "eot": 50256, "shards": []}
ENTRY = {"file": "train_000000.npy", "split": "val", "tokens": -1, "sha256": ""}


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "{}", "[" * 100_000),
        *(json.dumps({**WHOLE, **c}) for c in ({"shards": 3}, {"source": 3}, {"shards": [ENTRY]})),
    ],
)
def test_a_damaged_manifest_is_named(tmp_path, text):
    write(tmp_path, "train", 0, range(10))
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match="manifest.json is damaged"):
        find_shards(tmp_path, "train")


def test_too_little_room_says_how_much_is_needed_and_free(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=3_100_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    check_space(tmp_path, 3_100_000_000, "all of it")
    with pytest.raises(UserError, match=r"^a shard needs 20.0 GB, .* only 3.1 GB free"):
        check_space(tmp_path, 20 * 10**9, "a shard")


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (40_130, "40.1 kB"), (7 * 10**14, "700.0 TB")],
)
def test_bytes_are_written_as_people_do(size, text):
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("edufineweb_train_000001.npy", "train"),
        ("fineweb_val_000000.bin", "val"),
        ("medieval_train_000001.npy", "train"),
        ("retrieval-validation.npy", "val"),
        ("TinyStories-train.bin", "train"),
        ("trainset3.npy", "train"),
        ("notes.npy", None),
    ],
)
def test_a_name_is_of_one_split(name, split):
    assert split_of(name) == split


def test_a_name_of_both_splits_is_refused():
    with pytest.raises(UserError, match="train_val_0.npy is named as train and as val"):
        split_of("train_val_0.npy")


def test_characters_numbered_by_nanogpt_are_not_read_as_tokens_of_gpt2(tmp_path):
    write(tmp_path, "train", 0, range(5000))
    assert find_shards(tmp_path, "train") and TokenStream(tmp_path, "train").has_low_ids
    (tmp_path / "meta.pkl").touch()
    with pytest.raises(UserError, match="holds meta.pkl: .* --tokenizer bytes, into another"):
        find_shards(tmp_path, "train")
    np.arange(5000, dtype=np.uint16).tofile(tmp_path / "train.bin")  # as nanoGPT writes it
    (tmp_path / "train_000000.npy").unlink()
    with pytest.raises(UserError, match="holds meta.pkl"):
        find_shards(tmp_path, "train")


def test_only_ids_far_below_a_vocabulary_of_gpt2_are_low(tmp_path, shards):
    write(tmp_path, "train", 0, [*range(5000), 13_000])
    assert not TokenStream(tmp_path, "train").has_low_ids
    write(tmp_path, "val", 0, range(999))  # too few to tell
    assert not TokenStream(tmp_path, "val").has_low_ids
    assert not TokenStream(shards, "train").has_low_ids  # bytes, as its manifest says
