"""Stopping a run in good order."""

import signal
import time


class Stop:
    """Remembers a SIGTERM or SIGINT until the step is done; a later second one ends at once."""

    def __init__(self) -> None:
        self.signal, self.when = 0, 0.0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.receive)

    def receive(self, number: int, frame: object) -> None:
        if self.signal and time.monotonic() - self.when > 1:  # torchrun passes each on twice
            raise SystemExit(128 + number)
        if not self.signal:
            self.signal, self.when = number, time.monotonic()
