"""Files that survive a crash: atomic writes, locks of folders; and JSON that all can read.

The one idea: a file is written under a temporary name, forced to disk (fsync), and renamed. A
rename replaces the file in one step, so that a reader finds the old file or the whole new one.
"""

import contextlib
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from utils.errors import UserError


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces `path` at the end of the with statement, unless
    its body raises."""
    # in the same folder, because a rename cannot cross file systems
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()  # Python's buffer to the kernel
            os.fsync(file.fileno())  # to the disk: a power cut would leave zeros
        replace_file(temporary, path)
    except BaseException:  # also the SystemExit or KeyboardInterrupt of a signal
        temporary.unlink(missing_ok=True)
        raise


def to_json(value: object, indent: int | None = None) -> str:
    """Return JSON, in which a number that is not finite is null. The json module would write NaN or
    Infinity, which are no JSON, so that other readers refuse the whole file."""
    finite_value = json.loads(json.dumps(value), parse_constant=lambda name: None)
    return json.dumps(finite_value, indent=indent)


def replace_file(temporary: Path, path: Path) -> None:
    """Give a file, whose content is on the disk, its final name, also where a file has it."""
    os.replace(temporary, path)
    sync_folder(path.parent)


def link_or_copy(existing: Path, new_name: Path) -> None:
    """Give an `existing` file a second name, where another file may lie; copy it where the file
    system has no links. The caller calls sync_folder, once for all names."""
    temporary = new_name.with_name(new_name.name + ".tmp")
    temporary.unlink(missing_ok=True)  # left by a kill; os.link replaces no file
    try:
        os.link(existing, temporary)
    except OSError:
        with open(existing, "rb") as file, atomic_write(new_name) as new_file:
            shutil.copyfileobj(file, new_file, 2**20)  # 1 MiB at a time
    else:
        os.replace(temporary, new_name)
        # os.replace does nothing if both names belong to the same file
        temporary.unlink(missing_ok=True)


def lock_folder(folder: Path, activity: str) -> int:
    """Make a folder and lock it for this process; return the descriptor that holds the lock.

    The lock ends when the descriptor is closed or the process dies, so a killed run blocks nobody.
    Raises UserError, which names the `activity` ("writing to"), if another process holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # 0o666, minus the umask: with one of 002 a group can share the folder
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        # LOCK_NB: fail at once instead of waiting
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(f"another process is {activity} {folder}; wait for its end") from error
    except OSError as error:  # Lustre and some NFS have no locks
        print(
            f"warning: {folder} cannot be locked ({error.strerror}): see that no other process is "
            "writing to it",
            file=sys.stderr,
        )
    return descriptor


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut: a rename is on disk only after this."""
    descriptor = os.open(folder, os.O_RDONLY)  # `open` takes no folder
    os.fsync(descriptor)  # writes the names, not the contents of the files
    os.close(descriptor)
