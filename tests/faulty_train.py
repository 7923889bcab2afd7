"""train.py where the loss of some forwards is multiplied by FACTOR, or is NaN: FAULTS="RANK:CALL
..." names forwards of training, counted from 0."""

import os
from functools import partial

import train
from model.gpt import GPT
from utils.cli import call_and_exit

FAULTS = {tuple(map(int, fault.split(":"))) for fault in os.environ["FAULTS"].split()}
FACTOR = float(os.environ.get("FACTOR", "nan"))
RANK = int(os.environ.get("RANK", 0))


class FaultyGPT(GPT):
    calls = 0

    def forward(self, idx, targets=None):
        loss = super().forward(idx, targets)
        if self.training:
            loss = loss * FACTOR if (RANK, self.calls) in FAULTS else loss
            self.calls += 1
        return loss


train.build_without_weights = partial(train.build_without_weights, model_class=FaultyGPT)
call_and_exit(train.main)
