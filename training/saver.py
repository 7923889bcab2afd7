"""Checkpoints written while training goes on."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from training import checkpoint as ckpt

NAME = "saver"  # of the thread
PAUSES = (1, 5)  # seconds before a failed write is tried again


def finish_writing(seconds: float = 20) -> None:
    """Gives a checkpoint that is being written a last while, before the process ends."""
    for thread in threading.enumerate():
        if thread.name == NAME:
            thread.join(seconds)


class Saver:
    """Writes checkpoints of the main process in a thread, one at a time: a step waits for the copy
    of its state to memory of the host, and for the write before if that is not done.

    A write that fails is told to `say` and tried again. When it stays so, the run goes on, the
    files before it are whole, and the next save tries anew; `close` tells if that never came.
    """

    def __init__(self, folder: Path, *, keep_last: int, say: Callable[[str], None]) -> None:
        self.folder, self.keep_last, self.say = folder, keep_last, say
        self.thread = threading.Thread()
        self.errors: dict[str, Exception] = {}  # by file, of its newest save

    def save(
        self, name: str, weights: dict[str, Tensor], optimizer: dict[str, dict], **rest: object
    ) -> None:
        """Has a state that nothing else changes any more written as `name`; returns before it is.
        `rest` is what a checkpoint holds beside weights and optimizer state."""
        self.wait()
        rest = {**rest, "optimizer": optimizer}
        work = (name, weights, rest)
        self.thread = threading.Thread(target=self.write, args=work, name=NAME, daemon=True)
        self.thread.start()

    def write(self, name: str, weights: dict[str, Tensor], rest: dict) -> None:
        """Writes a file, and the numbered one beside it if it is the last."""
        for pause in (*PAUSES, None):
            try:
                ckpt.save_checkpoint(self.folder / name, ckpt.assemble(weights, **rest))
                if name == ckpt.LAST:
                    ckpt.keep_numbered(self.folder, rest["step"], self.keep_last)
                self.errors.pop(name, None)
                return
            except Exception as error:  # of a thread, so nothing else would tell of it
                self.errors[name] = error
                again = "at the next save" if pause is None else f"in {pause} s"
                self.say(f"{error}; trying again {again}")
                time.sleep(pause or 0)

    def wait(self) -> None:
        """Returns when nothing is being written."""
        if self.thread.is_alive():
            self.thread.join()

    def close(self) -> Exception | None:
        """Waits for the last write; the error of a file that is not as it should be, if any."""
        self.wait()
        return next(iter(self.errors.values()), None)
