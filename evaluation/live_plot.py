"""Redraw the picture of a run while it trains.

LivePlot runs this file as a script, `python evaluation/live_plot.py LOG_DIR SIZE`, which needs no
PyTorch, so that drawing takes neither time nor memory of the training process.
"""

import _thread
import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

SECONDS = 60  # least time between the starts of two drawings


class LivePlot:
    """Draws log_plot.png in a process of its own, which ends with this one, however that ends."""

    def __init__(self, log_dir: Path, size: str | None) -> None:
        self.command = [sys.executable, __file__, str(log_dir), size or ""]
        self.process: subprocess.Popen | None = None
        self.due = float("-inf")  # earliest time of the next drawing

    def redraw(self) -> None:
        """Start a drawing, unless one is under way or began less than a minute ago."""
        now = time.monotonic()
        if now < self.due or (self.process and self.process.poll() is None):
            return
        self.due = now + SECONDS
        null = subprocess.DEVNULL
        with contextlib.suppress(OSError, RuntimeError):  # no memory, or too many processes
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=null, stderr=null
            )
            threading.Thread(target=self.process.wait, daemon=True).start()  # leaves no zombie

    def close(self) -> None:
        """End a drawing that is under way, and wait for its process."""
        if self.process:
            self.process.stdin.close()
            self.process.wait()


def draw_picture(log_dir: Path, size: str | None) -> None:
    """Draw the picture of a log in its folder, if matplotlib is installed."""
    with contextlib.suppress(ModuleNotFoundError):
        from evaluation.figure import draw_if_possible  # takes a second
        from utils.log_files import PICTURE

        draw_if_possible([log_dir], log_dir / PICTURE, size)


def interrupt_at_end_of_input() -> None:
    """Raise KeyboardInterrupt in the main thread once standard input closes."""
    os.read(0, 1)
    _thread.interrupt_main()


def main() -> None:
    threading.Thread(target=interrupt_at_end_of_input, daemon=True).start()
    os.nice(10)  # the training process goes first
    draw_picture(Path(sys.argv[1]), sys.argv[2] or None)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    main()
