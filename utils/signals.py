"""Signals that ask a run to stop after the current step."""

import signal
import time


class StopSignal:
    """Remembers the first SIGTERM, SIGINT or SIGUSR1; a second one exits at once."""

    def __init__(self) -> None:
        self.signal, self.when = 0, 0.0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self.receive)

    def receive(self, number: int, frame: object) -> None:
        if self.signal and time.monotonic() - self.when > 1:  # torchrun forwards each twice
            raise SystemExit(128 + number)
        if not self.signal:
            self.signal, self.when = number, time.monotonic()
