"""Edits that someone may make to model/gpt.py, each in a few lines, as classes."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from model.gpt import GPT


class SoftCapped(GPT):
    def logits(self, x):
        return 15 * torch.tanh(super().logits(x) / 15)


class WithTemperature(GPT):
    """The logits have a parameter of their own, which begins where it has no effect."""

    def __init__(self, config):
        super().__init__(config)
        self.temperature = nn.Parameter(torch.ones(()))

    def logits(self, x):
        return super().logits(x) * self.temperature


class WithZLoss(GPT):
    def token_losses(self, logits, targets):
        return super().token_losses(logits, targets) + 1e-4 * logits.logsumexp(-1).square()


class LabelSmoothed(GPT):
    def token_losses(self, logits, targets):
        smoothing = 0.1 if self.training else 0.0
        return F.cross_entropy(
            logits, targets, ignore_index=-1, reduction="none", label_smoothing=smoothing
        )


LOSSES = [SoftCapped, WithTemperature, WithZLoss, LabelSmoothed]
