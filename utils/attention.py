"""PyTorch's attention kernels by their speed for a shape. PyTorch goes by a fixed order, but which
is fastest differs between GPUs: on Hopper cuDNN's takes half the time of FlashAttention's, on
Ampere it takes longer (huggingface/transformers, pull request 48163)."""

import time
import warnings
from contextlib import AbstractContextManager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from model.config import GPTConfig

KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
]
TRIALS = 10
preferred: AbstractContextManager | None = None  # in force as long as it is held


def seconds_of_kernels(
    shape: GPTConfig, batch: int, dtype: torch.dtype, device: torch.device
) -> dict[SDPBackend, float]:
    """Seconds that a layer's attention takes, forward and backward, with each of KERNELS that can
    do it there."""
    size = (batch, shape.block_size, 4, shape.n_head, shape.head_size)  # as the model lays it out
    made = torch.randn(size, dtype=dtype, device=device)
    *leaves, grad = (x.transpose(1, 2).requires_grad_() for x in made.unbind(2))

    def attend(times: int) -> None:
        for _ in range(times):
            y = scaled_dot_product_attention(*leaves, dropout_p=shape.dropout, is_causal=True)
            torch.autograd.grad(y, leaves, grad)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    seconds = {}
    for kernel in KERNELS:
        with sdpa_kernel(kernel), warnings.catch_warnings(action="ignore"):
            try:
                attend(3)
                began = time.perf_counter()
                attend(TRIALS)
            except RuntimeError:  # not for this shape, dtype or chip
                continue
            seconds[kernel] = (time.perf_counter() - began) / TRIALS
    return seconds


def prefer_fastest(shape: GPTConfig, batch: int, dtype: torch.dtype, device: torch.device) -> str:
    """From now on attention goes to the kernel that is fastest for this shape, or, where that
    cannot do it, to the next. Says what each takes."""
    global preferred
    found = seconds_of_kernels(shape, batch, dtype, device)
    order = sorted(found, key=found.get)
    rest = [kernel for kernel in KERNELS if kernel not in order]
    preferred = sdpa_kernel([*order, *rest, SDPBackend.MATH], set_priority=True)
    preferred.__enter__()
    told = ", ".join(f"{kernel.name} {1000 * found[kernel]:.2f} ms" for kernel in order)
    return f"attention of a layer, forward and backward, by kernel: {told}"
