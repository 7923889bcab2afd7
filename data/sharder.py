"""Sharder: resumable writing of documents to the shards of a folder.

The one idea: whenever a shard gets full, and at the end of the source, the sharder saves the
manifest with a ResumePoint, its "state": all that a later run needs to continue from this moment. A
run that is killed later has written more tokens than the resume point counts. The next run cuts the
open shards back to the resume point and writes the same tokens again. So the shards equal the
shards of a run that was never killed.

data/source.py decides where the documents come from, and in which order.
"""

import os
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from data.manifest import (
    Manifest,
    ResumePoint,
    Settings,
    ShardEntry,
    read_manifest,
    sha256,
    time_of_change,
    write_manifest,
)
from data.shards import Shard, bin_header, shard_paths
from data.source import Source, SourcePosition
from utils.errors import UserError
from utils.files import copy_file, replace_file

# number of spans of the last text, if it is divided: validation gets the end of each span
HELD_OUT_SPANS = 10
ADVICE = "give another folder or empty that one"
MIN_VAL_TOKENS = 1_025  # a sequence of GPT-2's context, and the target of its last token
TOKENS_AT_ONCE = 2**20  # tokens of a document that are in memory while they are written


class TokenFile:
    """Token ids of a text, uint32, in memory; those of a long text in a file without a name."""

    def __init__(self, folder: Path) -> None:
        self.file = tempfile.SpooledTemporaryFile(4 * TOKENS_AT_ONCE, dir=str(folder))
        self.num_tokens = 0

    def append(self, ids: np.ndarray) -> None:
        """Append token ids, uint32 (n,)."""
        self.file.seek(4 * self.num_tokens)  # in bytes; `read` may have moved the position
        self.file.write(ids.tobytes())
        self.num_tokens += len(ids)

    def read(self, start: int, end: int) -> np.ndarray:
        """Return tokens [start, end), uint32 (n,)."""
        self.file.seek(4 * start)  # also writes what append left in Python's buffer
        return np.frombuffer(self.file.read(4 * (end - start)), np.uint32)


@dataclass
class Document:
    """Tokens of a text, or of the last short texts that divide_last has joined, as the shards hold
    them, and the position of the text in the source."""

    token_file: TokenFile
    """Token ids, Tokenizer.start_ids first."""
    ranges: list[range]
    """Indices in `token_file`, in the order in which the shards hold these tokens: only
    range(num_tokens), except for a text with a held-out part."""
    num_start_ids: int
    """Number of start_ids, with which the tokens begin. In joined texts, the start_ids of the
    second text and of later ones stand between the texts, and are not counted here."""
    num_train: int
    """The first `num_train` tokens go to the train shards, the rest to validation: all or none,
    except for a text with a held-out part."""
    num_bytes: int
    """Size of the text in UTF-8, before a normalizer of the tokenizer changes it."""
    lost_counts: Counter[str] = field(default_factory=Counter)
    """Characters of the text that the tokens do not give back, and how often."""
    position: SourcePosition = field(default_factory=SourcePosition)
    """Where to read the document's batch again (data/source.py), for the next resume point."""
    row: int = 0
    """Index of the document's row in the batch."""
    num_written: int = 0
    """Number of the first tokens that an earlier run has written (ResumePoint.tokens): above 0 only
    for the first document of a run. Set by data/fineweb-edu.py; `write` skips these tokens."""
    num_texts: int = 1
    """Number of texts in the document: several if divide_last has joined the last short texts."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the shards, those of all ranges; start_ids may be in several."""
        return sum(map(len, self.ranges))

    def read(self, first: int, last: int) -> np.ndarray:
        """Return tokens [first, last) of all ranges, one after another: uint32 (n,)."""
        tokens_by_range: list[np.ndarray] = []  # uint32
        num_before = 0  # number of tokens in earlier ranges
        for indices in self.ranges:
            # a slice of a range is a range: range(10, 20)[5:7] is range(15, 17)
            to_read = indices[max(0, first - num_before) : max(0, last - num_before)]
            if to_read:
                tokens_by_range.append(self.token_file.read(to_read.start, to_read.stop))
            num_before += len(indices)
        return np.concatenate(tokens_by_range)


def count_last_tokens(documents: list[Document], num_held_out: int) -> int:
    """Return how many tokens the last documents have together: the fewest documents that have
    `num_held_out` tokens or more, and at most twice as many. Return 0 if no documents do, or only
    all, which leaves none to train on.
    To hold out 10 tokens, documents of 50, 4 and 9 tokens give 13, those of 50 and 30 tokens 0."""
    num_tokens = 0
    for document in reversed(documents[1:]):
        num_tokens += document.num_tokens
        if num_held_out <= num_tokens <= 2 * num_held_out:
            return num_tokens
    return 0


def join_documents(documents: list[Document], first: Document) -> Document:
    """Return one document with the tokens of `documents`, which the caller divides: its `num_train`
    is 0. Its position and `num_written` are those of `first`. Appends to the token file of
    documents[0]."""
    token_file = documents[0].token_file
    for document in documents[1:]:  # under 2,050 tokens together, see hold_back
        token_file.append(document.read(0, document.num_tokens))
    num_tokens = sum(document.num_tokens for document in documents)
    return replace(
        first,
        token_file=token_file,
        ranges=[range(num_tokens)],
        num_train=0,
        num_bytes=sum(document.num_bytes for document in documents),
        lost_counts=sum((document.lost_counts for document in documents), Counter()),
        num_texts=len(documents),
    )


def hold_out(document: Document, num_held_out: int) -> Document:
    """Divide a document into train and validation tokens. Hold out the end of each of
    HELD_OUT_SPANS equal spans, so that both splits get a part of each chapter, which may be in
    another language. start_ids precede the beginning of each span, and its held-out end.
    `num_held_out` counts tokens: at least 1, at most half of the document's tokens.

    Of 21 tokens, a start id among them, 2 are held out: token 10 and token 20. The ranges are
    [0:1] [1:10] [0:1] [11:20] for training, then [0:1] [10:11] [0:1] [20:21] for validation.
    """
    start_ids = range(document.num_start_ids)  # their indices in token_file: range(0, 1)
    # at most as many spans as held-out tokens, so that each span has an end
    num_spans = min(HELD_OUT_SPANS, num_held_out)
    # tokens at the end of each span; training gets the remainder of the division
    end_size = num_held_out // num_spans
    train: list[range] = []  # start_ids and the beginning of a span in turn
    val: list[range] = []  # start_ids and the end of a span in turn
    span_size, num_longer = divmod(document.num_tokens - document.num_start_ids, num_spans)
    span_start = document.num_start_ids
    for i in range(num_spans):
        span_end = span_start + span_size + (i < num_longer)  # the first spans take the remainder
        val_start = span_end - end_size
        train += [start_ids, range(span_start, val_start)]
        val += [start_ids, range(val_start, span_end)]
        span_start = span_end
    # All train tokens come first: Sharder.write needs one border between train and validation.
    return replace(document, ranges=train + val, num_train=sum(map(len, train)))


class ShardWriter:
    """Appends tokens of `dtype`, uint16 or uint32, to a temporary file; `finish` renames the file
    to its final name, `path` (.npy or .bin). An earlier run has written the first `num_written`
    tokens."""

    def __init__(self, path: Path, split: str, dtype: np.dtype, num_written: int = 0) -> None:
        self.path = path
        self.dtype = dtype
        self.split = split  # for the manifest entry that `finish` returns
        self.temporary = path.with_name(path.name + ".tmp")  # training ignores this suffix
        # read by Sharder.reopen, which removes a copy that does not hold the expected tokens
        self.is_copy = num_written > 0 and not self.temporary.exists()
        if self.is_copy:
            # The earlier run ended before the shard was full, or was killed between the rename and
            # the save of the manifest. Copy the shard, because training may be reading it.
            copy_file(path, self.temporary)
        # "r+b" keeps the tokens of the earlier run, "w+b" empties the file
        self.file = open(self.temporary, "r+b" if num_written else "w+b")
        self.num_tokens = num_written
        self.write_header()  # leaves the file position at the first token
        tokens = np.fromfile(self.file, self.dtype, num_written)  # leaves it after the last token
        # CRC-32 of all tokens; the manifest's state keeps it, and Sharder.reopen compares it
        self.checksum = zlib.crc32(tokens.tobytes())
        self.file.truncate()  # what the earlier run wrote after its last resume point

    def write_header(self) -> None:
        """Write the header for the current number of tokens at the beginning of the file, in place
        of an earlier header. All headers of a format have the same length."""
        self.file.seek(0)
        if self.path.suffix == ".bin":
            self.file.write(bin_header(self.dtype, self.num_tokens))  # 1,024 bytes
            return
        # NumPy pads a header to a multiple of 64 bytes: here to 128 for any number of tokens
        description = {
            "descr": self.dtype.str,  # "<u2"
            "fortran_order": False,
            "shape": (self.num_tokens,),
        }
        np.lib.format.write_array_header_1_0(self.file, description)

    def append(self, tokens: np.ndarray) -> None:
        """Append token ids, uint32 (n,). They fit `dtype`, which Sharder chooses by the size of the
        vocabulary."""
        token_bytes = tokens.astype(self.dtype, copy=False).tobytes()
        self.checksum = zlib.crc32(token_bytes, self.checksum)  # of all tokens so far
        self.file.write(token_bytes)
        self.num_tokens += len(tokens)

    def sync(self) -> int:
        """Flush the tokens to disk, so that they survive a crash; return their number."""
        self.file.flush()  # from Python's buffer to the kernel
        os.fsync(self.file.fileno())  # from the kernel to the disk
        return self.num_tokens

    def finish(self) -> ShardEntry:
        """Write the header, rename the file to its final name and return its manifest entry."""
        self.write_header()  # with the final number of tokens
        self.sync()
        self.file.close()
        digest = sha256(self.temporary)  # of the content, in hexadecimal
        # rename after the sync, so that a file with the final name is never a partial shard
        replace_file(self.temporary, self.path)
        return ShardEntry(self.path.name, self.split, self.num_tokens, digest)


def describe_difference(folder: Path, manifest: Manifest | None, settings: Settings) -> str | None:
    """Return in what the shards of a folder differ from those that a run with `settings` writes,
    such as "of shard_size 1000"; None if the run can continue them, or if there are none."""
    if manifest is None:
        return "without a manifest" if shard_paths(folder) else None
    if not manifest.shards:
        return None
    for setting, value in vars(settings).items():  # "vocab_size", 50257
        # Manifest inherits the fields of Settings
        value_of_shards = getattr(manifest, setting)
        if value_of_shards != value:
            return f"of {setting} {value_of_shards!r:.99}"
    for name, counts in manifest.ledger.items():
        # "" for a dataset, and for a pipe
        if counts.sha256 and counts.changed != time_of_change(name):
            # copied, touched or renamed; or edited to the same size
            if counts.sha256 != sha256(name):
                return f"of {name}, which has changed since then"
    return None


class Sharder:
    """Appends documents to the train and val shards of a folder, up to `max_shards` full train
    shards (None: no limit).

    The manifest holds `settings`, and the progress with the point where the next run continues.
    `source` gives the ledger of the rows that it has read. Raises UserError for a folder with
    shards of other settings.
    """

    def __init__(
        self, folder: Path, settings: Settings, source: Source, max_shards: int | None
    ) -> None:
        self.source = source  # gives save_resume_point the counts up to a batch
        self.folder = folder
        self.max_shards = max_shards  # `is_full` reads it after each shard
        self.shard_size = settings.shard_size  # tokens
        self.min_val_tokens = min(MIN_VAL_TOKENS, max(1, self.shard_size // 4))
        """1 to 1,025: `divide_last` holds out more if validation has fewer tokens. Never above the
        size of a shard, so that a run after a full validation shard never finds too few."""
        # the smallest dtype for all ids: little-endian uint16 or uint32, as the headers say
        self.dtype = np.dtype("<u2" if settings.vocab_size <= 2**16 else "<u4")
        self.writers: dict[str, ShardWriter] = {}
        """Writer of the open shard, by split; a split without an open shard has no entry."""
        self.tokens_by_split = {"train": 0, "val": 0}
        """Tokens in the folder: of the full shards, and after `reopen` also of the open shard.
        (ShardWriter.num_tokens counts the open shard alone.)"""
        manifest = read_manifest(folder)
        difference = describe_difference(folder, manifest, settings)  # "of format 'bin'", or None
        if difference is not None:
            raise UserError(f"{folder} holds shards {difference}; {ADVICE}")
        # a run that was killed before its first shard was full has left nothing to continue from
        if manifest is None or not manifest.shards:
            manifest = Manifest(**vars(settings), shards=[])  # inherits the fields of Settings
            write_manifest(folder, manifest)
        self.manifest = manifest
        for entry in manifest.shards:
            # `layout` reads the header: it raises an error if the file is missing or damaged, or
            # has fewer tokens than the manifest lists
            layout = Shard(folder / entry.file, entry.tokens).layout
            if entry.tokens == self.shard_size:  # `reopen` counts the shard that is not full
                self.tokens_by_split[entry.split] += layout.num_tokens

    def num_full(self, split: str) -> int:
        """Return the number of shards of a split that have shard_size tokens."""
        # only the last shard has fewer tokens
        return self.tokens_by_split[split] // self.shard_size

    @property
    def is_full(self) -> bool:
        """True once max_shards train shards are full; validation shards do not count."""
        return self.max_shards is not None and self.num_full("train") >= self.max_shards

    def reopen(self) -> None:
        """Open the unfinished shards, each after the tokens that the manifest's state counts. A
        short shard that an earlier run listed in `end` stays listed until its longer successor is
        finished. Raise UserError if a shard does not hold the counted tokens."""
        # Neither complete nor stopped: until `end`, training warns that the folder is not finished.
        self.manifest.stopped = False
        write_manifest(self.folder, self.manifest)
        # {"train": 31_000, "val": 400}
        for split, num_tokens in self.manifest.state.open.items():
            writer = self.open_shard(split, num_tokens)
            self.writers[split] = writer
            # __init__ has counted the tokens of full shards only
            self.tokens_by_split[split] += num_tokens
            # The file may have been replaced, for example from a backup.
            if writer.checksum != self.manifest.state.checksums[split]:
                damaged_path = writer.temporary
                if writer.is_copy:  # the next run would take the copy for the file of a killed run
                    writer.temporary.unlink()
                    damaged_path = writer.path
                raise UserError(
                    f"{damaged_path} does not hold the {num_tokens:,} tokens that the "
                    f"manifest counts; put back the file that does, or {ADVICE}"
                )

    def open_shard(self, split: str, num_written: int = 0) -> ShardWriter:
        """Return a writer for the next shard of a split, of which an earlier run has written the
        first `num_written` tokens."""
        # Shards are numbered from 0; all earlier shards are full and in the manifest.
        index = self.num_full(split)
        path = self.folder / f"{split}_{index:06d}.{self.manifest.format}"  # val_000003.npy
        return ShardWriter(path, split, self.dtype, num_written)

    def finish_shard(self, split: str) -> None:
        """Finish the open shard of a split and list it in the manifest. It replaces a shorter shard
        of the same name, which an earlier run may have listed in `end`."""
        entry = self.writers.pop(split).finish()  # ShardEntry of the renamed file
        other_entries = [other for other in self.manifest.shards if other.file != entry.file]
        self.manifest.shards = other_entries + [entry]

    def hold_back(self, documents: Iterator[Document]) -> Iterator[Document]:
        """Yield the documents to write. Hold back the last documents until the end of the source:
        if --val_fraction is above 0, a part of them may have to be held out for validation."""
        held_back: list[Document] = []  # read, but not yet yielded
        num_tokens = 0  # sum over `held_back`
        for document in documents:
            held_back.append(document)
            num_tokens += document.num_tokens
            # Keep just enough documents for twice the tokens that validation needs, because
            # divide_last holds out at most half of the tokens.
            while num_tokens - held_back[0].num_tokens >= 2 * self.min_val_tokens:
                num_tokens -= held_back[0].num_tokens
                yield held_back.pop(0)
        # divide_last holds out a part if validation has too little text. One of several workers
        # may have none, because other workers may have some.
        if held_back and self.manifest.val_fraction and self.manifest.worker_count == 1:
            held_back = self.divide_last(held_back, self.manifest.val_fraction)
        yield from held_back

    def divide_last(self, documents: list[Document], val_fraction: float) -> list[Document]:
        """Return the documents to write instead of `documents`, the last of the source. If hashes
        give one split no text, or validation too little (one book, a few short notes), join the
        train documents, or without any the validation documents, and hold out a part of them. The
        part is whole texts, the last ones, if about as many tokens are in them, else the ends of
        the spans of hold_out. Sets `manifest.held_out`."""
        # Hashes have put each whole document into one split: num_train is 0 in validation.
        to_divide = [document for document in documents if document.num_train]
        in_val = [document for document in documents if not document.num_train]
        # text of both splits in the folder and in `documents`, as hashes have chosen it
        has_train = bool(to_divide) or self.tokens_by_split["train"] > 0
        num_val = self.tokens_by_split["val"] + sum(document.num_tokens for document in in_val)
        if not to_divide:  # hashes put all of these documents into validation
            to_divide, in_val = in_val, []

        # A run that continues within these documents keeps the number of the run that began them:
        # a new number would differ, because tokens_by_split has grown since.
        if documents[0].num_written == 0:
            self.manifest.held_out = 0
            if num_val < self.min_val_tokens or not has_train:
                self.manifest.held_out = self.count_held_out(to_divide, val_fraction)
        num_held_out = self.manifest.held_out
        if num_held_out == 0:  # both splits have enough, or to_divide is a single token
            return documents

        joined = join_documents(to_divide, documents[0])
        num_last_tokens = count_last_tokens(to_divide, num_held_out)
        if num_last_tokens > 0:  # hold out whole texts
            joined.num_train = joined.num_tokens - num_last_tokens
            # a later run finds the same texts by their number of tokens
            self.manifest.held_out = num_last_tokens
        else:
            joined = hold_out(joined, num_held_out)
        # The joined document comes first, at the position of documents[0]: after a kill within it,
        # the next run reads all of `documents` again.
        return [joined] + in_val

    def count_held_out(self, to_divide: list[Document], val_fraction: float) -> int:
        """Return how many tokens of `to_divide` to hold out for validation: a tenth of them, or
        `val_fraction` of all tokens, or min_val_tokens (1 to 1,025), whichever is most, but at most
        half of them: 0 of a single token."""
        num_tokens = sum(document.num_tokens for document in to_divide)
        # val_fraction of all tokens: those written so far and those of `to_divide`
        num_of_fraction = int(val_fraction * (sum(self.tokens_by_split.values()) + num_tokens))
        return min(max(self.min_val_tokens, num_tokens // 10, num_of_fraction), num_tokens // 2)

    def write(self, document: Document) -> bool:
        """Append the tokens of a document that no earlier run has written. Return False once
        `max_shards` train shards are full, else True. Saves the manifest each time a shard gets
        full."""
        num_tokens = document.num_tokens
        # tokens [start, num_tokens) are not written yet
        start = document.num_written  # by an earlier run (ResumePoint.tokens); usually 0
        if start == 0:  # else an earlier run has counted the document
            self.manifest.documents += document.num_texts  # 1, or those that divide_last joined
            for character, count in document.lost_counts.items():  # "\t", 12
                self.manifest.lost_bytes += count * len(character.encode())
        while start < num_tokens:
            # tokens [0, num_train) go to train, [num_train, num_tokens) to validation
            split, split_end = "train", document.num_train
            if start >= document.num_train:
                split, split_end = "val", num_tokens
            if split not in self.writers:  # none yet, or the last one is full
                self.writers[split] = self.open_shard(split)
            writer = self.writers[split]
            end = min(
                split_end,  # the document may go on in the other split
                start + self.shard_size - writer.num_tokens,  # or in the next shard
                start + TOKENS_AT_ONCE,  # a text may be larger than memory
            )
            writer.append(document.read(start, end))
            self.tokens_by_split[split] += end - start
            # A part of a text counts bytes in proportion to its tokens, because a normalizer may
            # have changed the text. Differences of rounded sums add up to exactly num_bytes.
            bytes_before = document.num_bytes * start // num_tokens
            bytes_after = document.num_bytes * end // num_tokens
            self.manifest.text_bytes_by_split[split] += bytes_after - bytes_before
            start = end
            if writer.num_tokens == self.shard_size:
                # a later run can continue from here
                self.finish_shard(split)
                self.save_resume_point(document.position, document.row, start)
                if self.is_full:
                    return False
        return True

    def save_resume_point(
        self, position: SourcePosition, row: int = 0, num_written: int = 0
    ) -> None:
        """Save the manifest with a resume point: the batch at `position`, in it the document of
        row `row`, after its first `num_written` tokens. At the end of the source, `position` is
        past the last file, and both numbers are 0. The tokens of the open shards are synced to disk
        before the manifest counts them."""
        # tokens of the open shards, which `sync` forces to disk
        open_by_split = {split: writer.sync() for split, writer in self.writers.items()}
        self.manifest.state = ResumePoint(
            source=asdict(position),
            documents=row,  # read back as ResumePoint.first_row
            tokens=num_written,
            open=open_by_split,
            checksums={split: writer.checksum for split, writer in self.writers.items()},
        )
        # FileCounts by file, up to `position`: rows that are read but not yet written do not count
        self.manifest.ledger = self.source.counts_at(position)
        skipped_by_reason: Counter[str] = Counter()  # rows
        for counts in self.manifest.ledger.values():
            skipped_by_reason.update(counts.skipped)  # Counter.update adds
        self.manifest.skipped = dict(skipped_by_reason)
        write_manifest(self.folder, self.manifest)  # atomically: a kill leaves the old one

    def end(self, complete: bool) -> None:
        """Finish the shards that are not full; a later run can still continue them. `complete` is
        True if the source is read to its end, False if `max_shards` train shards are full."""
        for split in sorted(self.writers):
            self.finish_shard(split)
        # An interrupted run does not get here: `complete` and `stopped` stay False, and training
        # warns (TokenStream.unfinished_folders).
        self.manifest.complete = complete
        self.manifest.stopped = not complete
        write_manifest(self.folder, self.manifest)
