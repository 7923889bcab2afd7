"""train.py on a CPU with the plain modules, which a GPU would run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import train
from model import cpu
from utils.cli import run_and_exit

cpu.for_training = lambda model: model
run_and_exit(train.main)
