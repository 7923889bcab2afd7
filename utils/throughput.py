"""How fast a run is against what its device can do, and the memory it takes."""

import os
import re
import resource
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import profile, schedule

# Peak dense bfloat16 matrix TFLOP/s by words of the device's name, from the makers' data sheets;
# the first that matches counts. A device that is not here gets no MFU rather than a wrong one.
PEAK_BF16_TFLOPS = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("GH200", 989.0),
    ("H200 NVL", 835.0),
    ("H200", 989.0),
    ("H100 NVL", 835.0),
    ("H100 PCIe", 756.0),
    ("H100", 989.0),
    ("H800 PCIe", 756.0),
    ("H800", 989.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
    ("RTX 5090", 209.5),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
    ("MI300X", 1307.0),
)
SLICED_OR_SLOWED = {"MIG", "Laptop", "D", "Ti", "SUPER", "Max"}  # other chips of the same name


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of the device for matrix products in bfloat16; None if not known."""
    if device.type != "cuda" or dtype is not torch.bfloat16:
        return None
    return peak_by_name(torch.cuda.get_device_name(device))


def peak_by_name(name: str) -> float | None:
    """Peak bfloat16 FLOP/s of the GPU that calls itself `name`; None if not known."""
    words = set(re.split(r"[ -]", name))
    if words & SLICED_OR_SLOWED:
        return None
    return next((p * 1e12 for part, p in PEAK_BF16_TFLOPS if words >= set(part.split())), None)


def flops_per_token(multiplying: int, n_layer: int, n_embd: int, block_size: int) -> int:
    """Forward and backward FLOPs per token: 6 N + 12 L C T (Chowdhery et al. 2022, appendix B).

    N are the parameters that multiply, so without tables that are looked up; attention counts in
    full although it is causal, as in the paper and in nanoGPT.
    """
    return 6 * multiplying + 12 * n_layer * n_embd * block_size


def tracer(path: Path, device: torch.device, say: Callable[[str], None]) -> profile:
    """A started profiler that, told of each step's end, writes a Chrome trace of the fourth to the
    sixth to `path`, and says which operations took longest on the device."""

    def write(found: profile) -> None:
        found.export_chrome_trace(str(path))
        time_on = "device" if device.type == "cuda" else "cpu"
        say(found.key_averages().table(sort_by=f"self_{time_on}_time_total", row_limit=15))
        say(f"wrote {path}: open it in ui.perfetto.dev")

    steps = schedule(wait=2, warmup=1, active=3, repeat=1)
    profiler = profile(schedule=steps, on_trace_ready=write)
    profiler.start()
    return profiler


def since_start() -> float:
    """Seconds since this process began; 0 where the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:  # not Linux
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def peak_memory() -> int:
    """The most bytes of the host's memory that this process has used."""
    try:  # not ru_maxrss on Linux, where a process starts with its parent's
        return 1024 * int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on a Mac
