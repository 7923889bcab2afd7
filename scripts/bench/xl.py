"""Items of `bench_gpu.sh xl`: training steps of the larger models."""

import functools

import torch._inductor.config

from scripts.bench.gpu import Bench, Item, measure_step, process_group_of_one


def zero2(bench: Bench) -> dict:
    """Measure steps of 1558M with FSDP2 in a process group of one: what its hooks cost."""
    with process_group_of_one(bench):
        return measure_step(bench, "gpt2-xl", activation_checkpointing="cheap", sharding="zero2")


def max_autotune(bench: Bench) -> dict:
    """Measure steps of 350M where the compiler tries several kernels for each matmul."""
    with torch._inductor.config.patch(max_autotune=True):
        return measure_step(bench, "gpt2-medium")


def size_item(size: str, checkpointing: str) -> Item:
    """Return the item of a model and an activation checkpointing."""
    return functools.partial(measure_step, size=size, activation_checkpointing=checkpointing)


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
