"""GPUs by name, their peak FLOP/s and memory from the makers' data sheets, and step times."""

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GPU:
    """Model of a GPU."""

    name: str
    """Words that the name of the device contains, all of them."""
    peak: float
    """Peak dense FLOP/s in `dtype`."""
    memory: int | None = None
    """GB of 1e9 bytes, for the GPUs that --dry_run --device names."""
    dtype: str = "bfloat16"
    """Dtype that --dtype auto takes."""


GPUS = (  # the first entry whose words are all in the device's name is used
    *(GPU("GB200", 2500e12), GPU("B200", 2250e12, 180), GPU("H200 NVL", 835e12)),
    *(GPU("H100 NVL", 835e12), GPU("H100 PCIe", 756e12), GPU("H800 PCIe", 756e12)),
    *(GPU("GH200", 989e12), GPU("H200", 989e12, 141), GPU("H100", 989e12, 80)),
    *(GPU("H800", 989e12), GPU("A100", 312e12, 80), GPU("A800", 312e12), GPU("L40S", 362e12)),
    *(GPU("RTX 5090", 209.5e12), GPU("RTX 4090", 165.2e12, 24), GPU("RTX 3090", 71e12)),
    *(GPU("MI300X", 1307e12), GPU("T4", 65e12, 16, "float16")),
)
NAMED_GPUS = {gpu.name.lower().replace(" ", ""): gpu for gpu in GPUS if gpu.memory}
OTHER_CHIPS = {"MIG", "Laptop", "D", "Ti", "SUPER", "Max"}  # words of slower or partial devices


def find_gpu(device_name: str) -> GPU | None:
    """Return the GPU that the driver calls `device_name`, None if it is not listed."""
    words = set(re.split(r"[ -]", device_name))
    if words & OTHER_CHIPS:
        return None
    return next((gpu for gpu in GPUS if words >= set(gpu.name.split())), None)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of matmuls in a dtype of 16 bits on the device, None if unknown."""
    if device.type != "cuda" or dtype is torch.float32:
        return None
    gpu = find_gpu(torch.cuda.get_device_name(device))
    return gpu.peak if gpu else None


class StepTimer:
    """Wall time of a training step and the part of it spent waiting for data."""

    def __init__(self, flops_per_token: int, peak_flops: float | None, devices: int) -> None:
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops and devices * peak_flops  # None if unknown

    def start(self) -> None:
        """Begin a step."""
        self.began, self.waited = time.perf_counter(), 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting for data."""
        began = time.perf_counter()
        yield
        self.waited += time.perf_counter() - began

    def stop(self, tokens: int) -> dict[str, float | None]:
        """End a step of `tokens` tokens; return its throughput, MFU and milliseconds."""
        seconds = time.perf_counter() - self.began
        rate = tokens / seconds
        mfu = self.peak_flops and self.flops_per_token * rate / self.peak_flops
        ms, data_ms = 1000 * seconds, 1000 * self.waited
        return {"tokens_per_s": rate, "mfu": mfu, "ms": ms, "data_ms": data_ms}
