"""Processes: the only reader of the launcher's RANK, WORLD_SIZE, ..."""

import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from utils import malloc
from utils.devices import pick_device
from utils.errors import UserError
from utils.heartbeat import HeartbeatMonitor

Item = TypeVar("Item")
TIMEOUT = timedelta(minutes=10)  # of a collective: longer than a download or a slow disk
PATIENCE = 15  # seconds of waiting for other processes before that is said
CGROUPS = Path("/sys/fs/cgroup")
monitor: HeartbeatMonitor | None = None  # set while there is a process group


@dataclass(frozen=True)
class Process:
    """One of `world_size` processes that train together, and its device."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    nodes: int = 1
    """Machines with several processes each; 1 if every machine has a single process."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def to_device(self, batches: Iterator[tuple]) -> Iterator[tuple]:
        """Yield batches of NumPy arrays as tensors on the device; copies to a GPU overlap."""
        for arrays in batches:
            tensors = [torch.from_numpy(x) for x in arrays]
            if self.device.type == "cuda":
                tensors = [x.pin_memory().to(self.device, non_blocking=True) for x in tensors]
            yield tuple(x.to(self.device) for x in tensors)

    def share(self, items: Sequence[Item]) -> Iterator[tuple[int, Item, bool]]:
        """Yield index, item and whether it counts, for this process's share of items, round-robin.

        Every process gets equally many, as forward passes can be collectives: where items are left
        over, the last one comes again and does not count.
        """
        for turn in range(0, len(items), self.world_size):
            mine = turn + self.rank
            yield mine, items[min(mine, len(items) - 1)], mine < len(items)

    # every process must call these

    def wait_for_main(self) -> None:
        """Wait for the main process to get here, however long its download or its disk takes: a
        collective would time out."""
        if monitor is not None:
            monitor.wait_for_main()

    def all_agree(self, condition: bool) -> bool:
        """Return True if the condition holds on every process."""
        count = self.sum(torch.tensor(int(condition), device=self.device))
        return count.item() == self.world_size

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over all processes in place, and return it."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def sum_float64(self, values: Tensor) -> Tensor:
        """Return the sum of a float64 CPU tensor over all processes, on the CPU."""
        on_gpu = self.device.type == "cuda"  # NCCL needs it; Apple's GPUs have no float64
        return self.sum(values.to(self.device) if on_gpu else values).cpu()

    def min_max(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the elementwise minimum and maximum of a tensor over all processes."""
        both = torch.stack([values, -values])
        if self.world_size > 1:
            dist.all_reduce(both, dist.ReduceOp.MIN)
        return both[0], -both[1]


def launched(name: str, default: int) -> int:
    """Return a number that the launcher has set in the environment; UserError if it is none."""
    value = os.environ.get(name, str(default))
    if not value.isdigit() or int(value) < default:
        raise UserError(f"{name}={value} in the environment is not a number from {default} on")
    return int(value)


def is_main() -> bool:
    """Return True in a single process and in the first of those that the launcher started."""
    return os.environ.get("RANK", "0") == "0"


def world_size() -> int:
    """Return the number of processes that the launcher starts."""
    return launched("WORLD_SIZE", 1)


def check_launch() -> None:
    """Raise UserError for an environment that is not of one launcher, as one left by another."""
    names = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    lacking = [name for name in names if name not in os.environ] if world_size() > 1 else []
    if lacking or launched("RANK", 0) >= world_size():
        found = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ}
        raise UserError(
            f"the environment has {' '.join(f'{k}={v}' for k, v in found.items())}"
            f"{f', but no {lacking[0]}' if lacking else ''}: start with torchrun, or unset RANK, "
            "LOCAL_RANK and WORLD_SIZE"
        )


def num_nodes(default_per_node: int = 1) -> int:
    """Return the number of machines, 1 if each has a single process. `default_per_node` is for a
    launcher that does not say how many processes a machine has."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", default_per_node))
    return world_size() // per_node if per_node > 1 and world_size() % per_node == 0 else 1


def start(device: str, before_exit: Callable[[], None] = lambda: None) -> Process:
    """Join the process group if torchrun started this process: NCCL on CUDA, gloo elsewhere.

    `before_exit` runs when the loss of another process ends this one.
    """
    global monitor
    check_launch()
    rank, local_rank = launched("RANK", 0), launched("LOCAL_RANK", 0)
    process = Process(rank, local_rank, world_size(), pick_device(device, local_rank), num_nodes())
    if process.world_size > 1 and (process.device.type == "mps" or ":" in device):
        raise UserError(
            f"--device {device} is one device, which {process.world_size} processes cannot share; "
            "start without torchrun, or with --device cuda or cpu"
        )
    if process.device.type == "cpu":
        malloc.map_large_tensors()
    if process.device.type == "cuda":
        torch.cuda.set_device(process.device)
    if process.world_size > 1 and not dist.is_initialized():
        with say_waiting(process):
            monitor = HeartbeatMonitor(rank, process.world_size, before_exit)
            if process.device.type == "cuda":
                dist.init_process_group("nccl", timeout=TIMEOUT, device_id=process.device)
            else:
                dist.init_process_group("gloo", timeout=TIMEOUT)
    return process


@contextlib.contextmanager
def say_waiting(process: Process) -> Iterator[None]:
    """Print that a machine waits for others, if that takes PATIENCE seconds."""
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    text = (
        f"waiting up to {TIMEOUT.seconds // 60} minutes for {process.world_size} processes to meet "
        f"at {address}; is one not started?"
    )
    timer = threading.Timer(PATIENCE, lambda: print(text, file=sys.stderr, flush=True))
    timer.daemon = True
    if process.local_rank == 0:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def count_progress() -> None:
    """Tell the other ranks that this one is not stuck; called twice in each micro-step."""
    if monitor is not None:
        monitor.progress += 1


def explain_failed_collective(error: RuntimeError) -> str | None:
    """Return a sentence that explains a failed collective, None for any other error."""
    collective = isinstance(error, dist.DistError) or "gloo" in str(error)
    if monitor is None or not collective:
        return None
    reason, first_line = monitor.explain_failed_collective(), str(error).splitlines()[0]
    hint = ""
    if "connectFullMesh" in first_line and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        hint = "; restarts by torchrun need TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    return f"a collective failed: {reason} ({first_line}){hint}; continue with --resume auto"


def stop() -> None:
    """Tell the other processes that this one has ended normally, and leave the process group."""
    if monitor is not None:
        # gloo's stays: destroying it can deadlock on the interpreter lock with one of its threads
        if dist.get_backend() == "nccl":
            dist.destroy_process_group()  # waits for the other processes, so heartbeats go on
        monitor.stop()


def free_memory(device: torch.device) -> int:
    """Return the bytes of memory that this process can still allocate on the device.

    On a CPU this is its share of what the machine, or the container's limit, has left.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    with contextlib.suppress(OSError, TypeError):  # not Linux
        available = re.search(r"MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text())
        free = 1024 * int(available[1])
    with contextlib.suppress(OSError, TypeError):  # no control groups, or version 1
        own = re.search(r"^0::/(.*)", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
        for group in (CGROUPS / own[1], *(CGROUPS / own[1]).parents):
            limit = group / "memory.max"
            if limit.is_file() and (value := limit.read_text().strip()) != "max":
                taken = re.search(r"^anon (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)
                free = min(free, int(value) - int(taken[1]))
    return free // int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))
