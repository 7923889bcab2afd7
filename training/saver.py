"""Saver: gathers the state of a run and writes checkpoints in a thread."""

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from config.options import RunOptions
from model.gpt import GPT
from training.checkpoint import BEST, LAST, NUMBERED, assemble, first_line, numbered
from training.parallel import gather_state
from training.state import PATIENCE, TrainState
from utils.distributed import Process
from utils.errors import UserError
from utils.files import atomic_write, check_space, link_or_copy, sync_folder

THREAD = "saver"


def save_checkpoint(path: Path, state: dict) -> None:
    """Write a file atomically: `path` is the old file or the whole new one. Raises UserError if it
    cannot be written; a disk that is too full is found before."""
    moments = [x for values in state["optimizer"].values() for x in values.values()]
    tensors = [*state["model"].values(), *state["model_low"].values(), *moments]
    try:
        path.with_name(path.name + ".tmp").unlink(missing_ok=True)  # left by a killed run
        check_space(path.parent, sum(1000 + x.nbytes for x in tensors), path.name)
        with atomic_write(path) as file:
            torch.save(state, file)
    except Exception as error:  # a full disk is a RuntimeError to torch
        kept = "; the one before it is untouched" if path.exists() else ""
        raise UserError(f"{path} could not be written: {first_line(error)}{kept}") from error


def keep_numbered(folder: Path, step: int, keep: int) -> None:
    """Link model_last.pt as model_step_{step}.pt, and keep the newest `keep` of these."""
    if keep:
        # model_last.pt is replaced, never rewritten
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
    """Write checkpoints of a run in a thread of the main process, one at a time. A step waits for
    the copy of its state to the host, and for the write before it. A failed write is logged and the
    run continues: the older file is whole, and the next save tries again."""

    config: RunOptions
    model: GPT
    optimizers: list[torch.optim.Optimizer]
    about: dict  # further entries of the file: script, tokenizer, train_tokens
    process: Process
    log: Callable[[str], None]
    last_step: int  # of the newest model_last.pt, at the start of the checkpoint that is resumed
    thread: threading.Thread = field(default_factory=threading.Thread)
    errors: dict[str, Exception] = field(default_factory=dict)  # newest save, by file name

    def save(self, name: str, state: TrainState) -> None:
        """Copy the state of the run and have it written as `name`; every process must call it."""
        self.wait()  # one copy of the state at a time
        weights, moments = gather_state(self.model, self.optimizers)
        if name == LAST:
            self.last_step = state.step
        if self.process.is_main:
            entries = {
                "config": self.config.to_dict(),
                "derived": self.config.derived,
                "model_config": asdict(self.model.config),
                **self.about,
                **state.to_checkpoint(),
            }
            self.thread = threading.Thread(
                target=self.write, args=(name, weights, moments, entries), name=THREAD, daemon=True
            )
            self.thread.start()

    def write(self, name: str, weights: dict, moments: dict, entries: dict) -> None:
        """Write a file, and the numbered one beside it if it is the last checkpoint. The last one
        is saved before its validation: if that makes it the best, which is saved after, it becomes
        the same file, so that it knows its own loss."""
        folder, step = self.config.checkpoint_dir, entries["step"]
        try:
            save_checkpoint(folder / name, assemble(weights, moments, **entries))
            self.errors.pop(name, None)
            if step == self.last_step:
                if name == BEST:
                    link_or_copy(folder / BEST, folder / LAST)
                    self.errors.pop(LAST, None)
                keep_numbered(folder, step, self.config.keep_last)
        except Exception as error:  # an exception of a thread would get lost
            self.errors[name] = error
            self.log(f"{error}; the run continues, and the next save tries again")

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self.thread.is_alive():
            self.thread.join()

    def end_after_patience(self, state: TrainState) -> None:
        """If PATIENCE steps in a row had no finite loss and gradient, save and raise UserError."""
        if state.bad_steps >= PATIENCE:
            state.bad_steps = 0  # for a run that goes on
            self.save(LAST, state)
            self.finish()
            raise UserError(
                f"{PATIENCE} steps in a row had no finite loss and gradient, and were skipped; "
                "resume an earlier checkpoint with a lower --max_lr and --overwrite"
            )

    def finish(self) -> None:
        """Wait on all processes for the last write; raise UserError for a file that failed."""
        self.wait()
        problem = next(iter(self.errors.values()), None)
        if not self.process.all_agree(problem is None):
            raise UserError(str(problem or "the main process could not save")) from problem
