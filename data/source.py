"""Source of text to shard: rows of files, or of a dataset of the Hugging Face hub.

A row is a text, or what stands in its place: None, a number, or Skipped. `tokenize` of
data/fineweb-edu.py counts these. Rows come in batches, each with its position in the source, from
which a later run continues. Python's own readers and pyarrow read files row by row; `datasets`
streams the hub.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, NamedTuple

from utils.errors import UserError

BATCH = 100  # rows; another number would change the positions in manifests
# codecs that a file which is not UTF-8 is compared with: those of more languages look alike
CODECS = ("cp1252", "gb18030", "big5", "cp932", "cp1251", "koi8_r")
IN_FOLDERS = (".parquet", ".jsonl", ".txt", ".py")  # read in folders; other files only if named


@dataclass(frozen=True)
class Skipped:
    """Row that is no document."""

    reason: str
    """Key under which the manifest counts such rows."""


class Batch(NamedTuple):
    """Successive rows of a source."""

    position: dict
    """Where the first row is: what `Source.batches` takes to begin there, as plain JSON."""
    rows: list


# Files: what to read, and how to open it


def open_zstd(path: str | IO[bytes], mode: str = "rb") -> IO[bytes]:
    """Open a file compressed by zstd for reading. pyarrow reads all of its frames (zstd -T writes
    several), many readers only the first."""
    from pyarrow import CompressedInputStream  # slow to import; few files need it

    return io.BufferedReader(CompressedInputStream(path, "zstd"))


COMPRESSIONS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": open_zstd}


def open_text(name: str) -> IO[str]:
    """Open a file as UTF-8, decompressed. A byte that is not UTF-8 becomes a surrogate, U+DC80 to
    U+DCFF, so that one bad row does not end the file; read_column looks for them."""
    open_bytes = COMPRESSIONS.get(Path(name).suffix.lower(), open)
    # -sig drops a byte order mark at the beginning
    return io.TextIOWrapper(open_bytes(name, "rb"), "utf-8-sig", errors="surrogateescape")


def suffix_of(name: str) -> str:
    """Return the suffix of a file that tells its format, in lower case: .jsonl for A.JSONL.gz."""
    path = Path(name.lower())
    return Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix


def walk(folder: str) -> list[Path]:
    """Return the files below a folder in name order, but hidden ones and installed packages."""
    paths: list[Path] = []
    for parent, folders, names in os.walk(folder):
        # os.walk visits the folders that stay in this list
        folders[:] = [x for x in folders if not x.startswith(".") and x != "site-packages"]
        paths += [Path(parent, name) for name in names if not name.startswith(".")]
    # os.walk's order differs between file systems, and the shards follow the order of the files
    return sorted(paths)


def list_files(inputs: tuple[str, ...]) -> dict[str, int]:
    """Return the sizes in bytes of the files of `inputs` by name, folders in name order. Prints
    what is left out of the folders; raises UserError if nothing is left."""
    sizes: dict[str, int] = {}
    left_out: Counter[str] = Counter()  # files by suffix
    for name in inputs:
        if os.path.isdir(name):
            for path in walk(name):
                # is_file is false for a link to a file that is gone
                if suffix_of(path.name) in IN_FOLDERS and path.is_file():
                    sizes[str(path)] = path.stat().st_size
                else:
                    left_out[path.suffix.lower() or "without a suffix"] += 1
        else:
            sizes[name] = os.path.getsize(name)
    others = ", ".join(f"{count:,} {suffix}" for suffix, count in left_out.most_common(8))
    if not sizes:
        raise UserError(f"{' '.join(inputs)} holds none of {IN_FOLDERS}, but {others or 'nothing'}")
    if others:
        print(f"left out: {others}; name a file to read it", file=sys.stderr)
    return sizes


# Readers: each yields the rows of an open text file: objects with columns, texts, or Skipped


def read_document(file: IO[str]) -> Iterator[object]:
    """Yield the whole of a text file."""
    yield file.read()


def read_lines(lines: Iterable[str]) -> Iterator[object]:
    """Yield the values in lines of JSON."""
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            if line.strip():  # a blank line is no row
                yield Skipped("without text")


def read_json(file: IO[str]) -> Iterator[object]:
    """Yield the rows of a .json: those of an array, or the values in its lines."""
    first_line = file.readline()
    if first_line.startswith("["):  # an array is read as a whole: it may have a single line
        yield from json.loads(first_line + file.read())
    else:
        yield from read_lines(chain([first_line], file))


def read_csv(file: IO[str], delimiter: str = ",") -> Iterator[object]:
    """Yield the rows of CSV. One with more cells than the header is skipped: it has a comma that is
    not quoted, and which of the cells is the text cannot be told."""
    csv.field_size_limit(2**31 - 1)  # characters of a cell; the default, 131,072, is below a book
    # strict: a quote that is never closed is an error, and not one cell to the end of the file
    reader = csv.reader(file, delimiter=delimiter, strict=True)
    try:
        header = next(reader, [])
        for cells in reader:
            # further cells that are empty come from commas at the end of a line
            if any(cells[len(header) :]):
                yield Skipped("wider than the header")
            elif cells:  # not a blank line
                yield dict(zip(header, cells, strict=False))  # a short row lacks its last columns
    except csv.Error as error:  # it does not say where
        raise ValueError(f"line {reader.line_num}: {error}") from error


READERS = {
    ".jsonl": read_lines,
    ".ndjson": read_lines,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": partial(read_csv, delimiter="\t"),
}


def read_parquet(name: str, column: str) -> Iterator[object]:
    """Yield what each row of a parquet file has in a column."""
    from pyarrow.parquet import ParquetFile  # slow to import; few files need it

    file = ParquetFile(name)
    # pyarrow itself ignores a column that is not there
    check_column(name, column, file.schema_arrow.names)
    for table in file.iter_batches(BATCH, columns=[column]):
        yield from table.column(0).to_pylist()


def read_column(name: str, column: str) -> Iterator[object]:
    """Yield what each row of a file has in a column; Skipped for a row that is none or not UTF-8.
    Prints one warning for a file that is not UTF-8. Raises UserError if the first row lacks the
    column."""
    if suffix_of(name) == ".parquet":
        yield from read_parquet(name, column)
        return
    read_rows = READERS.get(suffix_of(name), read_document)
    is_warned = False  # one warning a file, not one a row
    with open_text(name) as file:
        for number, row in enumerate(read_rows(file)):
            value = row  # a text file is one string; a row of another may be Skipped
            if isinstance(row, dict):  # of JSON or CSV
                # the first row only: those of JSON may have different columns
                if number == 0 and row:
                    check_column(name, column, list(row))
                value = row.get(column)
            # a byte that is not UTF-8, see open_text, which would train as U+FFFD, or a zero, which
            # UTF-16 and binary files have
            if isinstance(value, str) and re.search("[\udc80-\udcff\0]", value):
                if not is_warned:
                    is_warned = True
                    print(
                        f"warning: {name} is not UTF-8: damaged, or {guess_encoding(value)}; such "
                        "texts are left out, convert the file",
                        file=sys.stderr,
                    )
                value = Skipped("not UTF-8")
            yield value


def check_column(name: str, column: str, columns: list[str]) -> None:
    """Raise UserError if a column is not among those of a file or dataset."""
    if column not in columns:
        raise UserError(f"{name} has no --text_column {column!r}, but {', '.join(columns):.300}")


def guess_encoding(text: str) -> str:
    """Return the encoding, one of CODECS, that a text which is not UTF-8 probably has, by its
    frequencies of characters."""
    from charset_normalizer import from_bytes  # slow to import; few files need it

    text = re.sub("[\ud800-\udc7f\udd00-\udfff]", "", text)  # surrogates that JSON has escaped
    content = text.encode(errors="surrogateescape")  # the bytes of the file
    match = from_bytes(content[:100_000], cp_isolation=list(CODECS)).best()
    return match.encoding if match else "in another encoding"


@contextmanager
def name_errors(name: str) -> Iterator[None]:
    """Raise what a reader or file system raises as a UserError that names the file or dataset."""
    try:
        yield
    except UserError:  # names it already
        raise
    except Exception as error:  # each reader has classes of its own, and none names the file
        first_line = str(error).partition("\n")[0]
        reason = f"({type(error).__name__}: {first_line:.200})"
        raise UserError(f"{name:.300} is damaged or cannot be read {reason}") from error


# The source


@dataclass
class Source:
    """Rows of `files` or, without any, of configuration `remote_name` of a dataset on the hub.
    Worker i of n reads every n-th file, from the i-th on."""

    files: tuple[str, ...] = ()
    dataset: str = ""
    remote_name: str = ""
    column: str = "text"
    """Column that holds the texts."""
    worker_index: int = 0
    worker_count: int = 1

    def batches(self, position: dict | None = None) -> Iterator[Batch]:
        """Yield batches of rows from a position or the beginning on. Raises UserError for what
        cannot be read; `datasets` itself retries downloads for some minutes."""
        if self.files:
            return self.read_files(position or {"file": 0, "row": 0})
        return self.read_dataset(position or {"revision": None, "stream": None})

    def read_files(self, position: dict) -> Iterator[Batch]:
        """Yield the batches of this worker's files; a position is a file and a row of it."""
        files = self.files[self.worker_index :: self.worker_count]
        first_row = position["row"]
        for index in range(position["file"], len(files)):
            with name_errors(files[index]):
                # formats other than parquet have no index: earlier rows are read again, and dropped
                rows_left = islice(read_column(files[index], self.column), first_row, None)
                rows = list(islice(rows_left, BATCH))
                while rows:
                    yield Batch({"file": index, "row": first_row}, rows)
                    first_row += len(rows)
                    rows = list(islice(rows_left, BATCH))
            first_row = 0  # of the next file

    def read_dataset(self, position: dict) -> Iterator[Batch]:
        """Yield the batches of the hub's dataset. A position is its commit, so that a later run
        reads the same files, and the state that `datasets` saves of its stream."""
        with name_errors(self.dataset):
            import datasets  # slow to import, as all that is needed for the hub only
            from fsspec.compression import register_compression
            from huggingface_hub import HfApi

            datasets.disable_progress_bars()  # one a file, between the lines of our own
            # fsspec would need another package for zstd, which reads the first frame only
            register_compression("zstd", lambda file, **_: open_zstd(file), "zst", force=True)
            # a dataset may change on the hub between two runs; its commit does not
            revision = position["revision"] or HfApi().dataset_info(self.dataset).sha
            stream = datasets.load_dataset(
                self.dataset, self.remote_name, split="train", revision=revision, streaming=True
            )
            if self.worker_index >= stream.num_shards:
                raise UserError(f"--worker_count must be at most the {stream.num_shards} files")
            # every n-th file, not a contiguous part of them
            stream = stream.shard(self.worker_count, self.worker_index, contiguous=False)
            state = position["stream"]
            if state:
                stream.load_state_dict(state)
            for columns in stream.iter(BATCH):
                check_column(self.dataset, self.column, list(columns))
                yield Batch({"revision": revision, "stream": state}, columns[self.column])
                state = stream.state_dict()  # where the next batch begins; the manifest keeps it
