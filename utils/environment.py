"""Check that this project's packages are installed, before a script imports the first of them.

Without an active environment, the user then reads what to type instead of a traceback. So each
script imports this module, which has nothing to call, above all installed packages. The module also
sets two environment variables that libraries read when they are loaded.
"""

import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path

START_SECONDS = time.perf_counter()  # before PyTorch is imported, which takes seconds
VENV = Path(__file__).resolve().parents[1] / ".venv"  # train.sh makes it

# Threads of GNU OpenMP that wait for another thread spin, by default 300,000 times. If another
# program shares the cores, the spinning threads take time slices from the thread that they wait
# for. Fewer spins are faster on such a machine, and slower on an idle one (docs/BENCHMARKS.md).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

# Jupyter and Colab set a backend of their own for Matplotlib, which this environment may lack.
# Scripts only write files.
os.environ["MPLBACKEND"] = "Agg"

# These four packages are enough to check, because all packages are installed together.
for package in ("torch", "numpy", "tyro", "yaml"):
    if find_spec(package) is None:  # searches the disk, imports nothing
        command = "bash train.sh demo, which installs it, or see README.md"
        # In a clone that was moved `activate` names the old folder, and train.sh makes .venv anew.
        activate = VENV / "bin/activate"
        is_whole = activate.exists() and (VENV / "bin/python").exists()
        # sys.prefix is the folder of the environment that Python runs in
        if is_whole and str(VENV) in activate.read_text() and Path(sys.prefix) != VENV:
            command = f'. "{activate}"'
        sys.stderr.write(f"error: {sys.executable} has no package {package}; type {command}\n")
        sys.exit(2)
