import errno
import fcntl
import os
import platform
import re

import pytest
from conftest import user_error

from utils import files
from utils.files import atomic_write, link_or_copy, lock_folder


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, capsys, number):
    def flock(fd, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    os.close(lock_folder(tmp_path, "writing to"))
    assert f"warning: {tmp_path} cannot be locked" in capsys.readouterr().err


@pytest.mark.parametrize("activity", ["writing to", "sharding into"])
def test_a_lock_names_its_holder(tmp_path, activity):
    for _ in range(2):  # the second lock is of a folder that was locked before
        lock = lock_folder(tmp_path, activity)
        holder = f"process {os.getpid()} on {platform.node()}"
        with user_error(f"another process is {activity} {tmp_path}: {re.escape(holder)}; wait"):
            lock_folder(tmp_path, activity)
        os.close(lock)


def test_a_file_is_on_the_disk_before_its_name_and_its_name_before_the_end(tmp_path, monkeypatch):
    """A rename may reach the disk before the content: after a power cut the file would be empty."""
    path = tmp_path / "file"
    events = []

    def fsync(descriptor):
        events.append((os.readlink(f"/proc/self/fd/{descriptor}"), path.exists()))
        if os.path.isfile(events[-1][0]):
            assert os.fstat(descriptor).st_size == 3  # Python's buffer is with the kernel

    monkeypatch.setattr(os, "fsync", fsync)
    with atomic_write(path) as file:
        file.write(b"new")
    assert events == [(f"{path}.tmp", False), (str(tmp_path), True)]


def test_an_error_of_the_disk_names_the_file(tmp_path, monkeypatch):
    def fsync(descriptor):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match=re.escape(str(tmp_path / "file"))):
        with atomic_write(tmp_path / "file"):
            pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("links", [True, False])
def test_a_second_name_replaces_a_file_and_can_be_given_again(tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: os.stat("/dev/null/none"))
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("new")
    target.write_text("old")
    for _ in range(2):
        link_or_copy(source, target)
        assert target.read_text() == "new" and target.samefile(source) == links
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]


def test_folders_that_a_process_has_made_and_left_empty_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "made_folders", [])
    (tmp_path / "mine").mkdir()
    for name in ("refused/checkpoints", "refused/logs", "used/logs", "used/checkpoints", "mine"):
        os.close(lock_folder(tmp_path / name, "writing to"))
    (tmp_path / "used/logs/config.json").touch()
    files.remove_unused_folders()
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("[!.]*")}
    assert left == {"mine", "used", "used/logs", "used/logs/config.json"}
