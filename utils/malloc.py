"""What glibc's malloc does with a CPU's tensors. It gives back to the system what is freed, which
hands out zeroed pages again: a fifth of a training step. A heap that keeps what is freed avoids
that, but gets holes where tensors that stay lie between those that come and go."""

import ctypes
import gc
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
GIVEN = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"}
begun = False


def apart() -> None:
    """From the start on a tensor of 1 MiB or more has pages to itself, which go with it: for those
    that stay. Settings in the environment have precedence; another libc is left alone."""
    global begun
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and not begun and not GIVEN & set(os.environ):
        begun = True
        libc.mallopt(M_MMAP_THRESHOLD, 2**20)


def shared() -> None:
    """From now on, once `apart` was in force, tensors below 32 MiB (glibc's limit) come from a heap
    that keeps what is freed: for those that come and go."""
    if begun:
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 2**25)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        gc.collect()
        libc.malloc_trim(0)  # of what compiling left
