"""Saver: gathers the state of a run, and writes its checkpoints in a thread.

A step waits until an earlier file is written and its own state is copied to the host's memory; its
file is written while training goes on. The format of the file stands in training/checkpoint.py.
"""

import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from model.gpt import GPT
from training.checkpoint import BEST, LAST, NUMBERED, assemble, first_line, numbered
from training.parallel import gather_state
from training.run import PATIENCE, Run
from utils.errors import UserError
from utils.files import atomic_write, link_or_copy, sync_folder

THREAD = "saver"  # name of the thread that writes
POLL_SECONDS = 0.05  # between two times that all processes ask whether it is writing


def save_checkpoint(path: Path, content: dict) -> None:
    """Write a file atomically: `path` is the old file or the whole new one. Raises UserError if it
    cannot be written, as on a full disk."""
    try:
        with atomic_write(path) as file:
            torch.save(content, file)
    except Exception as error:  # a full disk is a RuntimeError to torch
        unharmed = "; the one before it is untouched" if path.exists() else ""
        raise UserError(f"{path} could not be written: {first_line(error)}{unharmed}") from error


def keep_numbered(folder: Path, step: int, keep: int) -> None:
    """Give model_last.pt the second name model_step_{step}.pt; keep the newest `keep` of these."""
    if keep == 0:
        return
    # a link costs no space, and stays when model_last.pt is replaced by a new file
    link_or_copy(folder / LAST, folder / NUMBERED.format(step))
    for path in numbered(folder)[keep:]:
        path.unlink()
    sync_folder(folder)


def finish_writing(seconds: float = 20) -> None:
    """Wait up to `seconds` for a checkpoint that is being written, before the process exits."""
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join(seconds)


@dataclass
class Saver:
    """Write checkpoints of a run in a thread of the main process, one at a time.

    A failed write is logged and the run goes on: the older file is whole, and the next save tries
    again. If none of them succeeds, `finish` ends the run with the error.
    """

    run: Run
    model: GPT
    optimizers: list[torch.optim.Optimizer]
    entries: dict
    """Further entries of the file: script, tokenizer, ..."""
    last_step: int = field(init=False)
    """Step of the newest model_last.pt; at the start that of the checkpoint that is resumed."""
    thread: threading.Thread = field(init=False, default_factory=threading.Thread)
    error_of_file: dict[str, Exception] = field(init=False, default_factory=dict)
    """Errors of failed writes, by the name of the file; a later write that succeeds removes its."""

    def __post_init__(self) -> None:
        self.last_step = self.run.start_step  # a run that ends without a new step saves nothing

    def save(self, name: str) -> None:
        """Copy the state of the run and have it written as `name`. Every process must call it, as
        sharded state is gathered from all."""
        self.wait()  # one copy of the state at a time, or memory would grow on a slow disk
        # on the CPU, and not changed by later steps
        weights, moments = gather_state(self.model, self.optimizers)
        state = self.run.state
        if name == LAST:
            self.last_step = state.step
        # the other processes have helped to gather, and write nothing
        if not self.run.process.is_main:
            return
        entries = {
            "config": self.run.config.to_dict(),
            "model_config": asdict(self.model.config),
            **self.entries,
            **state.to_checkpoint(),
        }
        arguments = (name, weights, moments, entries)
        # daemon: a process that ends on an error does not wait for it without end, see THREAD
        self.thread = threading.Thread(target=self.write, args=arguments, name=THREAD, daemon=True)
        self.thread.start()

    def write(self, name: str, weights: dict, moments: dict, entries: dict) -> None:
        """Write a file, and give the last checkpoint its numbered name. Runs in the thread."""
        folder = self.run.config.checkpoint_dir
        step = entries["step"]
        try:
            save_checkpoint(folder / name, assemble(weights, moments, **entries))
            self.error_of_file.pop(name, None)  # an earlier failure is made up for
            # model_last.pt is saved before the validation of its step. Where that makes it the
            # best, it becomes the same file as model_best.pt, which knows its validation loss: a
            # resumed run would take a worse model for the best otherwise.
            if name == BEST and step == self.last_step:
                link_or_copy(folder / BEST, folder / LAST)
                self.error_of_file.pop(LAST, None)
            if step == self.last_step:
                keep_numbered(folder, step, self.run.config.keep_last)
        except Exception as error:  # an exception of a thread would get lost
            self.error_of_file[name] = error
            self.run.logger.print(f"{error}; the run continues, and the next save tries again")

    def wait(self) -> None:
        """Wait until nothing is being written. Every process must call it."""
        # Not one collective that lasts until then: on a slow disk it would outlast TIMEOUT of
        # utils/distributed.py. Not `join`: interrupted by a signal, it takes the thread for ended
        # in Python 3.11, and finish_writing would not wait for it.
        while not self.run.process.all_agree(not self.thread.is_alive()):
            time.sleep(POLL_SECONDS)

    def end_after_patience(self) -> None:
        """If PATIENCE steps in a row had no finite loss and gradient, save and raise UserError."""
        state = self.run.state
        if state.bad_steps < PATIENCE:
            return
        state.bad_steps = 0  # a run that resumes this checkpoint has its patience again
        self.save(LAST)
        self.finish()
        raise UserError(
            f"{PATIENCE} steps in a row had no finite loss and gradient, and were skipped; "
            "resume an earlier checkpoint with a lower --max_lr and --overwrite"
        )

    def finish(self) -> None:
        """Wait on all processes for the last write; raise UserError for a file that failed."""
        self.wait()
        # None if the newest write of every file succeeded
        problem = next(iter(self.error_of_file.values()), None)
        if not self.run.process.all_agree(problem is None):
            raise UserError(str(problem or "the main process could not save")) from problem
