"""Edits that someone may make to model/gpt.py, each in a few lines, as classes."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from model.gpt import GPT, Block
from model.layers import ScaledDotProduct


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


class TokenShift(GPT):
    """Each block reads half of the channels from the token before."""

    def __init__(self, config):
        super().__init__(config)
        self.transformer.h = nn.ModuleList(ShiftBlock(config, i) for i in range(config.n_layer))


class ShiftBlock(Block):
    def forward(self, x, *inputs):
        past = F.pad(x, (0, 0, 1, 0))[:, :-1]
        half = x.size(-1) // 2
        return super().forward(torch.cat((x[..., :half], past[..., half:]), -1), *inputs)


class SlidingWindow(GPT):
    """Attention to the newest half of the context, in the causal attention of training."""

    def __init__(self, config):
        super().__init__(config)
        for block in self.transformer.h:
            block.attn.attend = WindowedDotProduct(config)


class WindowedDotProduct(ScaledDotProduct):
    def __init__(self, config):
        super().__init__(config)
        self.width = config.block_size // 2  # in tokens

    def forward(self, q, k, v, mask=None):
        T = q.size(2)
        if mask is None and T > 1:
            mask = torch.ones(T, T, dtype=torch.bool).tril().triu(1 - self.width)
        return super().forward(q, k, v, mask)


class PostNorm(GPT):
    def __init__(self, config):
        super().__init__(config)
        self.transformer.h = nn.ModuleList(PostNormBlock(config, i) for i in range(config.n_layer))


class PostNormBlock(Block):
    def forward(self, x, *inputs):
        x = self.ln_1(x + self.attn(x, *inputs))
        return self.ln_2(x + self.mlp(x))


class WithGate(GPT):
    """Each block has a weight that begins where it has no effect."""

    def __init__(self, config):
        super().__init__(config)
        for block in self.transformer.h:
            block.gate = nn.Linear(config.n_embd, 1)
            nn.init.zeros_(block.gate.weight)


class WithQueryScale(GPT):
    """The queries of all heads have one learned factor. Divided among processes, its logits are
    right, but each process has the gradient of its own heads alone."""

    def __init__(self, config):
        super().__init__(config)
        for block in self.transformer.h:
            block.attn.attend = ScaledQueries(config)


class ScaledQueries(ScaledDotProduct):
    def __init__(self, config):
        super().__init__(config)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, q, k, v, mask=None):
        return super().forward(q * self.scale, k, v, mask)


READERS = [TokenShift, SlidingWindow]
