"""PyTorch's attention kernels by their speed for a shape. PyTorch goes by an order of its own, but
which is fastest differs between GPUs and versions: cuDNN's took half the time of FlashAttention's
on Hopper and more on Ampere (huggingface/transformers, pull request 48163)."""

import math
import time
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from model.config import GPTConfig
from utils.distributed import Process

KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
]
TURNS = 10


def seconds_of_kernels(
    shape: GPTConfig, batch: int, dtype: torch.dtype, process: Process
) -> dict[SDPBackend, float]:
    """Seconds that a layer's attention takes in training with each of KERNELS that can do it,
    fastest first: least of TURNS, mean over processes, which all must call this."""
    B, T, H, D, device = batch, shape.block_size, shape.n_head, shape.head_size, process.device
    qkv = torch.randn(B, T, 3, H, D, dtype=dtype, device=device)  # laid out as the model's
    leaves = [x.transpose(1, 2).requires_grad_() for x in qkv.unbind(2)]
    grad = torch.randn(B, T, H, D, dtype=dtype, device=device).transpose(1, 2)

    def attend() -> float:
        began = time.perf_counter()
        y = scaled_dot_product_attention(*leaves, dropout_p=shape.dropout, is_causal=True)
        torch.autograd.grad(y, leaves, grad)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    least = dict.fromkeys(KERNELS, math.inf)
    for turn in range(1 + TURNS):
        for kernel in KERNELS:
            with sdpa_kernel(kernel), warnings.catch_warnings(action="ignore"):
                try:
                    seconds = attend()
                except RuntimeError:  # not for this shape, dtype or device
                    continue
            if turn:  # the first warms up
                least[kernel] = min(seconds, least[kernel])
    means = process.sum(torch.tensor(list(least.values()), device=device)) / process.world_size
    found = dict(zip(KERNELS, means.tolist(), strict=True))
    order = sorted((kernel for kernel in KERNELS if math.isfinite(found[kernel])), key=found.get)
    # compiled code has its kernel in it, but the cache that it is kept in does not ask for that
    torch.compiler.config.cache_key_tag = "-".join(kernel.name for kernel in order)
    return {kernel: found[kernel] for kernel in order}


def preferring(order: Iterable[SDPBackend]) -> AbstractContextManager:
    """Around forward and backward: attention by the first of `order` that can do it, by PyTorch's
    plain one if none can, and as ever if `order` is empty."""
    order = list(order)
    return sdpa_kernel([*order, SDPBackend.MATH], set_priority=True) if order else nullcontext()


def describe(seconds: dict[SDPBackend, float]) -> str:
    """What the log says of them."""
    each = ", ".join(f"{kernel.name} {1000 * s:.2f} ms" for kernel, s in seconds.items())
    return f"attention of a layer, forward and backward: {each or 'by no kernel but the plain one'}"
