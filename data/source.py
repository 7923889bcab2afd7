"""Text to shard: rows of files, or of a dataset of the Hugging Face hub.

Python's own readers read text, JSON and CSV, row by row; `datasets` streams parquet and the hub. A
position in the source is plain data, to continue from.
"""

import bz2
import csv
import glob
import gzip
import io
import json
import lzma
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO

from utils.errors import UserError

BATCH = 100  # rows
IN_FOLDERS = (".parquet", ".jsonl", ".txt", ".py")  # read in folders; other files only if named
# what a file that is not UTF-8 is compared with: codecs of Python, and their names for users
ENCODINGS = {
    "cp1252": "Latin-1 (Windows-1252)",
    "gb18030": "GBK (GB18030)",
    "big5": "Big5",
    "cp932": "Shift-JIS",
    "euc_jp": "EUC-JP",
    "euc_kr": "EUC-KR",
    "cp1251": "Windows-1251",
    "koi8_r": "KOI8-R",
    "cp1253": "Windows-1253",
    "cp1255": "Windows-1255",
    "cp1256": "Windows-1256",
}


@dataclass(frozen=True)
class Skipped:
    """A row that is no document."""

    reason: str


# files


def open_zstd(path: str | IO[bytes], mode: str = "rb") -> IO[bytes]:
    """Open a file compressed by zstd, which may have several frames, for reading."""
    from pyarrow import CompressedInputStream

    return io.BufferedReader(CompressedInputStream(path, "zstd"))


COMPRESSIONS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": open_zstd}


def open_text(name: str) -> IO[str]:
    """Open a file as UTF-8, decompressed, line ends as \\n. Bytes that are not UTF-8 become lone
    surrogates, which `undecodable` finds."""
    open_bytes = COMPRESSIONS.get(Path(name).suffix.lower(), open)
    encoding = {"encoding": "utf-8-sig", "errors": "surrogateescape"}  # -sig drops a mark
    return io.TextIOWrapper(open_bytes(name, "rb"), **encoding)


def suffix_of(name: str) -> str:
    """Return the suffix of a file that tells its format, below that of a compression."""
    path = Path(name.lower())
    return Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix


def is_binary(path: Path) -> bool:
    """Return whether a file that would be read as text holds something else, as UTF-16 does."""
    if path.suffix.lower() in (".parquet", *COMPRESSIONS):
        return False
    with open(path, "rb") as file:
        return b"\0" in file.read(2**16)


def walk(folder: str) -> list[Path]:
    """Return the files below a folder in name order, but hidden ones and installed packages."""
    found: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [x for x in folders if not x.startswith(".") and x != "site-packages"]
        found += [Path(parent, x) for x in names if not x.startswith(".")]
    return sorted(found)


def list_files(inputs: tuple[str, ...]) -> dict[str, int]:
    """Return the sizes in bytes of the files of `inputs` by name, folders in name order. Prints
    what is left out of the folders; raises UserError for an input that is no text."""
    sizes, left_out = {}, Counter()
    for name in inputs:
        if os.path.isdir(name):
            for path in walk(name):
                if suffix_of(path.name) in IN_FOLDERS and path.is_file() and not is_binary(path):
                    sizes[str(path)] = path.stat().st_size
                else:
                    left_out[path.suffix.lower() or "without a suffix"] += 1
        elif is_binary(Path(name)):
            raise UserError(f"--input {name} is binary, not UTF-8 text")
        else:
            sizes[name] = os.path.getsize(name)
    others = ", ".join(f"{count:,} {suffix}" for suffix, count in left_out.most_common(8))
    if not sizes:
        raise UserError(f"{' '.join(inputs)} holds none of {IN_FOLDERS}, but {others or 'nothing'}")
    if others:
        print(f"left out: {others}; name a file to read it", file=sys.stderr)
    return sizes


# rows of a text file: an object, a text by itself, or what is no row


def read_document(file: IO[str]) -> Iterator[object]:
    """Yield the whole of a text file."""
    yield file.read()


def read_lines(file: IO[str]) -> Iterator[object]:
    """Yield the values in lines of JSON."""
    for line in file:
        try:
            yield json.loads(line)
        except ValueError:
            if line.strip():
                yield Skipped("without text")


def read_json(file: IO[str]) -> Iterator[object]:
    """Yield the rows of a .json: those of an array, else the values in its lines."""
    first_line = next((line for line in file if line.strip()), "")
    try:
        first = json.loads(first_line)
    except ValueError:  # an array or an object of several lines
        first = json.loads(first_line + file.read())
    if isinstance(first, list):
        yield from first
    else:
        yield first
        yield from read_lines(file)


def read_csv(file: IO[str], delimiter: str = ",") -> Iterator[object]:
    """Yield the rows of CSV. One with more cells than the header is none: which of them is the
    text cannot be told, as where a comma in it is not quoted."""
    csv.field_size_limit(2**31 - 1)  # characters of a cell
    reader = csv.reader(file, delimiter=delimiter, strict=True)
    try:
        header = next(reader, [])
        for cells in reader:
            if any(cells[len(header) :]):
                yield Skipped("wider than the header")
            elif cells:  # not a blank line
                yield dict(zip(header, cells, strict=False))
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num}: {error}") from error


READERS = {
    ".jsonl": read_lines,
    ".ndjson": read_lines,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": partial(read_csv, delimiter="\t"),
}


def read_column(name: str, column: str) -> Iterator[object]:
    """Yield what each row of a text file has in a column, and Skipped for what is no row or not
    UTF-8, of which it warns once. Raises UserError if the first row lacks the column."""
    read_rows = READERS.get(suffix_of(name), read_document)
    encoding = None  # of the file, if it is not UTF-8
    with open_text(name) as file:
        for number, row in enumerate(read_rows(file)):
            if isinstance(row, dict):
                if number == 0 and row:
                    check_column(name, column, list(row))
                row = row.get(column)
            data = undecodable(row) if isinstance(row, str) else None
            if data is None:
                yield row
                continue
            if encoding is None:
                encoding = guess_encoding(data)
                lost = data.decode(errors="replace").count("\ufffd") - row.count("\ufffd")
                print(
                    f"warning: {name} is not UTF-8: it looks like {encoding}; a text that would "
                    f"lose {lost:,} characters is left out, and others like it; convert the file",
                    file=sys.stderr,
                )
            yield Skipped(f"not UTF-8: looks like {encoding}")


def check_column(name: str, column: str, columns: list[str]) -> None:
    """Raise UserError if a column is not among those of a file or dataset."""
    if column not in columns:
        raise UserError(f"{name} has no --text_column {column!r}, but {', '.join(columns):.300}")


def undecodable(text: str) -> bytes | None:
    """Return the bytes that a text was decoded from if they were not UTF-8, else None. A text that
    holds U+FFFD itself is UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        try:
            return text.encode(errors="surrogateescape")
        except UnicodeEncodeError:  # lone surrogates as JSON writes them
            pass
    return None


def guess_encoding(data: bytes) -> str:
    """Return the name of the encoding that bytes, which are not UTF-8, look like."""
    from charset_normalizer import from_bytes

    valid = data.decode(errors="ignore")
    num_not_ascii = len(valid) - len(valid.encode("ascii", "ignore"))
    if num_not_ascii > len(data) - len(valid.encode()):
        return "damaged UTF-8"
    runs = re.findall(rb"[\x80-\xff]+", data)
    if 2 * sum(len(run) == 1 for run in runs) > len(runs):  # accents among letters
        return ENCODINGS["cp1252"]
    best = from_bytes(data[:100_000], cp_isolation=list(ENCODINGS)).best()
    return ENCODINGS[best.encoding] if best else "another encoding"


# the source


def set_up_datasets() -> None:
    """Import `datasets`, which is slow, and configure it."""
    os.environ.setdefault("USE_TORCH", "0")  # it would import PyTorch, for nothing here
    import datasets
    from fsspec.compression import register_compression

    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # a request to the hub, also for local files
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors reach the caller anyway
    # fsspec needs a package for zstd, and reads only the first frame of a file by some of them
    register_compression("zstd", lambda file, **_: open_zstd(file), "zst", force=True)


@dataclass
class Source:
    """Texts of files, or of configuration `remote_name` of the hub's dataset if there are none;
    worker i of n reads every n-th file, from the i-th on."""

    files: list[str]
    dataset: str
    remote_name: str
    text_column: str
    worker_index: int
    worker_count: int

    def names(self) -> list[str]:
        """Return this worker's files, or the dataset of the hub."""
        if not self.files:
            return [self.dataset]
        return self.files[self.worker_index :: self.worker_count]

    def batches(self, position: dict | None) -> Iterator[tuple[dict, list]]:
        """Yield the position of a batch, to continue from, and its texts; those that are no
        strings stand for rows without text. Raises UserError for a file that cannot be read;
        `datasets` itself retries downloads for some minutes."""
        at = position or {"revision": None, "file": 0, "place": None}
        names, name = self.names(), self.dataset
        try:
            if not self.files and at["revision"] is None:
                set_up_datasets()
                from huggingface_hub import HfApi

                at = {**at, "revision": HfApi().dataset_info(self.dataset).sha}
            for index in range(at["file"], len(names)):
                name = names[index]
                at = {**at, "file": index}
                if not self.files or suffix_of(name) == ".parquet":
                    batches = self.read_tables(name, at["revision"], at["place"])
                else:
                    batches = self.read_text(name, at["place"] or 0)
                for place, texts in batches:
                    yield {**at, "place": place}, texts
                at = {**at, "place": None}
        except UserError:
            raise
        except Exception as error:  # from datasets, its file systems or a parser
            reason = f"({type(error).__name__}: {str(error).partition(chr(10))[0]:.200})"
            raise UserError(f"{name:.300} is damaged or cannot be read {reason}") from error

    def read_text(self, name: str, start: int) -> Iterator[tuple[int, list]]:
        """Yield number of the first row and texts of each batch of a text file, from row `start`
        on."""
        values = islice(read_column(name, self.text_column), start, None)
        while True:
            texts = list(islice(values, BATCH))
            if not texts:
                return
            yield start, texts
            start += len(texts)

    def read_tables(
        self, name: str, revision: str | None, state: dict | None
    ) -> Iterator[tuple[dict | None, list]]:
        """Yield the state before each batch, as `datasets` saves it, and texts of the batch."""
        set_up_datasets()
        import datasets
        from pyarrow import JsonType

        if self.files:
            options = {"data_files": [glob.escape(name)], "batch_size": 1000}
            stream = datasets.load_dataset("parquet", split="train", streaming=True, **options)
        else:
            options = {"name": self.remote_name, "revision": revision}
            stream = datasets.load_dataset(name, split="train", streaming=True, **options)
            if self.worker_index >= stream.num_shards:
                raise UserError(f"--worker_count must be at most the {stream.num_shards} files")
            stream = stream.shard(self.worker_count, self.worker_index, contiguous=False)
        stream = stream.with_format("arrow")
        if state:
            stream.load_state_dict(state)
        for table in stream.iter(BATCH):
            check_column(name, self.text_column, table.column_names)
            column = table[self.text_column]
            texts = column.to_pylist()
            if isinstance(column.type, JsonType):  # of JSON lines where some are no text
                texts = [None if text is None else json.loads(text) for text in texts]
            yield state, texts
            state = stream.state_dict()
