"""Files that survive a crash: atomic writes, free space, checksums."""

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from utils.errors import UserError

LOCK = ".lock"  # file in a folder of a network file system


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces `path` once it is whole and on disk, or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def link_or_copy(source: Path, target: Path, link: bool = True) -> None:
    """Give a file a second name, atomically; copy it without `link`, to another disk, and where the
    file system has no links. Raises UserError if there is no room for a copy."""
    temporary = target.with_name(target.name + ".tmp")
    temporary.unlink(missing_ok=True)  # a partial copy takes room
    if link:
        with contextlib.suppress(OSError):
            os.link(source.resolve(), temporary)
            os.replace(temporary, target)
            temporary.unlink(missing_ok=True)  # still there if the target was the same file
            return
    check_space(target.parent, source.stat().st_size, f"a copy of {source}")
    with open(source, "rb") as file, atomic_write(target) as copy:
        shutil.copyfileobj(file, copy, 2**20)


def lock_folder(folder: Path, work: str) -> int | None:
    """Lock a folder for this process and return the descriptor that holds the lock until it is
    closed or the process ends; None on a file system without locks.

    Raises UserError, naming the `work`, if another process holds the lock. Network file systems
    lock no folders but a file in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path, flags in ((folder, os.O_RDONLY), (folder / LOCK, os.O_RDWR | os.O_CREAT)):
        fd = os.open(path, flags, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except OSError as error:
            os.close(fd)
            if isinstance(error, BlockingIOError):
                message = f"another process is {work} {folder}; wait for its end, or end it"
                raise UserError(message) from error
    return None


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def format_bytes(size: int) -> str:
    """Format a number of bytes for people: 20.0 GB."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if size >= 1000**power:
            return f"{size / 1000**power:.1f} {unit}"
    return f"{size} bytes"


def check_space(folder: Path, needed: int, what: str) -> None:
    """Raise UserError if the disk of `folder` has fewer than `needed` bytes free for `what`."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{what} needs {format_bytes(needed)}, but the disk of {folder} has only "
            f"{format_bytes(free)} free; make room"
        )
