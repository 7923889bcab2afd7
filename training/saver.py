"""Saver: writes the checkpoints of a run.

Without sharding a thread of the main process writes a copy of the state while training goes on.
Under sharding no process has all of the state: each writes what it holds into the one file, and
training waits. The format of the file stands in training/checkpoint.py.
"""

import threading
import time
from dataclasses import asdict, dataclass, field

import torch

from model.gpt import GPT
from training.checkpoint import BEST, LAST, NUMBERED, numbered
from training.parts import Piece, copy_state
from training.run import PATIENCE, Run
from training.writer import save_checkpoint
from utils.distributed import ALONE, Process
from utils.errors import UserError
from utils.files import link_or_copy, sync_folder

THREAD = "saver"  # name of the thread that writes, by which finish_writing finds it
POLL_SECONDS = 0.05  # between two times that all processes ask whether it is writing


def finish_writing() -> None:
    """Wait up to 20 seconds for a checkpoint that is being written, before the process exits, also
    after an error."""
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join(20)


@dataclass
class Saver:
    """Write checkpoints of a run, one at a time.

    A failed write is logged and the run goes on: the older file is whole, and the next save tries
    again. If none of them succeeds, `finish` ends the run with the error.
    """

    run: Run
    """Run of train.py or finetune.py: options, state and process."""
    model: GPT
    """The trained model itself, without DDP around it."""
    optimizers: list[torch.optim.Optimizer]
    last_step: int = -1
    """Step of the model_last.pt that this process has written, -1 before: so the first save
    writes it. Only the main process knows."""
    is_first: bool = True
    """True until model_last.pt was saved once, on all processes alike."""
    thread: threading.Thread = field(init=False, default_factory=threading.Thread)
    """The thread that writes, or that wrote last; one that never ran before the first save."""
    error: Exception | None = None
    """Why a write failed that no later model_last.pt has made up for."""

    # State follows the files. What lies on the disk is known after `wait`, and to the main process
    # alone, which decides for all.

    def due(self, step: int) -> bool:
        """Return True if model_last.pt is due after `step` steps: every --save_every steps, at the
        end, and before the first step of this process, so that a killed run can be continued."""
        save_every = self.run.config.save_every  # 0: after the last step, or a signal, alone
        is_regular = save_every > 0 and (self.is_first or step % save_every == 0)
        return self.run.ended or is_regular

    def save_last(self) -> None:
        """Save model_last.pt, unless it is of this step already. Every process must call it."""
        self.wait()  # last_step and best_loss are those of finished writes
        self.save(LAST, self.last_step != self.run.state.step)
        # Training goes on while a file is written, but not before the first one is there: a run
        # that is killed could not be continued.
        if self.is_first:
            self.finish()  # raises UserError if that write failed: the run ends before it trains
            self.is_first = False

    def save_if_best(self, loss: float) -> None:
        """Save model_best.pt if the loss of a validation is the lowest one so far; the weights that
        a run begins with are never the best. Every process must call it."""
        self.wait()
        state = self.run.state
        # `write` copies the new best_loss into the state once the file is there
        self.save(BEST, loss < state.best_loss and state.step > 0, best_loss=loss)

    def save(self, name: str, condition: bool, **changes: object) -> None:
        """Copy the state of the run, with `changes` of its entries, and have it written as `name`,
        if the condition of the main process holds. Every process must call it, as sharded state is
        written by all; and `wait` before: a second copy would take memory on a slow disk."""
        process = self.run.process
        # the others agree to what the main process decides
        if not process.all_agree(condition or not process.is_main):
            return
        is_sharded = self.run.config.sharding != "none" and process.num_processes > 1
        if not is_sharded and not process.is_main:
            return  # the main process has all of the state
        # copies on the CPU, which later steps do not change; moments are the optimizer state
        weights, moments = copy_state(self.model, self.optimizers, process)
        entries = {
            "config": self.run.config.to_dict(),
            "model_config": asdict(self.model.config),
            **self.run.entries,
            **asdict(self.run.state),  # step, tokens, best_loss, ...
            "scaler": self.run.scaler.state_dict(),  # {} unless in float16
            **changes,  # the new best_loss, in place of that of the state
        }
        if is_sharded:
            # Training waits: a thread's collectives would meet those of the next step.
            self.write(name, weights, moments, entries, process)
            return
        # daemon: a process that ends on an error does not wait for it without end, but as long as
        # finish_writing does
        self.thread = threading.Thread(
            target=self.write, args=(name, weights, moments, entries), name=THREAD, daemon=True
        )
        self.thread.start()

    def write(
        self,
        name: str,
        weights: dict[str, Piece],
        moments: dict[str, dict[str, Piece]],
        entries: dict,
        process: Process = ALONE,
    ) -> None:
        """Write a file, ALONE or under sharding together with the other processes, give it all of
        its names, and only then count it in last_step and best_loss. Runs in the thread of the main
        process, or under sharding on every process."""
        folder = self.run.config.checkpoint_dir
        keep = self.run.config.keep_last  # numbered checkpoints
        step = entries["step"]
        names = [name]  # the first one is written, the others are links to it
        # model_last.pt is saved before the validation of its step. Where that makes it the best, it
        # becomes the same file as model_best.pt, which knows its validation loss: a resumed run
        # would take a worse model for the best otherwise.
        if name == BEST and step == self.last_step:
            names.append(LAST)
        # The name LAST comes last: a run that is killed before resumes an earlier step, and saves
        # this one again.
        if LAST in names and keep > 0 and step > 0:
            names.insert(-1, NUMBERED.format(step))
        try:
            save_checkpoint(folder / names[0], weights, moments, entries, process)
            if not self.run.process.is_main:
                return
            if name == BEST:
                self.run.state.best_loss = entries["best_loss"]  # the file is there
            # a link costs no space, and stays when model_last.pt is replaced by a new file
            for further_name in names[1:]:
                link_or_copy(folder / names[0], folder / further_name)
            if LAST in names:
                self.last_step = step
            if keep > 0:
                for path in numbered(folder)[keep:]:  # newest first: all but the newest `keep`
                    path.unlink()
            sync_folder(folder)  # the links
            if LAST in names:
                self.error = None  # an earlier failure is made up for
        except Exception as error:  # an exception of a thread would get lost
            # save_checkpoint raises on all processes what one of them raised
            if self.run.process.is_main:
                self.error = error
            self.run.logger.print(f"{error}; the run continues, and the next save tries again")

    def wait(self) -> None:
        """Wait until nothing is being written. Every process must call it."""
        # Not one collective that lasts until then: on a slow disk it would outlast TIMEOUT of
        # utils/distributed.py. Not `join`: interrupted by a signal, it takes the thread for ended
        # in Python 3.11, and finish_writing would not wait for it.
        # Other processes than the main one never start a thread; under sharding none does.
        while not self.run.process.all_agree(not self.thread.is_alive()):
            time.sleep(POLL_SECONDS)

    def end_after_patience(self) -> None:
        """If PATIENCE steps in a row had no finite loss and gradient, save and raise UserError."""
        state = self.run.state
        if state.bad_steps < PATIENCE:  # the same on every process
            return
        state.bad_steps = 0  # a run that resumes this checkpoint has its patience again
        self.save_last()
        self.finish()
        raise UserError(
            f"{PATIENCE} steps in a row had no finite loss and gradient, and were skipped; "
            "resume an earlier checkpoint with a lower --max_lr and --overwrite"
        )

    def finish(self) -> None:
        """Wait on all processes for the last write; raise UserError if it failed."""
        self.wait()
        # `error` is None on all but the main process: these raise a sentence without the reason
        if not self.run.process.all_agree(self.error is None):
            raise UserError(str(self.error or "the main process could not save")) from self.error
