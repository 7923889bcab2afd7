"""Devices, and the dtypes that they multiply in."""

import ctypes
from contextlib import AbstractContextManager

import torch

from utils.errors import UserError


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


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of matmuls; "auto" is bfloat16 where the device multiplies in it: GPUs from
    Ampere on, processors with AVX-512 BF16."""
    if name != "auto":
        return getattr(torch, name)
    has_bfloat16 = device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()
    if device.type == "cuda":
        with torch.cuda.device(device):
            has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if has_bfloat16 else torch.float32


def keep_freed_memory() -> None:
    """Let glibc's malloc keep what is freed for the next tensors. By default it returns large
    blocks to the system, and a page fault and zeroing for each page of the next ones take an eighth
    of a training step."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-4, 0)  # M_MMAP_MAX: map no block by itself
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: return nothing


def autocast(
    device: torch.device, dtype: torch.dtype, *, keep_weights: bool = True
) -> AbstractContextManager:
    """Return a context in which matmuls run in `dtype`; float32 changes nothing. With
    `keep_weights` the cast weights are kept for another forward pass inside the context."""
    enabled = dtype is not torch.float32
    return torch.autocast(device.type, dtype, enabled=enabled, cache_enabled=keep_weights)
