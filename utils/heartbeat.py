"""Heartbeats between the processes of a run, which end it when a process is lost.

Each process increments a counter in a shared store (torchrun's, or that of rank 0). Rank 0 reads
all counters, the others read that of rank 0. A process or machine that dies, or that the network no
longer reaches, ends the run within a minute, even while collectives wait for it.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

INTERVAL = 2.0  # seconds between heartbeats
TIMEOUT = 30.0  # seconds without a heartbeat after which a process counts as lost
DONE = "done"  # last value of a process that has ended normally


def restarts_left() -> bool:
    """Return False if torchrun has no restarts left."""
    allowed = os.environ.get("TORCHELASTIC_MAX_RESTARTS")
    return allowed is None or int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < int(allowed)


class HeartbeatMonitor:
    """Sends heartbeats and checks those of other ranks in background threads, until `stop`."""

    def __init__(
        self, rank: int, world_size: int, before_exit: Callable[[], None] = lambda: None
    ) -> None:
        # a separate connection: one that waits for a collective would delay heartbeats
        store, _, _ = next(dist.rendezvous("env://", rank, world_size))
        self.store, self.rank = dist.PrefixStore("heartbeat", store), rank
        self.others = [r for r in range(world_size) if r != rank]
        self.watched = self.others if rank == 0 else [0]
        self.before_exit = before_exit
        self.progress = 0  # incremented by the training loop
        self.last_seen: dict[int, tuple[str, float]] = {}  # rank -> newest value, when it came
        self.last_exchange = time.monotonic()  # when the store last answered
        self.waits = 0  # calls of wait_for_main
        self.running = True
        self.parent = os.getppid()
        self.store.set(f"rank/{rank}", "0 0")
        for loop in (self.exchange_loop, self.check_loop):
            threading.Thread(target=loop, daemon=True, name="heartbeat").start()

    def exchange_loop(self) -> None:
        """Send heartbeats and read those of the watched ranks; blocks while the store does."""
        beats = 0
        while self.running:
            beats += 1
            try:
                self.store.set(f"rank/{self.rank}", f"{beats} {self.progress}")
                if not self.running:  # stop() was called in between
                    self.store.set(f"rank/{self.rank}", DONE)
                watched = [r for r in self.watched if self.store.check([f"rank/{r}"])]
                values = self.store.multi_get([f"rank/{r}" for r in watched]) if watched else []
                now = self.last_exchange = time.monotonic()
                for rank, value in zip(watched, map(bytes.decode, values), strict=True):
                    if self.last_seen.get(rank, ("", 0.0))[0] != value:
                        self.last_seen[rank] = (value, now)
            except (RuntimeError, OSError):  # check_loop notices the missing exchange
                pass
            time.sleep(INTERVAL)

    def check_loop(self) -> None:
        """End this process, and with it the run, when another process or the launcher is lost."""
        while self.running:
            began = time.monotonic()
            time.sleep(INTERVAL)
            now = time.monotonic()
            if now - began > TIMEOUT:  # this process was suspended: forget old heartbeats
                self.last_exchange, self.last_seen = now, {}
            reason = self.lost_reason(TIMEOUT)
            # a killed torchrun leaves its processes behind
            if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != self.parent:
                reason = "the launcher of this process has ended"
            if reason and self.running:
                self.end_process(f"{reason}; this process ends: continue with --resume auto")

    def end_process(self, message: str) -> None:
        """Print the message and exit with code 2."""
        print(f"error on rank {self.rank}: {message}", file=sys.stderr, flush=True)
        self.before_exit()
        if time.monotonic() - self.last_exchange > TIMEOUT and not restarts_left():
            # torchrun waits for the same store until TCP times out, a quarter of an hour later
            os.kill(self.parent, signal.SIGKILL)
        os._exit(2)

    def lost_reason(self, timeout: float) -> str | None:
        """Return a clause naming the ranks without a heartbeat for `timeout` seconds, or None."""
        now = time.monotonic()
        if now - self.last_exchange > timeout:
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            return f"the machine of rank 0 ({address}) has not answered for {timeout:.0f} s"
        seen = sorted(self.last_seen.copy().items())
        lost = ", ".join(str(r) for r, (value, at) in seen if value != DONE and now - at > timeout)
        return f"no heartbeat from rank {lost} for {timeout:.0f} s" if lost else None

    def explain_failed_collective(self) -> str:
        """Watch all ranks for a few heartbeats and return which are lost or behind, as a clause."""
        self.watched = self.others
        time.sleep(4 * INTERVAL)
        if reason := self.lost_reason(3 * INTERVAL):
            return reason
        seen = sorted(self.last_seen.copy().items())
        progress = {rank: int(value.split()[1]) for rank, (value, _) in seen if value != DONE}
        most = max([self.progress, *progress.values()])
        behind = ", ".join(str(rank) for rank, n in progress.items() if n < most)
        return f"rank {behind} is alive but behind" if behind else "all processes are alive"

    def wait_for_main(self) -> None:
        """Wait until rank 0 makes the same call, its first, second, ...; heartbeats go on."""
        self.waits += 1
        if self.rank == 0:
            self.store.set(f"main/{self.waits}", "")
        pause = 0.002
        while not self.store.check([f"main/{self.waits}"]):
            time.sleep(pause)
            pause = min(2 * pause, 1.0)  # many ranks share one store

    def stop(self) -> None:
        """Stop sending heartbeats and tell the other ranks that this one has ended normally."""
        self.running = False
        with contextlib.suppress(RuntimeError, OSError):
            self.store.set(f"rank/{self.rank}", DONE)
