import threading
import time

import pytest
import torch
from training.checkpoint_folder import LAST, numbered_checkpoints

from config import TrainConfig
from model.config import GPTConfig
from model.gpt import GPT
from training import checkpoint as ckpt
from training import saver as saver_module
from training.guard import Guard
from training.optim import make_optimizers
from training.saver import Saver
from training.state import TrainState
from utils.distributed import Process
from utils.errors import UserError

ALONE = Process(0, 0, 1, torch.device("cpu"))


@pytest.fixture
def said():
    return []


@pytest.fixture
def saver(tmp_path, said, monkeypatch):
    monkeypatch.setattr(saver_module, "PAUSES", (0.01, 0.01))
    torch.manual_seed(0)
    config = TrainConfig(checkpoint_dir=tmp_path, keep_last=2)
    model = GPT(GPTConfig(block_size=8, vocab_size=64, n_layer=1, n_head=1, n_embd=8))
    (optimizer,) = make_optimizers(model, config)
    about = {"tokenizer": "gpt2", "train_tokens": 100}
    return Saver(config, model, [optimizer], about, ALONE, said.append)


def save(saver, step):
    state = TrainState(Guard(None, {}), step=step)
    saver.save(LAST, state)


def test_a_save_comes_back_before_the_file_is_written(saver, tmp_path, monkeypatch):
    written, go = ckpt.save_checkpoint, threading.Event()

    def late(path, state):
        go.wait(10)
        written(path, state)

    monkeypatch.setattr(ckpt, "save_checkpoint", late)
    save(saver, 1)
    assert not (tmp_path / LAST).exists()
    go.set()
    saver.finish()
    state = ckpt.load_checkpoint(tmp_path / LAST)
    weights = saver.model.state_dict()
    for name, high in state["model"].items():
        assert torch.equal(ckpt.join_float32(high, state["model_low"][name]), weights[name])
    assert state["step"] == 1 and state["tokenizer"] == "gpt2"


def test_at_most_one_write_is_in_flight_and_none_is_lost(saver, tmp_path, monkeypatch):
    written, inside, most = ckpt.save_checkpoint, [], []

    def slow(path, state):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.05)
        written(path, state)
        inside.pop()

    monkeypatch.setattr(ckpt, "save_checkpoint", slow)
    for step in range(1, 6):
        save(saver, step)
    saver.finish()
    assert most == [1] * 5
    assert [p.name for p in numbered_checkpoints(tmp_path)] == [
        "model_step_000004.pt",
        "model_step_000005.pt",
    ]


def failing(times):
    written, left = ckpt.save_checkpoint, [times]

    def write(path, state):
        if left[0]:
            left[0] -= 1
            raise UserError("the disk is full")
        written(path, state)

    return write


def test_a_failed_write_is_told_and_tried_again(saver, said, tmp_path, monkeypatch):
    monkeypatch.setattr(ckpt, "save_checkpoint", failing(2))
    save(saver, 3)
    saver.finish()
    assert len(said) == 2 and all("the disk is full; trying again in" in line for line in said)
    assert ckpt.load_checkpoint(tmp_path / LAST)["step"] == 3


def test_a_write_that_stays_failed_leaves_the_run_and_the_file_before_it(
    saver, said, tmp_path, monkeypatch
):
    save(saver, 1)
    saver.wait()
    monkeypatch.setattr(ckpt, "save_checkpoint", failing(4))
    save(saver, 2)  # fails at every try
    saver.wait()
    assert said[-1].endswith("again at the next save")
    assert ckpt.load_checkpoint(tmp_path / LAST)["step"] == 1
    save(saver, 3)  # fails once, then there is room
    saver.finish()
    assert ckpt.load_checkpoint(tmp_path / LAST)["step"] == 3
    monkeypatch.setattr(ckpt, "save_checkpoint", failing(3))
    save(saver, 4)
    with pytest.raises(UserError, match="full"):
        saver.finish()


def test_a_folder_that_is_moved_is_not_made_anew(saver, said, tmp_path):
    folder, moved = tmp_path / "run", tmp_path / "moved"
    folder.mkdir()
    saver.config.checkpoint_dir = folder
    save(saver, 1)
    saver.wait()
    folder.rename(moved)
    save(saver, 2)
    with pytest.raises(UserError, match=r"run was moved or removed; move it back$"):
        saver.finish()
    assert len(said) == 3 and not folder.exists()
    moved.rename(folder)
    save(saver, 3)
    saver.finish()
    assert ckpt.load_checkpoint(folder / LAST)["step"] == 3


def test_pytorch_s_error_of_a_full_disk_is_explained(saver, tmp_path, monkeypatch):
    def save(state, file):
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(UserError, match="the file is too large .* or the disk is full$"):
        ckpt.save_checkpoint(tmp_path / LAST, {"model": {}, "model_low": {}, "optimizer": {}})
