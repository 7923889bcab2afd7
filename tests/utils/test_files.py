import errno
import fcntl
import os
import platform
import re

import pytest
from conftest import user_error

from utils.files import link_or_copy, lock_folder


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
