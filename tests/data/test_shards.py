import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import user_error

from data.export_tokenizer import save_tokenizer
from data.manifest import Manifest, ResumePoint, write_manifest
from data.sharder import ShardWriter
from data.shards import (
    Shard,
    ShardFolder,
    TokenStream,
    bin_header,
    open_folder,
    open_folders,
)
from data.tokenizer import load_tokenizer


def write(folder, split, index, tokens, suffix=".npy", dtype="<u2"):
    writer = ShardWriter(folder / f"{split}_{index:06d}{suffix}", split, np.dtype(dtype))
    writer.append(np.asarray(tokens, np.uint32))
    return writer.finish()


@pytest.mark.parametrize("dtype, magic, version", [("<u2", 20240520, 1), ("<u4", 20240801, 7)])
def test_shards_are_what_numpy_and_llm_c_read(tmp_path, dtype, magic, version):
    tokens = [5, 6, np.iinfo(dtype).max]
    path = tmp_path / write(tmp_path, "train", 0, tokens, dtype=dtype).file
    array = np.load(path, mmap_mode="r")
    assert array.dtype == dtype and array.tolist() == tokens
    assert Shard(path, 3).read(0, 9).tolist() == tokens
    path = tmp_path / write(tmp_path, "val", 3, tokens, ".bin", dtype).file
    content = path.read_bytes()
    assert path.name == "val_000003.bin"
    assert np.frombuffer(content[:1024], "<i4").tolist() == [magic, version, 3] + [0] * 253
    assert np.frombuffer(content[1024:], dtype).tolist() == tokens
    assert Shard(path, 3).read(1, 9).tolist() == tokens[1:]


@pytest.mark.parametrize("suffix", [".npy", ".bin"])
def test_an_unfinished_shard_is_not_seen_and_continued_equals_one_written_at_once(tmp_path, suffix):
    whole = write(tmp_path, "train", 0, range(100), suffix, "<u4")
    path = tmp_path / f"train_000001{suffix}"
    first = ShardWriter(path, "train", np.dtype("<u4"))
    first.append(np.arange(70))
    first.sync()  # 40 of these 70 are in the manifest; then a kill
    assert [shard.path.name for shard in open_folder(tmp_path, "train").shards] == [whole.file]
    second = ShardWriter(path, "train", np.dtype("<u4"), num_written=40)
    second.append(np.arange(40, 100))
    assert second.finish().sha256 == whole.sha256


np.save(buffer := io.BytesIO(), np.zeros(4, np.int32))
INT32 = buffer.getvalue()
BIN = bin_header(np.dtype("<u2"), 100)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("train_0.npy", b"not numpy at all", "pickled"),
        ("train_0.npy", INT32[:-1], "greater than file size"),
        ("train_0.bin", BIN + b"\0" * 199, "1,223 bytes instead of 1,224"),
        ("train_0.bin", BIN + b"\0" * 202, "1,226 bytes instead of 1,224"),
        ("train_0.bin", b"\0" * 4096, "no header of llm.c"),
        ("train_0.npy", INT32, "instead of 1-D uint16 or uint32"),
    ],
)
def test_a_broken_shard_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with user_error(f"{name} is damaged or not a shard.*{message}"):
        open_folder(tmp_path, "train")


def test_missing_and_empty_folders_say_what_to_do(tmp_path):
    write(tmp_path, "val", 0, range(10))
    (tmp_path / "empty").mkdir()
    for path, problem in {
        tmp_path / "nothing": "is no folder",
        tmp_path / "val_000000.npy": "is no folder",
        tmp_path / "empty": "holds no val shards",
    }.items():
        for folders in ([path], [tmp_path, path]):
            with user_error(f"{path} {problem}.*python data/finew.*--local_dir {path}"):
                open_folders(folders, "val")
    with user_error(f"{tmp_path} holds no train shards"):
        open_folders([tmp_path], "train")


def test_the_manifest_lists_the_shards_and_each_is_opened_when_it_is_first_read(tmp_path):
    entries = [write(tmp_path, "train", i, range(10)) for i in range(3)]

    def stream():
        manifest = Manifest(tokenizer="gpt2", vocab_size=50257, shards=entries)
        write_manifest(tmp_path, manifest)
        return TokenStream([open_folder(tmp_path, "train")])

    checksum = stream().checksum
    (tmp_path / "train_000001.npy").unlink()
    write(tmp_path, "train", 2, range(9))  # of another sharding
    write(tmp_path, "train", 3, range(10))  # of a sharding that goes on
    opened = stream()
    assert len(opened) == 30 and opened.checksum == checksum
    write(tmp_path, "train", 0, range(12))  # longer, as the sharding went on
    assert opened.read(0, 10).tolist() == list(range(10))
    with pytest.raises(FileNotFoundError, match="train_000001.npy"):
        opened.read(5, 10)
    write(tmp_path, "train", 1, range(10))
    assert opened.read(5, 10).tolist() == [*range(5, 10), *range(5)]
    with user_error("train_000002.npy is not as manifest.json lists it"):
        opened.read(20, 5)
    entries[0].sha256 = entries[1].sha256[::-1]
    assert stream().checksum != checksum


@pytest.mark.parametrize("text", ["", "[]", '{"tokenizer": "gpt2"}'])
def test_a_damaged_manifest_is_named(tmp_path, text):
    write(tmp_path, "train", 0, range(10))
    (tmp_path / "manifest.json").write_text(text)
    with user_error("manifest.json is damaged"):
        open_folder(tmp_path, "train")


@pytest.mark.parametrize(
    "split, names",
    [
        ("train", ["TinyStories-train", "edufineweb_train_000001", "medieval_train_000001"]),
        ("val", ["constrained_val_0", "fineweb_val_000000", "retrieval-Validation"]),
    ],
)
def test_the_last_train_or_val_in_a_name_is_the_split(tmp_path, split, names):
    for name in [*names, "notes"]:
        np.save(tmp_path / f"{name}.npy", np.zeros(10, np.uint16))
    assert [shard.path.stem for shard in open_folder(tmp_path, split).shards] == names


def test_a_folder_whose_sharding_was_interrupted_is_known():
    names = {"tokenizer": "bytes", "vocab_size": 257, "shards": []}
    manifests = [None]  # of a folder of others
    for complete, stopped in ((True, False), (False, True), (False, False)):
        manifests.append(Manifest(**names, complete=complete, stopped=stopped))
    folders = []
    for i, manifest in enumerate(manifests):
        folders.append(ShardFolder(Path(str(i)), "train", [], "bytes", manifest))
    assert TokenStream(folders).unfinished_folders == [Path("3")]


@pytest.mark.parametrize("open_tokens, num_tokens", [({}, 130), ({"train": 80}, 180)])
def test_bytes_per_token_counts_the_shard_that_is_being_written(open_tokens, num_tokens):
    shards = [SimpleNamespace(num_tokens=100), SimpleNamespace(num_tokens=30)]  # as listed
    settings = {"tokenizer": "bytes", "vocab_size": 257, "shard_size": 100, "shards": []}
    progress = {"bytes": {"train": 2 * num_tokens}, "state": ResumePoint(open=open_tokens)}
    folder = ShardFolder(Path("x"), "train", shards, "bytes", Manifest(**settings, **progress))
    assert TokenStream([folder]).bytes_per_token == 2


def write_datatrove(folder, name, tokens, tokenizer="gpt2", dtype="<u2"):
    """Write what datatrove's TokenizedFile does, without the ends of documents."""
    content = np.array(tokens, dtype)
    (folder / f"{name}.ds").write_bytes(content.tobytes())
    metadata = f"{tokenizer}|{content.itemsize}\n{len(content)}\n{len(content)} T"
    (folder / f"{name}.ds.metadata").write_text(metadata)


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_folders_of_datatrove_are_streams_of_their_files(tmp_path, dtype):
    write_datatrove(tmp_path, "train_00000_unshuffled", [1, 2, 50256, 3, 50256], dtype=dtype)
    write_datatrove(tmp_path, "train_00001_unshuffled", [], dtype=dtype)  # a task without input
    write_datatrove(tmp_path, "train_00002_unshuffled", [4, 50256], dtype=dtype)
    write_datatrove(tmp_path, "000_val", [5, 50256], dtype=dtype)
    train, val = (TokenStream([open_folder(tmp_path, split)]) for split in ("train", "val"))
    assert train.read(1, 6).tolist() == [2, 50256, 3, 50256, 4, 50256]
    assert len(train) == 7 and val.read(0, 2).tolist() == [5, 50256]
    assert train.tokenizer_spec == "gpt2" and train.bytes_per_token is None


def test_datatrove_tokens_of_another_tokenizer_need_its_file(tmp_path):
    write_datatrove(tmp_path, "train", [65, 256], "/data/|/tokenizer.json")
    with user_error(r"train.ds holds tokens of /data/\|/tok.*json beside it"):
        open_folder(tmp_path, "train")
    save_tokenizer(load_tokenizer("bytes"), tmp_path, block_size=8)
    assert open_folder(tmp_path, "train").tokenizer_spec == "bytes"
    (tmp_path / "train.ds").write_bytes(b"\0\0")
    with user_error("train.ds is damaged.* 2 bytes instead of 4"):
        open_folder(tmp_path, "train")
