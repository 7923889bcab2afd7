"""Devices: which one a run uses, and in which dtype it multiplies matrices.

Nothing here computes a model: training runs the same forward of model/ on every device.
"""

import os
import shutil
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from utils.errors import UserError

# Share of matmuls in the time of a training step on a CPU, for the forecast of `seconds_on_cpu`. It
# was measured as 0.88 for a compiled 124M, and as 0.4 for small models.
SHARE_OF_MATMULS = 0.6
# "auto" trains in bfloat16 on a CPU whose matmuls are this many times as fast in it as in float32.
# Casts of weights and activations would eat up a smaller gain.
BFLOAT16_SPEEDUP = 1.2
# where Linux says in which control groups a process is, and mounts them
CGROUPS = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the device for "auto", "cpu", "cuda", "cuda:1" or "mps".

    Without a number, a process gets the GPU of its number on this machine, `local_rank`. Raises
    UserError for a device that this machine does not have.
    """
    # fastest first, as "auto" takes the first
    available = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if torch.mps.is_available():  # Apple GPU
        available.append("mps")
    available.append("cpu")
    if name == "auto":
        # "cuda" for "cuda:0", so that each process takes its own
        name = available[0].partition(":")[0]
    if name == "cuda":
        name = f"cuda:{local_rank}"
    if name not in available:
        raise UserError(f"device {name} is not available; this machine has {', '.join(available)}")
    return torch.device(name)


def has_onednn(dtype: torch.dtype) -> bool:
    """Return whether oneDNN can multiply matrices of `dtype` on this processor."""
    if not torch.backends.mkldnn.is_available():  # mkldnn is oneDNN's former name
        return False
    if dtype is torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype is torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return dtype is torch.float32


@cache
def is_bfloat16_faster() -> bool:
    """Return whether this CPU multiplies in bfloat16 BFLOAT16_SPEEDUP times as fast as in float32.

    It is measured, because processors that have instructions for bfloat16 can still be slow in it.
    """
    if not has_onednn(torch.bfloat16):
        return False
    num_threads = torch.get_num_threads()
    # a single thread, because several would wait for each other on a busy machine
    torch.set_num_threads(1)
    # the fastest of 20, because other programs can only make a matmul slower
    float32_seconds = min(matmul_seconds(256, torch.float32) for _ in range(20))
    bfloat16_seconds = min(matmul_seconds(256, torch.bfloat16) for _ in range(20))
    torch.set_num_threads(num_threads)
    return float32_seconds >= BFLOAT16_SPEEDUP * bfloat16_seconds


def matmul_seconds(size: int, dtype: torch.dtype) -> float:
    """Return the time in which this CPU multiplies two matrices (size, size)."""
    # "cpu" also where torch.set_default_device has named another device
    matrix = torch.ones(size, size, dtype=dtype, device="cpu")
    start_seconds = time.perf_counter()
    matrix.mm(matrix)
    return time.perf_counter() - start_seconds


def seconds_on_cpu(flops: float, dtype: torch.dtype) -> float:
    """Return a forecast of the time in which this CPU trains for a number of FLOPs."""
    fastest_seconds = min(matmul_seconds(512, dtype) for _ in range(3))
    matmul_flops_per_second = 2 * 512**3 / fastest_seconds
    # the rest of a step, such as softmax and the optimizer, takes time but counts no FLOPs
    return flops / (SHARE_OF_MATMULS * matmul_flops_per_second)


def has_bfloat16(device: torch.device) -> bool:
    """Return whether a GPU multiplies in bfloat16, as NVIDIA's do since Ampere."""
    # is_bf16_supported asks about the current device
    with torch.cuda.device(device):
        # including emulation, it is True for older GPUs, too, which are slow in bfloat16
        return torch.cuda.is_bf16_supported(including_emulation=False)


def pick_dtype(
    name: str, device: torch.device, all_agree: Callable[[bool], bool] = bool
) -> torch.dtype:
    """Return the dtype of matmuls for "auto", "float32", "bfloat16" or "float16".

    "auto" is bfloat16 on GPUs that have it, float16 on older ones; on a CPU it is bfloat16 where
    that is faster, else float32. `all_agree` says whether something holds for all processes, which
    need the same dtype: Process.all_agree, or `bool` for a process alone. Raises UserError for
    bfloat16 on a GPU without it, where kernels would fail to compile or to run.
    """
    is_gpu = device.type == "cuda"
    if name == "bfloat16" and is_gpu and not has_bfloat16(device):
        gpu_name = torch.cuda.get_device_name(device)
        raise UserError(f"this {gpu_name} has no bfloat16: take float16")
    if name != "auto":
        return getattr(torch, name)
    if is_gpu:
        use_bfloat16 = has_bfloat16(device)
    else:
        # an Apple GPU gets float32
        use_bfloat16 = device.type == "cpu" and is_bfloat16_faster()
    if all_agree(use_bfloat16):
        return torch.bfloat16
    return torch.float16 if is_gpu else torch.float32


def missing_compiler(on_gpu: bool) -> str | None:
    """Return what to install for torch.compile, None if it is there: Triton needs a C compiler for
    GPUs, and inductor one for C++ for CPUs."""
    variable, usual = ("CC", ["gcc", "clang"]) if on_gpu else ("CXX", ["g++"])
    named = os.environ.get(variable)
    # A compiler that is named is used, whichever others there are.
    compilers = [named] if named else usual
    if any(shutil.which(compiler) for compiler in compilers):
        return None
    return f"install {usual[0]}, or name a compiler by {variable}"


def host_memory() -> int:
    """Return the bytes of memory that processes may use together: all of the machine's, or in a
    container the lowest limit of the control groups that this process is in, which may be nested
    (cgroup v1 and v2)."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    # macOS has no control groups
    lines = CGROUPS.read_text().splitlines() if CGROUPS.exists() else []
    for line in lines:
        # "4:memory:/docker/1f" of version 1, "0::/user.slice" of version 2
        _, controller, group = line.split(":", 2)
        if controller not in ("", "memory"):
            continue
        # A container may not see its own group, but one above it, as the root of its own.
        folder = CGROUP_ROOT / controller / group.lstrip("/")
        name = "memory.limit_in_bytes" if controller else "memory.max"
        for path in (folder / name, *(parent / name for parent in folder.parents)):
            limit = path.read_text().strip() if path.exists() else "max"
            if limit != "max":  # which stands for none
                limits.append(int(limit))
    return min(limits)


def autocast(
    device: torch.device, dtype: torch.dtype, *, keep_weights: bool = True
) -> torch.autocast:
    """Return a context in which matmuls run in `dtype`; it does nothing for float32.

    `keep_weights` keeps the cast copy of each weight until the context ends, for several forward
    passes; else none is kept.
    """
    # for float32 there is nothing to cast
    enabled = dtype is not torch.float32
    return torch.autocast(device.type, dtype, enabled=enabled, cache_enabled=keep_weights)


def describe_device(device: torch.device) -> dict[str, str]:
    """Return the names of the device and of PyTorch's version, which speed and rounding depend on,
    for config.json. The version ends in that of CUDA."""
    name = str(device)  # "cpu" or "mps"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {"device": name, "torch": str(torch.__version__)}
