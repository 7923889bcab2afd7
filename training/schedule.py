"""Learning rate as a pure function of the step.

A run warms up linearly to max_lr, keeps it until the decay begins, and decays to exactly min_lr at
the step `decay_end` of its options. SCHEDULES has the schedules. There is no state: a resumed run
computes the same learning rates.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from config import ResolvedOptions


@dataclass(frozen=True)
class Schedule:
    """Decay of the learning rate from max_lr to min_lr."""

    remaining: Callable[[float], float]
    """Share of max_lr - min_lr that is left, by the fraction of the decay that is done, 0 to 1."""
    decay_share: float = 1.0
    """Share of all steps that the decay takes. With 1, it begins at the end of warmup."""


def cosine(decay_fraction: float) -> float:
    """Fall along half a cosine: slow, fast, slow (Loshchilov and Hutter 2017)."""
    return 0.5 * (1 + math.cos(math.pi * decay_fraction))


def linear(decay_fraction: float) -> float:
    """Fall along a line."""
    return 1 - decay_fraction


SCHEDULES = {
    "cosine": Schedule(cosine),  # as in GPT-3 (Brown et al. 2020), nanoGPT
    "linear": Schedule(linear),
    "wsd": Schedule(linear, decay_share=0.2),  # warmup, stable, decay (Hu et al. 2024)
}


def learning_rate(step: int, options: ResolvedOptions) -> float:
    """Return the learning rate of step `step`, which counts from 0. After 9 steps of warmup it is
    max_lr: 0.1, 0.2, ..., 0.9, 1 of it."""
    num_steps = options.decay_end + 1  # decay_end is the step of min_lr, from 0
    # Warmup takes at most half of all steps, which leaves some for the decay.
    warmup_steps = min(options.warmup_steps, num_steps // 2)
    if step < warmup_steps:
        # + 1: the first learning rate is not 0, and the first one after warmup is max_lr.
        return options.max_lr * (step + 1) / (warmup_steps + 1)

    schedule = SCHEDULES[options.schedule]  # such as Schedule(linear, decay_share=0.2) of "wsd"
    # At least two steps: the first one of the decay still has max_lr.
    decay_steps = max(2, round(schedule.decay_share * num_steps))
    decay_start = max(warmup_steps, num_steps - decay_steps)
    # The step decay_end has exactly min_lr. `max` keeps a run of one step from dividing by 0.
    decay_length = max(1, options.decay_end - decay_start)
    decay_fraction = max(0, step - decay_start) / decay_length  # 0 until the decay begins
    remaining = schedule.remaining(decay_fraction)  # falls from 1 to 0
    return options.min_lr + remaining * (options.max_lr - options.min_lr)


def set_learning_rates(
    optimizers: list[torch.optim.Optimizer], options: ResolvedOptions, step: int
) -> float:
    """Set the learning rate of every parameter group for step `step`. Return it for the log.

    A group's learning rate is multiplied by its "lr_scale" (training/optimizers.py), because
    recipes give embeddings and heads learning rates of their own.
    """
    lr = learning_rate(step, options)  # before the group's lr_scale
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
    return lr
