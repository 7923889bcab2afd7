"""Processes, devices and dtypes: the one reader of RANK, LOCAL_RANK and WORLD_SIZE."""

import contextlib
import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from utils import malloc
from utils.errors import UserError
from utils.watch import Watch

TIMEOUT = timedelta(minutes=10)  # of a collective: longer than a download or a slow disk
CGROUPS = Path("/sys/fs/cgroup")
watch: Watch | None = None  # while there is a process group


class DeviceError(UserError):
    """A device that is not on this machine, or that cannot be used in this way."""


@dataclass(frozen=True)
class Process:
    """One of `world_size` processes that train together, and its device."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    nodes: int = 1
    """Machines with several processes each; 1 too where every machine has one process."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def all(self, holds: bool) -> bool:
        """Whether something holds on every process; every process must call it."""
        return self.sum(torch.tensor(int(holds), device=self.device)).item() == self.world_size

    def to_device(self, batches: Iterator[tuple]) -> Iterator[tuple]:
        """NumPy batches as tensors on the device; copies to a GPU do not hold up the caller."""
        for arrays in batches:
            tensors = [torch.from_numpy(x) for x in arrays]
            if self.device.type == "cuda":
                tensors = [x.pin_memory().to(self.device, non_blocking=True) for x in tensors]
            yield tuple(x.to(self.device) for x in tensors)

    def sum(self, values: Tensor) -> Tensor:
        """The sum of a tensor over all processes, in place; every process must call it."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def extremes(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the greatest of each value over all processes, which must all call it."""
        both = torch.cat([values, -values])
        if self.world_size > 1:
            dist.all_reduce(both, dist.ReduceOp.MIN)
        least, most = both.chunk(2)
        return least, -most

    def sum_float64(self, values: Tensor) -> Tensor:
        """The same for a float64 tensor on the CPU: NCCL reduces on the GPU, Apple's has none."""
        home = self.device if self.device.type == "cuda" else values.device
        return self.sum(values.to(home)).cpu()


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """The device that `name` ("auto", "cpu", "cuda", "cuda:1", "mps") means for a process.

    Raises DeviceError for a device that is not here.
    """
    here = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.mps.is_available())}
    if name == "auto":
        name = "cuda" if here["cuda"] else "mps" if here["mps"] else "cpu"
    kind, _, index = name.partition(":")
    number = int(index) if index.isdigit() else local_rank if kind == "cuda" else 0
    if (index and not index.isdigit()) or number >= here.get(kind, 0):
        found = ", ".join(f"{count} {kind}" for kind, count in here.items() if count)
        raise DeviceError(
            f"--device {name} (process {local_rank}) is not here; this machine has {found}"
        )
    return torch.device(kind, number) if kind == "cuda" else torch.device(kind)


def is_main() -> bool:
    """Whether this is the only process, or the first of those that the launcher started."""
    return int(os.environ.get("RANK", 0)) == 0


def world_size() -> int:
    """How many processes the launcher started, or will."""
    return int(os.environ.get("WORLD_SIZE", 1))


def start(device: str, before_exit: Callable[[], None] = lambda: None) -> Process:
    """Join the processes that torchrun started, if it did: NCCL on CUDA, gloo elsewhere.

    `before_exit` runs when the loss of another process ends this one.
    """
    global watch
    rank, local_rank = (int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK"))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    nodes = world_size() // here if here > 1 and world_size() % here == 0 else 1
    process = Process(rank, local_rank, world_size(), pick_device(device, local_rank), nodes)
    if process.world_size > 1 and (process.device.type == "mps" or ":" in device):
        raise DeviceError(
            f"--device {device} is one device, which {process.world_size} processes cannot share; "
            "start without torchrun, or with --device cuda or cpu"
        )
    if process.device.type == "cpu":
        malloc.apart()
    if process.device.type == "cuda":
        torch.cuda.set_device(process.device)
        torch.set_float32_matmul_precision("high")  # TF32 for what is not bfloat16
    if process.world_size > 1 and not dist.is_initialized():
        watch = Watch(rank, process.world_size, before_exit)
        if process.device.type == "cuda":
            dist.init_process_group("nccl", timeout=TIMEOUT, device_id=process.device)
        else:
            dist.init_process_group("gloo", timeout=TIMEOUT)
    return process


def free_memory(device: torch.device) -> int:
    """Bytes of the device's memory that this process can still take: on a CPU its share of what
    the machine, or the container's limit, has left."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    with contextlib.suppress(OSError, TypeError):  # not Linux
        available = re.search(r"MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text())
        free = 1024 * int(available[1])
    with contextlib.suppress(OSError, TypeError):  # no control groups, or old ones
        own = re.search(r"^0::/(.*)", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
        for group in (CGROUPS / own[1], *(CGROUPS / own[1]).parents):
            limit = group / "memory.max"
            if limit.is_file() and (value := limit.read_text().strip()) != "max":
                taken = re.search(r"^anon (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)
                free = min(free, int(value) - int(taken[1]))
    return free // int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


def heartbeat() -> None:
    """Count a sign of progress of this process, twice in each micro-step, for the watch."""
    if watch is not None:
        watch.heartbeat()


def explain_lost_contact(error: RuntimeError) -> str | None:
    """Explain a failed collective in a sentence; None for any other error."""
    own = isinstance(error, dist.DistError) or "gloo" in str(error)
    if watch is None or not own:
        return None
    reason = str(error).splitlines()[0]
    return f"a collective failed: {watch.explain()} ({reason}); go on with --resume auto"


def stop() -> None:
    """Tells the other processes that this one has done its work.

    The process group is left to the end of the process: taking it down joins a thread of gloo's
    that may be waiting for the interpreter's lock, which the joining one holds.
    """
    if watch is not None:
        watch.stop()


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of matrix products; "auto" is bfloat16 on CUDA devices that have it."""
    if name == "auto":
        low = device.type == "cuda" and not is_emulated(torch.bfloat16, device)
        return torch.bfloat16 if low else torch.float32
    return getattr(torch, name)


def is_emulated(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device is known to make products of `dtype` of those of float32, which takes
    longer; of processors other than x86 and NVIDIA's nothing is known."""
    if dtype is not torch.bfloat16:
        return False
    if device.type == "cuda":
        with torch.cuda.device(device):
            return not torch.cuda.is_bf16_supported(including_emulation=False)
    x86 = platform.machine() in ("x86_64", "AMD64")
    return device.type == "cpu" and x86 and not torch.cpu._is_avx512_bf16_supported()


def autocast(
    device: torch.device, dtype: torch.dtype, *, keep_weights: bool = True
) -> AbstractContextManager:
    """Matrix products in `dtype`; nothing changes where that is float32. `keep_weights` keeps what
    they were cast to for a second forward pass."""
    enabled = dtype is not torch.float32
    return torch.autocast(device.type, dtype, enabled=enabled, cache_enabled=keep_weights)
