"""Token shards on disk: uint16 .npy or llm.c's .bin, and the manifest beside them.

    train_000000.npy  val_000000.npy  ...  manifest.json

A .npy shard is a 1-D uint16 array that numpy.load reads. A .bin shard is llm.c's format: 256
little-endian int32 (20240520, 1, token count, zeros), then the uint16 tokens. Folders of
build-nanogpt, llm.c and modded-nanogpt work without conversion: a file name contains its split, and
a folder without a manifest holds GPT-2 tokens.
"""

import io
import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from utils.errors import UserError
from utils.files import atomic_write

BIN_MAGIC, BIN_VERSION, BIN_HEADER = 20240520, 1, struct.Struct("<3i1012x")
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Shard:
    """Shard file with a valid header: offset of its tokens in bytes, and their number."""

    path: Path
    offset: int
    tokens: int

    def open(self) -> np.ndarray:
        """Return the tokens as a read-only memory map, uint16 (tokens,)."""
        return np.memmap(self.path, np.dtype("<u2"), "r", self.offset, (self.tokens,))


def header(suffix: str, tokens: int) -> bytes:
    """Return the header of a .npy or .bin shard; its length does not depend on `tokens`."""
    if suffix == ".bin":
        return BIN_HEADER.pack(BIN_MAGIC, BIN_VERSION, tokens)
    buffer = io.BytesIO()
    description = {"descr": "<u2", "fortran_order": False, "shape": (tokens,)}
    np.lib.format.write_array_header_1_0(buffer, description)
    return buffer.getvalue()


def inspect_shard(path: Path) -> Shard:
    """Return a shard; raise UserError if its header is wrong or contradicts the file's size."""
    try:
        with open(path, "rb") as file:
            if path.suffix == ".bin":
                *kind, tokens = BIN_HEADER.unpack(file.read(BIN_HEADER.size))
                if kind != [BIN_MAGIC, BIN_VERSION]:
                    raise ValueError("no header of llm.c; np.save(path, np.fromfile(...)) adds one")
            else:
                version = np.lib.format.read_magic(file)
                parse = getattr(np.lib.format, "read_array_header_{}_{}".format(*version))
                shape, _, dtype = parse(file)
                if dtype != np.dtype("<u2") or len(shape) != 1:
                    raise ValueError(f"{dtype} {shape} instead of a 1-D uint16 array")
                tokens = shape[0]
            offset, size = file.tell(), path.stat().st_size
        if tokens < 0 or offset + 2 * tokens != size:
            raise ValueError(f"{size:,} bytes, but the header promises {tokens:,} tokens")
    except Exception as error:
        raise UserError(f"{path} is damaged or not a shard of uint16 tokens: {error}") from error
    return Shard(path, offset, tokens)


def read_manifest(folder: Path) -> dict | None:
    """Return the manifest of a folder, None if it has none; raise UserError if it is damaged."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        assert {"tokenizer", "vocab_size", "eot"} <= manifest.keys(), "a value is missing"
        assert all({"file", "split", "tokens"} <= shard.keys() for shard in manifest["shards"])
    except FileNotFoundError:
        return None
    except Exception as error:
        reason = f"({type(error).__name__}: {error}); shard into an empty folder"
        raise UserError(f"{path} is damaged or not the manifest of shards {reason}") from error
    return manifest


def write_manifest(folder: Path, manifest: dict) -> None:
    """Replace the manifest of a folder atomically."""
    with atomic_write(folder / MANIFEST) as file:
        file.write(json.dumps(manifest, indent=1).encode())


def corpus_name(folder: Path) -> str:
    """Return "FineWeb-Edu" for GPT-2 tokens of that dataset, else the name of the folder."""
    manifest = read_manifest(folder) or {"source": [folder.name], "tokenizer": "gpt2"}
    source = " ".join(map(str, manifest.get("source", ""))).lower()
    edu = re.search("fineweb-edu|edu_?fineweb", source)
    return "FineWeb-Edu" if edu and manifest["tokenizer"] == "gpt2" else folder.resolve().name


def is_interrupted(folder: Path) -> bool:
    """Return whether data/fineweb-edu.py was stopped while it wrote this folder."""
    manifest = read_manifest(folder) or {}
    return not manifest.get("complete", True) and not manifest.get("stopped", False)


def shard_paths(folder: Path) -> list[Path]:
    """Return the paths of a folder's .npy and .bin files in name order."""
    return sorted(p for p in folder.iterdir() if p.suffix in (".npy", ".bin") and p.is_file())


def split_of(name: str) -> str | None:
    """Return the split that a file name contains, best at the beginning of a word, None if none."""
    stem = name.rpartition(".")[0].lower()
    found = re.findall("(?<![a-z])(train|val)", stem) or re.findall("train|val", stem)
    return found[-1] if found else None


def find_shards(folder: Path, split: str) -> list[Shard]:
    """Return the shards of a split ("train" or "val") in name order.

    Raises UserError if there is none, one is damaged, or they are not those that the manifest
    lists.
    """
    paths = shard_paths(folder) if folder.is_dir() else []
    shards = [inspect_shard(path) for path in paths if split_of(path.name) == split]
    if not shards:
        make = "make some: python data/fineweb-edu.py --input YOUR_TEXT --local_dir"
        hint = f"{make} {folder}, or give another --data_dir"
        if is_interrupted(folder):
            hint = "sharding was interrupted: run its command again"
        elif paths:
            hint = "shard again with a larger --val_fraction, or without --max_shards"
        raise UserError(f"{folder} holds no {split} shards (.npy or .bin); {hint}")
    manifest = read_manifest(folder)
    if manifest is None:
        head = shards[0].open()[:100_000]
        if (folder / "meta.pkl").exists() or (len(head) >= 1000 and head.max() <= 256):
            raise UserError(
                f"{shards[0].path} holds bytes or characters, not tokens of GPT-2, and no "
                f"{MANIFEST} says so; shard the text with --tokenizer bytes"
            )
        return shards
    listed = {(s["file"], s["tokens"]) for s in manifest["shards"] if s["split"] == split}
    if differing := listed ^ {(shard.path.name, shard.tokens) for shard in shards}:
        raise UserError(
            f"{folder / min(differing)[0]} is missing or not as {MANIFEST} lists it; copy it "
            "again, or run data/fineweb-edu.py again if it was killed"
        )
    return shards
