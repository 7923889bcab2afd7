"""Steps that are left out: those whose loss or gradient is not finite, or far above the recent."""

import math
import statistics
from collections import deque

from utils.errors import UserError

WINDOW = 128  # recent steps that a spike is measured against, as in llm.c
PATIENCE = 5  # steps in a row without a finite gradient that end a run


class TrainingError(UserError):
    """A run that cannot go on: one sentence that says why and from where to go on."""


class Guard:
    """Judges each step before its update. All processes see the same figures and judge alike.

    With `skip_spikes`, a step is left out too if its loss or gradient norm is more than that many
    standard deviations above the mean of the last 128 (llm.c's -sl and -sg). `state` is the
    `state` of a guard before, in the checkpoint that the run goes on from.
    """

    def __init__(self, skip_spikes: float | None, state: dict) -> None:
        self.skip_spikes = skip_spikes
        self.windows = {
            name: deque(state.get(name, []), maxlen=WINDOW) for name in ("loss", "grad_norm")
        }
        self.skipped = int(state.get("skipped", 0))
        self.in_a_row = int(state.get("in_a_row", 0))

    def reason(self, loss: float, grad_norm: float) -> str | None:
        """Why the step is to be left out, None if it is not."""
        values = {"loss": loss, "grad_norm": grad_norm}
        if not all(map(math.isfinite, values.values())):
            self.in_a_row += 1
            self.skipped += 1
            return f"loss {loss}, gradient norm {grad_norm}"
        self.in_a_row = 0
        found = [
            f"{name} {value:.4g} is {z:.1f} standard deviations above the last {WINDOW}"
            for name, value in values.items()
            if self.skip_spikes and (z := self.z_score(name, value)) > self.skip_spikes
        ]
        if self.skip_spikes:
            for name, value in values.items():
                self.windows[name].append(value)
        self.skipped += bool(found)
        return "; ".join(found) or None

    def z_score(self, name: str, value: float) -> float:
        """Standard deviations above the mean of a full window; 0 while it fills."""
        window = self.windows[name]
        if len(window) < WINDOW:
            return 0.0
        spread = statistics.pstdev(window)
        return (value - statistics.fmean(window)) / spread if spread else 0.0

    def explain(self, step: int, batch: int) -> str:
        """Why a run ended whose last steps up to `step`, of `batch` sequences each, were bad."""
        first = step - self.in_a_row
        return (
            f"{self.in_a_row} steps in a row had no finite loss and gradient: steps {first + 1} to "
            f"{step}, positions {first * batch:,} to {step * batch - 1:,} of the data order (their "
            f"sequences are in metrics.jsonl); saved as of step {first}, before them. Lower "
            "--max_lr, or go on from an earlier checkpoint"
        )

    @property
    def state(self) -> dict:
        """What a checkpoint keeps of it."""
        windows = {name: list(window) for name, window in self.windows.items()}
        return {**windows, "skipped": self.skipped, "in_a_row": self.in_a_row}
