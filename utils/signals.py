"""Stopping a run in good order."""

import signal
import time


class Stop:
    """Remembers a SIGTERM, SIGINT or SIGUSR1 (a scheduler's warning) until the step is done; a
    later second one ends at once."""

    def __init__(self) -> None:
        self.signal, self.when = 0, 0.0
        for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
            if hasattr(signal, name):  # Windows has no SIGUSR1
                signal.signal(getattr(signal, name), self.receive)

    def receive(self, number: int, frame: object) -> None:
        if self.signal and time.monotonic() - self.when > 1:  # torchrun passes each on twice
            raise SystemExit(128 + number)
        if not self.signal:
            self.signal, self.when = number, time.monotonic()
