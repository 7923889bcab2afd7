"""README.md, pasted line by line into a shell in which nothing is active (tests/readme.sh).

The comments in the README say what a line costs. Lines that need a GPU, a download or files of the
user are left out.
"""

import importlib
import os
import re
import subprocess
import sys

import utils.environment

import pytest
from conftest import ROOT, bad, read_page, script, slow

COSTS = r"    # .*(GPU|downloads|your )"
IN_MINUTES = "|chat_demo|sweep|--dry_run|plot.py"


# the demo reads every tenth file of Python's library, with --slow all of them
@pytest.mark.parametrize("left_out, every", [(IN_MINUTES, "10"), slow("", "1")])
def test_every_line_works_in_a_shell_without_an_environment(tmp_path, left_out, every):
    lines = []
    page = read_page("README.md")
    for language, block in re.findall(r"\n```(sh|python)\n(.*?)\n```", page, re.S):
        if language == "python":
            lines.append(f"python - <<'END'\n{block}\nEND")
        else:
            lines += re.sub(r"\\\n *", "", block).splitlines()
    script = "\n".join(line for line in lines if not re.search(COSTS + left_out, line))
    command = ["bash", ROOT / "tests/readme.sh", ROOT, sys.executable, script, every]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '/.venv/bin/activate"\npython sample.py --checkpoint runs/demo' in done.stdout


@pytest.mark.parametrize("name", ["train", "finetune", "sample", "evaluate", "convert", "plot"])
def test_a_script_without_pytorch_says_what_to_type(name):
    bad(["-S", f"{name}.py"], "has no package torch; type ")  # -S: without what is installed


@pytest.mark.parametrize("given", [{}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}])
def test_waiting_threads_spin_briefly_unless_the_user_says_otherwise(monkeypatch, given):
    monkeypatch.setattr(os, "environ", dict(given))
    importlib.reload(utils.environment)
    expected = given or {"GOMP_SPINCOUNT": "3000"}
    assert os.environ == {**expected, "MPLBACKEND": "Agg"}


@pytest.mark.parametrize(
    "command, given", [("bdist_wheel", {}), ("egg_info", {"PIP_BUILD_TRACKER": "x"})]
)
def test_an_installation_of_the_repository_says_what_to_type(command, given):
    done = script("setup.py", command, env=os.environ | given, code=1)
    assert "no package: " in done.stderr and "pip install -r requirements.txt" in done.stderr
