"""Token shards on disk, and the manifest beside them.

    train_000000.npy  val_000000.npy  ...  manifest.json

A .npy shard is a 1-D array that numpy.load reads: uint16, or uint32 for a vocabulary of more than
65,536 tokens. Folders of build-nanogpt, llm.c, modded-nanogpt and datatrove work without
conversion: a file name contains its split, and a folder without a manifest or tokenizer.json holds
GPT-2 tokens. Their layouts:

    NAME.bin           256 little-endian int32 (magic, version, token count, zeros), then the tokens
                       (llm.c, dev/data/data_common.py)
    NAME.ds            the tokens alone, little-endian (datatrove, pipeline/tokens/tokenizer.py)
    NAME.ds.metadata   lines of text: the tokenizer, "|" and the bytes of a token; number of tokens
    NAME.ds.index      ends of the documents, which training does not need

This file reads folders, as the one TokenStream that all of their tokens are. Which tokens make a
batch is decided in data/loader.py; data/sharder.py writes shards.
"""

import json
import re
import struct
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.manifest import MANIFEST, Manifest, read_manifest
from data.named_tokenizer import TOKENIZER_FILE, TOKENIZERS
from data.tokenizer import count_tokens, load_tokenizer, read_tokenizer, tokenizer_identity
from utils.errors import UserError, reading

SUFFIXES = (".npy", ".bin", ".ds")  # other files of a folder are ignored
# magic, version, token count, and zeros up to 1,024 bytes
BIN_HEADER = struct.Struct("<3i1012x")
MAX_BIN_TOKENS = 2**31 - 1  # of a shard, as the count is an int32
# magic and version by dtype: llm.c writes GPT-2's tokens as uint16 and Llama 3's as uint32
BIN_VERSIONS = {"<u2": (20240520, 1), "<u4": (20240801, 7)}
GPT2_NAMES = ("gpt2", "openai-community/gpt2")  # names on the Hugging Face hub


class MissingShards(UserError):
    """Error for folders that hold no shards of a split: their sharding may not have begun."""


class Layout(NamedTuple):
    """Where the tokens of a file stand, by its header, which agrees with the file's size."""

    offset: int
    """Bytes before the first token."""
    num_tokens: int
    dtype: np.dtype
    """Little-endian uint16 or uint32."""


def inspect_shard(path: Path) -> Layout:
    """Return the layout of a file of tokens; raise UserError if its header is wrong or contradicts
    the file's size."""
    with reading(path, "a shard of tokens"):  # names the file in each error
        if path.suffix == ".npy":
            array = np.load(path, mmap_mode="r")  # an np.memmap: only the header is read
            if array.dtype.str not in ("<u2", "<u4") or array.ndim != 1:
                raise ValueError(f"{array.dtype} {array.shape} instead of 1-D uint16 or uint32")
            layout = Layout(array.offset, len(array), array.dtype)
        elif path.suffix == ".bin":
            layout = inspect_bin(path)
        else:
            layout = inspect_datatrove(path)
        # in bytes; a truncated copy has fewer
        expected_size = layout.offset + layout.num_tokens * layout.dtype.itemsize
        size = path.stat().st_size
        if size != expected_size:
            raise ValueError(f"{size:,} bytes instead of {expected_size:,}")
    return layout


def bin_header(dtype: str, num_tokens: int) -> bytes:
    """Return the header of a .bin shard of tokens of `dtype`, "<u2" or "<u4"."""
    return BIN_HEADER.pack(*BIN_VERSIONS[dtype], num_tokens)


def inspect_bin(path: Path) -> Layout:
    """Return the layout of a .bin file; raise ValueError if llm.c does not know it."""
    with open(path, "rb") as file:
        magic, version, num_tokens = BIN_HEADER.unpack(file.read(BIN_HEADER.size))
    for dtype, magic_and_version in BIN_VERSIONS.items():
        if magic_and_version == (magic, version):
            return Layout(BIN_HEADER.size, num_tokens, np.dtype(dtype))
    raise ValueError("no header of llm.c; np.save(path, np.fromfile(...)) adds one")


def inspect_datatrove(path: Path) -> Layout:
    """Return the layout by the metadata of a .ds file. Raise UserError if they name another
    tokenizer than GPT-2's, and no tokenizer.json stands in the folder."""
    metadata = path.with_name(path.name + ".metadata").read_text(encoding="utf-8")
    first_line, num_tokens = metadata.splitlines()[:2]
    tokenizer, _, token_size = first_line.rpartition("|")  # e.g. "gpt2|2"
    # A tokenizer.json at a local path is not looked for there, as this may be another machine.
    # Without this check, ids of another vocabulary of that size would be taken for GPT-2's.
    if tokenizer not in GPT2_NAMES and not path.with_name(TOKENIZER_FILE).exists():
        raise UserError(f"{path} holds tokens of {tokenizer}: put its {TOKENIZER_FILE} beside it")
    return Layout(0, int(num_tokens), np.dtype(f"<u{token_size}"))  # 0: no header


def shard_paths(folder: Path) -> list[Path]:
    """Return the paths of a folder's .npy, .bin and .ds files in name order; [] if there is no such
    folder."""
    return sorted(path for path in folder.glob("*") if path.suffix in SUFFIXES)


@dataclass(frozen=True)
class Shard:
    """Shard of a folder, whose file is opened when it is first read: 15 trillion tokens are 150,000
    files, which a thousand processes would open at once."""

    path: Path
    num_tokens: int
    """Tokens that the manifest lists, or without one those that the file has."""
    sha256: str | None = None
    """SHA-256 of the file in the manifest; None without one."""

    @cached_property
    def layout(self) -> Layout:
        """The layout of the file. Raises UserError if the file is damaged, or not the one that the
        manifest lists. It may have become longer since, if sharding goes on: its first tokens
        stay."""
        layout = inspect_shard(self.path)  # FileNotFoundError if it is missing
        if layout.num_tokens < self.num_tokens:  # replaced by another sharding
            raise UserError(f"{self.path} is not as {MANIFEST} lists it; make or copy it again")
        return layout

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens [start, start + count), uint16 or uint32 (count,); fewer where the shard
        ends.

        The file is opened each time: 350 billion tokens are 3,500 shards, more files than a process
        may hold open.
        """
        count = min(count, self.num_tokens - start)
        offset = self.layout.offset + start * self.layout.dtype.itemsize  # in bytes
        return np.fromfile(self.path, self.layout.dtype, count, offset=offset)

    @property
    def checksum(self) -> str:
        """Changes with the tokens: the SHA-256, or the CRC-32 of the first tokens, as reading whole
        files would take minutes at each start."""
        return self.sha256 or f"{zlib.crc32(self.read(0, 1000).tobytes())}"


@dataclass(frozen=True)
class ShardFolder:
    """Folder of token shards, opened for one split."""

    path: Path
    split: str
    """"train" or "val"."""
    shards: list[Shard]
    """Shards of the split, in the order of the stream; may be empty."""
    tokenizer: str
    """Spec of the tokenizer (data/tokenizer.py)."""
    manifest: Manifest | None
    """None if another project made the folder."""

    @property
    def name(self) -> str:
        """Name of the corpus: FineWeb-Edu for GPT-2 tokens of that dataset, else the folder's."""
        origin = self.path.name  # e.g. "edu_fineweb10B", of build-nanogpt
        if self.manifest:
            # e.g. "['HuggingFaceFW/fineweb-edu', 'sample-10BT']"
            origin = str(self.manifest.source)
        # Published losses, which evaluation/figure.py draws beside a run's, hold for this corpus
        # and these tokens only.
        edu_match = re.search("fineweb-edu|edu_?fineweb", origin.lower())
        if edu_match and self.tokenizer == "gpt2":
            return "FineWeb-Edu"
        return self.path.resolve().name  # "." has no name before it is resolved


def open_folder(folder: Path, split: str) -> ShardFolder:
    """Open a split, "train" or "val": the shards that the manifest lists, in its order. Without a
    manifest, all files of the split in name order. There may be none: see open_folders.

    Raises UserError if there are no shards of any split, or if their tokenizer is not known. A
    shard that is missing, damaged or not the one that the manifest lists raises an error when it is
    first read; without a manifest all are inspected now.
    """
    manifest = read_manifest(folder)
    paths = shard_paths(folder)  # files of all splits
    shards: list[Shard] = []
    if manifest:
        # Not `paths`: while sharding goes on, there are files that the manifest does not list yet.
        for entry in manifest.shards:
            if entry.split == split:
                shards.append(Shard(folder / entry.file, entry.tokens, entry.sha256))
    else:  # made by another project
        for path in paths:
            # the last of these words in a name counts, as in retrieval_train_000001.npy
            if re.findall("train|val", path.stem.lower())[-1:] == [split]:
                shards.append(Shard(path, inspect_shard(path).num_tokens))
    if not paths and not shards:  # no split at all: a mistyped folder
        raise missing_shards_error([folder], split)
    tokenizer = find_tokenizer_spec(folder, manifest, shards)
    return ShardFolder(folder, split, shards, tokenizer, manifest)


def open_folders(paths: list[Path], split: str) -> list[ShardFolder]:
    """Open a split of folders that are one stream: those that have some of it, as of several
    workers only some may have validation text. Raises UserError if none has."""
    folders = [open_folder(path, split) for path in paths]
    folders_with_split = [folder for folder in folders if folder.shards]
    if not folders_with_split:
        raise missing_shards_error(paths, split)
    return folders_with_split


def missing_shards_error(paths: list[Path], split: str) -> MissingShards:
    """Return the error for folders that hold no shards of a split."""
    names = " ".join(map(str, paths))
    command = f"python data/fineweb-edu.py --input YOUR_TEXT --local_dir {paths[0]}"
    if len(paths) == 1 and not paths[0].is_dir():
        return MissingShards(f"data_dir {names} is no folder; to make it of your text: {command}")
    return MissingShards(
        f"data_dir {names} holds no {split} shards (.npy, .bin, .ds); let the sharding end, or "
        f"begin it: {command}, with a val_fraction above 0"
    )


def find_tokenizer_spec(folder: Path, manifest: Manifest | None, shards: list[Shard]) -> str:
    """Return the spec of the tokenizer of a folder's shards; raise UserError if it is missing, or
    if the tokenizer.json in the folder is another."""
    path = folder / TOKENIZER_FILE
    if manifest is None:  # made by another project
        if path.exists():
            return read_tokenizer(path)
        # In practice 1,000 tokens of GPT-2 hold an id above 2**15. Ids of a smaller vocabulary,
        # such as characters, would train without an error, but as another text.
        first_ids = shards[0].read(0, 100_000) if shards else np.zeros(0)
        if len(first_ids) >= 1_000 and first_ids.max() < 2**15:
            raise UserError(
                f"{folder} holds no tokens of GPT-2, and no {MANIFEST} says which: put their "
                f"{TOKENIZER_FILE} beside them, or shard the text anew"
            )
        return "gpt2"
    if manifest.tokenizer in TOKENIZERS:  # "gpt2" or "bytes", which is also the spec
        return manifest.tokenizer
    # else it is "tokenizer-" and a checksum of the file that data/fineweb-edu.py has copied here
    if not path.exists():
        raise UserError(f"{path}, the tokenizer of these shards, is missing")
    spec = read_tokenizer(path, manifest.end_of_text)
    # FileTokenizer.name has the checksum: with another file, the ids would be other tokens. Shards
    # of earlier versions have that of the whole file.
    content = json.dumps(json.loads(path.read_text(encoding="utf-8")), sort_keys=True)
    file_name = f"tokenizer-{zlib.crc32(content.encode()):08x}"
    if manifest.tokenizer not in (load_tokenizer(spec).name, file_name):
        raise UserError(
            f"{path} is not the tokenizer of these shards, which have {manifest.tokenizer} tokens"
        )
    return spec


class TokenStream:
    """All tokens of one or several folders of a split as one array, read from disk when asked for.

    Raises UserError if the folders cannot be read together: they have several tokenizers, or were
    split by different --val_fraction, so that one may train on the validation text of another.
    """

    def __init__(self, folders: list[ShardFolder]) -> None:
        self.folders = folders
        self.split = folders[0].split  # the same in all
        self.tokenizer = folders[0].tokenizer
        """Spec. training/summary.py puts that of a pre-trained or resumed model here instead, which
        has the same tokens and may have a chat template."""
        self.vocab_size = count_tokens(self.tokenizer)  # without the model's padding
        self.shards: list[Shard] = []
        for folder in folders:
            self.shards += folder.shards
        # The spec changes with the order of the keys in tokenizer.json, the identity does not.
        identities = sorted({tokenizer_identity(folder.tokenizer) for folder in folders})
        if len(identities) > 1:
            raise UserError(f"the folders of data_dir have several tokenizers: {identities}")
        self.tokenizer_identity = identities[0]
        fractions: set[float] = set()
        for folder in folders:
            # not known for folders of other projects and of older versions
            if folder.manifest and folder.manifest.val_fraction is not None:
                fractions.add(folder.manifest.val_fraction)
        if len(fractions) > 1:
            raise UserError(
                f"the folders of data_dir have several val_fractions, {sorted(fractions)}: one "
                "may train on the validation text of another; shard them alike"
            )
        sizes = [shard.num_tokens for shard in self.shards]
        self.starts = np.cumsum([0, *sizes])
        """Index in the stream of the first token of each shard; last, the length of the stream."""

    def __len__(self) -> int:
        return self.starts[-1]

    def read(self, start: int, length: int) -> np.ndarray:
        """Return tokens [start, start + length), int64 (length,), across the borders of shards.
        Raises UserError for an id that the tokenizer does not have."""
        # Sequences.__len__ counts only whole sequences, and data/verify.py ends at len(stream)
        assert 0 <= start and start + length <= len(self)
        tokens_by_shard: list[np.ndarray] = []  # one from each shard in the range
        # the last shard that begins at `start` or before
        index = np.searchsorted(self.starts, start, side="right") - 1
        while length > 0:
            shard = self.shards[index]
            # at most to the end of the shard, whose first read opens and checks the file
            tokens = shard.read(start - self.starts[index], length)
            # On a GPU, an id beyond the embedding fails an assertion that names no file.
            highest = tokens.max(initial=0)  # initial: an empty shard has no maximum
            if highest >= self.vocab_size:
                raise UserError(
                    f"{shard.path} holds token id {highest}, not one of the {self.vocab_size:,} of "
                    f"{self.tokenizer_identity}"
                )
            tokens_by_shard.append(tokens)  # uint16 or uint32
            start += len(tokens)
            length -= len(tokens)
            index += 1
        # PyTorch's embedding and cross entropy take int64 (uint16 has hardly any operation there)
        return np.concatenate(tokens_by_shard).astype(np.int64)

    @property
    def bytes_per_token(self) -> float | None:
        """Mean bytes of source text for a token, by which bits per byte are computed; None if a
        folder of another project does not tell."""
        num_bytes = 0
        for folder in self.folders:
            # 0: the bytes of the text were not counted
            if folder.manifest is None or folder.manifest.bytes[self.split] == 0:
                return None
            num_bytes += folder.manifest.bytes[self.split]
        return num_bytes / len(self)

    @property
    def checksum(self) -> int:
        """Checksum of the lengths and checksums of the shards, in their order. It tells other data
        from the same data in another place."""
        # Cheap, as it runs at each start of a training run; data/verify.py reads all tokens.
        contents = [(shard.num_tokens, shard.checksum) for shard in self.shards]
        return zlib.crc32(f"{contents}".encode())

    @property
    def unfinished(self) -> list[Path]:
        """Folders whose sharding was interrupted, or still runs: they hold a part of their text, as
        neither its end nor --max_shards ended it."""
        return [
            folder.path
            for folder in self.folders
            if folder.manifest and not (folder.manifest.complete or folder.manifest.stopped)
        ]
