import contextlib
import errno
import functools
import itertools
import math
import os
import resource
import shutil
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import train_options, user_error
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.amp import GradScaler

from model.config import GPTConfig
from model.formats import checkpoint as ckpt
from model.formats.checkpoint import BEST, LAST
from model.gpt import GPT
from recipes import Recipe
from training import saver as saver_module
from training.optimizers import make_optimizers
from training.run import Progress, Run, check_space
from training.saver import Saver
from utils.distributed import ALONE
from utils.errors import UserError, writing


@pytest.fixture
def saver(tmp_path):
    torch.manual_seed(0)
    config = train_options(checkpoint_dir=tmp_path, keep_last=2)
    model = GPT(GPTConfig(block_size=8, vocab_size=64, n_layer=1, n_head=1, n_embd=8))
    entries = {"script": "train.py", "tokenizer": "gpt2", "val_checksum": 1}
    optimizers = make_optimizers(model, config, Recipe())
    run = Run(config, ALONE, GradScaler("cpu"), Progress(), entries)
    run.logger = SimpleNamespace(print=print)
    return Saver(run, model, optimizers, is_first_save=False)


def save(saver, step):
    saver.run.progress.step = step
    saver.save_last()


def test_a_save_comes_back_before_the_file_is_written(saver, tmp_path, monkeypatch):
    write, go = saver_module.save_checkpoint, threading.Event()
    monkeypatch.setattr(saver_module, "save_checkpoint", lambda *args: go.wait(10) and write(*args))
    save(saver, 1)
    assert not (tmp_path / LAST).exists()
    before = {name: x.clone() for name, x in saver.model.state_dict().items()}
    with torch.no_grad():
        for parameter in saver.model.parameters():
            parameter.add_(1)  # training goes on
    go.set()
    saver.finish()
    state = ckpt.load_checkpoint(tmp_path / LAST)
    for name, high in state["model"].items():
        assert torch.equal(ckpt.join_float32(high, state["model_low"][name]), before[name])
    assert state["step"] == 1 and state["tokenizer"] == "gpt2"


def test_no_step_is_taken_before_the_first_checkpoint_is_written(saver, tmp_path, monkeypatch):
    """From the first step on, a killed run can be continued."""
    write = saver_module.save_checkpoint

    def slow_write(*args):
        time.sleep(1)
        write(*args)

    monkeypatch.setattr(saver_module, "save_checkpoint", slow_write)
    saver.is_first_save = True
    assert saver.due(3)  # of a branch, whatever --save_every
    save(saver, 3)
    assert (tmp_path / LAST).exists() and not saver.due(3)


def test_the_lowest_loss_is_that_of_the_best_file_and_below_that_of_the_start(
    saver, tmp_path, capsys
):
    saver.save_if_best(3.0)  # step 0
    save(saver, 2)
    saver.save_if_best(492.0)  # a run that diverges has no best model
    saver.finish()
    assert not (tmp_path / BEST).exists()
    assert replace(saver, best_loss=math.inf).best_loss == 3.0  # a resumed run's, too
    save(saver, 4)
    saver.save_if_best(2.5)
    saver.finish()
    assert ckpt.load_checkpoint(tmp_path / BEST)["best_loss"] == 2.5
    again = replace(saver, best_loss=math.inf)  # of a resumed run
    assert again.best_loss == 2.5
    saver.run.entries["val_checksum"] = 2  # of another text
    assert replace(saver, best_loss=math.inf).best_loss == math.inf
    assert "a new lowest loss begins" in capsys.readouterr().out
    assert (tmp_path / LAST).samefile(tmp_path / "model_step_000004.pt")
    assert not list(tmp_path.glob("*.tmp"))


def test_a_disk_without_room_is_refused_at_the_start(tmp_path, monkeypatch):
    """Best, last and a temporary file, or --keep_last of them, less those that are replaced."""
    config = train_options(checkpoint_dir=tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=240))
    with user_error(f"the disk of {tmp_path} has 0.00 GB free"):
        check_space(config, Recipe(), 10)
    (tmp_path / LAST).write_bytes(bytes(120))
    check_space(config, Recipe(), 10)
    check_space(replace(config, checkpoint_dir=tmp_path / "a" / "b"), Recipe(), 1)  # a dry run's
    os.link(tmp_path / LAST, tmp_path / "model_step_000001.pt")
    check_space(replace(config, keep_last=1), Recipe(), 10)
    with user_error("need 0.00 GB more"):
        check_space(replace(config, keep_last=2), Recipe(), 10)


def test_a_write_that_fails_names_the_reason_of_the_system(tmp_path):
    """torch raises an error of its own about the positions in its file."""
    with user_error("m.pt could not be written: .*No space left"), writing(tmp_path / "m.pt"):
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        finally:
            raise RuntimeError("[enforce fail at inline_container.cc:672] unexpected pos 694528")


class Killed(BaseException):
    """Ends a run between two operations on files."""


class SameThread:
    """In place of threading.Thread: runs at once, and raises what its target raises."""

    def __init__(self, target, args, **_):
        self.start = functools.partial(target, *args)

    def is_alive(self):
        return False


def patch_disk(patch, fault, error):
    """Let rename, link or removal number `fault` raise the error; after Killed all later ones."""
    numbers = itertools.count(1)

    def operate(operation, *args):
        number = next(numbers)
        if number == fault or (error is Killed and number > fault):
            raise error("the disk is full")
        return operation(*args)

    for name in ("replace", "link", "unlink"):
        patch.setattr(os, name, functools.partial(operate, getattr(os, name)))
    patch.setattr(os, "fsync", lambda descriptor: None)  # quick
    patch.setattr(threading, "Thread", SameThread)


def read(path):
    """Return the step and the lowest loss of a file, 0 and infinity without one."""
    content = {"step": 0, "best_loss": math.inf}
    if path.exists():
        content = ckpt.load_checkpoint(path)
        ckpt.verify(content, "model")
    return content["step"], content["best_loss"]


def run_to_end(like, folder, losses):
    """Go on from the newest checkpoint of a folder as train.py does; step i + 1 has the validation
    loss losses[i]. Check after each save that what the run and the files say is what lies there.
    Return the step by file, and the lowest loss."""
    newest = ckpt.find_newest(folder)
    state = Progress.start(newest and ckpt.load_checkpoint(newest))
    resume = None if newest is None else str(newest)
    config = replace(like.run.options, checkpoint_dir=folder, resume=resume)
    run = replace(like.run, options=config, progress=state)
    run.logger = SimpleNamespace(print=lambda text: None)
    saver = Saver(run, like.model, like.optimizers)
    while True:
        if state.step % 2 == 0 or state.step == len(losses):
            saver.save_last()
        if state.step > 0:
            saver.save_if_best(losses[state.step - 1])
        (last_step, last_loss), (_, best_loss) = (read(folder / name) for name in (LAST, BEST))
        assert saver.last_step <= last_step and last_loss >= best_loss == saver.best_loss
        if state.step == len(losses):
            return {path.name: read(path)[0] for path in folder.glob("*.pt")}, best_loss
        state.step += 1


def test_run_and_files_say_what_lies_there_whenever_a_save_is_killed_or_fails(
    saver, tmp_path_factory
):
    """And a run that was killed ends with the files of one that was not."""

    def run(folder, losses, fault=math.inf, error=Killed):
        with pytest.MonkeyPatch.context() as patch:
            patch_disk(patch, fault, error)
            return run_to_end(saver, folder, losses)

    whole = functools.cache(lambda losses: run(tmp_path_factory.mktemp("whole"), losses))

    @settings(max_examples=16, deadline=None)
    @given(
        losses=st.sampled_from([(3.0, math.nan, 2.0, 2.5), (2.0, 1.0, 1.0, 0.5)]),
        fault=st.integers(1, 24),
        error=st.sampled_from([Killed, OSError]),
    )
    @example(losses=(2.0, 1.0, 1.0, 0.5), fault=4, error=Killed)  # before a first model_last.pt
    def check(losses, fault, error):
        folder = tmp_path_factory.mktemp("run")
        with contextlib.suppress(Killed, UserError):  # a run ends if its first save fails
            run(folder, losses, fault, error)
        assert run(folder, losses) == whole(losses) or error is OSError
        steps, best_loss = whole(losses)
        assert best_loss == min(loss for loss in losses if math.isfinite(loss))
        assert steps[BEST] == losses.index(best_loss) + 1

    check()


def test_a_failed_write_leaves_the_run_and_the_file_before_it(saver, tmp_path, capsys):
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step, last, numbers in ((1, 1, [1]), (2, 1, [1]), (3, 3, [1, 3]), (5, 5, [3, 5])):
        if step == 2:  # the disk is full for a while
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
        save(saver, step)
        saver.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        names = [LAST, *(f"model_step_{number:06d}.pt" for number in numbers)]
        assert sorted(path.name for path in tmp_path.iterdir()) == names
        assert ckpt.load_checkpoint(tmp_path / LAST)["step"] == last
    (note,) = capsys.readouterr().out.splitlines()
    assert f"{tmp_path / LAST} could not be written" in note
    assert "the run continues, and the next save tries again" in note
    saver.finish()  # later files made up for the one that failed


def test_a_failed_last_save_does_not_say_that_the_run_continues(saver, tmp_path, capsys):
    (tmp_path / f"{LAST}.tmp").mkdir()  # in the way of the next file
    saver.run.ended_early = True  # a signal has ended the run
    save(saver, 6)
    with user_error("could not be written"):
        saver.finish()
    assert "the run continues" not in capsys.readouterr().out
