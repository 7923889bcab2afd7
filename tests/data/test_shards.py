import io

import numpy as np
import pytest

from data.sharder import ShardWriter
from data.shards import TokenStream, header, inspect_shard, open_folder, write_manifest
from utils.errors import UserError


def write(folder, split, index, tokens, suffix=".npy"):
    writer = ShardWriter(folder, split, index, suffix)
    writer.append(np.asarray(tokens, np.uint16))
    return writer.finish()


def test_npy_shards_are_what_numpy_reads(tmp_path):
    entry = write(tmp_path, "train", 0, range(1000))
    array = np.load(tmp_path / entry["file"], mmap_mode="r")
    assert array.dtype == np.uint16 and array.shape == (1000,) and array[999] == 999
    assert (inspect_shard(tmp_path / entry["file"]).read() == array).all()


def test_bin_shards_are_llm_c_format(tmp_path):
    entry = write(tmp_path, "val", 3, [5, 6, 50256], ".bin")
    assert entry["file"] == "val_000003.bin"
    raw = (tmp_path / entry["file"]).read_bytes()
    assert np.frombuffer(raw[:12], "<i4").tolist() == [20240520, 1, 3] and len(raw) == 1024 + 6
    assert inspect_shard(tmp_path / entry["file"]).read().tolist() == [5, 6, 50256]


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
    assert [s.path.name for s in open_folder(tmp_path, "train").shards] == ["train_000000.npy"]


def npy(array):
    np.save(buffer := io.BytesIO(), array)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train_0.npy", b"not numpy at all", "pickled"),
        ("train_0.npy", b"", "No data left"),
        ("train_0.npy", header(".npy", 100) + b"\0" * 199, "greater than file size"),
        ("train_0.bin", header(".bin", 100) + b"\0" * 199, "greater than file size"),
        ("train_0.bin", header(".bin", 100) + b"\0" * 202, "longer than its header"),
        ("train_0.bin", b"\0" * 4096, "no header of llm.c"),
        ("train_0.npy", npy(np.zeros(4, np.int32)), "instead of a 1-D uint16 array"),
        ("train_0.npy", npy(np.zeros((2, 2), np.uint16)), "instead of a 1-D uint16 array"),
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


def test_shards_that_the_manifest_does_not_list_or_that_are_gone_are_named(tmp_path):
    entries = [write(tmp_path, "train", i, range(10)) for i in range(2)]
    write_manifest(tmp_path, {"tokenizer": "gpt2", "vocab_size": 50257, "shards": entries})
    assert len(open_folder(tmp_path, "train").shards) == 2
    write(tmp_path, "train", 2, range(10))
    with pytest.raises(UserError, match="train_000002.npy is missing or not as manifest.json"):
        open_folder(tmp_path, "train")
    for i in (1, 2):
        (tmp_path / f"train_00000{i}.npy").unlink()
    with pytest.raises(UserError, match="train_000001.npy is missing or not as manifest.json"):
        open_folder(tmp_path, "train")


@pytest.mark.parametrize("text", ["", "[]", '{"tokenizer": "gpt2"}'])
def test_a_damaged_manifest_is_named(tmp_path, text):
    write(tmp_path, "train", 0, range(10))
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match="manifest.json is damaged"):
        open_folder(tmp_path, "train")


def test_the_last_train_or_val_in_a_name_is_the_split(tmp_path):
    train = ["TinyStories-train.npy", "edufineweb_train_000001.npy", "medieval_train_000001.npy"]
    val = ["constrained_val_0.npy", "fineweb_val_000000.npy", "retrieval-Validation.npy"]
    for name in [*train, *val, "notes.npy"]:
        np.save(tmp_path / name, np.zeros(10, np.uint16))
    for split, names in (("train", train), ("val", val)):
        assert [shard.path.name for shard in open_folder(tmp_path, split).shards] == names


def test_tokens_of_a_smaller_vocabulary_are_not_read_as_those_of_gpt2(tmp_path):
    write(tmp_path, "train", 0, range(0, 50_000, 10))
    assert open_folder(tmp_path, "train")
    for tokens in ([*range(257)] * 40, [*range(600)] * 2):
        write(tmp_path, "train", 0, tokens)
        with pytest.raises(UserError, match="holds no tokens of GPT-2.* tokenizer.json beside it"):
            open_folder(tmp_path, "train")


@pytest.mark.parametrize(
    ("complete", "stopped", "expected"), [(True, False, 0), (False, True, 0), (False, False, 1)]
)
def test_a_folder_whose_sharding_was_interrupted_is_known(tmp_path, complete, stopped, expected):
    shards = [write(tmp_path, "train", 0, range(10))]
    manifest = {"tokenizer": "bytes", "vocab_size": 257, "shards": shards}
    write_manifest(tmp_path, manifest | {"complete": complete, "stopped": stopped})
    assert len(TokenStream([open_folder(tmp_path, "train")]).unfinished) == expected
    write_manifest(tmp_path, manifest)
    assert TokenStream([open_folder(tmp_path, "train")]).unfinished == []
