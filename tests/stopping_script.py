"""train.py or finetune.py, ended by SIGTERM in the middle of an evaluation or of a generated text.

    python tests/stopping_script.py SCRIPT FLAGS

STOP="RANK:CALL" names the process that gets the signal, and in which of its forwards outside of
training, counted from 0.
"""

import importlib
import os
import signal
import sys

from model.generate import TOKENS_PER_CHECK
from model.gpt import GPT
from utils.cli import call_and_exit

RANK, CALL = map(int, os.environ["STOP"].split(":"))
forward, calls = GPT.hidden, 0


def hidden(self, *args, **options):
    global calls
    if not self.training:
        if calls == CALL and RANK == int(os.environ.get("RANK", 0)):
            os.kill(os.getpid(), signal.SIGTERM)
        assert calls <= CALL + TOKENS_PER_CHECK, "the signal is noticed late"
        calls += 1
    return forward(self, *args, **options)


GPT.hidden = hidden
sys.argv = sys.argv[1:]
call_and_exit(importlib.import_module(sys.argv[0].removesuffix(".py")).main)
