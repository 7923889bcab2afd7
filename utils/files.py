"""Files that survive a crash: atomic writes, locks, free space, checksums."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from utils.errors import UserError


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


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it where the file system has no links. At any time
    `target` is the old file or the new one."""
    temporary = target.with_name(target.name + ".tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source.resolve(), temporary)
    except OSError:
        with open(source, "rb") as file, atomic_write(target) as copy:
            shutil.copyfileobj(file, copy, 2**20)
    else:
        os.replace(temporary, target)
        temporary.unlink(missing_ok=True)  # left where `target` was this file before


def lock_folder(folder: Path, work: str) -> int:
    """Lock a folder, made if it is missing, until the returned descriptor is closed or the process
    ends; warn where the file system has no locks. Raises UserError, naming the `work`, if another
    process holds the lock."""
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(f"another process is {work} {folder}; wait for its end") from error
    except OSError as error:  # of Lustre and some NFS
        print(
            f"warning: {folder} cannot be locked ({error.strerror}): see that no other process is "
            "writing to it",
            file=sys.stderr,
        )
    return fd


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut."""
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_space(folder: Path, needed: int, what: str) -> None:
    """Raise UserError if the disk of `folder` has fewer than `needed` bytes free for `what`."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{what} needs {needed / 1e9:.3f} GB, but the disk of {folder} has {free / 1e9:.3f}"
        )
