"""train.py where something goes wrong on some process: FAULTS="RANK:CALL ..." names forwards of
training, counted from 0. Their loss is not finite or, with HANG=1, they never end."""

import os
import time
from datetime import timedelta

import train
from model.gpt import GPT
from training import initial_model
from utils import distributed
from utils.cli import run_and_exit

FAULTS = {tuple(map(int, fault.split(":"))) for fault in os.environ["FAULTS"].split()}
RANK = int(os.environ.get("RANK", 0))


class FaultyGPT(GPT):
    calls = 0

    def forward(self, idx, targets=None):
        loss = super().forward(idx, targets)
        if self.training:
            if (RANK, self.calls) in FAULTS:
                while os.environ.get("HANG"):
                    time.sleep(1)
                loss = loss * float("nan")
            self.calls += 1
        return loss


initial_model.GPT = FaultyGPT
distributed.TIMEOUT = timedelta(seconds=10)
run_and_exit(train.main)
