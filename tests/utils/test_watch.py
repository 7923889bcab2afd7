import itertools
import time

import pytest
import torch.distributed as dist

from utils import watch as watch_module
from utils.watch import DONE, Watch, restarts_left


@pytest.fixture
def store(monkeypatch):
    """The store of one machine, and a quick heart."""
    store = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda *args: iter([(store, 0, 3)]))
    monkeypatch.setattr(watch_module, "BEAT", 0.1)
    monkeypatch.setattr(watch_module, "LOST", 1e9)  # nothing ends this process
    return dist.PrefixStore("watch", store)


def test_who_is_silent_is_lost_and_who_is_done_is_not(store):
    watch = Watch(0, 3)
    store.set("alive/2", "1 0")
    for beat in range(12):
        store.set("alive/1", f"{beat} 0")
        time.sleep(0.1)
    assert watch.lost(0.8) == "rank 2 has not been heard of for 1 s"
    store.set("alive/2", DONE)
    time.sleep(0.9)
    assert watch.lost(0.6) == "rank 1 has not been heard of for 1 s"
    watch.stop()
    assert store.get("alive/0").decode() == DONE


def test_other_ranks_look_at_rank_0_alone(store):
    watch = Watch(2, 3)
    store.set("alive/0", "1 0")
    store.set("alive/1", "1 0")
    time.sleep(1.2)
    assert watch.lost(0.8) == "rank 0 has not been heard of for 1 s"
    watch.stop()


def test_a_store_that_does_not_answer_is_the_machine_of_rank_0(store, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "node7")
    watch = Watch(1, 3)

    def gone():
        raise dist.DistNetworkError("connection reset")

    watch.store = Counting(watch.store, gone)
    time.sleep(1.2)
    assert "the machine of rank 0 (node7:" in watch.lost(0.8)
    watch.stop()


def test_after_a_failed_collective_who_is_behind_is_named(store):
    watch = Watch(0, 3)
    for _ in range(5):
        watch.heartbeat()
    others, beats = {1: 5, 2: 4}, itertools.count()

    def all_count():
        for rank, steps in others.items():
            store.set(f"alive/{rank}", f"{next(beats)} {steps}")

    watch.store = Counting(watch.store, all_count)
    assert watch.explain() == "rank 2 is alive but behind"
    others[2] = 5
    assert watch.explain() == "all processes are alive"
    watch.stop()


class Counting:
    """A store on which something happens whenever it is asked: the other ranks count up."""

    def __init__(self, store, count):
        self.inner, self.count = store, count

    def __getattr__(self, name):
        self.count()
        return getattr(self.inner, name)


def test_restarts_left_follow_torchrun(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS", raising=False)
    assert restarts_left()  # no launcher that could hang
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    for count, left in (("0", True), ("1", True), ("2", False)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        assert restarts_left() == left
