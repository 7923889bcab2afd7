"""Saver: writes the checkpoints of a run.

Without sharding a thread of the main process writes a copy of weights and optimizer state while
training goes on. Under sharding no process has all of them: each writes what it holds into the one
file, and training waits. The format of the file stands in model/formats/checkpoint.py.
"""

import math
import threading
from dataclasses import asdict, dataclass, field

import torch

from model.formats.checkpoint import BEST, LAST, NUMBERED, load_checkpoint, numbered_checkpoints
from model.gpt import GPT
from training.parallel.own_rows import OwnRows, copy_state
from training.run import PATIENCE, Run
from training.writer import save_checkpoint
from utils.distributed import ALONE, Process
from utils.errors import UserError
from utils.files import link_or_copy, sync_folder

THREAD = "saver"  # name by which finish_writing finds the thread


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
    """Run of train.py or finetune.py: options, progress and process."""
    model: GPT
    """The trained model itself, without DDP around it."""
    optimizers: list[torch.optim.Optimizer]
    last_step: int = -1
    """Step of the model_last.pt that this process has written, -1 before the first one, so that the
    first save writes it. Set by `write`, and on the main process only."""
    best_loss: float = math.inf
    """Lowest validation loss of the run, of pre-training and sft in nats per token: that of step 0,
    or of model_best.pt. Set by `write`, and on the main process only."""
    is_first_save: bool = True
    """True until model_last.pt was saved once, on all processes alike."""
    thread: threading.Thread = field(init=False, default_factory=threading.Thread)
    """The thread that writes or wrote last; before the first save, one that was never started."""
    error: Exception | None = None
    """Error of the last failed write; None again after a later model_last.pt."""

    def __post_init__(self) -> None:
        # A resumed run goes on from the lowest loss in its folder: that of model_best.pt, or, where
        # no validation was better than that of step 0, of model_last.pt. Losses of different texts
        # cannot be compared.
        folder = self.run.options.checkpoint_dir
        paths = [folder / name for name in (BEST, LAST) if (folder / name).exists()]
        if not paths:
            return
        checkpoint = load_checkpoint(paths[0])
        if checkpoint["val_checksum"] == self.run.entries["val_checksum"]:
            self.best_loss = checkpoint["best_loss"]
        elif self.run.entries["val_checksum"] is not None:  # None without --eval_data
            self.run.process.print("another text is validated on: a new lowest loss begins")

    # last_step and best_loss change when a file is on the disk. They are known after `wait`, and
    # only to the main process, which decides for all.
    def due(self, step: int) -> bool:
        """Return True if model_last.pt is due after `step` steps: every --save_every steps, at the
        end, and before the first step of this process, so that a killed run can be continued."""
        save_every = self.run.options.save_every
        is_regular = save_every > 0 and step % save_every == 0
        return self.is_first_save or is_regular or self.run.ended

    def save_last(self) -> None:
        """Save model_last.pt, unless it is of this step already. Every process must call it."""
        self.wait()
        self.save(LAST, self.last_step != self.run.progress.step)
        # Training goes on while a file is written, except for the first one: without it a run that
        # is killed could not be continued.
        if self.is_first_save:
            self.finish()  # raises UserError if the write failed
            self.is_first_save = False

    def save_if_best(self, loss: float) -> None:
        """Save model_best.pt if the loss of a validation after step 0 is the lowest one so far.
        Every process must call it."""
        self.wait()
        # A run begins with weights that lie elsewhere already, or are random. Their loss counts
        # without a file: a run that diverges from the first step on has no best model.
        if self.run.progress.step == 0:
            self.best_loss = loss
            return
        # `write` sets self.best_loss after the file is written
        self.save(BEST, loss < self.best_loss, best_loss=loss)

    def save(self, name: str, condition: bool, **changes: object) -> None:
        """Copy weights, optimizer state and the other entries, of which `changes` replace some, and
        have them written as `name`, if the condition of the main process holds. Every process must
        call it, as all write under sharding; and `wait` before: a second copy would take memory on
        a slow disk."""
        process = self.run.process
        # the main process decides: the others always agree
        if not process.all_agree(condition or not process.is_main):
            return
        is_sharded = self.run.options.sharding != "none" and process.world_size > 1
        if not is_sharded and not process.is_main:
            return  # the main process has all of weights and optimizer state
        # copies on the CPU: training changes the tensors while a thread writes
        weights, optimizer_state = copy_state(self.model, self.optimizers, process)
        entries = {
            "config": self.run.options.to_dict(),
            "model_config": asdict(self.model.config),
            **self.run.entries,
            **asdict(self.run.progress),  # step, tokens, ...
            "best_loss": self.best_loss,
            "scaler": self.run.scaler.state_dict(),  # {} unless in float16
            **changes,  # overwrites best_loss
        }
        if is_sharded:
            # Not in a thread, whose collectives would mix with those of the next step.
            self.write(name, weights, optimizer_state, entries, process)
            return
        # daemon: after an error the process waits for the thread only in finish_writing, which has
        # a time limit
        self.thread = threading.Thread(
            target=self.write,
            args=(name, weights, optimizer_state, entries),
            name=THREAD,  # by which finish_writing finds it
            daemon=True,
        )
        self.thread.start()

    def write(
        self,
        name: str,
        weights: dict[str, OwnRows],
        optimizer_state: dict[str, dict[str, OwnRows]],
        entries: dict,
        process: Process = ALONE,
    ) -> None:
        """Write a file, ALONE or under sharding together with the other processes, and only then
        count it in last_step or best_loss. Runs in the thread of the main process, or under
        sharding on every process."""
        folder = self.run.options.checkpoint_dir
        keep = self.run.options.keep_last
        step = entries["step"]
        try:
            save_checkpoint(folder / name, weights, optimizer_state, entries, process)
            if not self.run.process.is_main:
                return
            if name == BEST:
                self.best_loss = entries["best_loss"]
                return
            self.last_step = step
            if keep > 0 and step > 0:
                # A link takes no space, and keeps its content when model_last.pt is replaced. A run
                # that is killed before this line saves the step again when it is resumed.
                link_or_copy(folder / LAST, folder / NUMBERED.format(step))
                for path in numbered_checkpoints(folder)[keep:]:  # newest first
                    path.unlink()
                sync_folder(folder)  # makes the link survive a power cut
            self.error = None
        except Exception as error:  # an exception of a thread would get lost
            # Under sharding every process comes here, as save_checkpoint raises the error on all.
            if self.run.process.is_main:
                self.error = error
            self.run.logger.print(f"{error}; the run continues, and the next save tries again")

    def wait(self) -> None:
        """Wait until nothing is being written. Every process must call it."""
        # Only the main process may have a thread. Not `join`: a signal that interrupts it in Python
        # 3.11 marks the thread as ended, and finish_writing would not wait for it.
        self.run.process.wait_until(lambda: not self.thread.is_alive())

    def end_after_patience(self) -> None:
        """If PATIENCE steps in a row had no finite loss and gradient, save and raise UserError."""
        progress = self.run.progress
        if progress.bad_steps < PATIENCE:  # the same on every process
            return
        progress.bad_steps = 0  # saved, so that a resumed run can skip PATIENCE steps again
        self.save_last()
        self.finish()
        raise UserError(
            f"{PATIENCE} steps in a row had no finite loss and gradient, and were skipped; "
            "resume an earlier checkpoint with a lower learning rate"
        )

    def finish(self) -> None:
        """Wait on all processes for the last write; raise UserError if it failed."""
        self.wait()
        # Only the main process has an `error`; the others raise a general sentence.
        if not self.run.process.all_agree(self.error is None):
            raise UserError(str(self.error or "the main process could not save")) from self.error
