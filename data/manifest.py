"""Manifest of a folder of token shards, manifest.json: its settings, shards, and what was read.

data/sharder.py writes it, data/shards.py reads it; docs/FORMATS.md lists its keys, which are the
fields here. Its ledger counts for each file the rows, the texts, and the skipped rows by reason, so
that no row is lost silently. data/source.py counts them.
"""

import hashlib
import json
import os
from dataclasses import dataclass, field, fields
from pathlib import Path

from utils.errors import reading
from utils.files import atomic_write

MANIFEST = "manifest.json"


@dataclass
class FileCounts:
    """Entry of the ledger: counts of the rows that a file, or a dataset of the hub, gave so far."""

    size: int
    """Bytes of the file on disk; 0 for a dataset."""
    changed: int = 0
    """time_of_change of the file; 0 for a dataset, and for a pipe."""
    sha256: str = ""
    """SHA-256 of the file; "" where `changed` is 0."""
    rows: int = 0
    """All rows: texts and skipped rows."""
    texts: int = 0
    """Rows that are texts."""
    bytes: int = 0
    """Bytes of the texts in UTF-8."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Number of rows that are not texts, by reason."""


@dataclass
class ShardEntry:
    """Shard as the manifest lists it."""

    file: str
    """Name in the folder."""
    split: str
    """"train" or "val"."""
    tokens: int
    """Number of tokens."""
    sha256: str
    """SHA-256 of the file in hexadecimal."""


@dataclass
class ResumePoint:
    """Where the next run continues: in a document, after its first `tokens` tokens. ResumePoint()
    is the beginning of the source."""

    source: dict | None = None
    """SourcePosition (data/source.py) of the document's batch, as JSON; None: the source's
    beginning. {"file": 2, "counts": {...}, "revision": null, "stream": null}"""
    documents: int = 0
    """Rows of the batch before the document, skipped rows included; see `first_row`."""
    tokens: int = 0
    """Tokens of the document that are in the shards."""
    open: dict[str, int] = field(default_factory=dict)
    """Tokens of each shard that is not full, by split. After a killed run its file may hold more
    tokens."""
    checksums: dict[str, int] = field(default_factory=dict)
    """CRC-32 of the tokens that `open` counts, by split."""

    @property
    def first_row(self) -> int:
        """Index in the batch of the row to continue with; its key in the file is `documents`."""
        return self.documents


@dataclass(kw_only=True)
class SourceSettings:
    """Settings that say which texts data/source.py reads."""

    files: list[str] = field(default_factory=list)
    """Names of all files, other workers' files included; [] to read `dataset`."""
    sizes: list[int] = field(default_factory=list)
    """Bytes of each of `files`."""
    dataset: str = "HuggingFaceFW/fineweb-edu"
    """Name of the dataset on the hub."""
    remote_name: str | None = None
    """Configuration of the hub's dataset, such as "sample-10BT"."""
    text_column: str = "text"
    """Column that holds the texts."""
    separator: str | None = None
    """Text between the documents of a text file; None: a text file is one document."""
    replace_bad_bytes: bool = False
    """Read U+FFFD for bytes of files that are not UTF-8, instead of skipping their rows."""
    worker_index: int = 0
    worker_count: int = 1
    """Worker i of n reads every n-th file, from file i on."""


@dataclass(kw_only=True)
class Settings(SourceSettings):
    """Settings on which the tokens of a folder depend. A run with other settings is refused: its
    shards would not continue the folder's. Manifests of other versions may lack a setting that has
    a default."""

    tokenizer: str
    """Tokenizer.name: "gpt2", "bytes", or "tokenizer-" and a checksum of the tokenizer.json."""
    vocab_size: int
    eot: int | None = None
    """Id of the end-of-text token."""
    end_of_text: str | None = None
    """Text of the end-of-text token; None without a tokenizer.json."""
    shard_size: int = 0
    """Tokens of a full shard."""
    format: str = "npy"
    """"npy" or "bin", the suffix of the shards."""
    val_fraction: float | None = None
    """Share of documents for validation, 0 to 1; None in manifests of older versions."""


@dataclass(kw_only=True)
class Manifest(Settings):
    """Content of a manifest: the settings, and the progress of the sharding."""

    shards: list[ShardEntry]
    """Finished shards of both splits; those of one split are in order."""
    source: list[str] = field(default_factory=list)
    """Files and folders of --input, or dataset and configuration."""
    complete: bool = False
    """True once the source is read to its end."""
    stopped: bool = False
    """True if --max_shards ended the run. An interrupted run is neither complete nor stopped."""
    documents: int = 0
    """Documents written so far."""
    ledger: dict[str, FileCounts] = field(default_factory=dict)
    """Counts of each file that was read, by name, up to `state`."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Number of skipped rows, by reason: the sum over the ledger."""
    bytes: dict[str, int] = field(default_factory=lambda: {"train": 0, "val": 0})
    """Bytes of the source text in UTF-8, by split; 0 if they were not counted."""
    lost_bytes: int = 0
    """Bytes of the text that the tokenizer does not give back; 0 without --allow_loss."""
    held_out: int = 0
    """Tokens of the last document, or of the last short documents, to hold out for validation (up
    to nine fewer are); 0 if the hashes gave both splits enough text, or if nothing is divided."""
    state: ResumePoint = field(default_factory=ResumePoint)
    """Where the next run continues."""

    @property
    def text_bytes_by_split(self) -> dict[str, int]:
        """Bytes of the source text, {"train": 4_950_000, "val": 50_000}; the key in the file is
        `bytes`."""
        return self.bytes


def time_of_change(path: Path | str) -> int:
    """Return when a file was last changed, in nanoseconds."""
    status = os.stat(path)
    # st_ctime also tells of an edited file whose st_mtime was set back, as by `cp -p`
    return max(status.st_mtime_ns, status.st_ctime_ns)


def sha256(path: Path | str) -> str:
    """Return the SHA-256 of a file's content in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a folder; None if there is none, as in folders of other projects.
    Raises UserError if the manifest is damaged."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    # `reading` turns an error of the with statement into a UserError that names the file.
    with reading(path, "a manifest of shards"):
        content = json.loads(path.read_text(encoding="utf-8"))  # {"shards": [{...}], ...}
        # `write_manifest` has turned these dataclasses into dicts.
        content["shards"] = [ShardEntry(**entry) for entry in content["shards"]]
        ledger = content.get("ledger", {})  # {"books/a.txt": {"size": 12_345, ...}, ...}
        content["ledger"] = {name: FileCounts(**counts) for name, counts in ledger.items()}
        content["state"] = ResumePoint(**content.get("state", {}))
        # Drop keys of other versions; a missing key gets the default of its field.
        field_names = {field.name for field in fields(Manifest)}
        return Manifest(**{name: content[name] for name in field_names & content.keys()})


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest of a folder atomically."""
    with atomic_write(folder / MANIFEST) as file:
        # `vars` makes a dict of the manifest, and of each dataclass in it. Write one entry a line.
        # `indent` would take five times as long, and so would asdict, which copies all entries: it
        # matters for many files, with a save for each full shard.
        file.write(json.dumps(manifest, default=vars, separators=(",\n", ": ")).encode())
