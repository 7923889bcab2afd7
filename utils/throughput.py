"""Peak FLOP/s of a device, step times and profiling."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.profiler import profile, schedule

from utils.gpus import find_gpu


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of matmuls in a dtype of 16 bits on the device, None if unknown."""
    if device.type != "cuda" or dtype is torch.float32:
        return None
    gpu = find_gpu(torch.cuda.get_device_name(device))
    return gpu.peak if gpu else None


def profile_steps(path: Path, device: torch.device, report: Callable[[str], None]) -> profile:
    """Start a profiler that writes a Chrome trace of steps 4 to 6 to `path` and reports the slowest
    operations. Call its `step` after each step."""

    def write_trace(profiler: profile) -> None:
        profiler.export_chrome_trace(str(path))
        key = f"self_{'device' if device.type == 'cuda' else 'cpu'}_time_total"
        report(profiler.key_averages().table(sort_by=key, row_limit=15))
        report(f"wrote {path}: open it in ui.perfetto.dev")

    steps = schedule(wait=2, warmup=1, active=3, repeat=1)
    profiler = profile(schedule=steps, on_trace_ready=write_trace)
    profiler.start()
    return profiler


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
        times = {"ms": 1000 * seconds, "data_ms": 1000 * self.waited}
        return {"tokens_per_s": rate, "mfu": mfu, **times}
