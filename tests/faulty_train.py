"""train.py where a loss is not finite on some process: FAULTS="RANK:CALL ..." names which forwards
of training, counted from 0, of which process."""

import os

import train
from cli import exit_with_sentence
from model.gpt import GPT

FAULTS = {tuple(map(int, fault.split(":"))) for fault in os.environ["FAULTS"].split()}
RANK = int(os.environ.get("RANK", 0))


class FaultyGPT(GPT):
    calls = 0

    def forward(self, idx, targets=None):
        loss = super().forward(idx, targets)
        if self.training:
            if (RANK, self.calls) in FAULTS:
                loss = loss * float("nan")
            self.calls += 1
        return loss


train.GPT = FaultyGPT
exit_with_sentence(train.main)
