"""Learning rate and momentum as pure functions of the step."""

import math


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
    """Learning rate of update `step` (0 is the first).

    Rises linearly over `warmup_steps` updates, is max_lr at step == warmup_steps, and falls to
    exactly min_lr at the last update, step == max_steps - 1: along half a cosine (Brown et al.
    2020), linearly, or with "wsd" linearly in the last `decay` of the steps (Hu et al. 2024).
    """
    if step < warmup_steps:
        return max_lr * (step + 1) / (warmup_steps + 1)
    first = warmup_steps  # the last step at max_lr
    if schedule == "wsd":
        first = max(first, stable_steps(max_steps, decay))
    done = min(1.0, max(0, step - first) / max(1, max_steps - 1 - first))
    left = 0.5 * (1 + math.cos(math.pi * done)) if schedule == "cosine" else 1 - done
    return min_lr + left * (max_lr - min_lr)


def stable_steps(max_steps: int, decay: float) -> int:
    """Updates of a "wsd" run before it decays. From there a longer run goes on without having lost
    a step."""
    return max_steps - round(decay * max_steps)


def momentum(step: int, warmup_steps: int) -> float:
    """Momentum of update `step`: from 0.85 to 0.95 in `warmup_steps` updates (Jordan et al.)."""
    return 0.95 - 0.1 * max(0.0, 1 - step / warmup_steps) if warmup_steps else 0.95
