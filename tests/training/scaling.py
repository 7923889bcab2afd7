"""The table of docs/SCALING.md: which model fits on how many GPUs, and how fast at best.

    python -m tests.training.scaling

Computed, not measured. Of each pair it takes the settings with the fastest step, the simplest of
those within five percent. A step is its arithmetic at MFU, and what of its traffic that cannot
hide; latency, imbalance, loading, evaluation and saving come on top.
"""

from dataclasses import dataclass
from itertools import product

from model.config import GPTConfig
from training.forecast import GPUS_PER_MACHINE, PEAK_FLOPS, memory, parameters, seconds
from utils.throughput import flops_per_token

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
    """Settings of a run, bytes on a GPU and seconds of a step."""

    sharding: str
    checkpointing: str
    micro_batch_size: int
    bytes: int
    step: float


def traffic(
    blocks: int, rest: int, *, accumulation: int, sharding: str, shards: int, machines: int
) -> tuple[float, float]:
    """Bytes that a GPU sends in a step, within its machine and to others; ring algorithms, bf16.

    DDP reduces 4 bytes a gradient, twice on its way. Sharded: gradients are scattered (4) and
    weights gathered (2, outside the blocks 4) once a step; in zero2 the former, in zero3 both, and
    the latter twice, every micro-step. Machines reduce what each GPU holds, once a step.
    """
    total, part = blocks + rest, (shards - 1) / shards
    within = 2 * 4 * total * part
    if sharding != "none":
        scatters = 1 if sharding == "zero1" else accumulation
        gathers = 2 * accumulation if sharding == "zero3" else 1
        within = part * (4 * total * scatters + 2 * blocks * gathers + 4 * rest)
    return within, 2 * 4 * (total / shards) * (machines - 1) / machines


def plan(shape: GPTConfig, gpus: int, sharding: str, checkpointing: str, micro: int) -> Plan | None:
    """One way to run a model; None where the batch does not divide or memory is too small."""
    accumulation = BATCH // (micro * shape.block_size * gpus)
    if not accumulation:
        return None
    shards = min(gpus, GPUS_PER_MACHINE)
    need = memory(
        shape,
        muon=False,
        micro_batch_size=micro,
        accumulation=accumulation,
        world_size=gpus,
        shards=shards,
        sharding=sharding,
        e=2,
        checkpointing=checkpointing,
        device="cuda",
    ).peak
    if need > USABLE:
        return None
    step = step_seconds(shape, gpus, sharding, checkpointing, accumulation)
    return Plan(sharding, checkpointing, micro, need, step)


def step_seconds(
    shape: GPTConfig, gpus: int, sharding: str, checkpointing: str, accumulation: int
) -> float:
    """Time of a step: its arithmetic, and the traffic that is not hidden behind the part of it
    that runs at the same time."""
    shards = min(gpus, GPUS_PER_MACHINE)
    blocks, rest = parameters(shape)
    multiplying = blocks + rest - shape.block_size * shape.n_embd
    flops = BATCH * flops_per_token(multiplying, shape.n_layer, shape.n_embd, shape.block_size)
    compute = seconds(flops, gpus, PEAK_FLOPS, checkpointing)
    within, between = traffic(
        blocks,
        rest,
        accumulation=accumulation,
        sharding=sharding,
        shards=shards,
        machines=gpus // shards,
    )
    backward = 2 / 3 * compute
    hidden = {"zero2": backward, "zero3": compute}.get(sharding, backward / accumulation)
    return compute + max(0.0, within / NVLINK + between / NETWORK - hidden)


def best(shape: GPTConfig, gpus: int) -> Plan | None:
    """The simplest of the fastest plans; None where none fits."""
    shardings = ("none", "zero1", "zero2", "zero3") if gpus > 1 else ("none",)
    ways = product(shardings, ("none", "mlp", "block"), (64, 32, 16, 8, 4, 2, 1))
    plans = [p for p in (plan(shape, gpus, *way) for way in ways) if p]
    fastest = min((p.step for p in plans), default=0.0)
    return next((p for p in plans if p.step <= 1.05 * fastest), None)


def row(name: str, gpus: int) -> str:
    """A line of the table."""
    found = best(MODELS[name], gpus)
    if found is None:
        return f"| {name} | {gpus} | does not fit | | | | | |"
    tokens = TOKENS_PER_PARAMETER * sum(parameters(MODELS[name]))
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
