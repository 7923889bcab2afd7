"""train.py on a CPU with the plain modules, which a GPU would run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import train
from model import replace
from model.gpt import GPT
from utils.cli import run_and_exit


class PlainGPT(GPT):
    """A class of its own, which for_training leaves alone."""


train.GPT = PlainGPT
replace.swap_classes = lambda model: model
run_and_exit(train.main)
