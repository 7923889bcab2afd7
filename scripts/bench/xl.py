"""Items of `bench_gpu.sh xl`: training steps of the larger models."""

import functools

import torch._inductor.config
import torch.distributed as dist

from scripts.bench.gpu import Bench, Item, measure_training


def step(bench: Bench, size: str, checkpointing: str = "none", sharding: str = "none") -> dict:
    """Measure compiled training steps at the largest micro-batch."""
    options = {"activation_checkpointing": checkpointing, "sharding": sharding}
    return measure_training(bench, bench.job("train", size, use_torch_compile=True, **options))


def zero2(bench: Bench) -> dict:
    """Measure steps of 1558M with FSDP2 in a process group of one: what its hooks cost."""
    backend = "nccl" if bench.device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{bench.folder}/zero2", rank=0, world_size=1
    )
    try:
        return step(bench, "gpt2-xl", "cheap", "zero2")
    finally:
        dist.destroy_process_group()


def max_autotune(bench: Bench) -> dict:
    """Measure steps of 350M where the compiler tries several kernels for each matmul."""
    with torch._inductor.config.patch(max_autotune=True):
        return step(bench, "gpt2-medium")


def size_item(size: str, checkpointing: str) -> Item:
    """Return the item of a model and an activation checkpointing."""
    return functools.partial(step, size=size, checkpointing=checkpointing)


ITEMS: dict[str, Item] = {
    "350M": size_item("gpt2-medium", "none"),
    "774M": size_item("gpt2-large", "none"),
    "1558M": size_item("gpt2-xl", "none"),
    "1558M_cheap": size_item("gpt2-xl", "cheap"),
    "774M_cheap": size_item("gpt2-large", "cheap"),
    "1558M_block": size_item("gpt2-xl", "block"),
    "1558M_zero2": zero2,
    "350M_max_autotune": max_autotune,
}
