"""The learning rate as a pure function of the step."""

import math


def cosine_lr(
    step: int, *, max_lr: float, min_lr: float, warmup_steps: int, max_steps: int
) -> float:
    """Learning rate of update `step` (0 is the first), in the shape of Brown et al. 2020.

    Rises linearly over `warmup_steps` updates, is max_lr once, at step == warmup_steps, and falls
    along half a cosine to exactly min_lr at the last update, step == max_steps - 1.
    """
    if step < warmup_steps:
        return max_lr * (step + 1) / (warmup_steps + 1)
    decay = min(1.0, (step - warmup_steps) / max(1, max_steps - 1 - warmup_steps))
    return min_lr + 0.5 * (1 + math.cos(math.pi * decay)) * (max_lr - min_lr)
