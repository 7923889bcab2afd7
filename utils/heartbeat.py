"""Heartbeats between processes: a lost one ends the run within a minute, though collectives wait.

Each process increments a counter in a shared store (torchrun's, or that of rank 0). Rank 0 reads
all counters, the others read that of rank 0.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

INTERVAL = 2.0  # seconds between heartbeats
TIMEOUT = 30.0  # seconds without a heartbeat after which a process counts as lost
DONE = "done"  # last value of a process that has ended normally


class HeartbeatMonitor:
    """Sends heartbeats in one thread, which a dead store can block, checks others' in a second."""

    def __init__(self, rank: int, world_size: int, before_exit: Callable[[], None]) -> None:
        # a separate connection: one that waits for a collective would delay heartbeats
        store, _, _ = next(dist.rendezvous("env://", rank, world_size))
        self.store, self.rank = dist.PrefixStore("heartbeat", store), rank
        self.others = [r for r in range(world_size) if r != rank]
        self.watched = self.others if rank == 0 else [0]
        self.before_exit = before_exit
        self.last_seen: dict[int, tuple[str, float]] = {}  # rank -> newest value, when it came
        self.last_exchange = time.monotonic()  # when the store last answered
        self.running = True
        self.store.set(f"rank/{rank}", "0")
        for loop in (self.exchange_loop, self.check_loop):
            threading.Thread(target=loop, daemon=True, name="heartbeat").start()

    def exchange_loop(self) -> None:
        """Send heartbeats and read those of the watched ranks; blocks while the store does."""
        beats = 0
        while self.running:
            beats += 1
            with contextlib.suppress(RuntimeError, OSError):  # check_loop misses the exchange
                self.store.set(f"rank/{self.rank}", str(beats))
                if not self.running:  # stop() was called in between
                    self.store.set(f"rank/{self.rank}", DONE)
                watched = [r for r in self.watched if self.store.check([f"rank/{r}"])]
                values = self.store.multi_get([f"rank/{r}" for r in watched]) if watched else []
                now = self.last_exchange = time.monotonic()
                for rank, value in zip(watched, map(bytes.decode, values), strict=True):
                    if self.last_seen.get(rank, ("", 0.0))[0] != value:
                        self.last_seen[rank] = (value, now)
            time.sleep(INTERVAL)

    def check_loop(self) -> None:
        """End this process, and with it the run, when another one is lost."""
        while self.running:
            time.sleep(INTERVAL)
            reason = self.lost_reason(TIMEOUT)
            if reason and self.running:
                message = f"error on rank {self.rank}: {reason}; continue with --resume auto"
                print(message, file=sys.stderr, flush=True)
                self.before_exit()
                os._exit(2)

    def lost_reason(self, timeout: float) -> str | None:
        """Return a clause naming the ranks without a heartbeat for `timeout` seconds, or None."""
        seen, before = sorted(self.last_seen.copy().items()), time.monotonic() - timeout
        if self.last_exchange < before:
            return f"the machine of rank 0 has not answered for {timeout:.0f} s"
        lost = ", ".join(str(rank) for rank, (value, at) in seen if value != DONE and at < before)
        return f"no heartbeat from rank {lost} for {timeout:.0f} s" if lost else None

    def stop(self) -> None:
        """Stop sending heartbeats and tell the other ranks that this one has ended normally."""
        self.running = False
        with contextlib.suppress(RuntimeError, OSError):
            self.store.set(f"rank/{self.rank}", DONE)
