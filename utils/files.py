"""Files that survive a crash: atomic writes, locks of folders, and JSON for every reader.

The one idea: write a file under a temporary name, force it to disk (fsync), then rename it. A
rename replaces the file in one step, so a reader finds either the old file or the whole new one.
"""

import contextlib
import fcntl
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from utils.errors import UserError

PROJECT = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file, which replaces `path` at the end of the with statement. If the body
    raises, `path` stays and the temporary file is deleted."""
    # in the same folder, because a rename cannot cross file systems
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()  # write Python's buffer to the kernel
            os.fsync(file.fileno())  # write to the disk; else a power cut could leave zeros
        replace_file(temporary, path)
    except BaseException as error:  # includes the SystemExit or KeyboardInterrupt of a signal
        temporary.unlink(missing_ok=True)
        # errors of os.fsync and of a full disk lack the path; `filename` puts it into the message
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def printable(path: Path) -> str:
    """Return a path as text that can be printed: bytes of its name that are not UTF-8 as \\xff."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def describe_searched_place(path: Path | str) -> str:
    """Return where a path that does not exist was looked for, to append to a message. If a script
    was started in /tmp, and the project's folder has runs/demo: " in /tmp, but there is
    /home/me/clone/runs/demo"; "" for an absolute path."""
    if Path(path).is_absolute():
        return ""
    place = f" in {Path.cwd()}"
    if (PROJECT / path).exists():
        place += f", but there is {PROJECT / path}"
    return place


def to_json(value: object, indent: int | None = None) -> str:
    """Return JSON with null for each number that is not finite. The json module would write NaN or
    Infinity, which are not valid JSON: other readers would refuse the whole file."""
    finite_value = json.loads(json.dumps(value), parse_constant=lambda name: None)
    return json.dumps(finite_value, indent=indent)


def replace_file(temporary: Path, path: Path) -> None:
    """Rename a file to its final name, and replace a file of that name. The content must be on the
    disk already."""
    os.replace(temporary, path)
    sync_folder(path.parent)


def link_or_copy(existing: Path, new_name: Path) -> None:
    """Give the `existing` file a second name, and replace a file of that name; copy the file if the
    file system has no hard links. The caller must call sync_folder afterwards, once for all names.
    """
    temporary = new_name.with_name(new_name.name + ".tmp")
    temporary.unlink(missing_ok=True)  # a killed run may have left it; os.link replaces no file
    try:
        os.link(existing, temporary)
    except OSError:
        copy_file(existing, new_name)
    else:
        os.replace(temporary, new_name)
        # os.replace does nothing if both names belong to the same file
        temporary.unlink(missing_ok=True)


def copy_file(existing: Path, new_name: Path) -> None:
    """Copy a file atomically, so that a kill leaves no half copy."""
    with open(existing, "rb") as existing_file, atomic_write(new_name) as new_file:
        shutil.copyfileobj(existing_file, new_file, 2**20)  # 1 MiB at a time


made_folders: list[Path] = []  # by lock_folder; remove_unused_folders reads it


def remove_unused_folders() -> None:
    """Remove the folders that lock_folder has made for this process and that hold nothing but the
    lock, such as those of a run that was refused. Call it when the process ends."""
    for folder in sorted(made_folders, reverse=True):  # "x/logs" comes before "x"
        with contextlib.suppress(OSError):  # it holds files
            if os.listdir(folder) == [".lock"]:
                (folder / ".lock").unlink()
            folder.rmdir()


def lock_folder(folder: Path, activity: str) -> int:
    """Make a folder and lock it for this process; return the file descriptor that holds the lock.

    The lock ends when the descriptor is closed or the process dies, so a killed run blocks nobody.
    Raises UserError if another process holds the lock. The message has this process's `activity`,
    such as "writing to", and the other's host and process id, which the lock's file holds.
    """
    # for remove_unused_folders: if this run is refused, it removes its new folders
    made_folders.extend(path for path in (folder, *folder.parents) if not path.exists())
    folder.mkdir(parents=True, exist_ok=True)
    # 0o666 minus the umask: with a umask of 002 the users of a group can share the folder
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        # LOCK_NB: fail at once instead of waiting
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        # "process 4711 on node3", as written below; empty if the holder is about to write it
        holder = os.pread(descriptor, 300, 0).decode() or "not known"
        raise UserError(
            f"another process is {activity} {folder}: {holder}; wait for its end, or end it there"
        ) from error
    except OSError as error:  # Lustre and some NFS servers have no locks
        print(
            f"warning: {folder} cannot be locked ({error.strerror}): make sure that no other "
            "process writes to it",
            file=sys.stderr,
        )
    # a process that finds the folder locked reads this text as `holder`, above
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}".encode(), 0)
    return descriptor


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to disk: a rename survives a power cut only after this call."""
    descriptor = os.open(folder, os.O_RDONLY)  # the builtin `open` refuses folders
    os.fsync(descriptor)  # writes the names in the folder, not the contents of its files
    os.close(descriptor)
