"""Peak FLOP/s of a device, and step times."""

import contextlib
import time
from collections.abc import Iterator

import torch

from utils.gpus import find_gpu


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
