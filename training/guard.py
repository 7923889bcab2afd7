"""Guard against bad steps: skips updates whose loss or gradient norm is not finite or spikes."""

import math
import statistics
from collections import deque

WINDOW = 128  # recent steps that define a spike, as in llm.c
PATIENCE = 5  # non-finite steps in a row that end a run


class Guard:
    """Checks each step before its update, with the same result on all processes. With
    `skip_spikes`, a step is also skipped if its loss or gradient norm is more than that many
    standard deviations above the mean of the last 128 (llm.c's -sl and -sg)."""

    def __init__(self, skip_spikes: float | None, state: dict) -> None:
        self.skip_spikes = skip_spikes
        names = ("loss", "grad_norm")
        self.windows = {name: deque(state.get(name, []), maxlen=WINDOW) for name in names}
        self.in_a_row = state.get("in_a_row", 0)  # steps that were not finite

    def check(self, loss: float, grad_norm: float) -> str | None:
        """Count the step; return the reason to skip its update, or None."""
        values = {"loss": loss, "grad_norm": grad_norm}
        if not all(map(math.isfinite, values.values())):
            self.in_a_row += 1
            return f"loss {loss}, gradient norm {grad_norm}"
        self.in_a_row = 0
        if not self.skip_spikes:
            return None
        spikes = []
        for name, value in values.items():
            if (z := self.z_score(name, value)) > self.skip_spikes:
                spikes.append(f"{name} {value:.4g} is {z:.1f} standard deviations above the mean")
            self.windows[name].append(value)
        return f"{'; '.join(spikes)} of the last {WINDOW} steps" if spikes else None

    def z_score(self, name: str, value: float) -> float:
        """Return the standard deviations above the mean of the window; 0 until it is full."""
        window = self.windows[name]
        deviation = statistics.pstdev(window) if len(window) == WINDOW else 0.0
        return (value - statistics.fmean(window)) / deviation if deviation else 0.0

    @property
    def state(self) -> dict:
        """Plain values for a checkpoint."""
        return {name: list(x) for name, x in self.windows.items()} | {"in_a_row": self.in_a_row}
