"""Devices, and the dtypes that they multiply in."""

import ctypes
import os
import shutil
import time
from collections.abc import Callable
from functools import cache

import torch

from utils.errors import UserError

SHARE_OF_MATMULS = 0.6  # of a step's time on a CPU: 0.88 for 124M compiled, 0.4 for small models
BFLOAT16_SPEEDUP = 1.2  # over float32, from which a CPU trains in bfloat16


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the device for "auto", "cpu", "cuda:1", ...; raise UserError if it is not there."""
    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.mps.is_available())}
    if name == "auto":
        name = "cuda" if counts["cuda"] else "mps" if counts["mps"] else "cpu"
    kind, _, index = name.partition(":")
    number = int(index) if index.isdigit() else local_rank if kind == "cuda" else 0
    if (index and not index.isdigit()) or number >= counts.get(kind, 0):
        found = ", ".join(f"{n} {kind}".removeprefix("1 ") for kind, n in counts.items() if n)
        raise UserError(f"--device {name} is not available; this machine has {found}")
    return torch.device(kind, number) if kind == "cuda" else torch.device(kind)


def has_onednn(dtype: torch.dtype) -> bool:
    """Return whether oneDNN can multiply matrices of `dtype` on this processor."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype is torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return dtype is torch.float32


@cache
def is_bfloat16_faster() -> bool:
    """Return whether this CPU multiplies matrices in bfloat16 BFLOAT16_SPEEDUP times as fast as in
    float32. It is measured, as instruction flags and names do not tell."""
    if not has_onednn(torch.bfloat16):
        return False
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine several wait for each other
    float32_seconds = min(matmul_seconds(256, torch.float32) for _ in range(20))
    bfloat16_seconds = min(matmul_seconds(256, torch.bfloat16) for _ in range(20))
    torch.set_num_threads(threads)
    return float32_seconds >= BFLOAT16_SPEEDUP * bfloat16_seconds


def matmul_seconds(n: int, dtype: torch.dtype) -> float:
    """Return how long this CPU multiplies two matrices (n, n)."""
    a = torch.ones(n, n, dtype=dtype, device="cpu")
    began = time.perf_counter()
    a.mm(a)
    return time.perf_counter() - began


def seconds_on_cpu(flops: float, dtype: torch.dtype) -> float:
    """Return about how long training takes this CPU."""
    seconds = min(matmul_seconds(512, dtype) for _ in range(3))
    rate = 2 * 512**3 / seconds  # FLOP/s
    return flops / (SHARE_OF_MATMULS * rate)


def has_bfloat16(device: torch.device) -> bool:
    """Return whether a GPU multiplies in bfloat16: NVIDIA's do since Ampere."""
    with torch.cuda.device(device):
        return torch.cuda.is_bf16_supported(including_emulation=False)


def pick_dtype(
    name: str, device: torch.device, all_agree: Callable[[bool], bool] = bool
) -> torch.dtype:
    """Return the dtype of matmuls. "auto" is bfloat16 on GPUs that have it and CPUs where it is
    faster, for all processes by `all_agree`; else float16 on other GPUs, float32 elsewhere. Raises
    UserError for bfloat16 on a GPU without it, where kernels would fail to compile or to run."""
    if name == "bfloat16" and device.type == "cuda" and not has_bfloat16(device):
        gpu = torch.cuda.get_device_name(device)
        raise UserError(f"--dtype bfloat16: this {gpu} has none; give --dtype float16")
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        use_bfloat16, other = has_bfloat16(device), torch.float16
    else:
        use_bfloat16, other = device.type == "cpu" and is_bfloat16_faster(), torch.float32
    return torch.bfloat16 if all_agree(use_bfloat16) else other


def compile_problem(device: torch.device) -> str | None:
    """Return why Triton cannot compile for a GPU on this machine, None if it can."""
    major, minor = torch.cuda.get_device_capability(device)
    if major < 7:
        return f"Triton needs a GPU of compute capability 7.0, and this one has {major}.{minor}"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler: install gcc, or name another by CC"
    return None


def keep_freed_memory() -> None:
    """Let glibc's malloc keep freed memory, which by default is returned and zeroed again."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-4, 0)  # M_MMAP_MAX: map no block by itself
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: return nothing


def autocast(
    device: torch.device, dtype: torch.dtype, *, keep_weights: bool = True
) -> torch.autocast:
    """Return a context that runs matmuls in `dtype`; `keep_weights` keeps the cast weights."""
    enabled = dtype is not torch.float32
    return torch.autocast(device.type, dtype, enabled=enabled, cache_enabled=keep_weights)


def describe(device: torch.device) -> dict[str, str]:
    """Return the names and versions that speed and rounding depend on, for the log."""
    found = {"device": str(device), "torch": str(torch.__version__)}
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found |= {"CUDA": torch.version.cuda, "cuDNN": str(torch.backends.cudnn.version())}
        found["attention"] = "cuDNN for full contexts alone, if PyTorch takes it"
    return found
