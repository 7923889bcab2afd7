"""Print the table of docs/SCALING.md: the fastest settings of each model on each number of GPUs.

    python -m tests.training.scaling

Computed, not measured: the simplest settings within five percent of the fastest step. A step is its
arithmetic at MFU and the communication that does not overlap with it; latency, imbalance, loading,
evaluation and saving are left out.
"""

from dataclasses import dataclass
from itertools import product

import torch
from training.forecast import (
    GPUS_PER_MACHINE,
    count_parameters,
    forecast_memory,
    training_seconds,
)

from config import TrainConfig
from model.config import GPTConfig
from model.empty import empty_gpt
from utils.gpus import NAMED_GPUS

SHAPES = {  # blocks, heads, width: GPT-2's four, and two in the shapes of LLaMA's 7B and 13B
    "124M": (12, 12, 768),
    "350M": (24, 16, 1024),
    "774M": (36, 20, 1280),
    "1558M": (48, 25, 1600),
    "7B": (32, 32, 4096),
    "13B": (40, 40, 5120),
}
MODELS = {name: GPTConfig(1024, 50257, *shape) for name, shape in SHAPES.items()}
GPUS = (1, 8, 64, 1024)
BATCH = 2**20  # tokens in a step
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022
USABLE = 68e9  # bytes of 80 GB: 15 % are for the CUDA context, NCCL and fragmentation
NVLINK, NETWORK = 450e9, 50e9  # bytes/s a GPU and direction: NVLink 4, 400 Gbit/s InfiniBand


@dataclass(frozen=True)
class Plan:
    """Settings of a run, memory of a GPU in bytes and time of a step in seconds."""

    sharding: str
    checkpointing: str
    micro_batch_size: int
    bytes: int
    step: float


def traffic(
    blocks: int, rest: int, *, accumulation: int, sharding: str, shards: int, machines: int
) -> tuple[float, float]:
    """Return the bytes that a GPU sends in a step, within its machine and to others, by ring
    algorithms in bfloat16.

    DDP all-reduces 4 bytes per gradient, each sent twice. Sharded runs reduce-scatter gradients (4)
    and all-gather weights (2, outside the blocks 4) once a step; zero2 scatters every micro-step,
    zero3 also gathers twice every micro-step. Machines all-reduce their shards once a step.
    """
    total, part = blocks + rest, (shards - 1) / shards
    within = 2 * 4 * total * part
    if sharding != "none":
        scatters = 1 if sharding == "zero1" else accumulation
        gathers = 2 * accumulation if sharding == "zero3" else 1
        within = part * (4 * total * scatters + 2 * blocks * gathers + 4 * rest)
    return within, 2 * 4 * (total / shards) * (machines - 1) / machines


def plan(shape: GPTConfig, gpus: int, sharding: str, checkpointing: str, micro: int) -> Plan | None:
    """Return one way to run a model; None where batch or memory is too small. A step takes its
    arithmetic, and the communication that does not overlap with it."""
    accumulation, shards = BATCH // (micro * shape.block_size * gpus), min(gpus, GPUS_PER_MACHINE)
    if not accumulation:
        return None
    run = {"sharding": sharding, "activation_checkpointing": checkpointing}
    config = TrainConfig(total_batch_size=BATCH, micro_batch_size=micro, **run)
    machines = gpus // shards
    need = forecast_memory(config, shape, "cuda", torch.bfloat16, gpus, machines).peak
    if need > USABLE:
        return None
    blocks, rest = count_parameters(shape)
    flops = BATCH * empty_gpt(shape).flops_per_token()
    compute = training_seconds(flops, gpus, NAMED_GPUS["h100"].peak, checkpointing)
    within, between = traffic(
        blocks, rest, accumulation=accumulation, sharding=sharding, shards=shards, machines=machines
    )
    backward = 2 / 3 * compute
    hidden = {"zero2": backward, "zero3": compute}.get(sharding, backward / accumulation)
    step = compute + max(0.0, within / NVLINK + between / NETWORK - hidden)
    return Plan(sharding, checkpointing, micro, need, step)


def best(shape: GPTConfig, gpus: int) -> Plan | None:
    """Return the simplest of the fastest plans; None where none fits."""
    shardings = ("none", "zero1", "zero2", "zero3") if gpus > 1 else ("none",)
    ways = product(shardings, ("none", "cheap", "block"), (64, 32, 16, 8, 4, 2, 1))
    plans = [p for p in (plan(shape, gpus, *way) for way in ways) if p]
    fastest = min((p.step for p in plans), default=0.0)
    return next((p for p in plans if p.step <= 1.05 * fastest), None)


def row(name: str, gpus: int) -> str:
    """Return a row of the table."""
    found = best(MODELS[name], gpus)
    if found is None:
        return f"| {name} | {gpus} | does not fit | | | | | |"
    tokens = TOKENS_PER_PARAMETER * sum(count_parameters(MODELS[name]))
    days = tokens / BATCH * found.step / 86_400
    return (
        f"| {name} | {gpus} | {found.sharding} | {found.checkpointing} | "
        f"{found.micro_batch_size} | {found.bytes / 1e9:.0f} | {BATCH / found.step:,.0f} | "
        f"{days:.2g} |"
    )


if __name__ == "__main__":
    print("| model | GPUs | sharding | checkpointing | micro-batch | GB a GPU | tokens/s | days |")
    print("|---|---|---|---|---|---|---|---|")
    for name, gpus in product(MODELS, GPUS):
        print(row(name, gpus))
