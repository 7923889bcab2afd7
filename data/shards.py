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
import tokenize
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from utils.errors import UserError
from utils.files import atomic_write

BIN_MAGIC, BIN_VERSION, BIN_HEADER = 20240520, 1, struct.Struct("<3i1012x")
NPY_PARSERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
# raised by NumPy for a damaged header, which is a Python literal
BAD_HEADER = (ValueError, KeyError, TypeError, SyntaxError, tokenize.TokenError, RecursionError)
MANIFEST = "manifest.json"
NANOGPT_CHARACTERS = "meta.pkl"  # written beside the tokens of a character-level data set
SPLITS = ("train", "val")


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


def parse_header(start: bytes, path: Path) -> tuple[int, int]:
    """Return offset in bytes and number of the tokens; raise UserError if the header is wrong."""
    if path.suffix == ".bin":
        *kind, tokens = BIN_HEADER.unpack(start[: BIN_HEADER.size].ljust(BIN_HEADER.size, b"\0"))
        if kind != [BIN_MAGIC, BIN_VERSION]:
            raise UserError(
                f"{path} begins with {kind[0]}, {kind[1]} instead of {BIN_MAGIC}, {BIN_VERSION}, "
                "the header of llm.c's uint16 shards; for a file of nanoGPT, which has none: "
                "np.save('train.npy', np.fromfile('train.bin', np.uint16))"
            )
        return BIN_HEADER.size, tokens
    file = io.BytesIO(start)
    try:
        shape, _, dtype = NPY_PARSERS[np.lib.format.read_magic(file)](file)
    except BAD_HEADER as error:
        raise UserError(f"{path} is not a .npy file; make it again") from error
    if dtype != np.dtype("<u2") or len(shape) != 1:
        raise UserError(
            f"{path} holds {dtype} {shape}; a shard is a 1-D uint16 array: tokens.astype(np.uint16)"
        )
    return file.tell(), int(shape[0])


def inspect_shard(path: Path) -> Shard:
    """Return a shard; raise UserError if its header is wrong or contradicts the file's size."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            start = file.read(12_000)  # NumPy would read as much as a damaged length says
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    offset, tokens = parse_header(start, path)
    if tokens < 0 or offset + 2 * tokens != size:
        raise UserError(
            f"{path} is {size:,} bytes, but its header promises {tokens:,} tokens "
            f"({offset + 2 * tokens:,} bytes); copy it again or shard into an empty folder"
        )
    return Shard(path, offset, tokens)


def read_manifest(folder: Path) -> dict | None:
    """Return the manifest of a folder, None if it has none; raise UserError if it is damaged."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if not is_manifest(manifest):
            raise ValueError("values of a wrong type")
        return manifest
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{path} is damaged ({reason}); shard into an empty folder") from error


def is_manifest(manifest: dict) -> bool:
    """Return True if the values have the right types; raise KeyError or TypeError for others."""
    shards = manifest["shards"]
    texts = [manifest["tokenizer"], *(s[k] for s in shards for k in ("file", "split", "sha256"))]
    return (
        all(is_count(manifest[key]) and 0 < manifest[key] < 2**16 for key in ("vocab_size", "eot"))
        and isinstance(manifest.get("source", []), list)
        and all(isinstance(text, str) and text.isprintable() for text in texts)
        and all(is_count(shard["tokens"]) for shard in shards)
    )


def is_count(value: object) -> bool:
    """Return True for an integer from 0 to 2^63 - 1."""
    return type(value) is int and 0 <= value < 2**63


def corpus_name(folder: Path) -> str:
    """Return "FineWeb-Edu" for GPT-2 tokens of that dataset, else the name of the folder."""
    manifest = read_manifest(folder) or {"source": [folder.name], "tokenizer": "gpt2"}
    source = " ".join(map(str, manifest.get("source", ""))).lower()
    edu = re.search("fineweb-edu|edu_?fineweb", source)
    return "FineWeb-Edu" if edu and manifest["tokenizer"] == "gpt2" else folder.resolve().name


def write_manifest(folder: Path, manifest: dict) -> None:
    """Replace the manifest of a folder atomically."""
    with atomic_write(folder / MANIFEST) as file:
        file.write(json.dumps(manifest, indent=1).encode())


def shard_paths(folder: Path) -> list[Path]:
    """Return the paths of a folder's .npy and .bin files in name order."""
    return sorted(p for p in folder.iterdir() if p.suffix in (".npy", ".bin") and p.is_file())


def is_interrupted(folder: Path) -> bool:
    """Return whether data/fineweb-edu.py was stopped while it wrote this folder."""
    manifest = read_manifest(folder) or {}
    return not manifest.get("complete", True) and not manifest.get("stopped", False)


def split_of(name: str) -> str | None:
    """Return the split of a shard by its file name: by "train" or "val" between other characters
    than letters, else anywhere; UserError for a name with both, None for one with neither."""
    stem = name.rpartition(".")[0].lower()
    words = {word.removesuffix("idation") for word in re.split(r"[^a-z]+", stem)}
    found = [split for split in SPLITS if split in words] or [s for s in SPLITS if s in stem]
    if len(found) > 1:
        raise UserError(f"{name} is named as train and as val; rename it to be one of the two")
    return found[0] if found else None


def find_shards(folder: Path, split: str) -> list[Shard]:
    """Return the shards of a split ("train" or "val") in name order.

    Raises UserError if the folder is missing or empty, mixes formats, holds a damaged shard, or
    others than its manifest lists.
    """
    make = (
        f"make shards first: python data/fineweb-edu.py --local_dir {folder} --input YOUR_TEXT, or "
        "without --input of FineWeb-Edu; or give another --data_dir"
    )
    if folder.is_file():
        raise UserError(
            f"{folder} is a file; if it is text, make shards of it: python data/fineweb-edu.py "
            f"--input {folder} --local_dir data/{folder.stem}, and give that folder"
        )
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}; {make}")
    paths = [path for path in shard_paths(folder) if split_of(path.name) == split]
    if not paths:
        if is_interrupted(folder):
            make = "sharding was interrupted: run its command again"
        elif split == "val" and shard_paths(folder):
            make = (
                "shard again with a larger --val_fraction or, where --max_shards ended sharding "
                "early, run the same command without it"
            )
        raise UserError(f"{folder} holds no {split} shards (.npy or .bin); {make}")
    if len({path.suffix for path in paths}) > 1:
        raise UserError(f"{folder} holds {split} shards as .npy and as .bin; remove one of the two")
    manifest = read_manifest(folder)
    if manifest is None and (folder / NANOGPT_CHARACTERS).exists():
        raise UserError(
            f"{folder} holds {NANOGPT_CHARACTERS}: its tokens are characters that nanoGPT has "
            "numbered, not GPT-2's; shard the text with --tokenizer bytes, into another folder"
        )
    shards = [inspect_shard(path) for path in paths]
    found = {shard.path.name: shard.tokens for shard in shards}
    if manifest is None:
        check_gpt2_tokens(shards[0])
        return shards
    listed = [entry for entry in manifest["shards"] if entry["split"] == split]
    if extra := sorted(found.keys() - {entry["file"] for entry in listed}):
        raise UserError(
            f"{folder / extra[0]} is not in {MANIFEST}: move it away, or run data/fineweb-edu.py "
            "again if it was killed"
        )
    remedy = "copy it again or shard into an empty folder"
    if "merged" in manifest and is_interrupted(folder):
        remedy = "--merge was interrupted: run the same command again"
    for entry in listed:
        if found.get(entry["file"]) != entry["tokens"]:
            raise UserError(
                f"{folder / entry['file']} is missing or not the {entry['tokens']:,} tokens that "
                f"{MANIFEST} lists; {remedy}"
            )
    return shards


def check_gpt2_tokens(shard: Shard) -> None:
    """Raise UserError for a shard without a manifest that holds bytes: no text of some length has
    only those of GPT-2's tokens whose ids are below 257."""
    head = shard.open()[:100_000]
    if len(head) >= 1000 and head.max() <= 256:
        raise UserError(
            f"{shard.path} has ids up to {head.max()}: bytes or characters, not tokens of GPT-2; "
            f"copy the {MANIFEST} of its folder too, or shard the text with --tokenizer bytes"
        )
