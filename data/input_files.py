"""Input files of shards: a record of what was read, which a run that continues must find again."""

import hashlib
import os
import zlib
from pathlib import Path

from data.documents import DocumentStream, Place
from data.shards import is_count
from utils.errors import UserError

ENDS = 2**16  # bytes at either end of a file that tell it from another one


def fingerprint(name: str) -> tuple[int, int] | None:
    """Return the size of a file and a checksum of its first and last ENDS bytes, None for a URL."""
    if "://" in name:
        return None
    with open(name, "rb") as file:
        head, size = file.read(ENDS), file.seek(0, os.SEEK_END)
        file.seek(max(0, size - ENDS))
        return size, zlib.crc32(file.read(ENDS), zlib.crc32(head))


def size_and_time(name: str) -> tuple[int, int]:
    """Return the size of a file in bytes and its modification time in nanoseconds."""
    found = os.stat(name)
    return found.st_size, found.st_mtime_ns


def digest_of(fingerprints: dict[str, tuple[int, int] | None]) -> str:
    """Return a digest of the names, sizes and ends of all files."""
    return hashlib.sha256(repr(list(fingerprints.items())).encode()).hexdigest()


class InputFiles:
    """Files and URLs that a worker reads, in order, as they were when its run was started.

    `digests[i]` is of the names without folders, the sizes and the ends of the first i files.
    """

    def __init__(self, fingerprints: dict[str, tuple[int, int] | None]) -> None:
        self.names, self.digests = list(fingerprints), [""]
        self.times = {name: size_and_time(name) for name, found in fingerprints.items() if found}
        for name, found in fingerprints.items():
            known = (self.digests[-1], Path(name).name if found else name, found)
            self.digests.append(hashlib.sha256(repr(known).encode()).hexdigest())

    @property
    def digest(self) -> str:
        """Digest of all files."""
        return self.digests[-1]

    def record(self, place: Place) -> dict:
        """Return for the manifest what has been read up to a document, that one included."""
        before, through = self.digests[place.file : place.file + 2]
        read = {"file": place.file, "documents": place.row, "checksum": place.checksum}
        return {**read, "digest_before": before, "digest": through}

    def begin_with(self, read: dict, column: str) -> bool:
        """Return whether these files begin with those of a `record`: of the last one, its documents
        suffice. Raises UserError if that one cannot be read so far."""
        if read["file"] >= len(self.names):
            return False
        if self.digests[read["file"] + 1] == read["digest"]:
            return True
        if self.digests[read["file"]] != read["digest_before"]:
            return False
        stream = DocumentStream([self.names[read["file"]]], column)
        found = next((stream.place for _ in stream if stream.row == read["documents"]), None)
        return found is not None and found.checksum == read["checksum"]

    def check_unchanged(self, folder: Path) -> None:
        """Raise UserError if a file has another size or time than when the run was started; one
        that was removed has been read."""
        for name, before in self.times.items():
            if os.path.exists(name) and size_and_time(name) != before:
                raise UserError(
                    f"{name} was changed while it was read; once nothing writes to it any more, "
                    f"empty {folder} and run the same command again"
                )


def is_record(read: object) -> bool:
    """Return whether a value is of the types that InputFiles.record writes."""
    return (
        type(read) is dict
        and all(is_count(read.get(name)) for name in ("file", "documents"))
        and all(type(read.get(name)) is str for name in ("digest", "digest_before"))
    )
