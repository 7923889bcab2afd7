import itertools
import threading
import time

import pytest
import torch.distributed as dist

from utils import heartbeat
from utils.heartbeat import DONE, HeartbeatMonitor, restarts_left


@pytest.fixture
def store(monkeypatch):
    """The store of one machine, and short intervals."""
    store = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda *args: iter([(store, 0, 3)]))
    monkeypatch.setattr(heartbeat, "INTERVAL", 0.1)
    monkeypatch.setattr(heartbeat, "TIMEOUT", 1e9)  # nothing ends this process
    return dist.PrefixStore("heartbeat", store)


def test_who_is_silent_is_lost_and_who_is_done_is_not(store):
    monitor = HeartbeatMonitor(0, 3)
    store.set("rank/2", "1 0")
    for beat in range(12):
        store.set("rank/1", f"{beat} 0")
        time.sleep(0.1)
    assert monitor.lost_reason(0.8) == "no heartbeat from rank 2 for 1 s"
    store.set("rank/2", DONE)
    time.sleep(0.9)
    assert monitor.lost_reason(0.6) == "no heartbeat from rank 1 for 1 s"
    monitor.stop()
    assert store.get("rank/0").decode() == DONE


def test_other_ranks_look_at_rank_0_alone(store):
    monitor = HeartbeatMonitor(2, 3)
    store.set("rank/0", "1 0")
    store.set("rank/1", "1 0")
    time.sleep(1.2)
    assert monitor.lost_reason(0.8) == "no heartbeat from rank 0 for 1 s"
    monitor.stop()


def test_the_others_wait_for_rank_0_as_often_as_it_is_asked(store):
    monitors = [HeartbeatMonitor(rank, 3) for rank in (0, 1)]
    order = []

    def other():
        for turn in range(3):
            monitors[1].wait_for_main()
            order.append(turn)

    thread = threading.Thread(target=other)
    thread.start()
    for turn in range(3):
        time.sleep(0.2)
        assert order == list(range(turn))  # it has not gone ahead
        monitors[0].wait_for_main()
    thread.join(5)
    assert order == [0, 1, 2] and not thread.is_alive()
    for monitor in monitors:
        monitor.stop()


def test_a_store_that_does_not_answer_is_the_machine_of_rank_0(store, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "node7")
    monitor = HeartbeatMonitor(1, 3)

    def gone():
        raise dist.DistNetworkError("connection reset")

    monitor.store = Counting(monitor.store, gone)
    time.sleep(1.2)
    assert "the machine of rank 0 (node7:" in monitor.lost_reason(0.8)
    monitor.stop()


def test_after_a_failed_collective_who_is_behind_is_named(store):
    monitor = HeartbeatMonitor(0, 3)
    for _ in range(5):
        monitor.progress += 1
    others, beats = {1: 5, 2: 4}, itertools.count()

    def all_count():
        for rank, steps in others.items():
            store.set(f"rank/{rank}", f"{next(beats)} {steps}")

    monitor.store = Counting(monitor.store, all_count)
    assert monitor.explain_failed_collective() == "rank 2 is alive but behind"
    others[2] = 5
    assert monitor.explain_failed_collective() == "all processes are alive"
    monitor.stop()


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
