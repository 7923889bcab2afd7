"""Documents of files: rows of parquet, JSON lines and CSV, or whole text files; also compressed.

The format follows from the suffix below that of the compression: a.jsonl.gz holds JSON lines.
"""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO

from data.shards import DataError

TEXTS = (".txt", ".py", ".md")
HEAD = 2**16  # bytes that tell text from other content
BOMS = {  # byte order marks; that of UTF-32 begins with that of UTF-16
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


@dataclass(frozen=True)
class NoText:
    """A row without a text, and why."""

    why: str


Documents = Iterator[str | NoText]


def open_zstd(file: IO[bytes]) -> IO[bytes]:
    """Return the content of a zstd file; gzip, bz2 and lzma of Python do this for theirs."""
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))


COMPRESSIONS: dict[str, Callable[[IO[bytes]], IO[bytes]]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": open_zstd,
}


def suffixes(name: str) -> tuple[str, str]:
    """Return the suffixes of format and of compression of a file or URL, each "" if there is none:
    (".jsonl", ".gz") for A.JSONL.gz."""
    path = Path(name.partition("?")[0] if "://" in name else name)
    last = path.suffix.lower()
    return (path.with_suffix("").suffix.lower(), last) if last in COMPRESSIONS else (last, "")


def open_file(name: str) -> IO[bytes]:
    """Open a file or URL and decompress it."""
    if "://" in name:
        import fsspec

        file = fsspec.open(name).open()
    else:
        file = open(name, "rb")
    return COMPRESSIONS.get(suffixes(name)[1], lambda file: file)(file)


def text_encoding(head: bytes) -> str | None:
    """Return the encoding of a text that begins with `head`: UTF-8, or what a byte order mark says;
    None if it is no text."""
    for mark, encoding in BOMS.items():
        if head.startswith(mark):
            return encoding
    return None if b"\0" in head else "utf-8"


def is_text(name: str) -> bool:
    """Return whether a file begins with text: UTF-8, what a byte order mark announces, or anything
    without NUL bytes under a suffix of TEXTS."""
    with open_file(name) as file:
        head = file.read(HEAD)
    encoding = text_encoding(head)
    if encoding is None or suffixes(name)[0] in TEXTS:
        return encoding is not None
    try:
        codecs.getincrementaldecoder(encoding)().decode(head)  # its end may be cut
    except UnicodeDecodeError:
        return False
    return True


class TextFile:
    """A file decoded as its byte order mark says or as UTF-8; U+FFFD replaces what is neither.

    `encoding` is None for a file that is no text.
    """

    def __init__(self, file: IO[bytes], newline: str | None = None) -> None:
        buffered = io.BufferedReader(file, HEAD)
        self.encoding = text_encoding(buffered.peek(HEAD)[:HEAD])
        self.replaced = 0  # characters
        # undecodable bytes of UTF-8 become lone surrogates, which `repair` finds
        escape = (self.encoding or "utf-8").startswith("utf-8")
        errors = "surrogateescape" if escape else "replace"
        self.file = io.TextIOWrapper(buffered, self.encoding, errors, newline)

    def repair(self, text: str) -> str:
        """Return the text with U+FFFD for what could not be decoded."""
        try:
            text.encode()
            return text
        except UnicodeEncodeError:
            repaired = text.encode(errors="surrogateescape").decode(errors="replace")
            self.replaced += repaired.count("\ufffd") - text.count("\ufffd")
            return repaired

    def lines(self) -> Iterator[str]:
        """Yield the lines."""
        return map(self.repair, self.file)

    def read(self) -> str:
        """Return the whole text, with \\n for any end of line."""
        return self.repair(self.file.read())


def parquet_rows(file: IO[bytes], name: str, column: str, skip: int) -> Documents:
    """Yield the texts of a column from row `skip` on."""
    from pyarrow import parquet

    table = parquet.ParquetFile(file)
    names = table.schema_arrow.names
    if column not in names:
        raise DataError(missing_column(name, column, names))
    first, row = 0, 0
    while first < table.num_row_groups:
        rows = table.metadata.row_group(first).num_rows
        if row + rows > skip:
            break
        first, row = first + 1, row + rows
    groups = range(first, table.num_row_groups)
    for batch in table.iter_batches(1000, row_groups=groups, columns=[column]):
        for value in batch.column(0).to_pylist():
            if row >= skip:
                yield text_of(value, f"row {row + 1}", column)
            row += 1


def json_rows(text: TextFile, name: str, column: str, skip: int) -> Documents:
    """Yield the texts of JSON lines, blank lines not counted, from row `skip` on."""
    filled = ((number, line) for number, line in enumerate(text.lines(), 1) if line.strip())
    for number, line in islice(filled, skip, None):
        if number == 1 and line.lstrip().startswith("["):
            raise DataError(
                f"{name} is one JSON array; write an object a line: jq -c '.[]' {name} > rows.jsonl"
            )
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            yield NoText(f"line {number} is not JSON")
            continue
        if isinstance(row, dict) and column in row:
            yield text_of(row[column], f"line {number}", column)
        else:
            yield NoText(f"line {number} has no {column!r}; see --text_column")


def csv_rows(text: TextFile, name: str, column: str, skip: int) -> Documents:
    """Yield the texts of a column of comma- or tab-separated values with a header."""
    csv.field_size_limit(2**31 - 1)
    reader = csv.DictReader(text.lines(), delimiter="\t" if ".tsv" in suffixes(name) else ",")
    names = reader.fieldnames or []
    if column not in names:
        raise DataError(missing_column(name, column, names))
    for row in islice(reader, skip, None):
        yield text_of(row[column], f"line {reader.line_num}", column)


def missing_column(name: str, column: str, names: list[str]) -> str:
    """Return an error for a file without the column of texts."""
    return f"{name} has no column {column!r} but {', '.join(names)}; choose one by --text_column"


def text_of(value: object, where: str, column: str) -> str | NoText:
    """Return the value of a row's column if it is a text."""
    if isinstance(value, str):
        return value
    kind = "null" if value is None else f"of type {type(value).__name__}"
    return NoText(f"{where}: {column!r} is {kind}")


ROWS = {".jsonl": json_rows, ".ndjson": json_rows, ".json": json_rows}
ROWS |= {".csv": csv_rows, ".tsv": csv_rows}


def read_documents(name: str, column: str, skip: int) -> Documents:
    """Yield the documents of a file from number `skip` on; a file without rows is one document.

    Warns at the end of what was replaced, as UTF-8 that could not be decoded. Raises DataError for
    a file that cannot be read as its suffix says, with the errors of its readers as cause.
    """
    kind = suffixes(name)[0]
    with open_file(name) as file:
        if kind == ".parquet":
            yield from parquet_rows(file, name, column, skip)
            return
        text = TextFile(file, newline="" if kind in (".csv", ".tsv") else None)
        if text.encoding is None:
            if skip == 0:
                yield NoText("it is not text but holds NUL bytes")
        elif kind in ROWS:
            yield from ROWS[kind](text, name, column, skip)
        elif skip == 0:
            yield text.read()
        if text.replaced:
            warn(
                f"{name} is not UTF-8 throughout: U+FFFD replaced {text.replaced:,} characters; "
                "convert it, as by iconv -f latin1 -t utf-8"
            )


def warn(message: str) -> None:
    """Print a warning."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


class DocumentStream:
    """The documents of files, one after another, with a position to continue from.

    Iterating gives None for a row without text; what these are is reported once a file.
    """

    def __init__(self, files: list[str], column: str) -> None:
        self.files, self.column = files, column
        self.file, self.row = 0, 0  # the next document's

    def state_dict(self) -> dict[str, int]:
        """Return the position of the next document."""
        return {"file": self.file, "row": self.row}

    def load_state_dict(self, state: dict) -> None:
        """Continue from a position; raise DataError for one of another reader."""
        if set(state) != {"file", "row"}:
            raise DataError(
                "these shards were begun by an earlier version; use another --local_dir"
            )
        self.file, self.row = state["file"], state["row"]

    def __iter__(self) -> Iterator[str | None]:
        while self.file < len(self.files):
            name, without, first = self.files[self.file], 0, ""
            try:
                for text in read_documents(name, self.column, self.row):
                    self.row += 1
                    if isinstance(text, NoText):
                        without, first = without + 1, first or text.why
                    yield text if isinstance(text, str) else None
            except DataError:
                raise
            except Exception as error:  # of a decompressor or parser
                if "://" in name:  # may be the network: the caller tries again
                    raise
                reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"
                raise DataError(f"{name} cannot be read ({reason})") from error
            if without:
                warn(f"{name}: {without:,} rows without text are skipped; the first: {first}")
            self.file, self.row = self.file + 1, 0
