"""Text to shard: rows of files, or of a dataset of the Hugging Face hub.

Files are read row by row by Python's own readers and pyarrow; `datasets` streams the hub. A
position in the source is plain data, to continue from.
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
from typing import IO

from utils.errors import UserError

BATCH = 100  # rows
IN_FOLDERS = (".parquet", ".jsonl", ".txt", ".py")  # read in folders; other files only if named
# codecs that a file which is not UTF-8 is compared with, and their names for users
ENCODINGS = {
    "cp1252": "Latin-1 (Windows-1252)",
    "gb18030": "GBK (GB18030)",
    "big5": "Big5",
    "cp932": "Shift-JIS",
    "cp1251": "Windows-1251",
    "koi8_r": "KOI8-R",
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
    """Open a file as UTF-8, decompressed, line ends as \\n. Bytes that are not UTF-8 become
    surrogates, U+DC80 to U+DCFF."""
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
    paths: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [x for x in folders if not x.startswith(".") and x != "site-packages"]
        paths += [Path(parent, x) for x in names if not x.startswith(".")]
    return sorted(paths)


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


# rows of a file: an object, a text by itself, or what is no row


def read_document(file: IO[str]) -> Iterator[object]:
    """Yield the whole of a text file."""
    yield file.read()


def read_lines(lines: Iterable[str]) -> Iterator[object]:
    """Yield the values in lines of JSON."""
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            if line.strip():
                yield Skipped("without text")


def read_json(file: IO[str]) -> Iterator[object]:
    """Yield the rows of a .json: those of an array, one object, or the values in its lines."""
    first_line = file.readline()
    if first_line.startswith("["):
        yield from json.loads(first_line + file.read())
    elif first_line.strip() == "{":
        yield json.loads(first_line + file.read())
    else:
        yield from read_lines(chain([first_line], file))


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


def read_parquet(name: str, column: str) -> Iterator[object]:
    """Yield what each row of a parquet file has in a column."""
    from pyarrow.parquet import ParquetFile

    file = ParquetFile(name)
    check_column(name, column, file.schema_arrow.names)
    for batch in file.iter_batches(BATCH, columns=[column]):
        yield from batch.column(0).to_pylist()


def read_column(name: str, column: str) -> Iterator[object]:
    """Yield what each row of a file has in a column, and Skipped for what is no row or not UTF-8,
    of which it warns once. Raises UserError if the first row lacks the column."""
    if suffix_of(name) == ".parquet":
        yield from read_parquet(name, column)
        return
    read_rows = READERS.get(suffix_of(name), read_document)
    encoding = None  # of the file, if it is not UTF-8
    with open_text(name) as file:
        for number, row in enumerate(read_rows(file)):
            if isinstance(row, dict):
                if number == 0 and row:
                    check_column(name, column, list(row))
                row = row.get(column)
            undecoded = re.findall("[\udc80-\udcff]", row) if isinstance(row, str) else []
            if not undecoded:
                yield row
                continue
            if encoding is None:
                encoding = guess_encoding(row)
                print(
                    f"warning: {name} is not UTF-8: it looks like {encoding}; a text with "
                    f"{len(undecoded):,} lost characters is left out, and others like it; convert "
                    "the file",
                    file=sys.stderr,
                )
            yield Skipped(f"not UTF-8: looks like {encoding}")


def check_column(name: str, column: str, columns: list[str]) -> None:
    """Raise UserError if a column is not among those of a file or dataset."""
    if column not in columns:
        raise UserError(f"{name} has no --text_column {column!r}, but {', '.join(columns):.300}")


def guess_encoding(text: str) -> str:
    """Return the name of the encoding that a text, which is not UTF-8, looks like."""
    from charset_normalizer import from_bytes

    text = re.sub("[\ud800-\udc7f\udd00-\udfff]", "", text)  # as JSON may write them
    data = text.encode(errors="surrogateescape")
    replaced = data.decode(errors="replace")
    if 2 * replaced.count("\ufffd") < len(re.findall("[^\0-\x7f]", replaced)):
        return "damaged UTF-8"
    runs = re.findall(rb"[\x80-\xff]+", data)
    if 2 * sum(len(run) == 1 for run in runs) > len(runs):  # accents among letters
        return ENCODINGS["cp1252"]
    best = from_bytes(data[:100_000], cp_isolation=list(ENCODINGS)).best()
    return ENCODINGS[best.encoding] if best else "another encoding"


@contextmanager
def name_errors(name: str) -> Iterator[None]:
    """Raise what a reader or file system raises as a UserError that names the file or dataset."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = f"({type(error).__name__}: {str(error).partition(chr(10))[0]:.200})"
        raise UserError(f"{name:.300} is damaged or cannot be read {reason}") from error


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

    def batches(self, position: dict | None) -> Iterator[tuple[dict, list]]:
        """Yield the position of a batch, to continue from, and its texts; those that are no
        strings stand for rows without text. Raises UserError for a file that cannot be read;
        `datasets` itself retries downloads for some minutes."""
        if self.files:
            return self.read_files(position or {"file": 0, "row": 0})
        return self.read_dataset(position or {"revision": None, "stream": None})

    def read_files(self, position: dict) -> Iterator[tuple[dict, list]]:
        """Yield the batches of this worker's files."""
        files = self.files[self.worker_index :: self.worker_count]
        row = position["row"]
        for index in range(position["file"], len(files)):
            with name_errors(files[index]):
                values = islice(read_column(files[index], self.text_column), row, None)
                texts = list(islice(values, BATCH))
                while texts:
                    yield {"file": index, "row": row}, texts
                    row += len(texts)
                    texts = list(islice(values, BATCH))
            row = 0

    def read_dataset(self, position: dict) -> Iterator[tuple[dict, list]]:
        """Yield the batches of the hub's dataset; "stream" is the state that `datasets` saves."""
        with name_errors(self.dataset):
            set_up_datasets()
            import datasets
            from huggingface_hub import HfApi
            from pyarrow import JsonType

            revision = position["revision"] or HfApi().dataset_info(self.dataset).sha
            options = {"name": self.remote_name, "revision": revision}
            stream = datasets.load_dataset(self.dataset, split="train", streaming=True, **options)
            if self.worker_index >= stream.num_shards:
                raise UserError(f"--worker_count must be at most the {stream.num_shards} files")
            stream = stream.shard(self.worker_count, self.worker_index, contiguous=False)
            stream = stream.with_format("arrow")
            state = position["stream"]
            if state:
                stream.load_state_dict(state)
            for table in stream.iter(BATCH):
                check_column(self.dataset, self.text_column, table.column_names)
                column = table[self.text_column]
                texts = column.to_pylist()
                if isinstance(column.type, JsonType):  # of JSON lines where some are no text
                    texts = [None if text is None else json.loads(text) for text in texts]
                yield {"revision": revision, "stream": state}, texts
                state = stream.state_dict()
