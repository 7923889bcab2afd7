import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, environment

# dry runs are real; what else train.sh would start is logged
PYTHON = f"""#!/usr/bin/env bash
case "$*" in
  -c*sys.prefix*) dirname "$0" ;;
  -c*) echo 0 ;;
  "train.py --dry_run"*) exec {sys.executable} "$@" ;;
  "-m pip"*) ;;
  *) echo "$*" >>"$LOG" ;;
esac
"""


@pytest.mark.parametrize(
    ("flags", "started"),
    [
        ([], ["data/fineweb-edu.py", "train.py --resume auto"]),
        (["--data_dir", "elsewhere"], ["train.py --resume auto --data_dir elsewhere"]),
        (["--dry_run"], []),
        (["--device", "h100"], ["train.py --resume auto --device h100"]),  # which is an error
        (["--max_lr", "fast"], []),
    ],
)
def test_train_sh_shards_for_the_default_folder_once_the_settings_are_checked(
    tmp_path, flags, started
):
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    env = {**environment(), "LOG": str(tmp_path / "log"), "VIRTUAL_ENV": str(tmp_path)}
    env["PATH"] = f"{tmp_path}{os.pathsep}{env['PATH']}"
    folders = ["--checkpoint_dir", str(tmp_path / "c"), "--log_dir", str(tmp_path / "l")]
    command = ["bash", "train.sh", *flags, *folders]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == (2 if "fast" in flags else 0), done.stderr
    log = tmp_path / "log"
    found = log.read_text().splitlines() if log.exists() else []
    assert [line.removesuffix(" " + " ".join(folders)) for line in found] == started
