import io
from pathlib import Path

import numpy as np
import pytest

from data.sharder import ShardWriter
from data.shards import (
    ShardFolder,
    TokenStream,
    header,
    inspect_shard,
    open_folder,
    write_manifest,
)
from utils.errors import UserError


def write(folder, split, index, tokens, suffix=".npy"):
    writer = ShardWriter(folder, split, index, suffix)
    writer.append(np.asarray(tokens, np.uint16))
    return writer.finish()


def test_shards_are_what_numpy_and_llm_c_read(tmp_path):
    path = tmp_path / write(tmp_path, "train", 0, range(1000))["file"]
    array = np.load(path, mmap_mode="r")
    assert array.dtype == np.uint16 and array.tolist() == list(range(1000))
    assert (inspect_shard(path).read() == array).all()
    path = tmp_path / write(tmp_path, "val", 3, [5, 6, 50256], ".bin")["file"]
    content = path.read_bytes()
    assert path.name == "val_000003.bin" and len(content) == 1024 + 6
    assert np.frombuffer(content[:12], "<i4").tolist() == [20240520, 1, 3]
    assert inspect_shard(path).read().tolist() == [5, 6, 50256]


@pytest.mark.parametrize("suffix", [".npy", ".bin"])
def test_an_unfinished_shard_is_not_seen_and_continued_equals_one_written_at_once(tmp_path, suffix):
    whole = write(tmp_path, "train", 0, range(100), suffix)
    first = ShardWriter(tmp_path, "train", 1, suffix)
    first.append(np.arange(70, dtype=np.uint16))
    first.sync()  # 40 of these 70 are in the manifest; then a kill
    assert [shard.path.name for shard in open_folder(tmp_path, "train").shards] == [whole["file"]]
    second = ShardWriter(tmp_path, "train", 1, suffix, start=40)
    second.append(np.arange(40, 100, dtype=np.uint16))
    assert second.finish()["sha256"] == whole["sha256"]


np.save(buffer := io.BytesIO(), np.zeros(4, np.int32))
INT32 = buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train_0.npy", b"not numpy at all", "pickled"),
        ("train_0.npy", header(".npy", 100) + b"\0" * 199, "greater than file size"),
        ("train_0.bin", header(".bin", 100) + b"\0" * 199, "greater than file size"),
        ("train_0.bin", header(".bin", 100) + b"\0" * 202, "longer than its header"),
        ("train_0.bin", b"\0" * 4096, "no header of llm.c"),
        ("train_0.npy", INT32, "instead of a 1-D uint16 array"),
    ],
)
def test_a_broken_shard_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name} is damaged or not a shard.*{message}"):
        open_folder(tmp_path, "train")


def test_missing_and_empty_folders_say_what_to_do(tmp_path):
    for folder in (tmp_path / "nothing", tmp_path):
        with pytest.raises(UserError, match="holds no val shards.*python data/fineweb-edu.py"):
            open_folder(folder, "val")


def test_the_manifest_lists_the_shards_and_each_is_opened_when_it_is_first_read(tmp_path):
    entries = [write(tmp_path, "train", i, range(10)) for i in range(3)]
    write_manifest(tmp_path, {"tokenizer": "gpt2", "vocab_size": 50257, "shards": entries})
    digest = TokenStream([open_folder(tmp_path, "train")]).digest
    (tmp_path / "train_000001.npy").unlink()
    write(tmp_path, "train", 2, range(9))  # of another sharding
    write(tmp_path, "train", 3, range(10))  # of a sharding that goes on
    stream = TokenStream([open_folder(tmp_path, "train")])
    assert len(stream) == 30 and stream.digest == digest
    assert stream.tokens(0, 10).tolist() == list(range(10))
    with pytest.raises(FileNotFoundError, match="train_000001.npy"):
        stream.tokens(5, 10)
    with pytest.raises(UserError, match="train_000002.npy is not as manifest.json lists it"):
        stream.tokens(20, 5)
    entries[0]["sha256"] = entries[1]["sha256"][::-1]
    write_manifest(tmp_path, {"tokenizer": "gpt2", "vocab_size": 50257, "shards": entries})
    assert TokenStream([open_folder(tmp_path, "train")]).digest != digest


@pytest.mark.parametrize("text", ["", "[]", '{"tokenizer": "gpt2"}'])
def test_a_damaged_manifest_is_named(tmp_path, text):
    write(tmp_path, "train", 0, range(10))
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match="manifest.json is damaged"):
        open_folder(tmp_path, "train")


@pytest.mark.parametrize(
    ("split", "names"),
    [
        ("train", ["TinyStories-train", "edufineweb_train_000001", "medieval_train_000001"]),
        ("val", ["constrained_val_0", "fineweb_val_000000", "retrieval-Validation"]),
    ],
)
def test_the_last_train_or_val_in_a_name_is_the_split(tmp_path, split, names):
    for name in [*names, "notes"]:
        np.save(tmp_path / f"{name}.npy", np.zeros(10, np.uint16))
    assert [shard.path.stem for shard in open_folder(tmp_path, split).shards] == names


def test_tokens_of_a_smaller_vocabulary_are_not_read_as_those_of_gpt2(tmp_path):
    write(tmp_path, "train", 0, range(0, 50_000, 10))
    assert open_folder(tmp_path, "train").tokenizer == "gpt2"
    for tokens in ([*range(257)] * 40, [*range(600)] * 2):
        write(tmp_path, "train", 0, tokens)
        with pytest.raises(UserError, match="holds no tokens of GPT-2.* tokenizer.json beside it"):
            open_folder(tmp_path, "train")


@pytest.mark.parametrize(
    ("progress", "is_unfinished"),
    [
        ({"complete": True, "stopped": False}, False),
        ({"complete": False, "stopped": True}, False),
        ({"complete": False, "stopped": False}, True),
        ({}, False),  # a folder of others
    ],
)
def test_a_folder_whose_sharding_was_interrupted_is_known(progress, is_unfinished):
    folder = ShardFolder(Path("data"), "train", [], "bytes", progress)
    assert folder.is_unfinished == is_unfinished


def test_an_unfinished_shard_is_not_seen(tmp_path):
    write(tmp_path, "train", 0, range(10))
    ShardWriter(tmp_path, "train", 1, ".npy").append(np.arange(5, dtype=np.uint16))
    assert [s.path.name for s in open_folder(tmp_path, "train").shards] == ["train_000000.npy"]
