import threading
from types import SimpleNamespace

import pytest
import torch
from conftest import train_options

from model.config import GPTConfig
from model.gpt import GPT
from model.recipes import Recipe
from training import checkpoint as ckpt
from training import saver as saver_module
from training.checkpoint import BEST, LAST
from training.optim import make_optimizers
from training.run import Run, TrainState
from training.saver import Saver
from utils.distributed import Process
from utils.errors import UserError

ALONE = Process(0, 1, torch.device("cpu"))


@pytest.fixture
def saver(tmp_path):
    torch.manual_seed(0)
    config = train_options(checkpoint_dir=tmp_path, keep_last=2)
    model = GPT(GPTConfig(block_size=8, vocab_size=64, n_layer=1, n_head=1, n_embd=8))
    entries = {"script": "train.py", "tokenizer": "gpt2"}
    optimizers = make_optimizers(model, config, Recipe())
    run = Run(config, ALONE, torch.float32, TrainState(), 0, None)
    run.logger = SimpleNamespace(print=print)
    return Saver(run, model, optimizers, entries)


def save(saver, step):
    saver.run.state.step = step
    saver.save(LAST)


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


def test_a_best_checkpoint_becomes_the_last_of_its_step(saver, tmp_path):
    """What is saved before a validation knows its loss after it."""
    state = saver.run.state
    save(saver, 4)
    assert state.record_validation(2.5)
    saver.save(BEST)
    saver.finish()
    for name in (LAST, "model_step_000004.pt"):
        assert ckpt.load_checkpoint(tmp_path / name)["best_loss"] == 2.5
        assert (tmp_path / name).samefile(tmp_path / BEST)
    state.step = 5
    state.record_validation(2.0)
    saver.save(BEST)  # of a step that is not saved otherwise
    saver.finish()
    assert ckpt.load_checkpoint(tmp_path / LAST)["step"] == 4
    assert not list(tmp_path.glob("*.tmp"))


def test_a_failed_write_leaves_the_run_and_the_file_before_it(saver, tmp_path, monkeypatch, capsys):
    write = saver_module.save_checkpoint

    def fail(path, state):
        if state["step"] in (2, 4):
            raise UserError("the disk is full")
        write(path, state)

    monkeypatch.setattr(saver_module, "save_checkpoint", fail)
    for step, names in (
        (1, [LAST, "model_step_000001.pt"]),
        (2, [LAST, "model_step_000001.pt"]),
        (3, [LAST, "model_step_000001.pt", "model_step_000003.pt"]),  # there is room again
        (5, [LAST, "model_step_000003.pt", "model_step_000005.pt"]),
    ):
        save(saver, step)
        saver.wait()
        assert sorted(path.name for path in tmp_path.iterdir()) == names
        assert ckpt.load_checkpoint(tmp_path / LAST)["step"] == (1 if step == 2 else step)
    notes = capsys.readouterr().out
    assert notes == "the disk is full; the run continues, and the next save tries again\n"
    saver.finish()  # later files made up for the one that failed
    save(saver, 4)
    with pytest.raises(UserError, match="full"):
        saver.finish()
