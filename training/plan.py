"""Memory of a run: its forecast, and --micro_batch_size auto.

State is counted exactly. Activations, cast weights and the logits follow one formula from the shape
of the model; docs/SCALING.md says how far it is off.
"""

from dataclasses import dataclass, replace

import torch

from config.options import TrainConfig
from config.recipes import Recipe
from model import loss
from model.config import GPTConfig
from model.gpt import build_without_weights
from training.optim import MOMENTS
from utils.devices import pick_device, pick_dtype
from utils.distributed import free_memory, launched, num_nodes
from utils.errors import UserError
from utils.throughput import GPU, NAMED_GPUS

GPUS_PER_MACHINE = 8
USABLE = 0.9  # share of the free memory that a micro-batch is chosen for


@dataclass(frozen=True)
class Hardware:
    """Devices of a run: `world_size` processes on `nodes` machines, each with `free` bytes."""

    device: torch.device
    dtype: torch.dtype
    free: int
    world_size: int
    nodes: int = 1
    gpu: GPU | None = None
    """GPU that --device names; this machine need not have it."""

    @classmethod
    def of(cls, config: TrainConfig) -> "Hardware":
        """Return the hardware that the options name: a GPU by name, or that of this machine."""
        if gpu := NAMED_GPUS.get(config.device):
            device, free = torch.device("cuda"), gpu.memory * 10**9
            dtype = getattr(torch, gpu.dtype if config.dtype == "auto" else config.dtype)
        else:
            device = pick_device(config.device, launched("LOCAL_RANK"))
            dtype, free = pick_dtype(config.dtype, device), free_memory(device)
        nodes = num_nodes(GPUS_PER_MACHINE if device.type == "cuda" else 1)
        return cls(device, dtype, free, launched("WORLD_SIZE", 1), nodes, gpu)


def block_activations(shape: GPTConfig, e: int, checkpointing: str) -> int:
    """Return the bytes per token that autograd keeps of one block; `e` is the itemsize of matmuls,
    norms and the residual stream are float32."""
    C, inner, gates = shape.n_embd, shape.inner, int(shape.activation == "swiglu")
    qkv, fc = C + 2 * shape.kv_heads * shape.head_size, inner * (1 + gates)
    if checkpointing == "block":  # the block's input
        return 4 * C
    if checkpointing == "cheap":  # ... and the outputs of linear layers and attention
        return 4 * C + e * (qkv + fc + 3 * C)
    attention = qkv * (2 if shape.position == "rotary" else 1) + C
    return 8 * C + e * (attention + 2 * C + fc + inner * (1 + gates))


def forecast_memory(
    config: TrainConfig, recipe: Recipe, shape: GPTConfig, hardware: Hardware
) -> dict[str, int]:
    """Return the bytes of one process by part. Sharding divides state among the processes of each
    machine; a CPU also holds a copy of the state while it is saved."""
    e, world_size = hardware.dtype.itemsize, hardware.world_size
    model = build_without_weights(shape)
    total = sum(p.numel() for p in model.parameters())
    matrices = sum(p.numel() for p in model.transformer.h.parameters() if p.dim() >= 2)
    moments = 2 * total - (2 - MOMENTS[recipe.optimizer]) * matrices
    shards = world_size // hardware.nodes if config.sharding != "none" else 1
    micro_steps = config.sequences_per_step(world_size) // config.micro_batch_size // world_size
    whole_gradients = config.sharding == "zero1" and micro_steps > 1
    # DDP's buckets, and apart from them the gradients of the micro-steps that are not synchronized
    gradient_bytes = 8 if config.sharding == "none" and world_size > 1 and micro_steps > 1 else 4
    cast = 0
    if shards > 1:  # zero3 gathers the current block, the next, and a buffer to receive it
        gathered = min(1, 3 / shape.n_layer) if config.sharding == "zero3" else 1
        cast = int(e * gathered * matrices) + 4 * (total - matrices)
    elif e < 4 and config.activation_checkpointing == "none":
        cast = e * matrices

    tokens, V, C = config.micro_batch_size * shape.block_size, shape.padded_vocab_size, shape.n_embd
    kept = block_activations(shape, e, config.activation_checkpointing)
    rows = min(tokens, loss.rows_within(loss.chunk_bytes(hardware.device), 4 * V))
    head = (4 + e % 4) * (V + tokens) * C + (e + 8) * rows * V
    backward = tokens * (12 * C + block_activations(shape, e, "none") - kept)  # of one block
    parts = {
        "weights": 4 * total // shards,
        "weights cast or gathered for compute": cast,
        "gradients": gradient_bytes * total // (1 if whole_gradients else shards),
        "optimizer": 4 * moments // shards,
        "activations": tokens * (shape.n_layer * kept + 4 * C),
        "head and logits, or one block's backward pass": max(head, backward),
    }
    on_cpu = hardware.device.type == "cpu"
    return parts | ({"copy for saving": 4 * (total + moments)} if on_cpu else {})


def choose_micro_batch(
    config: TrainConfig,
    recipe: Recipe,
    shape: GPTConfig,
    hardware: Hardware,
    checkpoint: dict | None,
) -> tuple[int, str]:
    """Return the micro-batch for --micro_batch_size auto: that of the checkpoint, where it divides
    a process's share of a step, else the largest divisor whose forecast is within USABLE of the
    free memory; and a sentence on it. Raises UserError where there is none."""

    def need(size: int) -> int:
        trial = replace(config, micro_batch_size=size)
        return sum(forecast_memory(trial, recipe, shape, hardware).values())

    one = replace(config, micro_batch_size=1)
    share = one.sequences_per_step(hardware.world_size) // hardware.world_size
    sizes = [n for n in range(1, share + 1) if share % n == 0]
    fitting = [n for n in sizes if need(n) <= USABLE * hardware.free]
    free = f"{hardware.free / 1e9:.2f} GB free"
    if not fitting:
        raise UserError(
            f"one sequence needs {need(1) / 1e9:.2f} GB, but a process has {free}: see "
            "--activation_checkpointing and --sharding"
        )
    size = fitting[-1]
    if checkpoint and checkpoint["config"]["micro_batch_size"] in sizes:
        size = checkpoint["config"]["micro_batch_size"]
    return size, f"--micro_batch_size auto: {size}, by forecast {need(size) / 1e9:.2f} GB of {free}"
