"""Source of text to shard: rows of files, or of a dataset of the Hugging Face hub.

A row is a text, or Skipped with a reason: readers skip what they cannot parse, and `as_text` skips
unusable text. The ledger of the manifest counts texts and skipped rows. Rows come in batches, each
with its position in the source, from which a later run continues. Python's own readers and pyarrow
read files row by row; `datasets` streams the hub. A text file is read in pieces, and a long text
of a file is kept on disk, so that no text file has to fit into memory.
"""

import bz2
import codecs
import csv
import errno
import gzip
import io
import json
import lzma
import os
import re
import shlex
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, groupby, islice, repeat, tee
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, NamedTuple

from data.manifest import MANIFEST, FileCounts, SourceSettings, sha256, time_of_change
from data.named_tokenizer import TOKENIZER_FILE
from utils.errors import UserError
from utils.network import DOWNLOAD_SECONDS, HUB, ask

ROWS_PER_BATCH = 100  # at most
LONG_CHARACTERS = 2**20  # a longer text of a file is kept on disk
PIECE_CHARACTERS = 2**18  # a text file is read, and a long text written, in such pieces
# Usual marks between texts: <|endoftext|> anywhere, and lines such as [SEP], --- and * * *. A text
# file with MANY_MARKS of one kind may hold several texts.
BRACKETS = re.compile(r"<[^<>\s]{1,30}>|\[[A-Z]{2,9}\]")
MARK_LINES = rf"^(?:{BRACKETS.pattern}|[-=*_~%#]{{1,99}}|\*(?: \*)+)(?=[ \t]{{0,2}}\r?$)"
MARKS = re.compile(rf"{MARK_LINES}|<\|\w{{1,30}}\|>", re.M)
MANY_MARKS = 10
# Suffixes of the files that are read of a folder: the first of these groups that it has. Others,
# such as a table or a README beside the texts, are read only if named.
SUFFIXES_IN_FOLDERS: tuple[tuple[str, ...], ...] = (
    (".parquet", ".jsonl", ".txt", ".py"),
    (".csv", ".tsv", ".json", ".ndjson"),
    (".md", ".rst", ".tex"),
)
# Names that are not read: installed packages, and what sharding writes, perhaps into this folder.
NOT_INPUT = ("site-packages", MANIFEST, TOKENIZER_FILE)
# Reasons of Skipped that a sound file may have begin with these words, as "without text" does. A
# file with any other reason, or without any text, is suspect (warn_if_suspect).
USUAL_REASONS = ("empty", "without")
# How Python decodes a byte that is not UTF-8: to half of a surrogate pair, U+DC80 to U+DCFF. So one
# bad row does not end a file; as_text skips rows with surrogates.
SURROGATES = "surrogateescape"
BAD_BYTES = re.compile("[\udc80-\udcff]")
# Control characters, which texts hardly have. They are letters, dashes and quotation marks of a
# text of Windows that was read as Latin-1.
C1_CONTROLS = re.compile("[\x80-\x9f]")


@dataclass(frozen=True)
class Skipped:
    """Row that is not a text."""

    reason: str
    """Why the row is skipped; the ledger counts skipped rows by this key."""


# a byte that is not UTF-8, or "\ud800" in JSON without its other half
NOT_UTF8 = Skipped("not UTF-8, or half of a surrogate pair")
EMPTY = Skipped("empty")
WITH_NUL = Skipped("with U+0000")


class LongText:
    """Text in a file on disk, because it may be larger than memory. The file has no name, so that a
    killed run leaves nothing behind; it takes room on the disk of `folder`."""

    def __init__(self, folder: Path) -> None:
        # newline="" keeps \r\n
        self.file = tempfile.TemporaryFile("w+", encoding="utf-8", newline="", dir=folder)
        self.num_bytes = 0
        """Size of the text in UTF-8."""

    def append(self, piece: str) -> None:
        """Append characters to the text."""
        self.file.write(piece)
        self.num_bytes += len(piece.encode())


Row = str | LongText | Skipped  # text of a row (a long one on disk), or Skipped with the reason


def size_of(text: str | LongText) -> int:
    """Return the size of a text in bytes of UTF-8."""
    return text.num_bytes if isinstance(text, LongText) else len(text.encode())


def pieces_of(text: str | LongText, size: int) -> Iterator[str]:
    """Yield a text in pieces of `size` characters; the last piece may be shorter."""
    if isinstance(text, str):
        for start in range(0, len(text), size):
            yield text[start : start + size]
        return
    text.file.seek(0)  # `append` and earlier reads have moved the position
    yield from iter(partial(text.file.read, size), "")  # until read returns ""


@dataclass
class SourcePosition:
    """Place of a batch in the source, where a later run continues; a manifest has it as JSON."""

    file: int = 0
    """Index of the batch's file in Source.names, the files of this worker: 0 for a dataset, and
    len(names) after the last file."""
    counts: dict = field(default_factory=dict)
    """FileCounts, as JSON, of the rows of this file before the batch: {"size": 5_000_000, "rows":
    300, "texts": 298, ...}. {} if there is no batch: before the first batch of a first run, and
    after the last file."""
    revision: str | None = None
    """Commit of the hub's dataset, so that a later run reads the same files; None for files, and
    for a dataset that is read to its end."""
    stream: dict | None = None
    """State of the stream, as `datasets` saves it; None at the beginning and at the end of a
    dataset, and for files."""


class RowBatch(NamedTuple):
    """Consecutive rows of a file or dataset, and the position of the first."""

    position: SourcePosition
    rows: list[Row]


# Files: what to read, and how to open it


def open_zstd(path: str | IO[bytes], mode: str = "rb") -> io.BufferedReader:
    """Open a zstd-compressed file for reading. pyarrow reads all of its frames (pzstd writes
    several); many readers read only the first. UntilDamage passes a name, fsspec an open file, and
    both pass `mode` to any opener."""
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
    """Decompressed content of a file, up to its end or its first damage, such as bytes after the
    end of a .gz. `error` is None until a read meets the damage, then the error of that read."""

    def __init__(self, name: str) -> None:
        suffix = Path(name).suffix.lower()
        opener = COMPRESSIONS.get(suffix, open)  # gzip.open, ..., or Python's own open
        self.open = partial(opener, name, "rb")
        self.file = self.open()
        self.num_read = 0  # decompressed bytes that readinto has returned
        self.error: Exception | None = None
        self.lost_bytes: Iterator[bytes] | None = None  # read_again's, after a damage

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a bytearray or memoryview with the next bytes; return their number, 0 at the end."""
        if self.lost_bytes is None:
            try:
                next_bytes = self.file.read1(len(buffer))  # decompressed; b"" at the end
            except Exception as error:
                if not is_damage(error):
                    raise
                self.error = error  # raised by read_rows after the rows before it
                self.lost_bytes = self.read_again()
        if self.lost_bytes is not None:  # set by an earlier call, or just now
            next_bytes = next(self.lost_bytes, b"")  # b"" at the damage
        self.num_read += len(next_bytes)
        buffer[: len(next_bytes)] = next_bytes
        return len(next_bytes)

    def read_again(self) -> Iterator[bytes]:
        """Yield, one by one, the bytes between the last one that readinto has returned and the
        damage: pyarrow does not return what a failed read has decompressed."""
        file = self.open()
        bytes_left = self.num_read
        while bytes_left:
            bytes_left -= len(file.read1(min(bytes_left, 2**20)))
        try:
            yield from iter(partial(file.read1, 1), b"")  # until read1 returns b""
        except Exception as error:
            if not is_damage(error):
                raise


def open_text(raw: UntilDamage, errors: str = SURROGATES) -> io.TextIOWrapper:
    """Open the content of a file as text. `errors` says what becomes of bad bytes, as in
    bytes.decode: "surrogateescape" or "replace"."""
    # utf-8-sig drops a byte order mark at the beginning. newline="" keeps \r\n, so that shards hold
    # the text as it is. `raw` gives decompressed bytes.
    return io.TextIOWrapper(io.BufferedReader(raw), "utf-8-sig", errors, newline="")


def is_full_disk(error: Exception) -> bool:
    """Return whether an error says that a disk, a quota or a limit has no room for a file."""
    full_codes = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return isinstance(error, OSError) and error.errno in full_codes


def is_damage(error: Exception) -> bool:
    """Return whether an error of a reader means that the file is damaged. Any other error, such as
    a disk's, must end the run, which would else go on without the rest of a sound file."""
    from pyarrow import ArrowInvalid  # slow to import; few files need it

    if isinstance(error, OSError):  # gzip, bz2 and pyarrow set no errno; the system does
        return error.errno is None
    # EOFError: the compressed content ends too early
    return isinstance(error, EOFError | zlib.error | lzma.LZMAError | csv.Error | ArrowInvalid)


def suffix_of(name: str) -> str:
    """Return the suffix that tells a file's format, in lower case: .jsonl for A.JSONL.gz."""
    path = Path(name.lower())
    # COMPRESSIONS has .gz, .bz2, .xz and .zst; the stem of a.jsonl.gz is a.jsonl
    return Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix


def walk(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder in name order, and links to folders, which are not followed.
    Leaves out hidden names, installed packages, and the manifest.json and tokenizer.json of shards.
    Raises OSError for a folder that cannot be listed."""
    # iterdir raises an error where rglob passes over a folder that it cannot list. Sort, because
    # the order of names differs between file systems, and the order of the shards follows it.
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in NOT_INPUT:
            continue
        if path.is_dir() and not path.is_symlink():
            yield from walk(path)
        else:
            yield path


def list_files(inputs: tuple[str, ...]) -> dict[str, int]:
    """Return the size in bytes of each file by name: the named files, and the files in the named
    folders, in name order. Prints which files of the folders are left out. Raises UserError if no
    file is left, and OSError for a name that is missing or cannot be listed."""
    bytes_by_file: dict[str, int] = {}
    num_left_out: Counter[str] = Counter()  # files not read: {".jpg": 2, "link to a folder": 1}
    for name in inputs:
        if not os.path.isdir(name):
            # A named file is read with any suffix. OSError if it is missing.
            bytes_by_file[name] = os.path.getsize(name)
            continue
        paths: list[Path] = []
        for path in walk(Path(name)):
            if path.is_dir():  # walk yields a folder only where it is a link
                num_left_out["link to a folder"] += 1
            else:
                paths.append(path)
        suffixes_here = {suffix_of(path.name) for path in paths}  # {".jsonl", ".md", ".png"}
        # Each group has several formats: (".csv", ".tsv", ".json", ".ndjson"). The first group of
        # which the folder has a file decides.
        groups = (group for group in SUFFIXES_IN_FOLDERS if suffixes_here & set(group))
        suffixes = next(groups, ())  # (): all of its files are left out
        for path in paths:
            if suffix_of(path.name) in suffixes:
                # OSError for a broken link
                bytes_by_file[str(path)] = path.stat().st_size
            else:
                num_left_out[path.suffix.lower() or "without a suffix"] += 1
    # e.g. "2 .jpg, 1 without a suffix"; "" if nothing is left out
    summary = ", ".join(f"{count:,} {suffix}" for suffix, count in num_left_out.most_common(8))
    if not bytes_by_file:
        readable = ", ".join(chain.from_iterable(SUFFIXES_IN_FOLDERS))  # ".parquet, .jsonl, ..."
        raise UserError(
            f"{' '.join(inputs)} holds none of {readable}, but {summary or 'nothing'}; "
            f"to read other files, name them one by one, such as {Path(inputs[0], '*')}"
        )
    if summary:
        print(f"left out: {summary}; name a file or a folder to read it", file=sys.stderr)
    return bytes_by_file


# Readers: each yields the rows of an open text file: dicts by column, texts, or Skipped


def join_pieces(pieces: Iterable[str], folder: Path) -> Row:
    """Return the text that pieces form, or Skipped if it is no usable text; a long text is written
    to a file in `folder`. Reads all pieces, because another text may follow them."""
    first_pieces: list[str] = []
    num_characters = 0
    pieces = iter(pieces)
    for piece in pieces:
        first_pieces.append(piece)
        num_characters += len(piece)
        if num_characters > LONG_CHARACTERS:
            return write_long_text(chain(first_pieces, pieces), folder)
    return as_text("".join(first_pieces))


def write_long_text(pieces: Iterable[str], folder: Path) -> Row:
    """Write a text to a file in `folder`, piece by piece. Return it, or the Skipped that as_text
    would return for the whole text."""
    text = LongText(folder)
    has_usable_piece = False
    skipped: set[Skipped] = set()  # of the other pieces: EMPTY, NOT_UTF8 or WITH_NUL
    for piece in pieces:
        value = as_text(piece)
        if isinstance(value, Skipped):
            skipped.add(value)
        else:
            has_usable_piece = True
        # A piece of white space, EMPTY, is a part of the text. After any other Skipped the text is
        # not used, and nothing more is written.
        if skipped <= {EMPTY}:
            text.append(piece)
    if NOT_UTF8 in skipped:  # as_text checks this before U+0000
        return NOT_UTF8
    if WITH_NUL in skipped:
        return WITH_NUL
    return text if has_usable_piece else EMPTY


def separator_pattern(separator: str) -> re.Pattern[str]:
    """Return the expression of --separator. A mark in brackets, <|endoftext|>, separates texts
    anywhere, and so does a separator with a line break. Another one, such as "---", has to stand
    alone on a line, but for up to two blanks or tabs, which belong to it. The line break behind a
    separator belongs to it, too."""
    # the separator by its line breaks, which a user types as \n: ["---"], ["", "", ""] for \n\n
    separator_lines = separator.replace("\\r", "").replace("\\n", "\n").split("\n")
    # the file may have \r\n for a line break of the separator
    escaped_separator = r"\r?\n".join(map(re.escape, separator_lines))
    if len(separator_lines) > 1 or BRACKETS.fullmatch(separator):
        return re.compile(escaped_separator + r"(?:\r?\n)?")
    return re.compile(rf"(?<=\n){escaped_separator}[ \t]{{0,2}}(?:\r?\n|\Z)")


def number_pieces(pieces: Iterable[str], separator: str) -> Iterator[tuple[int, str]]:
    """Yield the pieces of several texts with a separator between them, each with the index of its
    text: "one\\n--", "-\\ntwo" with the separator --- become (0, "one\\n"), (1, "two"). Leaves out
    the separators. Some yielded pieces are empty."""
    pattern = separator_pattern(separator)
    # most characters of a match: each \n may be \r\n; two blanks or tabs, and \r\n, may follow
    max_match_length = 2 * len(separator) + 4
    text_index = 0
    pending = "\n"  # a character for (?<=\n), then the characters that are not yielded yet
    for piece in chain(pieces, [""]):  # "": the end
        pending += piece
        start = 1  # `pending` begins with a character that only (?<=\n) looks at
        for match in pattern.finditer(pending, 1):
            # the next piece may begin with the line break behind this separator
            if piece and match.end() > len(pending) - 2:
                break
            yield text_index, pending[start : match.start()]
            text_index += 1
            start = match.end()
        # Keep the last characters for the next piece, if one follows. They may be the beginning of
        # a separator, or the whole separator of the `break`, which ends in the last 2 characters.
        end = max(start, len(pending) - max_match_length - 2) if piece else len(pending)
        yield text_index, pending[start:end]
        pending = pending[end - 1 :]  # with one character more, for (?<=\n)


def parse_json(text: str) -> object:
    """Return the value of a JSON text, or Skipped if it is not JSON."""
    try:
        return json.loads(text)
    # ValueError also for a number of over 4,300 digits, RecursionError for deep nesting
    except (ValueError, RecursionError):
        return Skipped("not JSON")


def read_json(file: IO[str]) -> Iterator[object]:
    """Yield JSON values: one from each line, or the elements of one array, which may span lines.
    Skips a line that is not JSON. An array has to fit into memory."""
    # the first line that is not blank; "" if there is none
    first_line = next((line for line in file if line.strip()), "")
    lines: Iterable[str] = chain([first_line], file)
    if first_line.lstrip().startswith("["):
        content = "".join(lines)  # the whole file
        rows = parse_json(content)
        if isinstance(rows, list):
            yield from rows
            return
        # This is one value per line, or a damaged array. If one line of an array with one element
        # per line is damaged, its other lines are still rows.
        elements = [line.strip().removesuffix(",") for line in content.split("\n")]
        lines = [element for element in elements if element not in ("[", "]")]
    for line in lines:  # each holds one value
        if line.strip():  # a blank line is no row
            yield parse_json(line)


def read_csv(file: IO[str], delimiter: str = ",") -> Iterator[object]:
    """Yield the rows of CSV as dicts by column. Skips a row with more cells than the header: it has
    a comma that is not quoted, so that it is unknown which cell is the text."""
    # The default limit, 131,072 characters in a cell, is too low for a book.
    csv.field_size_limit(2**31 - 1)
    # strict: an unclosed quote is an error. Without it, one cell would reach to the file's end.
    make_reader = partial(csv.reader, delimiter=delimiter, strict=True)
    lines: Iterator[str] = iter(file)
    # the header, ["id", "text"]; [] for an empty file
    columns = next(make_reader(lines), [])
    while True:
        # The reader takes all lines of one row from `lines`; `lines_again` still has them.
        lines, lines_again = tee(lines)
        try:
            cells = next(make_reader(lines), None)  # ["1", "Hello"]; None at the end
        except csv.Error as error:
            yield Skipped(f"not CSV {describe_error(error)}")  # "(Error: unexpected end of data)"
            # Skip only its first line: an unclosed quote has taken the lines of other rows, too.
            next(lines_again)
            lines = lines_again
            continue
        if cells is None:
            return
        # Commas at the end of a line add empty cells, which do no harm.
        if any(cells[len(columns) :]):
            yield Skipped("wider than the header")
        elif cells:  # a blank line is no row
            # {"id": "1", "text": "Hello"}; a missing cell is None
            yield dict.fromkeys(columns) | dict(zip(columns, cells, strict=False))


# by the result of suffix_of; a file with another suffix, except .parquet, is read as text
READERS: dict[str, Callable[[IO[str]], Iterator[object]]] = {
    ".jsonl": read_json,
    ".ndjson": read_json,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": partial(read_csv, delimiter="\t"),
}


def read_parquet(name: str, column: str) -> Iterator[object]:
    """Yield the rows of a parquet file as dicts, which hold only `column` if the file has it."""
    from pyarrow.parquet import ParquetFile  # slow to import; few files need it

    file = ParquetFile(name)
    columns = file.schema_arrow.names  # ["id", "text"]
    if column not in columns:
        # {"id": None, ...} for each row, unread: read_texts skips all rows for one reason
        yield from repeat(dict.fromkeys(columns), file.metadata.num_rows)
        return
    for record_batch in file.iter_batches(ROWS_PER_BATCH, columns=[column]):
        for value in record_batch.column(0):  # a scalar of pyarrow
            try:
                yield {column: value.as_py()}
            except UnicodeDecodeError:  # parquet does not check its strings
                yield {column: value.as_buffer().to_pybytes()}  # as_text decodes these bytes


def without_column(column: str, names: Iterable[str]) -> Skipped:
    """Return the Skipped for a row that has the columns `names`, but not `column`."""
    # !r escapes a name that is not UTF-8 (CSV in Latin-1), which cannot be printed
    return Skipped(f"without a column {column!r}, but {', '.join(names)!r:.200}")


def as_text(value: object, errors: str = SURROGATES) -> Row:
    """Return the text of a row, or Skipped if the value that its reader gave is no usable text.
    `errors` says what becomes of bad bytes: "surrogateescape" or "replace"."""
    if isinstance(value, bytes):  # a binary column of parquet, or a string with bad bytes
        value = value.decode("utf-8", errors)
    if isinstance(value, Skipped | LongText):
        return value
    if not isinstance(value, str):  # null, a number, a list
        return Skipped("without text")
    if not value or value.isspace():
        return EMPTY
    try:
        value.encode()
    except UnicodeEncodeError:  # in a tokenizer this error would end the run
        return NOT_UTF8
    if "\0" in value:  # binary, or UTF-16 without a byte order mark
        return WITH_NUL
    return value


def describe_error(error: Exception) -> str:
    """Return class and first line of an error, for the end of a message or reason."""
    first_line = str(error).partition("\n")[0]
    return f"({type(error).__name__}: {first_line:.200})"


# The source


def make_row_batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Yield up to ROWS_PER_BATCH (100) consecutive rows at a time, no more once they have over
    PIECE_CHARACTERS (2**18): a hundred long texts are too much for memory, and for a disk."""
    batch: list[Row] = []
    num_characters = 0
    for row in rows:
        batch.append(row)
        if not isinstance(row, Skipped):
            # LONG_CHARACTERS is above PIECE_CHARACTERS: a text on disk ends its batch
            num_characters += LONG_CHARACTERS if isinstance(row, LongText) else len(row)
        if num_characters > PIECE_CHARACTERS or len(batch) == ROWS_PER_BATCH:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def count_rows(counts: FileCounts, rows: list[Row]) -> None:
    """Add rows to the counts of their file, in place."""
    counts.rows += len(rows)
    for row in rows:
        if isinstance(row, Skipped):
            counts.skipped[row.reason] = counts.skipped.get(row.reason, 0) + 1
        else:
            counts.texts += 1
            counts.bytes += size_of(row)  # in UTF-8


def warn_if_suspect(name: str, counts: FileCounts) -> None:
    """Print a warning if a file has rows but no text, or if rows of it were skipped for a reason
    that no sound file has: any but "empty" and "without ..."."""
    lacks_text = counts.rows > 0 and counts.texts == 0  # an empty file has no rows
    if lacks_text or any(not reason.startswith(USUAL_REASONS) for reason in counts.skipped):
        advice = ""
        if os.path.isfile(name) and suffix_of(name) != ".parquet":  # not a dataset, nor a pipe
            advice = encoding_advice(name, counts)  # "; it is utf-16: iconv -f ...", or ""
        print(
            f"warning: {name} gave {counts.texts:,} texts in {counts.rows:,} rows; skipped: "
            f"{join_reasons(counts.skipped)}{advice}",  # "2 empty, 1 not JSON"
            file=sys.stderr,
        )


def warn_of_control_characters(name: str, rows: list[Row]) -> bool:
    """Print a warning if a text has control characters of Latin-1. Return whether one has."""
    for row in rows:
        if isinstance(row, Skipped):
            continue
        for piece in pieces_of(row, LONG_CHARACTERS):
            if piece.isascii():  # has none, and is tested faster than searched
                continue
            control = C1_CONTROLS.search(piece)  # a match of one of U+0080 to U+009F, or None
            if control:
                print(
                    f"warning: a text of {name} has control characters, such as "
                    f"U+{ord(control[0]):04X} after {piece[: control.start()][-20:]!r}: a text "
                    "of Windows that was read as Latin-1? Convert the original by "
                    "iconv -f windows-1252 -t utf-8 OLD > NEW",
                    file=sys.stderr,
                )
                return True
    return False


def encoding_advice(name: str, counts: FileCounts) -> str:
    """Return how to make UTF-8 of a file, by its bytes, for the end of a warning; "" if they are
    UTF-8."""
    with UntilDamage(name) as raw:
        beginning = raw.read(2**12) or b""  # the type of read allows None
    encoding = unicode_encoding(beginning)
    if encoding is not None:
        return f"; it is {encoding}: iconv -f {encoding} -t utf-8 OLD > NEW"
    if NOT_UTF8.reason not in counts.skipped:
        return ""
    num_bytes_before, piece = find_bad_byte(name)
    if not piece:  # a row of JSON has half of a surrogate pair, "\ud800"
        return ""
    if beginning.startswith(codecs.BOM_UTF8):  # open_text drops its 3 bytes
        num_bytes_before += 3
    bad_bytes = "".join(BAD_BYTES.findall(piece)).encode("utf-8", SURROGATES)  # b"\xe4\xfc"
    advice = f"; its byte {num_bytes_before + 1:,} is 0x{bad_bytes[0]:02x}, not UTF-8: "
    # characters beyond ASCII that are valid UTF-8; the pattern matches the bad bytes, too
    num_valid = len(re.findall(r"[^\x00-\x7f]", piece)) - len(bad_bytes)
    if num_valid < len(bad_bytes):  # else UTF-8 with some bad bytes, which iconv would garble
        # Windows-1252 lacks five bytes, which "ignore" drops. Texts of other alphabets have many
        # bad bytes, more than one for four characters.
        num_windows = len(bad_bytes.decode("cp1252", "ignore"))
        if num_windows == len(bad_bytes) <= len(piece) // 4:
            # also right for Latin-1, which has the same printable characters
            advice += "iconv -f windows-1252 -t utf-8 OLD > NEW if it is a text of Windows, or "
        else:
            advice += "iconv -f ENCODING -t utf-8 OLD > NEW with the encoding of its language, or "
    return advice + "--replace_bad_bytes, with another --local_dir, reads U+FFFD for such bytes"


def find_bad_byte(name: str) -> tuple[int, str]:
    """Return the number of bytes before the first byte of a file that is not UTF-8, without a byte
    order mark, and the piece of text with that byte; (0, "") if the whole file is UTF-8."""
    num_bytes = 0  # of the pieces before
    with open_text(UntilDamage(name)) as file:
        for piece in iter(partial(file.read, PIECE_CHARACTERS), ""):
            match = BAD_BYTES.search(piece)  # open_text decodes bad bytes to surrogates
            if match:
                return num_bytes + len(piece[: match.start()].encode()), piece
            num_bytes += len(piece.encode())
    return 0, ""


def unicode_encoding(beginning: bytes) -> str | None:
    """Return the encoding of a file of UTF-16 or UTF-32, as iconv names it, by its first bytes: a
    byte order mark, or many bytes 0. None for any other file."""
    encoding = json.detect_encoding(beginning)  # "utf-8", "utf-16", "utf-16-le", ...
    if encoding in ("utf-16", "utf-32"):  # by a byte order mark
        return encoding
    # The high bytes of Latin letters are 0: those at even positions in big-endian UTF-16.
    # json.detect_encoding looks at two letters only, and the first one may be a quotation mark.
    even_zeros, odd_zeros = beginning[::2].count(0), beginning[1::2].count(0)
    if min(even_zeros, odd_zeros) > 0 or max(even_zeros, odd_zeros) <= len(beginning) // 4:
        return None
    return "utf-16be" if even_zeros else "utf-16le"


def join_reasons(skipped: dict[str, int]) -> str:
    """Return how many rows were skipped for each reason: "2 empty, 1 not JSON", or "none"."""
    return ", ".join(f"{count:,} {reason}" for reason, count in skipped.items()) or "none"


@dataclass
class Source:
    """Rows of files or, without files, of a dataset on the hub. Worker i of n reads every n-th
    file, beginning with file i."""

    settings: SourceSettings
    folder: Path
    """Folder for long texts, which `batches` keeps on disk."""
    has_noted_marks: bool = False  # note_marks prints its note once in a run
    has_warned_of_controls: bool = False  # read_and_count warns once in a run
    counts_by_file: dict[str, FileCounts] = field(default_factory=dict)
    """The ledger of the manifest: counts of each file that was read, by name, in the order of
    `names`. `batches` updates it; before that, the caller adds the counts of earlier runs."""

    @cached_property
    def names(self) -> list[str]:
        """Files of this worker in the order of reading; without files, the dataset's name."""
        if self.settings.files:  # [] for a dataset
            return self.settings.files[self.settings.worker_index :: self.settings.worker_count]
        return [self.settings.dataset]

    @property
    def decoding_errors(self) -> str:
        """The argument `errors` of bytes.decode: what becomes of a byte that is not UTF-8."""
        return "replace" if self.settings.replace_bad_bytes else SURROGATES

    def counts_at(self, position: SourcePosition) -> dict[str, FileCounts]:
        """Return the counts up to a position, for the manifest. `self.counts_by_file` is ahead of
        the shards: it counts batches that still wait for the tokenizer."""
        # Of the files before the batch's file: counts_by_file has the order of `names`, in which
        # position.file is an index.
        counts_by_file = dict(islice(self.counts_by_file.items(), position.file))
        if position.counts:  # {} after the last file
            counts_by_file[self.names[position.file]] = FileCounts(**position.counts)
        return counts_by_file

    def batches(self, position_json: dict | None = None) -> Iterator[RowBatch]:
        """Yield batches of rows from a position on: a SourcePosition as JSON, ResumePoint.source of
        a manifest; None for the beginning. Prints a warning about each suspect file and about
        control characters, and a note if there is no --separator in the files. Raises
        UserError for a source that cannot be read, and at the end if no row was a text. `datasets`
        retries downloads, for DOWNLOAD_SECONDS a batch."""
        first_position = SourcePosition(**(position_json or {}))
        # {"books/a.txt": 12_345, ...}; {} for a dataset
        bytes_by_file = dict(zip(self.settings.files, self.settings.sizes, strict=True))
        for file_index in range(first_position.file, len(self.names)):
            # files after the first one are read from their beginning
            is_first = file_index == first_position.file
            position = first_position if is_first else SourcePosition()
            name = self.names[file_index]
            # The counts begin with the rows that an earlier run has sharded: position.counts, {} if
            # it has sharded none of this file.
            counts = FileCounts(**(position.counts or {"size": bytes_by_file.get(name, 0)}))
            self.counts_by_file[name] = counts
            try:
                yield from self.read_and_count(file_index, position)
            except Exception as error:  # a reader's own error, without the file's name
                # A UserError names the source already. If LongText has filled the disk, `main` of
                # data/fineweb-edu.py names self.folder.
                if isinstance(error, UserError) or is_full_disk(error):
                    raise
                advice = ""
                if not self.settings.files:
                    advice = "; check name and network, or shard files of your own"
                reason = describe_error(error)  # "(OSError: ...)"
                raise UserError(f"{name:.300} cannot be read {reason}{advice}") from error
            warn_if_suspect(name, counts)
        self.note_unused_separator()
        # with the texts of earlier runs: this run may have begun at the very end
        if not any(counts.texts for counts in self.counts_by_file.values()):
            # a worker may have no file
            origin = " ".join(self.names) or f"the input of worker {self.settings.worker_index}"
            raise UserError(f"{origin:.300} holds no text")

    def note_unused_separator(self) -> None:
        """Print a note if --separator divides no text file. A divided file has several rows."""
        separator = self.settings.separator
        if separator is None:
            return
        for name, counts in self.counts_by_file.items():
            is_text_file = suffix_of(name) not in (*READERS, ".parquet")
            # without files, `name` is that of a dataset
            if self.settings.files and is_text_file and counts.rows > 1:
                return
        print(f"note: no text file has --separator {separator!r}", file=sys.stderr)

    def read_and_count(self, file_index: int, position: SourcePosition) -> Iterator[RowBatch]:
        """Yield the batches of a file or dataset from a position in it on, and add their rows to
        its entry of counts_by_file."""
        name = self.names[file_index]
        counts = self.counts_by_file[name]
        # Not for a dataset, nor for a pipe, which can be read only once. In the middle of a file,
        # `counts` has both already.
        if os.path.isfile(name) and not position.counts:
            # The next run compares them (describe_difference in data/sharder.py). The time comes
            # first, so that it also notices a change while the file is read.
            counts.changed = time_of_change(name)  # nanoseconds
            counts.sha256 = sha256(name)  # of the whole file, in hexadecimal
        read = self.read_batches if self.settings.files else self.read_dataset
        for batch_position, rows in read(name, position):
            # asdict copies the counts of the rows before this batch
            batch_position = replace(batch_position, file=file_index, counts=asdict(counts))
            count_rows(counts, rows)
            if not self.has_warned_of_controls:
                self.has_warned_of_controls = warn_of_control_characters(name, rows)
            yield RowBatch(batch_position, rows)

    def read_batches(self, name: str, position: SourcePosition) -> Iterator[RowBatch]:
        """Yield the batches of a file from a position in it on, with empty positions, which
        read_and_count fills in."""
        # Most formats have no index of rows: earlier rows are read again and dropped.
        # counts: {"rows": 300, ...} of this file, which earlier runs have sharded; {} if none has
        first_row = position.counts.get("rows", 0)
        rows_left = islice(self.read_texts(name), first_row, None)
        for rows in make_row_batches(rows_left):
            yield RowBatch(SourcePosition(), rows)

    def read_texts(self, name: str) -> Iterator[Row]:
        """Yield the text of each row of a file, or Skipped with the reason. If the file is damaged,
        the last item is a Skipped that says so."""
        # One Skipped for all rows that lack the column. Its reason lists the columns of the first
        # such row: if rows differ in their columns, the ledger still gets one key.
        skipped_without_column: Skipped | None = None
        column = self.settings.text_column  # "text", or that of --text_column
        try:
            for row in self.read_rows(name):
                value = row  # a text, a JSON value, or Skipped
                if isinstance(row, dict):
                    value = row.get(column)
                    if column not in row:
                        if skipped_without_column is None:
                            skipped_without_column = without_column(column, row)
                        value = skipped_without_column
                # a long text waits for the tokenizer on disk, in self.folder: LongText, or Skipped
                if isinstance(value, str) and len(value) > LONG_CHARACTERS:
                    value = join_pieces(pieces_of(value, PIECE_CHARACTERS), self.folder)
                yield as_text(value, self.decoding_errors)  # Skipped if it is no usable text
        except Exception as error:
            if not is_damage(error):
                raise
            yield Skipped(f"damaged from here on {describe_error(error)}")  # "(EOFError: ...)"

    def read_rows(self, name: str) -> Iterator[object]:
        """Yield the rows of a file: dicts by column, texts, or Skipped. For a damaged file, raises
        its error after the rows before the damage."""
        if suffix_of(name) == ".parquet":  # pyarrow opens files by name
            yield from read_parquet(name, self.settings.text_column)
            return
        raw = UntilDamage(name)  # decompresses; damage ends it and sets raw.error
        with open_text(raw, self.decoding_errors) as file:
            if suffix_of(name) in READERS:
                yield from READERS[suffix_of(name)](file)  # read_json or read_csv
            else:
                yield from self.read_documents(name, file)
        if raw.error:  # the damage at which the file seemed to end
            raise raw.error

    def read_documents(self, name: str, file: IO[str]) -> Iterator[object]:
        """Split a text file at the separator and yield its texts; without a separator, yield the
        whole file as one text. An empty text (many __init__.py, two separators in a row) is no row.
        """
        pieces = iter(partial(file.read, PIECE_CHARACTERS), "")  # until read returns ""
        if self.settings.separator is not None:
            # finds a separator also across two pieces, and leaves the separators out
            numbered_pieces = number_pieces(pieces, self.settings.separator)
        else:
            # note_marks yields the same pieces, and may print a note
            numbered_pieces = zip(repeat(0), self.note_marks(name, pieces))
        # pairs (index of the text, piece); number_pieces also yields pieces without characters
        non_empty_pairs = (pair for pair in numbered_pieces if pair[1])
        for _, pairs in groupby(non_empty_pairs, itemgetter(0)):  # the pairs of one text
            yield join_pieces((piece for _, piece in pairs), self.folder)  # str, LongText, Skipped

    def note_marks(self, name: str, pieces: Iterator[str]) -> Iterator[str]:
        """Yield the pieces of a text file. Print a note, once in a run, if the file has many usual
        marks between texts: they would be learned as text."""
        counts_by_mark: Counter[str] = Counter()
        for piece in pieces:
            yield piece
            if self.has_noted_marks or suffix_of(name) == ".py":  # code has lines of -----
                continue
            counts_by_mark.update(MARKS.findall(piece))  # ["<|endoftext|>", "---", ...]
            for mark, count in counts_by_mark.most_common(1):
                if count >= MANY_MARKS:
                    self.has_noted_marks = True
                    print(
                        f"note: {mark} occurs often in {name}; if it separates texts, begin anew "
                        f"in another folder with --separator {shlex.quote(mark)}",
                        file=sys.stderr,
                    )

    def read_dataset(self, name: str, position: SourcePosition) -> Iterator[RowBatch]:
        """Yield the batches of the hub's dataset `name` from a position on, with positions that
        have only `revision` and `stream`; read_and_count fills in the rest."""
        import datasets  # slow to import; only the hub needs these
        from fsspec.compression import register_compression
        from huggingface_hub import HfApi

        settings = self.settings
        column = settings.text_column
        datasets.disable_progress_bars()  # else one bar for each file
        # For zstd, fsspec would need another package, which reads the first frame only.
        # force: replace fsspec's own opener, if it has one.
        register_compression("zstd", open_zstd, "zst", force=True)
        # The commit that an earlier run has read, or today's: a dataset may change on the hub
        # between two runs. `ask` calls the library, with a limit of time.
        revision = position.revision or ask(HUB, lambda: HfApi().dataset_info(name).sha)
        # an IterableDataset, which downloads a file when its rows are read
        stream = ask(
            HUB,
            lambda: datasets.load_dataset(
                name, settings.remote_name, split="train", revision=revision, streaming=True
            ),
        )
        if settings.worker_index >= stream.num_shards:
            raise UserError(
                f"{name} has {stream.num_shards} files, none for worker {settings.worker_index} of "
                f"{settings.worker_count}"
            )
        # contiguous=False: every n-th file, as in `names`
        stream = stream.shard(settings.worker_count, settings.worker_index, contiguous=False)
        stream_state = position.stream  # where the next batch begins; None: at the beginning
        if stream_state:
            stream.load_state_dict(stream_state)
        columns_of_batches = iter(stream.iter(ROWS_PER_BATCH))
        while True:
            # {"text": [up to 100 texts], "id": [...], ...}; None: the end. `datasets` retries
            # within the limit of time.
            columns = ask(HUB, lambda: next(columns_of_batches, None), DOWNLOAD_SECONDS)
            if columns is None:
                return
            if column not in columns:  # fail now, not after hours without a text
                reason = without_column(column, columns).reason  # "without a column 'text', ..."
                raise UserError(f"{name} is {reason}; name the column of its texts")
            batch_position = SourcePosition(revision=revision, stream=stream_state)
            # a value that is no usable text becomes Skipped
            rows = [as_text(value, self.decoding_errors) for value in columns[column]]
            yield RowBatch(batch_position, rows)
            stream_state = stream.state_dict()  # where the next batch begins
