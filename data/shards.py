"""Token shards on disk: uint16 .npy or llm.c's .bin, and the manifest beside them.

    train_000000.npy  val_000000.npy  ...  manifest.json

A .npy shard is a 1-D uint16 array that numpy.load reads. A .bin shard is llm.c's format: 256
little-endian int32 (20240520, 1, token count, zeros), then the uint16 tokens. Folders of
build-nanogpt, llm.c and modded-nanogpt are read as they are: a shard belongs to the split that its
name contains, and a folder without a manifest is taken to hold GPT-2 tokens.
"""

import io
import json
import os
import tokenize
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from utils.errors import UserError
from utils.files import atomic_write, sha256, sync_folder

BIN_MAGIC, BIN_VERSION, BIN_HEADER_BYTES = 20240520, 1, 1024
NPY_HEADER_BYTES = 128  # numpy pads the header of a 1-D array to this
# what numpy raises for the headers of damaged files, which are Python literals
BAD_HEADER = (ValueError, KeyError, TypeError, SyntaxError, tokenize.TokenError, RecursionError)
MANIFEST = "manifest.json"


class DataError(UserError):
    """Shards, manifests, text or tokenizers that cannot be used. Names the path."""


@dataclass(frozen=True)
class Shard:
    """One checked shard file: where its tokens start (bytes) and how many there are."""

    path: Path
    offset: int
    tokens: int

    def open(self) -> np.ndarray:
        """The tokens as a read-only memory map, uint16 (tokens,)."""
        return np.memmap(self.path, np.dtype("<u2"), "r", self.offset, (self.tokens,))


def header(suffix: str, tokens: int) -> bytes:
    """What precedes the tokens in a shard of that format, .npy or .bin."""
    if suffix == ".bin":
        values = np.zeros(256, "<i4")
        values[:3] = BIN_MAGIC, BIN_VERSION, tokens
        return values.tobytes()
    buffer = io.BytesIO()
    description = {"descr": "<u2", "fortran_order": False, "shape": (tokens,)}
    np.lib.format.write_array_header_1_0(buffer, description)
    assert buffer.tell() == NPY_HEADER_BYTES
    return buffer.getvalue()


def _read_npy_header(file: IO[bytes], path: Path) -> tuple[int, int]:
    start = io.BytesIO(file.read(12_000))  # numpy reads as much as a damaged length says
    try:
        version = np.lib.format.read_magic(start)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }
        shape, _, dtype = read[version](start)
    except BAD_HEADER as error:
        raise DataError(f"{path} is not a .npy file; make it again") from error
    if dtype != np.dtype("<u2") or len(shape) != 1:
        raise DataError(f"{path} holds {dtype} {shape}; a shard is one row of uint16")
    return start.tell(), int(shape[0])


def _read_bin_header(file: IO[bytes], path: Path) -> tuple[int, int]:
    raw = file.read(BIN_HEADER_BYTES)
    values = np.frombuffer(raw, "<i4") if len(raw) == BIN_HEADER_BYTES else np.zeros(3)
    if values[0] != BIN_MAGIC or values[1] != BIN_VERSION:
        raise DataError(
            f"{path} does not start with llm.c's header ({BIN_MAGIC}, version {BIN_VERSION}); "
            "shard the text again with data/fineweb-edu.py"
        )
    return BIN_HEADER_BYTES, int(values[2])


def inspect(path: Path) -> Shard:
    """Reads and checks the header of a shard; DataError if the file is not what it says."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            read = _read_bin_header if path.suffix == ".bin" else _read_npy_header
            offset, tokens = read(file, path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if tokens < 0 or offset + 2 * tokens != size:
        raise DataError(
            f"{path} is {size:,} bytes, but its header promises {tokens:,} tokens "
            f"({offset + 2 * tokens:,} bytes); delete it and make it again"
        )
    return Shard(path, offset, tokens)


def read_manifest(folder: Path) -> dict | None:
    """The manifest of a folder of shards, None where there is none; DataError if broken."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        ids = manifest["vocab_size"], manifest["eot"]
        listed = [(s["file"], s["split"], s["tokens"], s["sha256"]) for s in manifest["shards"]]
        source = manifest.get("source", [])
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"{path} is damaged ({type(error).__name__}: {error}); shard into an empty folder"
        ) from error
    whole = all(type(i) is int and 0 < i < 2**16 for i in ids) and all(
        isinstance(f, str)
        and f.isprintable()
        and isinstance(s, str)
        and type(t) is int
        and 0 <= t < 2**63
        and isinstance(h, str)
        for f, s, t, h in listed
    )
    if not (whole and isinstance(manifest.get("tokenizer"), str) and isinstance(source, list)):
        raise DataError(f"{path} is damaged; shard into an empty folder")
    return manifest


def corpus_name(folder: Path) -> str:
    """What the tokens of a folder are: "FineWeb-Edu" where they are GPT-2 tokens of that, else the
    folder's name. Folders without a manifest go by their name."""
    manifest = read_manifest(folder) or {"source": [folder.name], "tokenizer": "gpt2"}
    source = " ".join(map(str, manifest.get("source", ""))).lower()
    edu = "fineweb-edu" in source or "edu_fineweb" in source or "edufineweb" in source
    return "FineWeb-Edu" if edu and manifest["tokenizer"] == "gpt2" else folder.resolve().name


def write_manifest(folder: Path, manifest: dict) -> None:
    """Replaces the manifest of a folder in one step."""
    with atomic_write(folder / MANIFEST) as file:
        file.write(json.dumps(manifest, indent=1).encode())


def find_shards(folder: Path, split: str) -> list[Shard]:
    """The shards of a split ("train" or "val") in name order, each checked, none missing.

    Raises DataError for a folder that is absent, empty, of two formats, or short of a shard that
    its manifest lists.
    """
    make = f"make shards first: python data/fineweb-edu.py --local_dir {folder}"
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}; {make}")
    paths = sorted(
        p
        for p in folder.iterdir()
        if p.suffix in (".npy", ".bin") and split in p.name and p.is_file()
    )
    if not paths:
        if split == "val" and any("train" in p.name for p in folder.iterdir()):
            make = "shard again with a --val_fraction above 0, or with more text"
        raise DataError(f"{folder} holds no {split} shards (.npy or .bin); {make}")
    if len({p.suffix for p in paths}) > 1:
        raise DataError(f"{folder} holds {split} shards as .npy and as .bin; remove one of the two")
    shards = [inspect(path) for path in paths]
    found = {shard.path.name: shard.tokens for shard in shards}
    for entry in (read_manifest(folder) or {"shards": []})["shards"]:
        if entry["split"] == split and found.get(entry["file"]) != entry["tokens"]:
            raise DataError(
                f"{folder / entry['file']} is missing or not the {entry['tokens']:,} tokens that "
                f"{MANIFEST} lists; copy it again or shard into an empty folder"
            )
    return shards


class ShardWriter:
    """One growing shard: tokens go to a temporary file that takes its final name when finished.

    `start` continues a shard that an earlier run left unfinished, after its first `start` tokens.
    """

    def __init__(self, folder: Path, split: str, index: int, suffix: str, start: int = 0) -> None:
        self.path = folder / f"{split}_{index:06d}{suffix}"
        self.split, self.index, self.tokens = split, index, start
        self.temporary = self.path.with_name(self.path.name + ".tmp")
        if start and not self.temporary.exists():  # finished short, or renamed just before a kill
            if not self.path.exists():
                raise DataError(f"{self.path} is gone, half done; shard into an empty folder")
            os.replace(self.path, self.temporary)
        offset = len(header(suffix, 0))
        self.file = open(self.temporary, "r+b" if start else "wb")
        if start and os.fstat(self.file.fileno()).st_size < offset + 2 * start:
            raise DataError(f"{self.temporary} has lost tokens; shard into an empty folder")
        self.file.truncate(offset + 2 * start)
        self.file.seek(offset + 2 * start)

    def append(self, tokens: np.ndarray) -> None:
        """Adds uint16 tokens (n,)."""
        self.file.write(tokens.astype("<u2", copy=False).tobytes())
        self.tokens += len(tokens)

    def sync(self) -> None:
        """Makes everything appended so far survive a crash."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def finish(self) -> dict:
        """Writes the header, gives the file its final name, returns its manifest entry."""
        self.file.seek(0)
        self.file.write(header(self.path.suffix, self.tokens))
        self.sync()
        self.file.close()
        digest = sha256(self.temporary)
        os.replace(self.temporary, self.path)
        sync_folder(self.path.parent)
        return {
            "file": self.path.name,
            "split": self.split,
            "tokens": self.tokens,
            "sha256": digest,
        }
