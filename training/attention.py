"""PyTorch's attention kernels by their speed for a shape. PyTorch goes by an order of its own, but
which is fastest differs between GPUs and versions: cuDNN's took half the time of FlashAttention's
on Hopper and more on Ampere (huggingface/transformers, pull request 48163)."""

import math
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from model.config import GPTConfig
from utils.distributed import Process

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
TURNS = 10


def fastest_kernel(
    shape: GPTConfig, batch: int, dtype: torch.dtype, process: Process
) -> tuple[str | None, list[str]]:
    """The name of the kernel for training on a GPU, by trying, and what the log says of that;
    elsewhere None. All processes must call this."""
    if process.device.type != "cuda":
        return None, []
    seconds = seconds_of_kernels(shape, batch, dtype, process)
    return next(iter(seconds), None), [describe(seconds)]


def seconds_of_kernels(
    shape: GPTConfig, batch: int, dtype: torch.dtype, process: Process
) -> dict[str, float]:
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
        for name, kernel in KERNELS.items():
            with sdpa_kernel(kernel), warnings.catch_warnings(action="ignore"):
                try:
                    seconds = attend()
                except RuntimeError:  # not for this shape, dtype or device
                    continue
            if turn:  # the first warms up
                least[name] = min(seconds, least[name])
    means = process.sum(torch.tensor(list(least.values()), device=device)) / process.world_size
    found = dict(zip(KERNELS, means.tolist(), strict=True))
    able = sorted((name for name in KERNELS if math.isfinite(found[name])), key=found.get)
    return {name: found[name] for name in able}


@contextmanager
def preferring(name: str | None) -> Iterator[None]:
    """Around forward and backward: attention by the kernel of that name where it can do it, else by
    another; None leaves the choice to PyTorch."""
    if name is None:
        yield
        return
    order = [KERNELS[name], *KERNELS.values(), SDPBackend.MATH]
    # compiled code has its kernel in it, but the cache that it is kept in does not ask for that
    config = torch.compiler.config  # whose `patch` leaves a variable behind each time
    tag = config.cache_key_tag
    config.cache_key_tag = f"{tag} attention {name}"
    try:
        with sdpa_kernel(order, set_priority=True):
            yield
    finally:
        config.cache_key_tag = tag


def describe(seconds: dict[str, float]) -> str:
    """What the log says of them."""
    each = ", ".join(f"{name} {1000 * s:.2f} ms" for name, s in seconds.items())
    return f"attention of a layer, forward and backward: {each or 'by no kernel but the plain one'}"
