"""Signals that ask a run to stop: after its step, or at the next batch of an evaluation."""

import contextlib
import os
import signal
import time

MESSAGE = b"\nstopping soon, then saving; again to stop now without saving\n"


class Stopped(Exception):
    """A process got a signal: raised on all processes in the same place, and caught by the loop of
    a run, which then saves. A step that it interrupts is not taken."""


class StopSignal:
    """Remembers the first SIGTERM, SIGINT, SIGUSR1 or, without nohup, SIGHUP; a second one exits at
    once. With `announce`, the first prints what will happen."""

    def __init__(self, announce: bool) -> None:
        self.announce = announce
        self.signal, self.when = 0, 0.0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self.receive)

    def receive(self, number: int, frame: object) -> None:
        if self.signal and time.monotonic() - self.when > 1:  # torchrun forwards each twice
            raise SystemExit(128 + number)
        if not self.signal:
            self.signal, self.when = number, time.monotonic()
            if self.announce:  # not print: a signal can come while another print has the buffer
                with contextlib.suppress(OSError):  # nobody reads it, as after Ctrl-C to `| tee`
                    os.write(2, MESSAGE)
