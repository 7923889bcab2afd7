"""Saver: writes the checkpoints of a run.

Without sharding, a thread of the main process writes a copy of weights and optimizer state while
training goes on. With sharding, each process writes the part of the state that it holds into the
same file, and training waits. model/formats/checkpoint.py has the format of the file.
"""

import math
import os
import threading
from dataclasses import asdict, dataclass, field

import torch

from model.execution import uncompiled
from model.formats.checkpoint import BEST, LAST, NUMBERED, load_checkpoint, numbered_checkpoints
from model.gpt import GPT
from training.optimizer_state import attributes_of, check_state, group_values, state_by_parameter
from training.parallel.data_parallel import free_gathered_weights
from training.parallel.own_rows import OwnRows, copy_state
from training.run import PATIENCE, Run, resume_command
from training.writer import save_checkpoint
from utils.distributed import ALONE, Process
from utils.errors import UserError
from utils.files import link_or_copy, sync_folder

THREAD = "saver"  # name by which finish_writing finds the thread


def finish_writing() -> None:
    """Wait up to 20 seconds for the checkpoint that is being written. Scripts call it before they
    exit, also after an error."""
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join(20)


@dataclass
class Saver:
    """Write checkpoints of a run, one at a time.

    After a failed write, but for the first, the run prints the error and goes on: the older file is
    whole, and the next save tries again. Weights that give no finite numbers, and so no finite
    loss, do not replace it either. If no later save succeeds, `finish` ends the run with the error.
    """

    run: Run
    """The run of train.py or finetune.py: options, progress and process."""
    model: GPT
    """The trained model itself, without DDP around it."""
    optimizers: list[torch.optim.Optimizer]
    last_step: int = -1
    """Step of the model_last.pt that this process has written, -1 before the first one. Set by
    `write`, on the main process only."""
    best_loss: float = math.inf
    """Lowest validation loss of the run: the loss of step 0 or of model_best.pt, in nats per token
    for pre-training and sft. All processes know it at the start and at step 0, later only the
    main process, which decides: `write` sets it."""
    is_first_save: bool = True
    """True until model_last.pt has been saved once; the same on all processes."""
    thread: threading.Thread = field(init=False, default_factory=threading.Thread)
    """The thread that writes or wrote last; before the first save, one that was never started."""
    error: Exception | None = None
    """Why the last save failed, on the main process; None again after a later model_last.pt.
    Until then `finish` raises UserError on all processes."""
    attributes_before: list[dict[str, list]] = field(init=False)
    """Attributes of each optimizer outside of its state, before the first step: [{"count": [3]}].
    No checkpoint has them: check_step ends a run that changes them."""
    is_state_checked: bool = False
    """True after the first step that has updated the weights: see check_step."""

    def __post_init__(self) -> None:
        self.attributes_before = [attributes_of(optimizer) for optimizer in self.optimizers]
        # A resumed run continues with the lowest loss in its folder, from model_best.pt. If no loss
        # was lower than at step 0, there is no such file, and model_last.pt has the lowest loss.
        folder = self.run.options.checkpoint_dir
        # [.../model_best.pt, .../model_last.pt], or one of them; [] for a new run
        paths = [folder / name for name in (BEST, LAST) if (folder / name).exists()]
        if not paths:
            return
        checkpoint = load_checkpoint(paths[0])  # maps the file, reads no tensor
        if checkpoint["val_checksum"] == self.run.entries["val_checksum"]:
            self.best_loss = checkpoint["best_loss"]
        # losses of different texts cannot be compared
        elif self.run.entries["val_checksum"] is not None:  # None without --eval_data
            self.run.logger.print("the validation text has changed: a new lowest loss begins")

    def due(self, step: int) -> bool:
        """Return True if model_last.pt is due after `step` steps: every --save_every steps, at the
        end, and before the first step, so that the user can always resume a killed run."""
        save_every = self.run.options.save_every
        is_regular = save_every > 0 and step % save_every == 0
        return self.is_first_save or is_regular or self.run.ended

    def save_last(self) -> None:
        """Save model_last.pt, unless this step is already saved. Every process must call it."""
        self.wait()
        # last_step is the step of the model_last.pt written before, and on all but the main process
        # always -1: `save` takes the main process's condition.
        is_new = self.last_step != self.run.progress.step
        self.save(LAST, condition=is_new, best_loss=self.best_loss)
        # Wait for the first file: without it the user could not resume a killed run. While later
        # files are written, training goes on.
        if self.is_first_save:
            self.finish()  # raises UserError if the write failed
            self.is_first_save = False

    def save_if_best(self, loss: float) -> None:
        """Save model_best.pt if this validation loss is the lowest so far and not of step 0. Every
        process must call it."""
        self.wait()
        # The loss of step 0 counts, but saves no file: its weights are random or lie elsewhere. So
        # a run that diverges from its first step has no model_best.pt.
        if self.run.progress.step == 0:
            self.best_loss = loss
            return
        # `write` sets self.best_loss after the file is written
        self.save(BEST, condition=loss < self.best_loss, best_loss=loss)

    def save(self, name: str, condition: bool, best_loss: float) -> None:
        """Save a copy of weights, optimizer state and other entries as the file `name` if the
        `condition` holds on the main process. `best_loss` is an entry of the file.

        Every process must call it, because all write with sharding. Call `wait` before: while an
        earlier file is being written, a second copy would take memory.
        """
        process = self.run.process
        # the main process decides, and the others always agree
        if not process.all_agree(condition or not process.is_main):
            return
        # model_best.pt has a finite loss already
        if name == LAST and not self.gives_finite_logits():
            if process.is_main:
                self.error = UserError(  # `finish` raises it unless a later model_last.pt succeeds
                    f"the weights of step {self.run.progress.step} give no finite loss, so they "
                    f"are not saved; {self.describe_last()}"
                )
                self.run.logger.print(str(self.error))
        elif self.run.options.sharding != "none" and process.world_size > 1:
            # Every process writes its rows, and not in a thread, because the collectives of `write`
            # would mix with those of the next step.
            self.write(name, *self.copy_content(best_loss), process)
        elif process.is_main:  # it has the whole state, and writes it alone
            # daemon: at exit Python does not wait for the thread, but finish_writing does, for 20 s
            self.thread = threading.Thread(
                target=self.write,
                args=(name, *self.copy_content(best_loss)),
                name=THREAD,  # by which finish_writing finds it
                daemon=True,
            )
            self.thread.start()

    def copy_content(self, best_loss: float) -> tuple[dict[str, OwnRows], dict[str, dict], dict]:
        """Return the content of a file, as `write` takes it: copies on the CPU of the weights and
        of the optimizer state that this process writes, and the other entries. Training changes the
        originals while a thread writes."""
        # so that the model has the parameters that the optimizers train
        free_gathered_weights(self.model)
        # {"lm_head.weight": {"exp_avg": Tensor, ...}, ...}, the optimizers' own tensors
        state = state_by_parameter(self.model, self.optimizers)
        # {"lm_head.weight": OwnRows, ...} and {"lm_head.weight": {"exp_avg": OwnRows, ...}, ...}
        weights, optimizer_state = copy_state(self.model, state, self.run.process)
        entries = {
            "config": self.run.options.to_dict(),
            "working_dir": os.getcwd(),  # relative paths in "config" start here
            "model_config": asdict(self.model.config),
            **self.run.entries,  # "tokenizer", "data_order", ...: the same at each step
            **asdict(self.run.progress),  # step, tokens, ...
            "best_loss": best_loss,
            "scaler": self.run.scaler.state_dict(),  # {} unless in float16
            # such as a counter of an optimizer
            "group_values": group_values(self.model, self.optimizers),
        }
        return weights, optimizer_state, entries

    @torch.no_grad()
    def gives_finite_logits(self) -> bool:
        """Return whether the weights give finite logits after each token of a short text, on every
        process. Every process must call it. A skipped step does not show it: the weights of the
        step before have given its loss, not those that are saved."""
        model = self.model
        process = self.run.process
        num_tokens = min(64, model.config.block_size, model.config.vocab_size)
        idx = torch.arange(num_tokens, device=process.device)[None]  # (1, num_tokens): 0, 1, ...
        was_training = model.training
        model.eval()  # no dropout
        # uncompiled, because the compiler would compile the blocks again for this short text
        with process.autocast(), uncompiled(self.run.options.use_torch_compile):
            is_finite = bool(model(idx).isfinite().all())  # of logits (1, num_tokens, V)
        model.train(was_training)
        return process.all_agree(is_finite)

    def describe_last(self) -> str:
        """Return the end of a message about steps that are not finite: the step of model_last.pt
        with the command that continues from it at a lower learning rate, or that there is no
        file."""
        path = self.run.options.checkpoint_dir / LAST
        if not path.exists():  # such as before the first save of --init_from
            return "there is no earlier checkpoint"
        lower_lr = self.run.options.max_lr / 3
        step = load_checkpoint(path)["step"]
        # resume_command returns "python train.py --resume checkpoints/model_last.pt"
        return f"continue from step {step} with {resume_command(path)} --max_lr {lower_lr:.1g}"

    def write(
        self,
        name: str,
        weights: dict[str, OwnRows],
        optimizer_state: dict[str, dict],
        entries: dict,
        process: Process = ALONE,
    ) -> None:
        """Write the file `name`, LAST or BEST, with what copy_content returned. Then record it in
        last_step or best_loss. Without sharding it runs in a thread of the main process, which
        writes ALONE; with sharding, on every process."""
        folder = self.run.options.checkpoint_dir
        keep_last = self.run.options.keep_last  # how many numbered checkpoints to keep
        step = entries["step"]
        try:
            save_checkpoint(folder / name, weights, optimizer_state, entries, process)
            if not self.run.process.is_main:
                return
            if name == BEST:
                self.best_loss = entries["best_loss"]
                return
            self.last_step = step
            if keep_last > 0 and step > 0:
                # A hard link takes no space, and keeps its content when model_last.pt is replaced.
                # A run that is killed before this line saves the step again when it is resumed.
                link_or_copy(folder / LAST, folder / NUMBERED.format(step))  # model_step_005000.pt
                for path in numbered_checkpoints(folder)[keep_last:]:  # newest first
                    path.unlink()
                sync_folder(folder)  # makes the link survive a power cut
            self.error = None
        except Exception as error:  # an exception in a thread would get lost
            # With sharding save_checkpoint raises its error on every process; the lines after it
            # run, and may fail, on the main process alone.
            if self.run.process.is_main:
                self.error = error
            line = str(error)
            # after the first and the last save `finish` ends the run with this error
            if not (self.is_first_save or self.run.ended or self.run.ended_early):
                line += "; the run continues, and the next save tries again"
            self.run.logger.print(line)  # on the main process only

    def wait(self) -> None:
        """Wait until nothing is being written. Every process must call it."""
        # Only the main process may have a thread. Not `join`: in Python 3.11 a signal that
        # interrupts it marks the thread as ended, and finish_writing would not wait for the thread.
        self.run.process.wait_until(lambda: not self.thread.is_alive())

    def check_step(self) -> None:
        """After the first step that is not skipped, raise UserError if a checkpoint would lose
        state of the optimizers. After PATIENCE steps in a row without a finite loss and gradient,
        save and raise UserError. Every process must call it."""
        progress = self.run.progress  # a Progress; advance has counted the step
        if not self.is_state_checked and progress.bad_steps == 0:  # this step was not skipped
            # UserError on every process if a checkpoint would lose state of an optimizer, or an
            # attribute that differs from attributes_before. Not earlier: the first step makes the
            # state.
            check_state(self.model, self.optimizers, self.attributes_before, self.run.process)
            self.is_state_checked = True
        if progress.bad_steps < PATIENCE:  # 5; bad_steps are the same on every process
            return
        progress.bad_steps = 0  # saved, so that a resumed run can skip PATIENCE steps again
        self.run.ended_early = True  # `write` then does not print that the run continues
        self.save_last()
        self.wait()
        with self.run.process.raise_on_all():  # the others may lack the folder
            if self.run.process.is_main:
                raise UserError(
                    f"{PATIENCE} steps in a row had no finite loss and gradient, and were skipped; "
                    f"{self.describe_last()}"
                )

    def finish(self) -> None:
        """Wait for the last write. Raise UserError if it failed. Every process must call it."""
        self.wait()
        # Only the main process has an `error`. The others raise a general message.
        if not self.run.process.all_agree(self.error is None):
            raise UserError(str(self.error or "the main process could not save")) from self.error
