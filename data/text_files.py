"""Text files: decompressed by their suffix, decoded by their byte order mark or as UTF-8."""

import bz2
import codecs
import gzip
import io
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

TEXTS = (".txt", ".py", ".md")
HEAD = 2**16  # bytes that tell text from other content
BLOCK = io.DEFAULT_BUFFER_SIZE  # compressed bytes that are read at a time
BOMS = {  # byte order marks; that of UTF-32 begins with that of UTF-16
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


class StreamReader(io.RawIOBase):
    """Content of a file of one or more bz2 or xz streams.

    bz2.open and lzma.open end where something else than a stream follows the first one; here the
    decompressor raises its error.
    """

    def __init__(
        self,
        file: IO[bytes],
        new_stream: Callable[[], bz2.BZ2Decompressor | lzma.LZMADecompressor],
    ) -> None:
        self.file, self.new_stream = file, new_stream
        self.stream = new_stream()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        """Fill the buffer as far as one block allows; return the number of bytes, 0 at the end."""
        data = b""
        while not data:
            block = b""
            if self.stream.eof:
                if not (block := self.next_block()):
                    return 0
                self.stream = self.new_stream()
            elif self.stream.needs_input and not (block := self.file.read(BLOCK)):
                raise EOFError("the file ends within a stream")
            data = self.stream.decompress(block, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def next_block(self) -> bytes:
        """Return the first bytes of the next stream, b"" at the end of the file."""
        block = self.stream.unused_data or self.file.read(BLOCK)
        if self.new_stream is not lzma.LZMADecompressor:
            return block
        zeros = 0  # xz pads its streams to a multiple of four bytes
        while block and not block.strip(b"\0"):
            zeros += len(block)
            block = self.file.read(BLOCK)
        start = block.lstrip(b"\0")
        if (zeros + len(block) - len(start)) % 4:
            raise lzma.LZMAError("stream padding is not a multiple of four bytes")
        return start


def open_bz2(file: IO[bytes]) -> IO[bytes]:
    """Return the content of a bz2 file."""
    return io.BufferedReader(StreamReader(file, bz2.BZ2Decompressor))


def open_xz(file: IO[bytes]) -> IO[bytes]:
    """Return the content of an xz file."""
    return io.BufferedReader(StreamReader(file, lzma.LZMADecompressor))


def open_zstd(file: IO[bytes]) -> IO[bytes]:
    """Return the content of a zstd file."""
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))


COMPRESSIONS: dict[str, Callable[[IO[bytes]], IO[bytes]]] = {
    ".gz": gzip.open,
    ".bz2": open_bz2,
    ".xz": open_xz,
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
        self.is_utf8 = (self.encoding or "utf-8").startswith("utf-8")
        errors = "surrogateescape" if self.is_utf8 else "replace"
        self.file = io.TextIOWrapper(buffered, self.encoding, errors, newline)

    def repair(self, text: str) -> str:
        """Return the text with U+FFFD for what could not be decoded."""
        if not self.is_utf8:
            self.replaced += text.count("\ufffd")
            return text
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
