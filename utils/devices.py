"""Devices, and the dtypes that they multiply in."""

import platform
from contextlib import AbstractContextManager

import torch

from utils.errors import UserError


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the device for "auto", "cpu", "cuda", "cuda:1" or "mps".

    Raises UserError if this machine lacks it.
    """
    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.mps.is_available())}
    if name == "auto":
        name = "cuda" if counts["cuda"] else "mps" if counts["mps"] else "cpu"
    kind, _, index = name.partition(":")
    number = int(index) if index.isdigit() else local_rank if kind == "cuda" else 0
    if (index and not index.isdigit()) or number >= counts.get(kind, 0):
        found = ", ".join(f"{n} {kind}".removeprefix("1 ") for kind, n in counts.items() if n)
        rank = f" to local rank {local_rank}" if local_rank else ""
        raise UserError(f"--device {name} is not available{rank}; this machine has {found}")
    return torch.device(kind, number) if kind == "cuda" else torch.device(kind)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of matmuls; "auto" is bfloat16 where the device multiplies in it."""
    if name == "auto":
        return torch.bfloat16 if has_bfloat16(device) else torch.float32
    return getattr(torch, name)


def has_bfloat16(device: torch.device) -> bool:
    """Return True if the device is known to multiply in bfloat16: GPUs from Ampere on, processors
    with AVX-512 BF16, which those with AMX have, too."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()


def is_emulated(dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if the device is known to run matmuls in `dtype` as slower float32 ones."""
    x86 = device.type == "cpu" and platform.machine() in ("x86_64", "AMD64")
    known = x86 or device.type == "cuda"
    return dtype is torch.bfloat16 and known and not has_bfloat16(device)


def autocast(
    device: torch.device, dtype: torch.dtype, *, keep_weights: bool = True
) -> AbstractContextManager:
    """Return a context in which matmuls run in `dtype`; float32 changes nothing.

    With `keep_weights` the cast weights are kept for another forward pass inside the context.
    """
    enabled = dtype is not torch.float32
    return torch.autocast(device.type, dtype, enabled=enabled, cache_enabled=keep_weights)
