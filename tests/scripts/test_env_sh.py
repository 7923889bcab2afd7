"""scripts/env.sh with an installer that logs what it would install, and where."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, write_commands

BASE_PYTHON = os.path.realpath(sys.executable)
MADE = f'{BASE_PYTHON} -m venv --without-pip "$@"'  # takes no time


@pytest.fixture
def install(tmp_path):
    """A function that sources env.sh in a clone; return what is installed, and for which Python."""
    (tmp_path / "commands").mkdir()
    env = write_commands(
        tmp_path / "commands",
        python3=f'if [ "$2" = venv ]; then shift 2; {MADE}; else {BASE_PYTHON} "$@"; fi',
        uv='echo "$@" >>log',
    )
    env = {name: value for name, value in env.items() if "PREFIX" not in name}
    env["PATH"] = f"{tmp_path}/commands:/usr/bin:/bin"

    def run(clone: Path, **variables: str) -> tuple[list[str], str]:
        (clone / "scripts").mkdir(parents=True, exist_ok=True)
        for name in ("scripts/env.sh", "requirements.txt", "requirements-dev.txt"):
            shutil.copy(ROOT / name, clone / name)
        (clone / "log").write_text("")
        command = "set -euo pipefail; . scripts/env.sh requirements-dev.txt; command -v python"
        variables = {"VIRTUAL_ENV": "/left/over"} | variables
        done = subprocess.run(
            ["bash", "-c", command], cwd=clone, env=env | variables, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return (clone / "log").read_text().split(), done.stdout.splitlines()[-1]

    return run


def test_a_clone_that_was_moved_or_has_lost_its_python_gets_a_new_environment(install, tmp_path):
    clone, moved = tmp_path / "clone", tmp_path / "moved"
    words, python = install(clone)
    assert python == f"{clone}/.venv/bin/python" and python in words
    assert {"torch==2.13.0", "pytest>=8,<10"} <= set(words)
    assert install(clone) == ([], python)  # nothing has changed
    shutil.copytree(clone, moved, symlinks=True)
    words, python = install(moved)
    assert python == f"{moved}/.venv/bin/python" and python in words
    for path in (moved / ".venv/bin").glob("python*"):
        path.unlink()
        path.symlink_to("/none/python")
    words, python = install(moved)
    assert python == f"{moved}/.venv/bin/python" and python in words


@pytest.mark.parametrize(
    "version, is_named",
    [("2.10.0", True), ("2.10.0", False), ("2.11.0+cu126", True), ("3.0.1", False)],
)
def test_an_environment_keeps_its_pytorch_unless_it_is_too_old(
    install, tmp_path, version, is_named
):
    """A virtual environment, or a Python with packages that no variable names, as on Colab."""
    given = tmp_path / "given"
    subprocess.run([BASE_PYTHON, "-m", "venv", "--without-pip", given], check=True)
    [packages] = given.glob("lib/*/site-packages")
    (packages / "torch.dist-info").mkdir()
    (packages / "torch.dist-info/METADATA").write_text(f"Name: torch\nVersion: {version}\n")
    variables = {"PATH": f"{given}/bin:{tmp_path}/commands:/usr/bin:/bin"}
    if is_named:
        variables["VIRTUAL_ENV"] = str(given)
    clone = tmp_path / "clone"
    words, python = install(clone, **variables)
    is_old = version == "2.10.0"
    assert ("torch==2.13.0" in words) == is_old and "numpy>=2.0,<3" in words
    assert python == f"{given if is_named or not is_old else clone / '.venv'}/bin/python"
