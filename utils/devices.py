"""Devices, and the dtypes that they multiply in."""

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

from utils.errors import UserError

onednn = torch.ops.mkldnn  # oneDNN's former name
HAS_ONEDNN = torch.backends.mkldnn.is_available()
SHARE_OF_MATMULS = 0.6  # of a step's time on a CPU: 0.88 for 124M compiled, 0.4 for small models
FASTER = 1.2  # times as fast as what it replaces that a matmul has to be on a CPU


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
    """Return whether oneDNN can multiply matrices of `dtype` here."""
    if HAS_ONEDNN and dtype is torch.bfloat16:
        return onednn._is_mkldnn_bf16_supported()
    if HAS_ONEDNN and dtype is torch.float16:
        return onednn._is_mkldnn_fp16_supported()
    return HAS_ONEDNN and dtype is torch.float32


@cache
def onednn_speedup(dtype: torch.dtype) -> float:
    """Return how many times as fast this CPU multiplies matrices by oneDNN in `dtype` as PyTorch
    does in float32, by MKL, 0 if it cannot. Instruction flags and names do not tell."""
    if not has_onednn(dtype):
        return 0.0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine several wait for each other
    mkl = min(matmul_seconds(256) for _ in range(20))
    by_onednn = min(matmul_seconds(256, dtype) for _ in range(20))
    torch.set_num_threads(threads)
    return mkl / by_onednn


def is_faster(dtype: torch.dtype) -> bool:
    """Return whether oneDNN is FASTER in `dtype` than float32 is without it, or otherwise by it."""
    other = 1.0 if dtype is torch.float32 else max(1.0, onednn_speedup(torch.float32))
    return onednn_speedup(dtype) >= FASTER * other


def matmul_seconds(n: int, dtype: torch.dtype | None = None) -> float:
    """Return how long this CPU multiplies two matrices (n, n), by oneDNN, without dtype by MKL."""
    a = torch.ones(n, n, dtype=dtype)
    began = time.perf_counter()
    onednn._linear_pointwise(a, a, None, "none", [], "") if dtype else a.mm(a)
    return time.perf_counter() - began


def seconds_on_cpu(flops: float, dtype: torch.dtype) -> float:
    """Return about how long training takes this CPU."""
    taken = dtype if has_onednn(dtype) else None
    rate = 2 * 1024**3 / min(matmul_seconds(1024, taken) for _ in range(5))
    return flops / (SHARE_OF_MATMULS * rate)


def pick_dtype(name: str, device: torch.device, all_agree: Callable = bool) -> torch.dtype:
    """Return the dtype of matmuls. "auto" is bfloat16 on GPUs that have it and CPUs where it is
    FASTER, for all processes by `all_agree`; else float16 on other GPUs, float32 elsewhere."""
    if name != "auto":
        return getattr(torch, name)
    other = torch.float16 if device.type == "cuda" else torch.float32
    use_bfloat16 = device.type == "cpu" and is_faster(torch.bfloat16)
    if device.type == "cuda":
        with torch.cuda.device(device):
            use_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if all_agree(use_bfloat16) else other


def keep_freed_memory() -> None:
    """Let glibc's malloc keep freed memory, which by default is returned and zeroed again."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-4, 0)  # M_MMAP_MAX: map no block by itself
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: return nothing


@contextmanager
def autocast(
    device: torch.device,
    dtype: torch.dtype,
    *,
    keep_weights: bool = True,
    fixed_shapes: bool = False,
) -> Iterator[None]:
    """Run matmuls in `dtype`; `keep_weights` keeps cast weights. Unless shapes are fixed, attention
    does without cuDNN, which plans for each; until the next call: a backward pass may recompute."""
    torch.backends.cuda.enable_cudnn_sdp(fixed_shapes)
    enabled = dtype is not torch.float32
    with torch.autocast(device.type, dtype, enabled=enabled, cache_enabled=keep_weights):
        yield


def describe(device: torch.device) -> dict[str, str]:
    """Return the names and versions that speed and rounding depend on, for the log."""
    found = {"device": str(device), "torch": str(torch.__version__)}
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found |= {"CUDA": torch.version.cuda, "cuDNN": str(torch.backends.cudnn.version())}
        found["attention"] = "cuDNN in pre-training alone, if PyTorch takes it"
    return found
