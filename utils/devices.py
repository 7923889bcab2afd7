"""Choose the device of a run and the dtype of its matmuls; describe this machine.

Nothing here computes a model: training runs the same forward of model/ on every device.
"""

import os
import shutil
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from utils.errors import UserError
from utils.launch import is_main_process

# Fraction of a training step on a CPU that matmuls take, for the forecast of `seconds_on_cpu`. We
# measured 0.88 for a compiled 124M, and 0.4 for small models.
SHARE_OF_MATMULS = 0.6
# "auto" trains in bfloat16 on a CPU if its bfloat16 matmuls are this many times as fast as float32.
# Casts of weights and activations would eat up a smaller gain.
BFLOAT16_SPEEDUP = 1.2
CGROUPS = Path("/proc/self/cgroup")  # Linux lists the control groups of this process here
CGROUP_ROOT = Path("/sys/fs/cgroup")  # Linux mounts the control groups here
# Name of the file with a group's memory limit, by the controller in a line of CGROUPS: "memory" in
# version 1 of control groups, "" in version 2.
LIMIT_FILES = {"memory": "memory.limit_in_bytes", "": "memory.max"}


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the device for "auto", "cpu", "cuda", "cuda:1" or "mps".

    "cuda" gives a process the GPU whose number is `local_rank`, the number of the process on this
    machine. Raises UserError for a device that this machine does not have.
    """
    # the fastest comes first, because "auto" takes the first
    available = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if torch.mps.is_available():  # Apple GPU
        available.append("mps")
    available.append("cpu")
    if name == "auto":
        # "cuda:0" becomes "cuda", so that each process takes a GPU of its own
        name = available[0].partition(":")[0]
        if name == "cpu":
            warn_without_cuda()
    if name == "cuda":
        name = f"cuda:{local_rank}"
    if name not in available:
        message = f"device {name} is not available; this machine has {', '.join(available)}"
        reason = missing_cuda()  # why an NVIDIA GPU is not among them, or None
        if reason is not None:
            message += f"; {reason}"
        raise UserError(message)
    return torch.device(name)


def missing_cuda() -> str | None:
    """Return a sentence if this PyTorch cannot use the NVIDIA GPU of this machine, else None."""
    # a container may have the driver without nvidia-smi
    has_driver = Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi") is not None
    if torch.version.cuda is not None or torch.version.hip is not None or not has_driver:
        return None
    return (
        f"PyTorch {torch.__version__} is a wheel without CUDA, and this machine has an NVIDIA "
        'driver: see "The wrong PyTorch" in docs/TROUBLESHOOTING.md'
    )


@cache
def warn_without_cuda() -> None:
    """Print the sentence of missing_cuda, once."""
    sentence = missing_cuda()
    if sentence is not None and is_main_process():
        print(f"warning: using the CPU: {sentence}", file=sys.stderr)


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
    """Return whether bfloat16 matmuls on this CPU are BFLOAT16_SPEEDUP times as fast as float32.

    Measure it, because a processor with instructions for bfloat16 can still be slow in bfloat16.
    """
    if not has_onednn(torch.bfloat16):
        return False
    num_threads = torch.get_num_threads()
    # a single thread, because several would wait for each other on a busy machine
    torch.set_num_threads(1)
    # take the fastest of 20, because other programs can only make a matmul slower
    float32_seconds = min(matmul_seconds(256, torch.float32) for _ in range(20))
    bfloat16_seconds = min(matmul_seconds(256, torch.bfloat16) for _ in range(20))
    torch.set_num_threads(num_threads)
    return float32_seconds >= BFLOAT16_SPEEDUP * bfloat16_seconds


def matmul_seconds(size: int, dtype: torch.dtype) -> float:
    """Return the seconds in which this CPU multiplies two (size, size) matrices."""
    # device="cpu", because torch.set_default_device may have named another device
    matrix = torch.ones(size, size, dtype=dtype, device="cpu")
    start_seconds = time.perf_counter()
    matrix.mm(matrix)
    return time.perf_counter() - start_seconds


def seconds_on_cpu(flops: float, dtype: torch.dtype) -> float:
    """Return a forecast of the seconds in which this CPU trains for a number of FLOPs."""
    fastest_seconds = min(matmul_seconds(512, dtype) for _ in range(3))
    matmul_flops_per_second = 2 * 512**3 / fastest_seconds
    # Matmuls take about 0.6 of a step. The rest, such as the optimizer, has no counted FLOPs.
    return flops / (SHARE_OF_MATMULS * matmul_flops_per_second)


def has_bfloat16(device: torch.device) -> bool:
    """Return whether a GPU has bfloat16 matmuls; NVIDIA's GPUs have them since Ampere."""
    # is_bf16_supported asks about the current device
    with torch.cuda.device(device):
        # without emulation, which makes bfloat16 work on older GPUs, but slowly
        return torch.cuda.is_bf16_supported(including_emulation=False)


def pick_dtype(
    name: str, device: torch.device, all_agree: Callable[[bool], bool] = bool
) -> torch.dtype:
    """Return the dtype of matmuls for "auto", "float32", "bfloat16" or "float16".

    "auto" is bfloat16 on GPUs that have it, and float16 on older GPUs. On a CPU it is bfloat16 if
    that is faster, else float32. All processes need the same dtype: `all_agree` returns whether a
    condition holds on all of them. It is Process.all_agree, or `bool` for a single process. Raises
    UserError for bfloat16 on a GPU without it, where kernels would fail to compile or to run.
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
        # a CPU is measured; False for an Apple GPU, which gets float32
        use_bfloat16 = device.type == "cpu" and is_bfloat16_faster()
    if all_agree(use_bfloat16):
        return torch.bfloat16
    return torch.float16 if is_gpu else torch.float32


def host_memory() -> int:
    """Return the bytes of host memory that all processes may use together: the memory of the
    machine, or the lowest limit of the nested control groups (cgroup v1 or v2) of a container."""
    byte_limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    if not CGROUPS.exists():  # on macOS
        return byte_limits[0]
    for line in CGROUPS.read_text().splitlines():
        # "4:memory:/docker/1f" in version 1, "0::/user.slice" in version 2
        _, controller, group = line.split(":", 2)
        if controller not in LIMIT_FILES:
            continue
        # /sys/fs/cgroup/memory/docker/1f or /sys/fs/cgroup/user.slice, and all folders above it: a
        # container may not see its own group, only one above it
        group_folder = CGROUP_ROOT / controller / group.lstrip("/")
        for folder in [group_folder, *group_folder.parents]:
            path = folder / LIMIT_FILES[controller]
            if path.exists():
                limit_text = path.read_text().strip()
                if limit_text != "max":  # "max" means no limit
                    byte_limits.append(int(limit_text))
    return min(byte_limits)


def autocast(
    device: torch.device, dtype: torch.dtype, *, keep_weights: bool = True
) -> torch.autocast:
    """Return a context of autocast, in which matmuls run in `dtype`; off for float32.

    With `keep_weights` autocast keeps the cast copy of each weight until the context ends, so that
    several forward passes cast it only once. Around one forward pass, as in a training step, it is
    False: the copies would only take memory.
    """
    enabled = dtype is not torch.float32
    return torch.autocast(device.type, dtype, enabled=enabled, cache_enabled=keep_weights)


def describe_device(device: torch.device) -> dict[str, str]:
    """Return the name of the device and PyTorch's version, which includes CUDA's, for config.json:
    speed and rounding depend on both."""
    name = str(device)  # "cpu" or "mps"; a GPU gets its own name below
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {"device": name, "torch": str(torch.__version__)}
