"""train.py where the loss of some forwards is multiplied by FACTOR, is NaN, or raises the ERROR of
torch or Python of that name: FAULTS="RANK:CALL ..." names forwards of training, counted from 0.
MEMORY="RANK:SEQUENCES" is the largest micro-batch of a process: its memory is full with more."""

import builtins
import os
from functools import partial

import torch

import train
from model.gpt import GPT
from training.saver import finish_writing
from utils.cli import call_and_exit


def numbers(name):
    return {tuple(map(int, pair.split(":"))) for pair in os.environ.get(name, "").split()}


FAULTS = numbers("FAULTS")
MEMORY = dict(numbers("MEMORY"))
FACTOR = float(os.environ.get("FACTOR", "nan"))
ERROR = os.environ.get("ERROR")
RANK = int(os.environ.get("RANK", 0))


class FaultyGPT(GPT):
    calls = 0

    def forward(self, idx, targets=None):
        loss = super().forward(idx, targets)
        if self.training:
            if len(idx) > MEMORY.get(RANK, len(idx)):
                raise torch.OutOfMemoryError("CUDA out of memory")
            if (RANK, self.calls) in FAULTS:
                if ERROR is not None:
                    raise getattr(torch, ERROR, None) or getattr(builtins, ERROR)
                loss = loss * FACTOR
            self.calls += 1
        return loss


train.build_without_weights = partial(train.build_without_weights, model_class=FaultyGPT)
call_and_exit(train.main, before_exit=finish_writing)
