"""train.py or finetune.py, ended by SIGTERM in the middle of an evaluation or of a generated text.

From then on a collective fails after two seconds, less than it takes to write a checkpoint; and the
signal is repeated, as by a scheduler at the end of its patience.

    python tests/stopping_script.py SCRIPT FLAGS

STOP="RANK:CALL" names the process that gets the signal, and in which of its forwards outside of
training, counted from 0.
"""

import importlib
import os
import signal
import sys
import time
from datetime import timedelta

import torch.distributed as dist

from evaluation import scoring
from model import generate
from model.generate import TOKENS_PER_CHECK
from model.gpt import GPT
from training import saver
from utils.cli import call_and_exit

RANK, CALL = map(int, os.environ["STOP"].split(":"))
forward, calls = GPT.hidden, 0
write = saver.save_checkpoint


def hidden(self, *args, **options):
    global calls
    if not self.training:
        if calls == CALL and dist.is_initialized():
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2))
        if calls == CALL and RANK == int(os.environ.get("RANK", 0)):
            os.kill(os.getpid(), signal.SIGTERM)
        assert calls <= CALL + TOKENS_PER_CHECK, "the signal is noticed late"
        calls += 1
    return forward(self, *args, **options)


def write_slowly(*arguments):
    if calls > CALL:  # not the checkpoint before the first step
        time.sleep(3)
        os.kill(os.getpid(), signal.SIGTERM)
    write(*arguments)


GPT.hidden = hidden
for module in (generate, scoring):  # forwards of narrow copies are not counted
    module.is_proven = lambda *_: True
saver.save_checkpoint = write_slowly
sys.argv = sys.argv[1:]
call_and_exit(importlib.import_module(sys.argv[0].removesuffix(".py")).main)
