"""Whether the other processes of a run are still there: who is lost is named, and nobody waits on.

Each process counts up a number in the store that they share (torchrun's, or that of rank 0). Rank 0
looks at all of them, the others at rank 0: a process or a machine that dies without a word, or that
the network no longer reaches, ends the run within a minute, whatever the collectives wait for.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

BEAT = 2.0  # seconds between two counts
LOST = 30.0  # seconds without one after which a process counts as lost
DONE = "done"


def restarts_left() -> bool:
    """Whether torchrun, if it is there, will start the run anew when the network is back."""
    allowed = os.environ.get("TORCHELASTIC_MAX_RESTARTS")
    return allowed is None or int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < int(allowed)


class Watch:
    """Counts and looks, in threads of its own, until `stop`."""

    def __init__(
        self, rank: int, world_size: int, before_exit: Callable[[], None] = lambda: None
    ) -> None:
        # a connection of its own: one that waits for a collective would hold up the counting
        store, _, _ = next(dist.rendezvous("env://", rank, world_size))
        self.store, self.rank = dist.PrefixStore("watch", store), rank
        self.others = [r for r in range(world_size) if r != rank]
        self.watched = self.others if rank == 0 else [0]
        self.before_exit = before_exit
        self.heartbeats = 0  # signs of progress of this process
        self.seen: dict[int, tuple[str, float]] = {}  # rank -> its newest count, since when
        self.exchanged = time.monotonic()  # when the store last answered
        self.running = True
        self.parent = os.getppid()
        self.store.set(self.key(rank), "0 0")
        for work in (self.exchange, self.judge):
            threading.Thread(target=work, daemon=True, name="watch").start()

    def key(self, rank: int) -> str:
        return f"alive/{rank}"

    def heartbeat(self) -> None:
        """Count a sign of progress of this process."""
        self.heartbeats += 1

    def exchange(self) -> None:
        """Counts up and reads the others' counts; hangs for as long as the store does."""
        beats = 0
        while self.running:
            beats += 1
            try:
                self.store.set(self.key(self.rank), f"{beats} {self.heartbeats}")
                if not self.running:  # stop() came in between
                    self.store.set(self.key(self.rank), DONE)
                watched = [r for r in self.watched if self.store.check([self.key(r)])]
                values = self.store.multi_get([self.key(r) for r in watched]) if watched else []
            except (RuntimeError, OSError):  # judge() finds that nothing was exchanged
                time.sleep(BEAT)
                continue
            now = self.exchanged = time.monotonic()
            for rank, value in zip(watched, map(bytes.decode, values), strict=True):
                if self.seen.get(rank, ("", 0.0))[0] != value:
                    self.seen[rank] = (value, now)
            time.sleep(BEAT)

    def judge(self) -> None:
        """Ends the process, and with it the run, when another is lost."""
        while self.running:
            began = time.monotonic()
            time.sleep(BEAT)
            now = time.monotonic()
            if now - began > LOST:  # this process itself was suspended: begin to look anew
                self.exchanged, self.seen = now, {}
            lost = self.lost(LOST)
            # killed, torchrun leaves its processes behind
            if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != self.parent:
                lost = "the launcher of this process is gone"
            if lost and self.running:
                self.end(lost)

    def end(self, lost: str) -> None:
        """Ends this process with a sentence."""
        end = "the run ends here and goes on with --resume auto"
        print(f"error on rank {self.rank}: {lost}; {end}", file=sys.stderr, flush=True)
        self.before_exit()
        if time.monotonic() - self.exchanged > LOST and not restarts_left():
            # torchrun waits for the same store until TCP gives up, a quarter of an hour
            os.kill(self.parent, signal.SIGKILL)
        os._exit(2)

    def lost(self, seconds: float) -> str:
        """Which processes have not been heard of for so long, as a clause; empty if none."""
        now = time.monotonic()
        if now - self.exchanged > seconds:
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            return f"the machine of rank 0 ({address}) has not answered for {seconds:.0f} s"
        silent = [
            rank
            for rank, (value, since) in sorted(self.seen.copy().items())
            if value != DONE and now - since > seconds
        ]
        return (
            f"rank {', '.join(map(str, silent))} has not been heard of for {seconds:.0f} s"
            if silent
            else ""
        )

    def explain(self) -> str:
        """After a collective failed: who is lost or behind, after looking for a few beats."""
        self.watched = self.others
        time.sleep(4 * BEAT)
        lost = self.lost(3 * BEAT)
        if lost:
            return lost
        ticks = {r: int(v.split()[1]) for r, (v, _) in self.seen.copy().items() if v != DONE}
        behind = [r for r, n in sorted(ticks.items()) if n < max(self.heartbeats, *ticks.values())]
        if behind:
            return f"rank {', '.join(map(str, behind))} is alive but behind"
        return "all processes are alive"

    def stop(self) -> None:
        """This process has done its work and may leave."""
        self.running = False
        try:
            self.store.set(self.key(self.rank), DONE)
        except (RuntimeError, OSError):
            pass
