"""Processes: the only reader of the launcher's RANK, WORLD_SIZE, ..."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from utils.devices import keep_freed_memory, pick_device
from utils.errors import UserError
from utils.heartbeat import HeartbeatMonitor

Item = TypeVar("Item")
# of a collective: longer than a download or a slow disk; lost processes are found by heartbeats
TIMEOUT = timedelta(hours=1)
monitor: HeartbeatMonitor | None = None  # set while there is a process group


MESSAGE = b"\nstopping soon, then saving; again to stop now without saving\n"


class Stopped(Exception):
    """A process got a signal: raised on all processes in the same place, and caught by the loop of
    a run, which then saves. A step that it interrupts is not taken."""


class StopSignal:
    """Remembers the first SIGTERM, SIGINT, SIGUSR1 or, without nohup, SIGHUP; a second one exits at
    once. With `announce`, the first prints what will happen."""

    def __init__(self, announce: bool) -> None:
        self.announce = announce
        self.signal, self.when = 0, 0.0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self.receive)

    def receive(self, number: int, frame: object) -> None:
        if self.signal and time.monotonic() - self.when > 1:  # torchrun forwards each twice
            raise SystemExit(128 + number)
        if not self.signal:
            self.signal, self.when = number, time.monotonic()
            if self.announce:  # not print: a signal can come while another print has the buffer
                with contextlib.suppress(OSError):  # nobody reads it, as after Ctrl-C to `| tee`
                    os.write(2, MESSAGE)


@dataclass(frozen=True)
class Process:
    """One of `world_size` processes that train together, and its device."""

    rank: int
    world_size: int
    device: torch.device
    nodes: int = 1
    """Machines with several processes each; 1 if every machine has a single process."""
    stop: StopSignal | None = None
    """Signal that ends a run between two batches; None in other scripts, which just end."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def print(self, message: str) -> None:
        """Print a message on the main process."""
        if self.is_main:
            print(message, flush=True)

    def to_device(self, batches: Iterator[tuple]) -> Iterator[tuple]:
        """Yield batches of NumPy arrays as tensors on the device; copies to a GPU overlap."""
        for arrays in batches:
            yield tuple(self.copy(torch.from_numpy(x)) for x in arrays)

    def copy(self, x: Tensor) -> Tensor:
        """Return a tensor of the CPU on the device, without waiting for a copy to a GPU."""
        if self.device.type == "cuda":
            return x.pin_memory().to(self.device, non_blocking=True)
        return x.to(self.device)

    def share(self, items: Sequence[Item]) -> Iterator[tuple[int, Item, bool]]:
        """Yield index, item and whether it counts, for this process's share of items, round-robin.
        Every process gets equally many, as forward passes can be collectives: where items are left
        over, the last one comes again and does not count. Raises Stopped between two items."""
        for turn in range(0, len(items), self.world_size):
            self.end_if_stopped()
            mine = turn + self.rank
            yield mine, items[min(mine, len(items) - 1)], mine < len(items)

    # every process must call these

    def end_if_stopped(self) -> None:
        """Raise Stopped on every process if one of them got a signal."""
        if self.stop is not None and not self.all_agree(self.stop.signal == 0):
            raise Stopped

    def all_done(self, done: bool) -> bool:
        """Return True if every process is done with its texts; raise Stopped after a signal. Called
        every few tokens of a generated text."""
        self.end_if_stopped()
        return self.all_agree(done)

    def all_agree(self, condition: bool) -> bool:
        """Return True if the condition holds on every process."""
        return self.min(int(condition)) == 1

    def all_equal(self, number: int) -> bool:
        """Return True if every process has the same number, below 2^63."""
        return self.min(number) == -self.min(-number)

    def min(self, number: int) -> int:
        """Return the least of the processes' numbers."""
        if self.world_size == 1:
            return number
        least = torch.tensor(number, device=self.device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over all processes in place, and return it."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def sum_float64(self, values: Tensor) -> Tensor:
        """Return the sum of a float64 CPU tensor over all processes, on the CPU."""
        if self.world_size > 1 and self.device.type == "cuda":  # as NCCL needs it
            return self.sum(values.to(self.device)).cpu()
        return self.sum(values)


def launched(name: str, default: int = 0) -> int:
    """Return a number that the launcher has set in the environment."""
    return int(os.environ.get(name, default))


def num_nodes(default_per_node: int = 1) -> int:
    """Return the number of machines with several processes each, else 1. `default_per_node` is for
    a launcher that does not say how many processes a machine has."""
    world, per_node = launched("WORLD_SIZE", 1), launched("LOCAL_WORLD_SIZE", default_per_node)
    return world // per_node if per_node > 1 and world % per_node == 0 else 1


def start(
    device: str, before_exit: Callable[[], None] = lambda: None, *, catch_signals: bool = False
) -> Process:
    """Join the process group if torchrun started this process: NCCL on CUDA, gloo elsewhere.
    `before_exit` runs when the loss of another process ends this one."""
    global monitor
    rank, local_rank, world = launched("RANK"), launched("LOCAL_RANK"), launched("WORLD_SIZE", 1)
    stop = StopSignal(announce=rank == 0) if catch_signals else None
    process = Process(rank, world, pick_device(device, local_rank), num_nodes(), stop)
    if world > 1 and (process.device.type == "mps" or ":" in device):
        raise UserError(f"--device {device} is one device, which several processes cannot share")
    if process.device.type == "cuda":
        torch.cuda.set_device(process.device)
    elif process.device.type == "cpu":
        keep_freed_memory()
    if world > 1 and not dist.is_initialized():
        monitor = HeartbeatMonitor(rank, world, before_exit)
        backend, gpu = ("gloo", None) if process.device.type == "cpu" else ("nccl", process.device)
        dist.init_process_group(backend, timeout=TIMEOUT, device_id=gpu)
    return process


def explain(error: Exception) -> str | None:
    """Return a sentence for a collective that failed because a process was lost, else None."""
    if monitor is None or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
        return None
    return f"another process has ended ({error!s:.200}); continue with --resume auto"


def stop() -> None:
    """Tell the other processes that this one has ended normally, and leave the process group."""
    if monitor is not None:
        # gloo's stays: destroying it can deadlock on the interpreter lock with one of its threads
        if dist.get_backend() == "nccl":
            dist.destroy_process_group()  # waits for the other processes, so heartbeats go on
        monitor.stop()


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process can still allocate: of a GPU, or its share of the host."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    with contextlib.suppress(OSError, TypeError):  # not Linux
        available = re.search(r"MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text())
        free = 1024 * int(available[1])
    return free // launched("LOCAL_WORLD_SIZE", launched("WORLD_SIZE", 1))
