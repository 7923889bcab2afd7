import time

import pytest
import torch.distributed as dist

from utils import heartbeat
from utils.heartbeat import DONE, HeartbeatMonitor


@pytest.fixture
def store(monkeypatch):
    """The store of one machine, and short intervals."""
    store = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda *args: iter([(store, 0, 3)]))
    monkeypatch.setattr(heartbeat, "INTERVAL", 0.1)
    monkeypatch.setattr(heartbeat, "TIMEOUT", 1e9)  # nothing ends this process
    return dist.PrefixStore("heartbeat", store)


def monitor(rank):
    return HeartbeatMonitor(rank, 3, before_exit=lambda: None)


def test_who_is_silent_is_lost_and_who_is_done_is_not(store):
    main = monitor(0)
    store.set("rank/2", "1")
    for beat in range(12):
        store.set("rank/1", str(beat))
        time.sleep(0.1)
    assert main.lost_reason(0.8) == "no heartbeat from rank 2 for 1 s"
    store.set("rank/2", DONE)
    time.sleep(0.9)
    assert main.lost_reason(0.6) == "no heartbeat from rank 1 for 1 s"
    main.stop()
    assert store.get("rank/0").decode() == DONE


def test_other_ranks_look_at_rank_0_alone(store):
    other = monitor(2)
    store.set("rank/0", "1")
    store.set("rank/1", "1")
    time.sleep(1.2)
    assert other.lost_reason(0.8) == "no heartbeat from rank 0 for 1 s"
    other.stop()


def test_a_store_that_does_not_answer_is_the_machine_of_rank_0(store):
    other = monitor(1)

    class Gone:
        def __getattr__(self, name):
            raise dist.DistNetworkError("connection reset")

    other.store = Gone()
    time.sleep(1.2)
    assert "the machine of rank 0 has not answered" in other.lost_reason(0.8)
    other.stop()
