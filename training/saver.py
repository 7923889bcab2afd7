"""Saver: gathers the state of a run and writes checkpoints in a thread."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from config import TrainConfig
from model.gpt import GPT
from training import checkpoint as ckpt
from training.checkpoint_folder import LAST, find_newest, keep_numbered
from training.guard import PATIENCE
from training.parallel import gather_state
from training.state import TrainState
from utils.distributed import Process
from utils.errors import UserError

THREAD = "saver"
PAUSES = (1, 5)  # seconds before a failed write is tried again


def finish_writing(seconds: float = 20) -> None:
    """Wait up to `seconds` for a checkpoint that is being written, before the process exits."""
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join(seconds)


@dataclass
class Saver:
    """Write checkpoints of a run in a thread of the main process, one at a time.

    A step waits for the copy of its state to the host, and for the write before it. A failed write
    is logged and tried again, at last by the next save; the run continues, the older file is whole.
    """

    config: TrainConfig
    model: GPT
    optimizers: list[torch.optim.Optimizer]
    about: dict
    """Further entries of the file: tokenizer, train_tokens, ..."""
    process: Process
    log: Callable[[str], None]
    thread: threading.Thread = field(default_factory=threading.Thread)
    errors: dict[str, Exception] = field(default_factory=dict)
    """Error of the newest save, by file name."""

    def save(self, name: str, state: TrainState) -> None:
        """Copy the state of the run and have it written as `name`; every process must call it."""
        self.wait()  # one copy of the state at a time
        self.process.wait_for_main()
        weights, moments = gather_state(self.model, self.optimizers)
        if self.process.is_main:
            entries = {
                "optimizer": moments,
                "seed": self.config.seed,
                "model_config": ckpt.config_values(self.model.config),
                "train_config": self.config.to_dict(),
                **self.about,
                **state.to_checkpoint(),
            }
            self.thread = threading.Thread(
                target=self.write, args=(name, weights, entries), name=THREAD, daemon=True
            )
            self.thread.start()

    def write(self, name: str, weights: dict[str, torch.Tensor], entries: dict) -> None:
        """Write a file, and the numbered one beside it if it is the last checkpoint."""
        folder = self.config.checkpoint_dir
        for pause in (*PAUSES, None):
            try:
                ckpt.save_checkpoint(folder / name, ckpt.assemble(weights, **entries))
                if name == LAST:
                    keep_numbered(folder, entries["step"], self.config.keep_last)
                self.errors.pop(name, None)
                return
            except Exception as error:  # an exception of a thread would get lost
                self.errors[name] = error
                again = "at the next save" if pause is None else f"in {pause} s"
                self.log(f"{error}; trying again {again}")
                time.sleep(pause or 0)

    def end_after_patience(self, state: TrainState, tokens: int, batch: int) -> None:
        """If PATIENCE steps in a row, of `tokens` tokens and `batch` sequences each, had no finite
        gradient, save the state before them and raise UserError."""
        if state.guard.in_a_row < PATIENCE:
            return
        message = state.guard.failure_message(state.step, batch)
        state.rewind(tokens)
        self.save(LAST, state)
        self.finish()
        raise UserError(message)

    def has(self, name: str) -> bool:
        """Return whether a checkpoint of that name is in the folder."""
        return (self.config.checkpoint_dir / name).exists()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self.thread.is_alive():
            self.thread.join()

    def finish(self) -> None:
        """Wait on all processes for the last write; raise the error of a file that failed."""
        self.wait()
        self.process.wait_for_main()
        problem = next(iter(self.errors.values()), None)
        if not self.process.all_agree(problem is None):
            left = find_newest(self.config.checkpoint_dir)
            remedy = f"; --resume auto continues from {left.name}" if left else ""
            reason = problem or "the main process could not save"
            raise UserError(f"{reason}{remedy}") from problem
