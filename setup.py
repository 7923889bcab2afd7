"""Refuse an installation by pip: the scripts run from the clone, and nothing is packaged."""

import os
import sys

from setuptools import setup

# pip sets the variable, so that it is refused before it downloads PyTorch. uv only reads the list
# of requirements (pyproject.toml).
if "PIP_BUILD_TRACKER" in os.environ or "bdist_wheel" in sys.argv:
    sys.exit(
        "this repository is no package: its scripts run from the clone; pip install -r "
        "requirements.txt installs what they need"
    )
setup()
