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
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np

from data.tokenizer import TOKENIZER, TOKENIZERS, tokenizer_name
from utils.errors import UserError, is_of_machine
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
        if path.suffix == ".bin":
            with open(path, "rb") as file:
                *kind, tokens = BIN_HEADER.unpack(file.read(BIN_HEADER.size))
            if kind != [BIN_MAGIC, BIN_VERSION]:
                raise ValueError("no header of llm.c; np.save(path, np.fromfile(...)) adds one")
            array = np.memmap(path, np.dtype("<u2"), "r", BIN_HEADER.size, (tokens,))
        else:
            array = np.load(path, mmap_mode="r")
        if array.dtype != np.dtype("<u2") or array.ndim != 1:
            raise ValueError(f"{array.dtype} {array.shape} instead of a 1-D uint16 array")
        assert array.offset + array.nbytes == path.stat().st_size, "longer than its header says"
    except Exception as error:
        if is_of_machine(error):
            raise
        raise UserError(f"{path} is damaged or not a shard of uint16 tokens: {error}") from error
    return Shard(path, array.offset, len(array))


def read_manifest(folder: Path) -> dict | None:
    """Return the manifest of a folder, None if it has none; raise UserError if it is damaged."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        assert {"tokenizer", "vocab_size", "shards"} <= manifest.keys(), "a value is missing"
    except FileNotFoundError:
        return None
    except (ValueError, AssertionError, AttributeError) as error:
        raise UserError(f"{path} is damaged or not a manifest of shards: {error}") from error
    return manifest


def folder_tokenizer(folder: Path) -> str:
    """Return the spec of a folder's tokenizer; raise UserError if it is missing or another."""
    manifest = read_manifest(folder) or {}
    path = folder / TOKENIZER
    if path.exists():
        reader = import_module("data.file_tokenizer")  # on demand: it imports tokenizers
        spec = reader.read_tokenizer(path, manifest.get("end_of_text"))
        name = manifest.get("tokenizer")
        if name not in (None, tokenizer_name(spec)):
            raise UserError(
                f"{path} is not the tokenizer of these shards, which have {name} tokens"
            )
        return spec
    if (name := manifest.get("tokenizer", "gpt2")) not in TOKENIZERS:
        raise UserError(f"{path}, the tokenizer of these shards, is missing")
    return name


def check_together(folders: Sequence[Path]) -> None:
    """Raise UserError for folders that cannot be read together: one that is given twice, and those
    of different --val_fraction, as one may train on the validation text of the other."""
    seen: set[Path] = set()
    fractions: dict[float, Path] = {}  # those of folders made by others are not known
    for folder in folders:
        if folder.resolve() in seen:
            raise UserError(f"--data_dir names {folder} twice; a weight gives it a larger share")
        seen.add(folder.resolve())
        manifest = read_manifest(folder) or {}
        if "val_fraction" in manifest:
            fractions[manifest["val_fraction"]] = folder
    if len(fractions) > 1:
        shares = [f"{folder}: {fraction}" for fraction, folder in fractions.items()]
        raise UserError(
            f"the folders of --data_dir differ in --val_fraction ({', '.join(shares)}): one may "
            "train on the validation text of another; shard them alike"
        )


def bytes_per_token(manifests: Sequence[dict | None], split: str) -> float | None:
    """Return the mean bytes of source text for a token of a split in one or several folders; None
    if one of them, made by others, does not tell the size of its text."""
    num_bytes, num_tokens = 0, 0
    for manifest in manifests:
        if manifest is None or "bytes" not in manifest:
            return None
        num_bytes += manifest["bytes"][split]
        num_tokens += sum(s["tokens"] for s in manifest["shards"] if s["split"] == split)
    return num_bytes / num_tokens if num_bytes else None


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


def shard_paths(folder: Path) -> list[Path]:
    """Return the paths of a folder's .npy and .bin files in name order."""
    return sorted(p for p in folder.iterdir() if p.suffix in (".npy", ".bin") and p.is_file())


def find_shards(folder: Path, split: str) -> list[Shard]:
    """Return the shards of a split ("train" or "val") in name order. Raises UserError if there is
    none, one is damaged, or they are not those in the manifest."""
    paths = shard_paths(folder) if folder.is_dir() else []
    # the last of these words in a name counts, as in retrieval_train_000001.npy
    mine = [p for p in paths if re.findall("train|val", p.stem.lower())[-1:] == [split]]
    shards = [inspect_shard(path) for path in mine]
    if not shards:
        raise UserError(
            f"{folder} holds no {split} shards (.npy or .bin); give another --data_dir, or make "
            f"some: python data/fineweb-edu.py --input YOUR_TEXT --local_dir {folder}"
        )
    manifest = read_manifest(folder)
    if manifest is None:
        # of GPT-2's tokens any 1,000 have one above 2**15
        head = shards[0].open()[:100_000]
        is_gpt2 = len(head) < 1_000 or head.max() >= 2**15
        if not is_gpt2 and not (folder / TOKENIZER).exists():
            raise UserError(
                f"{shards[0].path} holds no tokens of GPT-2, and no {MANIFEST} says which: put "
                f"their {TOKENIZER} beside it, or shard the text anew"
            )
        return shards
    listed = {(s["file"], s["tokens"]) for s in manifest["shards"] if s["split"] == split}
    if differing := listed ^ {(shard.path.name, shard.tokens) for shard in shards}:
        path = folder / min(differing)[0]
        raise UserError(f"{path} is missing or not as {MANIFEST} lists it; make or copy it again")
    return shards
