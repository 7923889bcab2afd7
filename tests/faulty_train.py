"""train.py where the loss of some forwards is multiplied by FACTOR, or is NaN: FAULTS="RANK:CALL
..." names forwards of training, counted from 0. MEMORY="RANK:SEQUENCES" is the largest micro-batch
of a process, whose memory is full with more."""

import os

import torch

import train
import training.trial
from model.gpt import GPT
from utils.cli import call_and_exit


def numbers(name):
    return {tuple(map(int, pair.split(":"))) for pair in os.environ.get(name, "").split()}


FAULTS = numbers("FAULTS")
MEMORY = dict(numbers("MEMORY"))
FACTOR = float(os.environ.get("FACTOR", "nan"))
RANK = int(os.environ.get("RANK", 0))


class FaultyGPT(GPT):
    calls = 0

    def forward(self, idx, targets=None):
        loss = super().forward(idx, targets)
        if self.training:
            if len(idx) > MEMORY.get(RANK, len(idx)):
                raise torch.OutOfMemoryError("CUDA out of memory")
            loss = loss * FACTOR if (RANK, self.calls) in FAULTS else loss
            self.calls += 1
        return loss


train.GPT = FaultyGPT
training.trial.TRIED_DEVICES = ("cpu",)
call_and_exit(train.main)
