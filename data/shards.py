"""Token shards on disk, and the manifest beside them.

    train_000000.npy  val_000000.npy  ...  manifest.json

A .npy shard is a 1-D array that numpy.load reads: uint16, or uint32 for a vocabulary of more than
65,536 tokens. Folders of build-nanogpt, llm.c, modded-nanogpt and datatrove work without
conversion: a file name contains its split, and a folder without a manifest or tokenizer.json holds
GPT-2 tokens. The layouts of these folders:

    NAME.bin           256 little-endian int32 (magic, version, token count, zeros), then the tokens
                       (llm.c, dev/data/data_common.py)
    NAME.ds            the tokens alone, little-endian (datatrove, pipeline/tokens/tokenizer.py)
    NAME.ds.metadata   lines of text: the tokenizer, "|" and the bytes of a token; number of tokens
    NAME.ds.index      ends of the documents, which training does not need

This file reads one or several folders as one TokenStream. data/loader.py decides which tokens make
a batch; data/sharder.py writes shards.
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
from data.tokenizer import load_tokenizer, read_tokenizer_spec, tokenizer_identity, vocab_size_of
from utils.errors import UserError, reading
from utils.files import describe_searched_place

SUFFIXES = (".npy", ".bin", ".ds")  # other files of a folder are ignored
# magic, version, token count, and zeros up to 1,024 bytes
BIN_HEADER = struct.Struct("<3i1012x")
MAX_BIN_TOKENS = 2**31 - 1  # most tokens of a .bin shard: its header counts in int32
# magic and version by np.dtype.str: llm.c writes GPT-2's tokens as uint16, Llama 3's as uint32
BIN_VERSIONS = {"<u2": (20240520, 1), "<u4": (20240801, 7)}
GPT2_NAMES = ("gpt2", "openai-community/gpt2")  # names on the Hugging Face hub


class MissingShards(UserError):
    """Error for folders without shards of a split, for example before their sharding begins."""


class Layout(NamedTuple):
    """Where the tokens of a file are, by its header or, for a .ds file, by its metadata. The size
    of the file agrees with it."""

    header_bytes: int
    """Bytes before the first token."""
    num_tokens: int
    dtype: np.dtype
    """Little-endian uint16 or uint32."""


def inspect_shard(path: Path) -> Layout:
    """Return the layout of a file of tokens. Raise UserError if its header or, for a .ds file,
    its metadata is wrong or contradicts the file's size."""
    with reading(path, "a shard of tokens"):  # an error of the content becomes a UserError
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
        expected_size = layout.header_bytes + layout.num_tokens * layout.dtype.itemsize
        size = path.stat().st_size
        if size != expected_size:
            raise ValueError(f"{size:,} bytes instead of {expected_size:,}")
    return layout


def bin_header(dtype: np.dtype, num_tokens: int) -> bytes:
    """Return the header of a .bin shard of tokens of `dtype`, little-endian uint16 or uint32."""
    # magic, version, number of tokens, zeros: 1,024 bytes
    return BIN_HEADER.pack(*BIN_VERSIONS[dtype.str], num_tokens)


def inspect_bin(path: Path) -> Layout:
    """Return the layout of a .bin file; raise an error if its header is not llm.c's."""
    with open(path, "rb") as file:
        magic, version, num_tokens = BIN_HEADER.unpack(file.read(BIN_HEADER.size))
    for dtype_name, magic_and_version in BIN_VERSIONS.items():  # "<u2", (20240520, 1)
        if magic_and_version == (magic, version):
            return Layout(BIN_HEADER.size, num_tokens, np.dtype(dtype_name))
    raise ValueError(
        "no header of llm.c; if the file is tokens alone, replace it by "
        f"np.save('{path.stem}.npy', np.fromfile('{path.name}', 'uint16'))"
    )


def inspect_datatrove(path: Path) -> Layout:
    """Return the layout of a .ds file by its metadata. Raise UserError if the metadata name another
    tokenizer than GPT-2's and the folder has no tokenizer.json."""
    metadata = path.with_name(path.name + ".metadata").read_text(encoding="utf-8")
    first_line, num_tokens = metadata.splitlines()[:2]  # "gpt2|2", "100000000"
    tokenizer_name, _, token_size = first_line.rpartition("|")  # "gpt2", "2" bytes a token
    # Do not look for a tokenizer at a local path in the metadata: this may be another machine.
    # Without this check, ids of another vocabulary would be taken for GPT-2's.
    if tokenizer_name not in GPT2_NAMES and not path.with_name(TOKENIZER_FILE).exists():
        raise UserError(
            f"{path} holds tokens of {tokenizer_name}: put its {TOKENIZER_FILE} beside it"
        )
    return Layout(0, int(num_tokens), np.dtype(f"<u{token_size}"))  # 0: no header


def shard_paths(folder: Path) -> list[Path]:
    """Return the paths of a folder's .npy, .bin and .ds files in name order; [] if the folder does
    not exist."""
    return sorted(path for path in folder.glob("*") if path.suffix in SUFFIXES)


@dataclass(frozen=True)
class Shard:
    """Shard of a folder. With a manifest, its file is opened only when it is read: else a thousand
    processes would open the 150,000 files of 15 trillion tokens at once."""

    path: Path
    num_tokens: int
    """Tokens that the manifest lists; without a manifest, the tokens in the file."""
    sha256: str | None = None
    """SHA-256 of the file, by the manifest; None without a manifest."""

    @cached_property
    def layout(self) -> Layout:
        """Layout of the file. Raises UserError if the file is damaged, or has fewer tokens than the
        manifest lists. It may have more, if sharding goes on; its first tokens stay."""
        # header_bytes, num_tokens and dtype; FileNotFoundError if the file is missing
        inspected = inspect_shard(self.path)
        if inspected.num_tokens < self.num_tokens:  # another sharding has overwritten the file
            raise UserError(f"{self.path} is not as {MANIFEST} lists it; make or copy it again")
        return inspected

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens [start, start + count), uint16 or uint32 (count,); fewer at the end of the
        shard.

        The file is opened each time: 350 billion tokens are 3,500 shards, more files than a process
        may hold open.
        """
        # While sharding goes on, the file may have more tokens than the manifest lists. In a stream
        # they would take the places of the next shard's tokens.
        count = min(count, self.num_tokens - start)
        offset = self.layout.header_bytes + start * self.layout.dtype.itemsize  # in bytes
        return np.fromfile(self.path, self.layout.dtype, count, offset=offset)

    @property
    def checksum(self) -> str:
        """Checksum by which a resumed run notices other tokens: the SHA-256 in the manifest, or the
        CRC-32 of the first 1,000 tokens, because whole files would take minutes at each start."""
        return self.sha256 or f"{zlib.crc32(self.read(0, 1000).tobytes())}"


@dataclass(frozen=True)
class ShardFolder:
    """Folder of token shards, opened for one split."""

    path: Path
    split: str
    """"train" or "val"."""
    shards: list[Shard]
    """Shards of the split, in the order of the stream; [] if the folder lacks the split."""
    tokenizer_spec: str
    """Spec of the tokenizer (data/tokenizer.py)."""
    manifest: Manifest | None
    """None if another project made the folder."""

    @property
    def name(self) -> str:
        """Name of the corpus: FineWeb-Edu for its GPT-2 tokens, else the name of the folder."""
        origin = self.path.name  # e.g. "edu_fineweb10B", of build-nanogpt
        if self.manifest:
            # e.g. "['HuggingFaceFW/fineweb-edu', 'sample-10BT']"
            origin = str(self.manifest.source)
        # evaluation/figure.py draws published losses beside the losses of a run with this name;
        # they hold only for this corpus with GPT-2's tokens.
        if self.tokenizer_spec == "gpt2" and re.search("fineweb-edu|edu_?fineweb", origin.lower()):
            return "FineWeb-Edu"
        return self.path.resolve().name  # Path(".").name is ""


def open_folder(folder: Path, split: str) -> ShardFolder:
    """Open a split, "train" or "val", of a folder: the shards that the manifest lists, in its
    order; without a manifest, all files of the split in name order. A folder may lack the split.

    Raises UserError if the tokenizer of the shards is unknown. A shard that is missing, damaged or
    not as the manifest lists it raises an error at its first read. Without a manifest all shards
    are inspected now.
    """
    manifest = read_manifest(folder)
    shards: list[Shard] = []
    if manifest:
        # not shard_paths: while sharding goes on, some files are not in the manifest yet
        for entry in manifest.shards:  # ShardEntry: "train_000000.npy", 100_000_000 tokens, ...
            if entry.split == split:
                shards.append(Shard(folder / entry.file, entry.tokens, entry.sha256))
        tokenizer_spec = find_tokenizer_spec(folder, manifest)
    else:  # made by another project
        for path in shard_paths(folder):
            # the last "train" or "val" in the name counts, as in retrieval_train_000001.npy
            if re.findall("train|val", path.stem.lower())[-1:] == [split]:
                shards.append(Shard(path, inspect_shard(path).num_tokens))
        tokenizer_spec = guess_tokenizer_spec(folder, shards)
    return ShardFolder(folder, split, shards, tokenizer_spec, manifest)


def open_folders(paths: list[Path], split: str) -> list[ShardFolder]:
    """Open a split, "train" or "val", of folders that form one stream. Skip folders without this
    split: only some workers may have written validation text. Raises MissingShards, which says how
    to make shards, if no folder has the split, or if a folder has no shards of any split."""
    folders = [open_folder(path, split) for path in paths]
    folders_with_split = [folder for folder in folders if folder.shards]
    # folders without a shard of any split, such as a mistyped one
    empty_paths = [
        folder.path for folder in folders if not folder.shards and not shard_paths(folder.path)
    ]
    if empty_paths or not folders_with_split:
        missing = empty_paths or paths  # all paths, if they hold only the other split
        problem = f"holds no {split} shards (.npy, .bin, .ds); let the sharding end, or begin it"
        if split == "val":
            problem += " with a val_fraction above 0"
        if not missing[0].is_dir():
            problem = f"is no folder{describe_searched_place(missing[0])}; to make it of your text"
        raise MissingShards(
            f"data_dir {' '.join(map(str, missing))} {problem}: "
            f"python data/fineweb-edu.py --input YOUR_TEXT --local_dir {missing[0]}"
        )
    return folders_with_split


def guess_tokenizer_spec(folder: Path, shards: list[Shard]) -> str:
    """Return the spec of the tokenizer of a folder of another project: of its tokenizer.json, else
    "gpt2". Raise UserError if the tokens cannot be GPT-2's."""
    path = folder / TOKENIZER_FILE
    if path.exists():
        return read_tokenizer_spec(path)
    # In practice 1,000 tokens of GPT-2 hold an id of 2**15 or above. Up to 100,000 are read, to be
    # sure. Training would accept ids of a smaller vocabulary, such as characters, but the tokens
    # would mean another text.
    first_ids = shards[0].read(0, 100_000) if shards else np.zeros(0)  # [] without the split
    if len(first_ids) >= 1_000 and first_ids.max() < 2**15:
        raise UserError(
            f"{folder} holds no tokens of GPT-2, and has no {MANIFEST} with their tokenizer: "
            f"put its {TOKENIZER_FILE} beside them, or shard the text anew"
        )
    return "gpt2"


def find_tokenizer_spec(folder: Path, manifest: Manifest) -> str:
    """Return the spec of the tokenizer that a manifest names. Raise UserError if the folder's
    tokenizer.json is another tokenizer."""
    if manifest.tokenizer in TOKENIZERS:  # "gpt2" or "bytes", which is also the spec
        return manifest.tokenizer
    # else "tokenizer-" and a checksum of the tokenizer.json that data/fineweb-edu.py copied here
    path = folder / TOKENIZER_FILE
    spec = read_tokenizer_spec(path, manifest.end_of_text)  # FileNotFoundError if it is missing
    # Compare the checksum in FileTokenizer.name: with another file, the ids would be other tokens.
    # Manifests of earlier versions have a checksum of the whole file instead.
    sorted_json = json.dumps(json.loads(path.read_text(encoding="utf-8")), sort_keys=True)
    earlier_name = f"tokenizer-{zlib.crc32(sorted_json.encode()):08x}"
    if manifest.tokenizer not in (load_tokenizer(spec).name, earlier_name):
        raise UserError(
            f"{path} is not the tokenizer of these shards, which have {manifest.tokenizer} tokens"
        )
    return spec


def refuse_several(setting: str, values: set) -> None:
    """Raise UserError if folders of one stream have several values of a setting."""
    if len(values) > 1:
        raise UserError(
            f"the folders of data_dir have several {setting}, {sorted(values)}: shard them alike"
        )


class TokenStream:
    """All tokens of a split of one or several folders as one array, read from disk on demand.

    Raises UserError if the folders have different tokenizers, or a different --val_fraction, so
    that one may train on the validation text of another.
    """

    def __init__(self, folders: list[ShardFolder]) -> None:
        self.folders = folders  # bytes_per_token and `unfinished_folders` read their manifests
        self.split = folders[0].split  # "train" or "val", the same in all folders
        self.tokenizer_spec = folders[0].tokenizer_spec
        """Spec of the tokenizer. main of train.py replaces it, for the train split, by the spec of
        a pre-trained or resumed model, which has the same tokens and may have a chat template."""
        # without the model's padding: `read` refuses ids from this one on
        self.vocab_size = vocab_size_of(self.tokenizer_spec)
        self.shards: list[Shard] = []
        for folder in folders:
            self.shards += folder.shards
        # The spec, a string, changes with the order of the keys in tokenizer.json; the identity,
        # another string, does not.
        self.tokenizer_identity = tokenizer_identity(self.tokenizer_spec)
        identities = {tokenizer_identity(folder.tokenizer_spec) for folder in folders}  # {"gpt2"}
        refuse_several("tokenizers", identities)
        # {0.01}; without the None of folders of older versions, which do not know it
        fractions = {folder.manifest.val_fraction for folder in folders if folder.manifest} - {None}
        # with two of them, a validation text of one folder may be a train text of another
        refuse_several("val_fractions", fractions)
        self.shard_starts = np.cumsum([0] + [shard.num_tokens for shard in self.shards])
        """Index in the stream of the first token of each shard, and at the end the length of the
        stream: int64 (shards + 1,), [0, 100, 150] for shards of 100 and 50 tokens."""

    def __len__(self) -> int:
        return self.shard_starts[-1]

    def read(self, start: int, length: int) -> np.ndarray:
        """Return tokens [start, start + length), int64 (length,), across the borders of shards.
        Raises UserError for an id outside the tokenizer's vocabulary."""
        # Callers stay inside: Sequences counts only whole sequences, data/verify.py ends at len()
        assert 0 <= start and start + length <= len(self)
        tokens_by_shard: list[np.ndarray] = []  # one array from each shard in the range
        # the last shard that begins at `start` or before
        index = np.searchsorted(self.shard_starts, start, side="right") - 1
        while length > 0:
            shard = self.shards[index]
            # at most to the end of the shard, whose first read opens and checks the file
            tokens = shard.read(start - self.shard_starts[index], length)
            # Check ids here: on a GPU, an id beyond the embedding fails without naming a file.
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
        """Mean number of bytes of source text per token, to compute bits per byte; None if the
        bytes of a folder are unknown."""
        num_bytes = 0
        num_tokens = 0
        for folder in self.folders:
            manifest = folder.manifest
            # made by another project, or by an older version, which did not count the bytes
            if manifest is None or manifest.text_bytes_by_split[self.split] == 0:
                return None
            num_bytes += manifest.text_bytes_by_split[self.split]
            token_counts = [shard.num_tokens for shard in folder.shards]
            if self.split in manifest.state.open:
                # `open`, {"train": 31_000}, counts the tokens of the shard that is not full, all of
                # whose text is in num_bytes. While sharding goes on, `shards` may list fewer of
                # them, or none. So count full shards, then the open one.
                token_counts = [count for count in token_counts if count == manifest.shard_size]
                token_counts.append(manifest.state.open[self.split])
            num_tokens += sum(token_counts)
        return num_bytes / num_tokens

    @property
    def checksum(self) -> int:
        """Checksum of the lengths and checksums of the shards, in their order, by which a resumed
        run notices other data. It does not depend on where the folders are."""
        # Cheap, because each training run computes it; data/verify.py reads all tokens. With a
        # manifest, `contents` has its checksums: [(100_000_000, "9f3a..."), ...].
        contents = [(shard.num_tokens, shard.checksum) for shard in self.shards]
        return zlib.crc32(f"{contents}".encode())

    @property
    def unfinished_folders(self) -> list[Path]:
        """Paths of the folders whose sharding was interrupted or still runs, for a warning: neither
        the end of the text nor --max_shards has ended it, so that they hold a part of the text."""
        # Sharder.end sets `complete` at the end of the text, else `stopped`
        return [
            folder.path
            for folder in self.folders
            if folder.manifest and not (folder.manifest.complete or folder.manifest.stopped)
        ]
