"""Documents of files: rows of parquet, JSON lines and CSV, or whole text files; also compressed.

The format follows from the suffix below that of the compression: a.jsonl.gz holds JSON lines.
"""

import csv
import json
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import IO

from data.text_files import TextFile, open_file, suffixes
from utils.errors import UserError


@dataclass(frozen=True)
class NoText:
    """A row without a text, and why."""

    why: str


Documents = Iterator[str | NoText]
DELIMITERS = (",", ";", "\t", "|")


def parquet_rows(file: IO[bytes], name: str, column: str, skip: int) -> Documents:
    """Yield the texts of a column from row `skip` on."""
    from pyarrow import parquet

    table = parquet.ParquetFile(file)
    names = table.schema_arrow.names
    if column not in names:
        raise UserError(missing_column(name, column, names))
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
            raise UserError(
                f"{name} is one JSON array; write an object a line, as jq -c '.[]' does, to .jsonl"
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
    """Yield the texts of a column of separated values with a header.

    The separator is the one of DELIMITERS that is most frequent in the header, a tab for .tsv. Rows
    with another number of fields than the header are no texts; UserError for wrong quotes.
    """
    csv.field_size_limit(2**31 - 1)
    lines = text.lines()
    header = next(lines, "")
    if header.startswith("sep="):  # by Excel
        header = next(lines, "")
    delimiter = "\t" if ".tsv" in suffixes(name) else max(DELIMITERS, key=header.count)
    reader, joined = csv.reader(chain([header], lines), delimiter=delimiter, strict=True), 0
    try:
        names = next(reader, [])
        if names.count(column) != 1:
            raise UserError(missing_column(name, column, names))
        index = names.index(column)
        for row in islice(filter(None, reader), skip, None):
            where = f"line {reader.line_num}"
            if delimiter == "\t" and any("\n" in value and "\t" in value for value in row):
                joined += 1
            if len(row) == len(names):
                yield text_of(row[index], where, column)
            else:
                yield NoText(f"{where} has {len(row)} fields, the header {len(names)}")
    except csv.Error as error:
        raise UserError(
            f"{name} is not valid CSV up to line {reader.line_num} ({error}): a quote inside a "
            "quoted field is written twice; .jsonl avoids this"
        ) from error
    if joined:
        warn(
            f"{name}: rows whose quoted text holds tabs and line ends: {joined}; stray quotes join "
            "rows, and .jsonl avoids them"
        )


def missing_column(name: str, column: str, names: list[str]) -> str:
    """Return an error for a file that does not have the column of texts once."""
    if column in names:
        return f"{name} has {names.count(column)} columns {column!r}; rename all but one"
    shown = ", ".join(repr(x if len(x) <= 40 else f"{x[:40]}...") for x in names)
    return f"{name} has no column {column!r} but {shown}; choose one by --text_column"


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

    Warns at the end of what was replaced, as UTF-8 that could not be decoded. Raises UserError for
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
                yield NoText("it is not text but holds NUL bytes, or is compressed")
        elif kind in ROWS:
            yield from ROWS[kind](text, name, column, skip)
        elif skip == 0:
            yield text.read()
        if text.replaced:
            convert = "; convert it: iconv -f ENCODING -t utf-8" if text.is_utf8 else ""
            warn(
                f"{name} is not {text.encoding.upper()} throughout: U+FFFD replaced "
                f"{text.replaced:,} characters{convert}"
            )


def warn(message: str) -> None:
    """Print a warning."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


class FileError(UserError):
    """File of a DocumentStream that cannot be read to its end; `file` is its index."""

    def __init__(self, message: str, file: int) -> None:
        super().__init__(message)
        self.file = file


@dataclass(frozen=True)
class Place:
    """Document of a DocumentStream: its file, its number from 1 on, and a checksum of the documents
    of that file up to it, None where that is unknown."""

    name: str
    file: int
    row: int
    checksum: int | None

    def __str__(self) -> str:
        return f"{self.name}, row {self.row}"


class DocumentStream:
    """The documents of files, one after another, with a position to continue from.

    Iterating gives None for a row without text; what these are is reported once a file.
    """

    def __init__(self, files: list[str], column: str) -> None:
        self.files, self.column = files, column
        self.file, self.row = 0, 0  # the next document's
        self.checksum: int | None = 0  # of the documents before it in the file

    @property
    def place(self) -> Place:
        """Place of the document that was read last."""
        return Place(self.files[self.file], self.file, self.row, self.checksum)

    def state_dict(self) -> dict[str, int | None]:
        """Return the position of the next document."""
        return {"file": self.file, "row": self.row, "checksum": self.checksum}

    def load_state_dict(self, state: dict) -> None:
        """Continue from a position; raise UserError for one of another reader."""
        if not {"file", "row"} <= set(state) <= {"file", "row", "checksum"}:
            raise UserError(
                "these shards were begun by an earlier version; use another --local_dir"
            )
        self.file, self.row = state["file"], state["row"]
        self.checksum = state.get("checksum")  # older manifests have none

    def count(self, text: str | NoText) -> None:
        """Count a document of the current file, and add it to the checksum."""
        self.row += 1
        if self.checksum is not None:
            data = text.encode(errors="surrogatepass") if isinstance(text, str) else b"\0"
            self.checksum = zlib.crc32(b"\n", zlib.crc32(data, self.checksum))

    def __iter__(self) -> Iterator[str | None]:
        while self.file < len(self.files):
            name, without, first = self.files[self.file], 0, ""
            try:
                for text in read_documents(name, self.column, self.row):
                    self.count(text)
                    if isinstance(text, NoText):
                        without, first = without + 1, first or text.why
                    yield text if isinstance(text, str) else None
            except UserError as error:
                raise FileError(str(error), self.file) from error
            except Exception as error:  # of a decompressor or parser
                if "://" in name:  # may be the network: the caller tries again
                    raise
                reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"
                raise FileError(f"{name} cannot be read ({reason})", self.file) from error
            if without:
                warn(f"{name}: {without:,} rows without text are skipped; the first: {first}")
            self.file, self.row, self.checksum = self.file + 1, 0, 0
