import threading
import time

import pytest
import torch

from training import checkpoint as ckpt
from training import saver as saver_module
from training.checkpoint import CheckpointError
from training.saver import Saver

REST = {
    "tokens": 0,
    "best_loss": 1.0,
    "seed": 1,
    "run_id": "a",
    "model_config": {},
    "tokenizer": "bytes",
    "train_tokens": 0,
    "train_config": {},
    "guard": {},
}


@pytest.fixture
def said():
    return []


@pytest.fixture
def saver(tmp_path, said, monkeypatch):
    monkeypatch.setattr(saver_module, "PAUSES", (0.01, 0.01))
    return Saver(tmp_path, keep_last=2, say=said.append)


def save(saver, step, value=1.0):
    x = torch.full((4,), value)
    saver.save(ckpt.LAST, {"w": x}, {"w": {"exp_avg": x}}, step=step, **REST)


def test_a_save_comes_back_before_the_file_is_written(saver, tmp_path, monkeypatch):
    written, go = ckpt.save_checkpoint, threading.Event()

    def late(path, state):
        go.wait(10)
        written(path, state)

    monkeypatch.setattr(ckpt, "save_checkpoint", late)
    save(saver, 1)
    assert not (tmp_path / ckpt.LAST).exists()
    go.set()
    saver.close()
    state = ckpt.load_checkpoint(tmp_path / ckpt.LAST)
    assert (state["model"]["w"] == 1).all() and (state["optimizer"]["w"]["exp_avg"] == 1).all()


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
    saver.close()
    assert most == [1] * 5
    assert [p.name for p in ckpt.numbered(tmp_path)] == [
        "model_step_000004.pt",
        "model_step_000005.pt",
    ]


def failing(times):
    written, left = ckpt.save_checkpoint, [times]

    def write(path, state):
        if left[0]:
            left[0] -= 1
            raise CheckpointError("the disk is full")
        written(path, state)

    return write


def test_a_failed_write_is_told_and_tried_again(saver, said, tmp_path, monkeypatch):
    monkeypatch.setattr(ckpt, "save_checkpoint", failing(2))
    save(saver, 3)
    saver.close()
    assert len(said) == 2 and all("the disk is full; trying again in" in line for line in said)
    assert ckpt.load_checkpoint(tmp_path / ckpt.LAST)["step"] == 3


def test_a_write_that_stays_failed_leaves_the_run_and_the_file_before_it(
    saver, said, tmp_path, monkeypatch
):
    save(saver, 1)
    saver.wait()
    monkeypatch.setattr(ckpt, "save_checkpoint", failing(4))
    save(saver, 2)  # fails at every try
    saver.wait()
    assert said[-1].endswith("again at the next save")
    assert ckpt.load_checkpoint(tmp_path / ckpt.LAST)["step"] == 1
    save(saver, 3)  # fails once, then there is room
    assert saver.close() is None
    assert ckpt.load_checkpoint(tmp_path / ckpt.LAST)["step"] == 3
    monkeypatch.setattr(ckpt, "save_checkpoint", failing(3))
    save(saver, 4)
    assert "full" in str(saver.close())
