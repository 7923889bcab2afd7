"""Learning rate and momentum as pure functions of the step."""

import math

import torch

from config import TrainConfig


def learning_rate(
    step: int,
    *,
    schedule: str,
    max_lr: float,
    min_lr: float,
    warmup_steps: int,
    max_steps: int,
    decay: float = 0.2,
) -> float:
    """Return the learning rate of update `step`, which counts from 0.

    Linear warmup to max_lr at step == warmup_steps, then decay to exactly min_lr at the last
    update: "cosine" (Brown et al. 2020), "linear", or "wsd" (Hu et al. 2024), which is constant
    until the last `decay` of the updates and linear from there.
    """
    if step < warmup_steps:
        return max_lr * (step + 1) / (warmup_steps + 1)
    decay_start = warmup_steps
    if schedule == "wsd":
        decay_start = max(decay_start, stable_steps(max_steps, decay))
    progress = min(1.0, max(0, step - decay_start) / max(1, max_steps - 1 - decay_start))
    linear, cosine = 1 - progress, 0.5 * (1 + math.cos(math.pi * progress))
    remaining = {"cosine": cosine, "linear": linear, "wsd": linear}[schedule]
    return min_lr + remaining * (max_lr - min_lr)


def stable_steps(max_steps: int, decay: float) -> int:
    """Return the number of updates of a "wsd" run before its decay; a longer run can resume there
    without repeating a step."""
    return max_steps - round(decay * max_steps)


def wsd_stable_step(config: TrainConfig) -> int | None:
    """Return the last step before the decay of a "wsd" run, None for another schedule."""
    recipe = config.resolved_recipe
    if recipe.schedule != "wsd":
        return None
    return max(config.resolved_warmup, stable_steps(config.max_steps, recipe.decay))


def momentum(step: int, final: float, warmup_steps: int) -> float:
    """Return Muon's momentum of update `step`: `final`, to which it rises from 0.1 less over
    `warmup_steps` updates (Jordan et al. 2024)."""
    return final - 0.1 * max(0.0, 1 - step / warmup_steps) if warmup_steps else final


def set_rates(optimizers: list[torch.optim.Optimizer], config: TrainConfig, step: int) -> float:
    """Set learning rate and momentum of every parameter group for update `step`; return the
    learning rate."""
    recipe = config.resolved_recipe
    options = {name: getattr(recipe, name) for name in ("schedule", "max_lr", "decay")}
    steps = {"warmup_steps": config.resolved_warmup, "max_steps": config.max_steps}
    lr = learning_rate(step, min_lr=config.final_lr, **options, **steps)
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = lr * group["lr_scale"]
        if "momentum" in group:
            group["momentum"] = momentum(step, recipe.momentum, recipe.momentum_warmup)
    return lr
