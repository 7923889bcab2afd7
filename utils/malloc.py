"""glibc malloc settings for tensors on a CPU.

By default glibc returns freed memory to the system, and every page that is taken again costs a
page fault and zeroing. A heap that keeps freed memory avoids this, but is fragmented by long-lived
tensors between temporary ones. So long-lived tensors are mapped one by one, then the heap is kept.
"""

import ctypes
import gc
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
OVERRIDES = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"}
configured = False


def map_large_tensors() -> None:
    """Map each tensor of 1 MiB or more separately; do nothing without glibc or under OVERRIDES."""
    global configured
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and not configured and not OVERRIDES & set(os.environ):
        configured = True
        libc.mallopt(M_MMAP_THRESHOLD, 2**20)


def reuse_freed_memory() -> None:
    """Serve later tensors below 32 MiB (glibc's limit) from a heap that keeps freed memory."""
    if configured:
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 2**25)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        gc.collect()
        libc.malloc_trim(0)  # once, of what the compiler has freed
