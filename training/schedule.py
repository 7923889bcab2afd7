"""Learning rate as a pure function of the step. A schedule is an entry of SCHEDULES."""

import math

import torch

from config.options import OptimizerOptions
from utils.errors import UserError, did_you_mean

# name: share of the learning rate that is left, by progress of the decay from 0 to 1; share of all
# updates that the decay takes, if warmup leaves room
SCHEDULES = {
    "cosine": (lambda progress: 0.5 * (1 + math.cos(math.pi * progress)), 1.0),  # Brown et al. 2020
    "linear": (lambda progress: 1 - progress, 1.0),
    "wsd": (lambda progress: 1 - progress, 0.2),  # warmup, stable, decay: Hu et al. 2024
}


def check_schedule(name: str) -> None:
    """Raise UserError unless a schedule has this name."""
    if name not in SCHEDULES:
        hint = did_you_mean(name, list(SCHEDULES))
        raise UserError(f"--schedule {name} is none of {', '.join(SCHEDULES)}{hint}")


def warmup_length(options: OptimizerOptions) -> int:
    """Return --warmup_steps, but at most half of all updates, so that some are left to decay."""
    return min(options.warmup_steps, (options.last_update + 1) // 2)


def learning_rate(step: int, options: OptimizerOptions) -> float:
    """Return the learning rate of update `step`, which counts from 0. Linear warmup to max_lr at
    the end of warmup, constant until the decay begins, then decay to exactly min_lr at update
    `last_update`."""
    max_lr, min_lr, last = options.max_lr, options.min_lr, options.last_update
    warmup = warmup_length(options)
    if step < warmup:
        return max_lr * (step + 1) / (warmup + 1)
    remaining, share = SCHEDULES[options.schedule]
    start = max(warmup, last + 1 - round(share * (last + 1)))
    progress = min(1.0, max(0, step - start) / max(1, last - start))
    return min_lr + remaining(progress) * (max_lr - min_lr)


def set_rates(
    optimizers: list[torch.optim.Optimizer], options: OptimizerOptions, step: int
) -> float:
    """Set the learning rate of every parameter group for update `step`; return it."""
    lr = learning_rate(step, options)
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = lr * group["lr_scale"]
    return lr
