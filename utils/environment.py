"""Check that this project's packages are installed, before a script imports the first of them.

A user whose environment is not active then reads what to type, not a traceback. So the scripts
import this module above everything that is installed; it has nothing to import. It also sets
environment variables that PyTorch's libraries read when they are loaded.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

VENV = Path(__file__).resolve().parents[1] / ".venv"  # train.sh makes it

# Threads of GNU OpenMP that wait for each other spin, by default 300,000 times. If another program
# shares the cores, this uses up time slices in which the threads that they wait for could work.
# Fewer spins help more there, and cost more on an idle machine (docs/BENCHMARKS.md).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

# These four are enough to check, as all packages are installed together.
for package in ("torch", "numpy", "tyro", "yaml"):
    if find_spec(package) is None:  # searches the disk, imports nothing
        command = "bash train.sh demo, which installs it, or see Install in README.md"
        # sys.prefix is the folder of the environment that Python runs in
        if VENV.exists() and Path(sys.prefix) != VENV:
            command = f'. "{VENV}/bin/activate"'
        sys.stderr.write(f"error: {sys.executable} has no package {package}; type {command}\n")
        sys.exit(2)
