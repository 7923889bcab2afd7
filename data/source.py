"""Source of text to shard: rows of files, or of a dataset of the Hugging Face hub.

A row is a text, or Skipped with the reason why it is none: readers skip what they cannot parse, and
`as_text` what is no usable text. The ledger of the manifest counts both. Rows come in batches, each
with its position in the source, from which a later run continues. Python's own readers and pyarrow
read files row by row; `datasets` streams the hub.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, islice, repeat, tee
from pathlib import Path
from typing import IO, Any, NamedTuple

from data.manifest import FileCounts
from utils.errors import UserError

# A manifest counts rows within a batch (ResumePoint.documents): with a smaller number a later run
# would continue at the wrong row.
ROWS_PER_BATCH = 100
SUFFIXES_IN_FOLDERS = (".parquet", ".jsonl", ".txt", ".py")  # other files are read only if named
# How reasons of Skipped begin that a sound file may have: "without text", "without a column
# 'text'". A file with another reason, or without any text, is suspect (warn_if_suspect).
USUAL_REASONS = ("empty", "without")


@dataclass(frozen=True)
class Skipped:
    """Row that is no text."""

    reason: str
    """Key under which the ledger counts such rows."""


# a byte that is not UTF-8, or "\ud800" in JSON without its other half
NOT_UTF8 = Skipped("not UTF-8, or half of a surrogate pair")


@dataclass
class SourcePosition:
    """Place of a batch in the source, from which a later run continues; JSON in a manifest."""

    file: int = 0
    """Index of its file among those of this worker; 0 for a dataset."""
    counts: dict = field(default_factory=dict)
    """FileCounts, as JSON, of the rows of this file before the batch; {} if no batch is there: in
    a first run before the first one, and after the last file."""
    revision: str | None = None
    """Commit of the hub's dataset, so that a later run reads the same files; None for files."""
    stream: dict | None = None
    """State that `datasets` saves of its stream; None at the beginning, and for files."""


class RowBatch(NamedTuple):
    """Successive rows of a file or dataset, at most ROWS_PER_BATCH, and where the first one is."""

    position: SourcePosition
    rows: list[str | Skipped]
    """Text of each row, or why it has none."""


# Files: what to read, and how to open it


def open_zstd(path: str | IO[bytes], mode: str = "rb") -> io.BufferedReader:
    """Open a file compressed by zstd for reading. pyarrow reads all of its frames (zstd -T writes
    several), many readers only the first. `mode` is what open_text and fsspec give any opener."""
    from pyarrow import CompressedInputStream  # slow to import; few files need it

    return io.BufferedReader(CompressedInputStream(path, "zstd"))


# openers of compressed files, by the last suffix of the name
COMPRESSIONS: dict[str, Callable[..., io.BufferedIOBase]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": open_zstd,
}


class UntilDamage(io.RawIOBase):
    """Content of a file, decompressed, up to its end or to its damage, such as bytes after the end
    of a .gz. `error` is then the damage, else None."""

    def __init__(self, name: str) -> None:
        self.open = partial(COMPRESSIONS.get(Path(name).suffix.lower(), open), name, "rb")
        self.file = self.open()
        self.num_read = 0  # bytes
        self.error: Exception | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with the next bytes; return their number, 0 at the end."""
        try:
            # 1 byte at a time once the damage is known, see below
            content = self.file.read1(1 if self.error else len(buffer))
        except Exception as error:
            if not is_damage(error):
                raise
            if self.error:  # for the second time: all before the damage is read
                self.file = io.BytesIO()  # pyarrow, if asked again, would give more
                return 0
            self.error = error  # raised by read_rows after the rows before it
            # pyarrow keeps to itself what it has decompressed right before the damage. Read the
            # file again up to here, then byte by byte.
            self.file = self.open()
            bytes_left = self.num_read
            while bytes_left:
                bytes_left -= len(self.file.read1(min(bytes_left, 2**20)))
            return self.readinto(buffer)
        self.num_read += len(content)
        buffer[: len(content)] = content
        return len(content)


def is_damage(error: Exception) -> bool:
    """Return whether a reader raised an error because of the format of the file. All other errors,
    as of a disk, end the run: with them, the rest of a sound file would be given up."""
    from pyarrow import ArrowInvalid  # slow to import; few files need it

    if isinstance(error, OSError):  # of gzip, bz2 and pyarrow, or with a number: of the system
        return error.errno is None
    return isinstance(error, EOFError | zlib.error | lzma.LZMAError | csv.Error | ArrowInvalid)


def suffix_of(name: str) -> str:
    """Return the suffix of a file that tells its format, in lower case: .jsonl for A.JSONL.gz."""
    path = Path(name.lower())
    # the stem of a.jsonl.gz is a.jsonl
    return Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix


def walk(folder: Path) -> Iterator[Path]:
    """Yield what is below a folder in name order: files, and links to folders, which are not
    followed. Left out are hidden names and installed packages. Raises OSError for a folder that
    cannot be listed."""
    # iterdir: rglob passes over a folder that it cannot list. The order differs between file
    # systems, and the order of the shards would follow it.
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name == "site-packages":
            continue
        if path.is_dir() and not path.is_symlink():
            yield from walk(path)
        else:
            yield path


def list_files(inputs: tuple[str, ...]) -> dict[str, int]:
    """Return the sizes in bytes of files, and of those in folders, by name; folders in name order.
    Prints what is left out of the folders; raises UserError if nothing is left, and OSError for
    what is missing or cannot be listed."""
    sizes: dict[str, int] = {}
    left_out: Counter[str] = Counter()  # number of files that are not read, by suffix
    for name in inputs:
        if os.path.isdir(name):
            for path in walk(Path(name)):
                # a folder here is a link to one
                if suffix_of(path.name) in SUFFIXES_IN_FOLDERS and not path.is_dir():
                    # OSError for a broken link
                    sizes[str(path)] = path.stat().st_size
                else:
                    left_out[path.suffix.lower() or "without a suffix"] += 1
        else:
            # A named file is read whatever its suffix. OSError if it is missing.
            sizes[name] = os.path.getsize(name)
    # e.g. "2 .jpg, 1 without a suffix"; "" if nothing is left out
    summary = ", ".join(f"{count:,} {suffix}" for suffix, count in left_out.most_common(8))
    if not sizes:
        suffixes = ", ".join(SUFFIXES_IN_FOLDERS)
        raise UserError(
            f"{' '.join(inputs)} holds none of {suffixes}, but {summary or 'nothing'}; "
            f"other files are read if you name them one by one, as {Path(inputs[0], '*')}"
        )
    if summary:
        print(f"left out: {summary}; name a file to read it", file=sys.stderr)
    return sizes


# Readers: each yields the rows of an open text file: objects with columns, texts, or Skipped


def read_document(file: IO[str]) -> Iterator[object]:
    """Yield the whole of a text file; nothing if it is empty, as many an __init__.py."""
    text = file.read()
    if text:
        yield text


def read_json(file: IO[str]) -> Iterator[object]:
    """Yield the values of JSON, one in each line, or the elements of one array, which may span
    lines. A line that is not JSON is skipped; an array has to fit into memory."""
    # the first line that is not blank; "" if there is none
    first_line = next(filter(str.strip, file), "")
    lines: Iterable[str] = chain([first_line], file)
    if first_line.lstrip().startswith("["):
        content = "".join(lines)  # of the whole file
        try:
            rows = json.loads(content)
        except (ValueError, RecursionError):
            # Lines, the first of which has a bracket, or an array that is damaged: of one with an
            # element in each line, the others are rows.
            elements = [line.strip().removesuffix(",") for line in content.split("\n")]
            lines = [element for element in elements if element not in ("[", "]")]
        else:
            yield from rows
            return
    for line in lines:
        if line.strip():  # a blank line is no row
            try:
                value = json.loads(line)
            # also for a number of over 4,300 digits, and for a thousand brackets within each other
            except (ValueError, RecursionError):
                value = Skipped("not JSON")
            yield value


def read_csv(file: IO[str], delimiter: str = ",") -> Iterator[object]:
    """Yield the rows of CSV. One with more cells than the header is skipped: it has a comma that is
    not quoted, and which of the cells is the text cannot be told."""
    # Characters of a cell: the default, 131,072, is too few for a book.
    csv.field_size_limit(2**31 - 1)
    # strict: a quote that is never closed is an error, and not one cell to the end of the file.
    make_reader = partial(csv.reader, delimiter=delimiter, strict=True)
    lines: Iterator[str] = iter(file)
    columns = next(make_reader(lines), [])  # the names in the header; [] of an empty file
    while True:
        # A row is read from `lines`, as many as it spans; `lines_again` stays before it.
        lines, lines_again = tee(lines)
        try:
            cells = next(make_reader(lines), None)
        except csv.Error as error:
            yield Skipped(f"not CSV {quote(error)}")
            # Its first line alone is bad: a quote without an end takes those of other rows, too.
            next(lines_again)
            lines = lines_again
            continue
        if cells is None:
            return
        # Commas at the end of a line add empty cells, which do no harm.
        if any(cells[len(columns) :]):
            yield Skipped("wider than the header")
        elif cells:  # a blank line is no row
            # a missing cell is None
            yield dict.fromkeys(columns) | dict(zip(columns, cells, strict=False))


# by suffix_of; any other file is read as one text
READERS: dict[str, Callable[[IO[str]], Iterator[object]]] = {
    ".jsonl": read_json,
    ".ndjson": read_json,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": partial(read_csv, delimiter="\t"),
}


def read_parquet(name: str, column: str) -> Iterator[object]:
    """Yield the rows of a parquet file, with the column alone if the file has it."""
    from pyarrow.parquet import ParquetFile  # slow to import; few files need it

    file = ParquetFile(name)
    columns = file.schema_arrow.names
    if column not in columns:
        # without reading any row: read_texts gives all of them the one reason
        yield from repeat(dict.fromkeys(columns), file.metadata.num_rows)
        return
    for record_batch in file.iter_batches(ROWS_PER_BATCH, columns=[column]):
        for value in record_batch.column(0):
            try:
                yield {column: value.as_py()}
            except UnicodeDecodeError:  # nobody checks the strings of parquet before
                yield NOT_UTF8


def without_column(column: str, names: Iterable[str]) -> Skipped:
    """Return what stands for a row that lacks a column and has those of `names`."""
    # !r: a name that is not UTF-8, as in CSV of Latin-1, cannot be printed
    return Skipped(f"without a column {column!r}, but {', '.join(names)!r:.200}")


def as_text(value: object) -> str | Skipped:
    """Return the text of a row from what its reader gave for it; Skipped if that is no text."""
    if isinstance(value, bytes):  # a binary column of parquet
        value = value.decode("utf-8", "surrogateescape")  # as in read_rows
    if isinstance(value, Skipped):
        return value
    if not isinstance(value, str):  # null, a number, a list
        return Skipped("without text")
    if not value or value.isspace():
        return Skipped("empty")
    try:
        value.encode()
    except UnicodeEncodeError:  # a tokenizer would raise it, too, and end the run
        return NOT_UTF8
    if "\0" in value:  # binary, or UTF-16 without a byte order mark
        return Skipped("with U+0000")
    return value


def read_texts(name: str, column: str) -> Iterator[str | Skipped]:
    """Yield the text of each row of a file, or why it has none. If the file is damaged, the last
    row says so."""
    # One Skipped for all rows that lack the column: the reason is a key of the ledger, and lists
    # the columns of a row, which may differ.
    skipped_without_column: Skipped | None = None
    try:
        for row in read_rows(name, column):
            value = row  # a text, a value of JSON, or Skipped
            if isinstance(row, dict):
                value = row.get(column)
                if column not in row:
                    if skipped_without_column is None:
                        skipped_without_column = without_column(column, row)
                    value = skipped_without_column
            yield as_text(value)
    except Exception as error:
        if not is_damage(error):
            raise
        yield Skipped(f"damaged from here on {quote(error)}")


def read_rows(name: str, column: str) -> Iterator[object]:
    """Yield the rows of a file: objects with columns, texts, or Skipped."""
    if suffix_of(name) == ".parquet":  # pyarrow opens files by name
        yield from read_parquet(name, column)
        return
    read = READERS.get(suffix_of(name), read_document)
    content = UntilDamage(name)
    # A byte that is not UTF-8 becomes a surrogate, U+DC80 to U+DCFF, so that one bad row does not
    # end the file; as_text looks for them. -sig drops a byte order mark at the beginning;
    # newline="" leaves \r\n as it stands in the file.
    with io.TextIOWrapper(
        io.BufferedReader(content), "utf-8-sig", errors="surrogateescape", newline=""
    ) as file:
        yield from read(file)
    if content.error:
        raise content.error


def quote(error: Exception) -> str:
    """Return class and first line of an error."""
    first_line = str(error).partition("\n")[0]
    return f"({type(error).__name__}: {first_line:.200})"


# The source


def count_rows(counts: FileCounts, rows: list[str | Skipped]) -> None:
    """Add rows to the counts of their file, in place."""
    counts.rows += len(rows)
    for row in rows:
        if isinstance(row, Skipped):
            counts.skipped[row.reason] = counts.skipped.get(row.reason, 0) + 1
        else:
            counts.texts += 1
            counts.bytes += len(row.encode())


def warn_if_suspect(name: str, counts: FileCounts) -> None:
    """Print a warning about a file that is not what it seems: none of its rows is a text, or some
    are skipped for a reason that no sound file has."""
    lacks_text = counts.rows > 0 and counts.texts == 0  # an empty file has no row
    if lacks_text or any(not reason.startswith(USUAL_REASONS) for reason in counts.skipped):
        advice = ""
        if NOT_UTF8.reason in counts.skipped:
            advice = "; to convert Latin-1: iconv -f latin1 -t utf-8 OLD > NEW"
        print(
            f"warning: {name} gave {counts.texts:,} texts in {counts.rows:,} rows; skipped: "
            f"{join_reasons(counts.skipped)}{advice}",
            file=sys.stderr,
        )


def join_reasons(skipped: dict[str, int]) -> str:
    """Return how many rows were skipped for each reason, as "2 empty, 1 not JSON"."""
    return ", ".join(f"{count:,} {reason}" for reason, count in skipped.items()) or "none"


@dataclass
class Source:
    """Rows of files or, without any, of configuration `remote_name` of a dataset on the hub.
    Worker i of n reads every n-th file, from the i-th on."""

    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of each file by its name, in the order of reading, of all workers; {}: `dataset` is
    read."""
    dataset: str = ""
    """Name of the dataset on the hub."""
    remote_name: str = ""
    """Its configuration, as sample-10BT."""
    column: str = "text"
    """Column that holds the texts."""
    worker_index: int = 0
    worker_count: int = 1
    ledger: dict[str, FileCounts] = field(default_factory=dict)
    """Counts of each file of `names` that was read, in their order. `batches` updates it; the
    caller puts those of earlier runs in before."""

    @cached_property
    def names(self) -> list[str]:
        """Files of this worker in the order of reading; without any, the dataset."""
        if self.sizes:
            return list(self.sizes)[self.worker_index :: self.worker_count]
        return [self.dataset]

    def ledger_at(self, position: SourcePosition) -> dict[str, FileCounts]:
        """Return the ledger up to a position, for the manifest. Reading is ahead of it: batches
        wait for the tokenizer."""
        ledger = dict(islice(self.ledger.items(), position.file))
        if position.counts:  # {} after the last file
            ledger[self.names[position.file]] = FileCounts(**position.counts)
        return ledger

    def batches(self, resume_point: dict | None = None) -> Iterator[RowBatch]:
        """Yield batches of rows from the beginning or from `resume_point` on, ResumePoint.source of
        a manifest, and warn of files that are not what they seem. Raises UserError for what cannot
        be read, and at the end if nothing was a text; `datasets` itself retries downloads for some
        minutes."""
        position = SourcePosition(**(resume_point or {}))
        # both yield the batches of a name from a position on
        read = self.read_batches if self.sizes else self.read_dataset
        for index in range(position.file, len(self.names)):
            name = self.names[index]
            # The counts begin with the rows that an earlier run has sharded.
            counts = FileCounts(**(position.counts or {"size": self.sizes.get(name, 0)}))
            self.ledger[name] = counts  # updated in place by count_rows
            try:
                for row_batch in read(name, position):
                    # The position takes a copy, by asdict: counts of the rows before this batch.
                    # Only then those of this batch are added.
                    batch_position = replace(row_batch.position, file=index, counts=asdict(counts))
                    count_rows(counts, row_batch.rows)
                    yield RowBatch(batch_position, row_batch.rows)
            except UserError:  # the message names the source already
                raise
            except Exception as error:  # a reader's own error, without the file's name
                advice = ""
                if not self.sizes:
                    advice = "; check name and network, or shard files of your own"
                message = f"{name:.300} cannot be read {quote(error)}{advice}"
                raise UserError(message) from error
            warn_if_suspect(name, counts)
            position = SourcePosition()  # the next file is read from its beginning
        # The ledger has the texts of earlier runs, too: this run may have begun at the very end.
        if not any(counts.texts for counts in self.ledger.values()):
            names = " ".join(self.names) or "the input"  # a worker may have no file
            worker = f" for worker {self.worker_index}" if self.worker_count > 1 else ""
            raise UserError(f"{names:.300} holds no text{worker}")

    def read_batches(self, name: str, position: SourcePosition) -> Iterator[RowBatch]:
        """Yield the batches of a file from a position in it on; their own positions are empty, as
        `batches` fills in all that a file has."""
        # Most formats have no index of rows: earlier rows are read again and dropped.
        first_row = position.counts.get("rows", 0)
        rows_left = islice(read_texts(name, self.column), first_row, None)
        rows = list(islice(rows_left, ROWS_PER_BATCH))
        while rows:
            yield RowBatch(SourcePosition(), rows)
            rows = list(islice(rows_left, ROWS_PER_BATCH))

    def read_dataset(self, name: str, position: SourcePosition) -> Iterator[RowBatch]:
        """Yield the batches of the hub's dataset, named `name`, from a position on; their own
        positions have `revision` and `stream` alone."""
        import datasets  # slow to import; only the hub needs these
        from fsspec.compression import register_compression
        from huggingface_hub import HfApi

        datasets.disable_progress_bars()  # else one bar for each file
        # For zstd, fsspec would need another package, which reads the first frame only.
        # force: replace fsspec's own opener, if it has one.
        register_compression("zstd", open_zstd, "zst", force=True)
        # A dataset may change on the hub between two runs; its commit does not.
        revision = position.revision or HfApi().dataset_info(name).sha
        # an IterableDataset, which downloads a file when its rows are due
        stream = datasets.load_dataset(
            name, self.remote_name, split="train", revision=revision, streaming=True
        )
        if self.worker_index >= stream.num_shards:
            raise UserError(
                f"{name} has {stream.num_shards} files, none for worker {self.worker_index} of "
                f"{self.worker_count}"
            )
        # contiguous=False: every n-th file, as `names` has those of a folder
        stream = stream.shard(self.worker_count, self.worker_index, contiguous=False)
        stream_state = position.stream  # where the next batch begins; None: at the beginning
        if stream_state:
            stream.load_state_dict(stream_state)
        for columns in stream.iter(ROWS_PER_BATCH):  # a dict of lists, by column
            if self.column not in columns:  # fail now, not after hours without a text
                reason = without_column(self.column, columns).reason
                raise UserError(f"{name} is {reason}; name the column of its texts")
            rows = [as_text(value) for value in columns[self.column]]
            yield RowBatch(SourcePosition(revision=revision, stream=stream_state), rows)
            stream_state = stream.state_dict()
