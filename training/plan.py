"""Memory of a run: its forecast by part, and the micro-batch that fits.

Weights, gradients and optimizer state are counted exactly. Activations, cast weights and logits are
sums of terms, one for each tensor that is alive at the peak; docs/SCALING.md says how far they are
off. Nothing is allocated: models here are on the device "meta". Time and cost are
training/dry_run.py.
"""

import os
from dataclasses import dataclass, replace

import torch

from config import ResolvedTrainConfig, TrainConfig
from model import loss
from model.config import GPTConfig
from model.gpt import build_without_weights
from model.recipes import Recipe
from training.optim import MOMENTS
from utils.devices import pick_device, pick_dtype
from utils.distributed import launched, num_nodes
from utils.errors import UserError
from utils.throughput import GPU, NAMED_GPUS

FLOAT32_BYTES = 4
GPUS_PER_MACHINE = 8  # where a launcher does not say how many processes a machine has
USABLE = 0.9  # share of the free memory that a micro-batch is chosen for; the forecast is not exact


@dataclass(frozen=True)
class Hardware:
    """Devices of a run on `nodes` machines."""

    device: torch.device
    dtype: torch.dtype
    """Dtype of matmuls."""
    free: int
    """Bytes that each process can allocate."""
    world_size: int
    """Parts of the data; the number of processes without tensor parallelism."""
    nodes: int = 1
    gpu: GPU | None = None
    """GPU that --device names; this machine need not have it."""
    tensor_parallel: int = 1
    """Processes that share each block."""

    @classmethod
    def of(cls, options: TrainConfig) -> "Hardware":
        """Return the hardware that the options name: a GPU by name, or that of this machine."""
        gpu = NAMED_GPUS.get(options.device)
        if gpu is not None:
            device = torch.device("cuda")
            free = gpu.memory * 10**9
            dtype_name = gpu.dtype if options.dtype == "auto" else options.dtype
            dtype = getattr(torch, dtype_name)
        else:
            device = pick_device(options.device, launched("LOCAL_RANK"))
            free = free_memory(device)
            dtype = pick_dtype(options.dtype, device)
        nodes = num_nodes(GPUS_PER_MACHINE if device.type == "cuda" else 1)
        # without a launcher, of one group of processes that share each block
        world_size = max(1, launched("WORLD_SIZE", 1) // options.tensor_parallel)
        return cls(device, dtype, free, world_size, nodes, gpu, options.tensor_parallel)


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process can allocate: on its GPU, or its share of the host."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    # half of the memory that is there: the system, other programs and cached files have the rest
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    processes_here = launched("LOCAL_WORLD_SIZE", launched("WORLD_SIZE", 1))
    return free // processes_here


def block_activations(
    shape: GPTConfig, itemsize: int, checkpointing: str, num_ranks: int = 1
) -> int:
    """Return the bytes per token that autograd keeps of one block for the backward pass, in each of
    `num_ranks` processes that share it.

    `itemsize` is that of the dtype of matmuls; norms and the residual stream are float32.
    """
    C = shape.n_embd
    residual = FLOAT32_BYTES * C
    if checkpointing == "block":
        return residual  # its input alone

    # channels of a process
    inner = shape.inner // num_ranks
    attention = C // num_ranks
    qkv = attention + 2 * shape.kv_heads * shape.head_size // num_ranks  # c_attn's output
    hidden = 2 * inner if shape.is_gated else inner  # c_fc's output
    if checkpointing == "cheap":
        # the block's input, and the outputs of the four linear layers and of attention
        projections = 2 * C
        return residual + itemsize * (qkv + attention + hidden + projections)

    residuals = 2 * residual  # inputs of the two norms
    normed = 2 * C  # outputs of the norms, which are the inputs of c_attn and c_fc
    if shape.position == "rotary":
        qkv *= 2  # before and after the rotation
    activated = inner  # input of the MLP's c_proj
    if shape.is_gated:
        activated += inner  # SiLU of the gate, which multiplies the other half
    return residuals + itemsize * (normed + qkv + attention + hidden + activated)


def head_memory(shape: GPTConfig, tokens: int, hardware: Hardware, compiled: bool) -> int:
    """Return the bytes that the loss of `tokens` tokens holds at its peak (model/loss.py), from the
    output of the final norm on."""
    itemsize = hardware.dtype.itemsize
    C = shape.n_embd
    V = shape.padded_vocab_size
    hidden = FLOAT32_BYTES * tokens * C
    # the loss computes gradients of hidden states and of the head's weight in its forward pass
    gradients = FLOAT32_BYTES * (tokens * C + V * C)
    copies = 0
    if itemsize < FLOAT32_BYTES:
        # of hidden states, of their gradient and of the weight, for the matmuls
        copies = itemsize * (2 * tokens * C + V * C)
    # One chunk of logits in the dtype of matmuls. Without the compiler, which stores no
    # intermediate results, also a copy of some of its rows in float32, and their softmax. A CPU
    # works on too few rows at a time to count.
    max_rows = loss.rows_within(loss.chunk_bytes(hardware.device), FLOAT32_BYTES * V)
    logits = itemsize * loss.chunk_rows(tokens, max_rows) * V
    if not compiled and hardware.device.type != "cpu":
        logits += 2 * loss.SOFTMAX_BYTES
    return hidden + gradients + copies + logits


def forecast_memory(
    options: TrainConfig, recipe: Recipe, shape: GPTConfig, hardware: Hardware
) -> dict[str, int]:
    """Return the bytes of one process at its peak, by part.

    Sharding divides state among the processes of each machine. Names are printed by --dry_run.
    """
    itemsize = hardware.dtype.itemsize  # bytes of a number in matmuls
    num_ranks = hardware.tensor_parallel
    world_size = hardware.world_size
    model = build_without_weights(shape)
    # counts of weights: all, matrices of the blocks (trained by a recipe's optimizer), all others
    num_weights = sum(p.numel() for p in model.parameters())
    num_matrix_weights = sum(p.numel() for p in model.transformer.h.parameters() if p.dim() >= 2)
    num_other_weights = num_weights - num_matrix_weights
    num_matrix_weights //= num_ranks  # from here on, of one process's part of the blocks
    num_weights = num_matrix_weights + num_other_weights
    num_moments = MOMENTS["adamw"] * num_other_weights
    num_moments += MOMENTS[recipe.optimizer] * num_matrix_weights
    sequences = options.sequences_per_step(world_size)
    micro_steps = sequences // (options.sequences_per_pass * world_size)
    is_sharded = options.sharding != "none"  # zero1, zero2 or zero3
    # processes of a machine, among which sharding divides
    num_shards = world_size // hardware.nodes if is_sharded else 1
    # FSDP2 copies weights also where it divides them among one process, as tensor parallelism may
    has_copies = num_shards * num_ranks > 1

    gradients = FLOAT32_BYTES * num_weights
    if not is_sharded and world_size > 1 and micro_steps > 1:
        gradients *= 2  # DDP's buckets, and apart from them what earlier micro-steps have summed
    if options.sharding != "zero1" or micro_steps == 1:
        gradients //= num_shards  # zero1 sums whole gradients until the last micro-step

    compute_weights = 0
    if has_copies:
        gathered = itemsize * num_matrix_weights
        if options.sharding == "zero3":
            # the current block, the next, and a buffer to receive it
            gathered = int(itemsize * min(1, 3 / shape.n_layer) * num_matrix_weights)
        # embeddings, final norm and head are gathered in float32, and the blocks' small vectors
        # are counted with them
        compute_weights = gathered + FLOAT32_BYTES * num_other_weights
    elif itemsize < FLOAT32_BYTES and options.activation_checkpointing == "none":
        compute_weights = itemsize * num_matrix_weights  # autocast's copies, which autograd keeps

    # FSDP2 holds the buffer of a micro-step's last reduction, that of the root, until the next one
    held_buffer = 0
    if has_copies and micro_steps > 1 and options.sharding != "zero1":
        held_buffer = FLOAT32_BYTES * num_other_weights

    tokens = options.sequences_per_pass * shape.block_size
    checkpointing = options.activation_checkpointing
    per_block = block_activations(shape, itemsize, checkpointing, num_ranks)
    final_norm = FLOAT32_BYTES * shape.n_embd  # its input
    # One block's backward pass: its activations, where they are computed again, and three float32
    # gradients of the residual stream. The loss is over by then, so only the larger one counts.
    recomputed = block_activations(shape, itemsize, "none", num_ranks) - per_block
    block_backward = tokens * (3 * FLOAT32_BYTES * shape.n_embd + recomputed)
    forecast = {
        "weights": FLOAT32_BYTES * num_weights // num_shards,
        "weights cast or gathered for compute": compute_weights,
        "gradients": gradients,  # divided among processes above, where they are
        "optimizer": FLOAT32_BYTES * num_moments // num_shards,
        "buffer of the last reduction": held_buffer,
        "activations": tokens * (shape.n_layer * per_block + final_norm),
        "head and logits, or one block's backward pass": max(
            head_memory(shape, tokens, hardware, options.use_torch_compile), block_backward
        ),
    }
    if hardware.device.type == "cpu":
        # a thread splits the weights of a copy in two, and writes it while training goes on
        forecast["copy for saving"] = FLOAT32_BYTES * (2 * num_weights + num_moments)
    return forecast


def choose_micro_batch(
    options: ResolvedTrainConfig,
    recipe: Recipe,
    shape: GPTConfig,
    hardware: Hardware,
) -> tuple[int, str]:
    """Return the sequences of a micro-batch for --micro_batch_size auto, and a sentence about it.

    That is the largest divisor of a process's share of a step whose forecast fits USABLE of the
    free memory. Raises UserError if not even one sequence fits.
    """
    sequences = replace(options, micro_batch_size=1).sequences_per_step(hardware.world_size)
    sequences_per_process = sequences // hardware.world_size
    free_text = f"{hardware.free / 1e9:.2f} GB free"
    # the largest first
    for size in range(sequences_per_process, 0, -1):
        if sequences_per_process % size == 0:
            trial = replace(options, micro_batch_size=size)
            needed_bytes = sum(forecast_memory(trial, recipe, shape, hardware).values())
            if needed_bytes <= USABLE * hardware.free:
                forecast = f"by forecast {needed_bytes / 1e9:.2f} GB of {free_text}"
                return size, f"--micro_batch_size auto: {size}, {forecast}"
    raise UserError(
        f"one sequence needs {needed_bytes / 1e9:.2f} GB, but a process has {free_text}: "
        "see --activation_checkpointing and --sharding"
    )
