"""Hardware of a run, and the forecast of its memory by use.

Weights, gradients and optimizer state are counted exactly (but not NorMuon's state, which has one
number per row). What the blocks keep is measured (training/forecast/blocks.py); head, logits and
gathered weights are formulas. docs/SCALING.md gives the errors. tests/training/test_counts.py and
test_graphs.py compare with PyTorch's own counts. Nothing is allocated: models here are on the
device "meta". training/forecast/step_time.py forecasts communication, and
training/forecast/advice.py finds what fits.
"""

import functools
import gc
from dataclasses import dataclass, replace

import torch

from config import MachineOptions, ResolvedTrainOptions
from model import chunked_loss
from model.config import GPTConfig
from model.execution import Execution
from model.gpt import GPT
from model.initial_weights import build_without_weights
from recipes import Recipe
from training.forecast.blocks import measure_blocks
from training.optimizers import ADAMW_MOMENTS, matrix_optimizer
from utils.devices import host_memory, pick_device, pick_dtype
from utils.distributed import count_shards
from utils.launch import read_launch
from utils.throughput import GPU, gpu_of, plan_gpus

FLOAT32_BYTES = 4
# Fraction of the free memory that the forecast of a run may fill, because it is not exact.
USABLE_SHARE = 0.9


@dataclass(frozen=True)
class Hardware:
    """Devices of a run, and the number of its processes. parallel_degrees returns how the processes
    divide the work, which depends on the options of the run."""

    device: torch.device
    dtype: torch.dtype
    """Dtype of matmuls."""
    free_bytes: int
    """Bytes that each process can allocate."""
    world_size: int = 1
    """Number of all processes, one per device."""
    processes_per_machine: int = 1
    """Processes of a machine."""
    gpu: GPU | None = None
    """GPU that --device names, perhaps of another machine, with its peak FLOP/s and bandwidth; None
    for CPUs, and for GPUs whose peak in `dtype` is not known."""

    @classmethod
    def of(cls, options: ResolvedTrainOptions) -> "Hardware":
        """Return the hardware that --device names: a GPU by name (h100), or a device of this
        machine."""
        launch = read_launch()
        gpu: GPU | None
        plan = plan_gpus(options.device)  # (GPU, Launch) of h100 or 16xh100; None for cuda
        if plan is not None:
            gpu, launch = plan
            device = torch.device("cuda")
            free_bytes = gpu.memory_gb * 10**9  # memory_gb is in GB; all of it counts as free
            dtype_name = gpu.dtype_name if options.dtype == "auto" else options.dtype
            dtype = getattr(torch, dtype_name)
            if dtype_name not in ("float16", gpu.dtype_name):  # the peak in this dtype is not known
                gpu = None
        else:
            device = pick_device(options.device, launch.local_rank)  # "cuda" is cuda:local_rank
            free_bytes = free_memory(device)
            dtype = pick_dtype(options.dtype, device)  # on a CPU, "auto" times matmuls
            # None for a CPU, and for a GPU or dtype whose peak FLOP/s are not known
            gpu = gpu_of(device, dtype)
        world_size = launch.world_size
        processes_per_machine = launch.processes_per_machine
        if world_size == 1:  # without torchrun, the run has one tensor-parallel group
            world_size = processes_per_machine = options.tensor_parallel
        return cls(device, dtype, free_bytes, world_size, processes_per_machine, gpu)

    def parallel_degrees(self, options: MachineOptions) -> tuple[int, int]:
        """Return data_parallel, the number of parts of the data, and num_shards, the number of
        shards of one copy of the training state (1 without sharding). Raises UserError for options
        that do not divide the processes."""
        # The processes of a tensor-parallel group read the same part of the data.
        data_parallel = self.world_size // options.tensor_parallel
        # Shards of a copy of the training state. Called without sharding, too, for its UserError.
        num_shards = count_shards(
            self.world_size,
            self.processes_per_machine,
            options.tensor_parallel,
            options.shard_across,
        )
        return data_parallel, num_shards if options.sharding != "none" else 1

    def count_micro_steps(self, options: ResolvedTrainOptions) -> int:
        """Return the number of micro-batches of a process in a step. Raises UserError if
        --total_batch_size does not divide into micro-batches."""
        data_parallel, _ = self.parallel_degrees(options)
        return options.micro_steps(data_parallel)


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process can allocate: the free memory of its GPU, to which PyTorch
    returns first what it does not use, or its share of the host memory."""
    if device.type == "cuda":
        gc.collect()  # models that --minutes has measured: compiled ones are reference cycles
        torch.cuda.empty_cache()  # else memory that PyTorch keeps would count as used
        return torch.cuda.mem_get_info(device)[0]  # [0] is free memory, [1] is all memory
    # half of all memory: the system, other programs and the page cache need the other half
    free_bytes = host_memory() // 2
    return free_bytes // read_launch().processes_per_machine


def effective_checkpointing(options: ResolvedTrainOptions) -> str:
    """Return the activation checkpointing that the blocks really do: "none", "cheap" or "block".
    With dropout, "cheap" does the same as "block" unless the model is compiled
    (choose_recomputation of model/execution.py)."""
    if options.dropout > 0 and not options.use_torch_compile:
        return options.activation_checkpointing.replace("cheap", "block")
    return options.activation_checkpointing


def sequence_bytes(
    options: ResolvedTrainOptions, model_config: GPTConfig, hardware: Hardware
) -> tuple[int, int]:
    """Return the bytes of activations of one sequence that all blocks keep for the backward pass,
    and those that the backward pass of one block computes again, without masks of dropout."""
    checkpointed, plain = (  # lists of BlockCost: with the run's checkpointing, and without
        measure_blocks(
            replace(model_config, dropout=0.0),
            Execution(mode, options.use_torch_compile),
            hardware.device.type,
            hardware.dtype,
            options.tensor_parallel,
        )
        for mode in (effective_checkpointing(options), "none")
    )
    # of the block that recomputes the most, because one block is recomputed at a time
    recomputed_bytes = max(
        of_plain.activation_bytes - of_checkpointed.activation_bytes
        for of_plain, of_checkpointed in zip(plain, checkpointed, strict=True)
    )
    return sum(cost.activation_bytes for cost in checkpointed), recomputed_bytes


def head_bytes(model_config: GPTConfig, num_tokens: int, hardware: Hardware, compiled: bool) -> int:
    """Return the bytes that the head and the loss (model/chunked_loss.py) hold at their peak, for a
    micro-batch of `num_tokens` tokens. The output of the final norm is included."""
    itemsize = hardware.dtype.itemsize  # bytes of a number in matmuls
    C = model_config.n_embd
    V = model_config.padded_vocab_size  # 50304 for GPT-2
    hidden_bytes = FLOAT32_BYTES * num_tokens * C  # output of the final norm
    # The loss computes the gradients of the hidden states and the head in its forward pass.
    loss_gradient_bytes = FLOAT32_BYTES * (num_tokens * C + V * C)
    cast_bytes = 0
    if itemsize < FLOAT32_BYTES:
        # hidden states, their gradient and the head's weight in the dtype of matmuls
        cast_bytes = itemsize * (2 * num_tokens * C + V * C)
    # The loss computes the logits of one chunk of the micro-batch at a time, (tokens, padded V) in
    # the dtype of matmuls.
    logits_bytes = itemsize * chunked_loss.tokens_per_chunk(num_tokens, V, hardware.device) * V
    # Without the compiler, the loss also holds a float32 copy of some rows of the chunk, and their
    # softmax. On a CPU these rows are too few to count.
    if not compiled and hardware.device.type != "cpu":
        logits_bytes += 2 * chunked_loss.SOFTMAX_BYTES
    return hidden_bytes + loss_gradient_bytes + cast_bytes + logits_bytes


# Cached, because each call builds the model, and `advise` calls it hundreds of times.
@functools.cache
def count_weights(model_config: GPTConfig, tensor_parallel: int) -> tuple[int, int]:
    """Return the number of matrix weights (in the matrices of the blocks) and of other weights
    (embeddings, head, biases, gains) of a process, before sharding. Tensor parallelism, optimizers
    and FSDP2 treat them differently."""
    model = build_without_weights(GPT, model_config)  # on "meta": shapes only
    num_weights = sum(p.numel() for p in model.parameters())
    num_matrix_weights = sum(p.numel() for p in model.transformer.h.parameters() if p.dim() >= 2)
    # Tensor parallelism divides the matrices. It also divides biases of c_attn and c_fc, which are
    # counted whole here: they are few.
    return num_matrix_weights // tensor_parallel, num_weights - num_matrix_weights


def uses_fsdp(options: ResolvedTrainOptions, hardware: Hardware) -> bool:
    """Return whether FSDP2 divides the state. A single process trains the plain model. With tensor
    parallelism FSDP2 may shard over a group of one process, and still gathers copies."""
    return options.sharding != "none" and hardware.world_size > 1


def sums_unsharded_gradients(options: ResolvedTrainOptions, hardware: Hardware) -> bool:
    """Return whether the gradients of several micro-steps add up before they are sharded: zero1
    reduces them only in the last one."""
    return options.sharding == "zero1" and hardware.count_micro_steps(options) > 1


def copies_bytes(options: ResolvedTrainOptions, model_config: GPTConfig, hardware: Hardware) -> int:
    """Return the bytes of the copies of weights that matmuls read."""
    itemsize = hardware.dtype.itemsize  # bytes of a number in matmuls
    # of a process before sharding: of 124M 84.9M in the blocks' matrices, and 39.5M others
    num_matrix_weights, num_other_weights = count_weights(model_config, options.tensor_parallel)
    if uses_fsdp(options, hardware):
        num_gathered_weights = num_matrix_weights  # of all blocks: zero1 and zero2 keep them
        if options.sharding == "zero3":  # of the current block and the next one
            num_gathered_weights = 2 * (num_matrix_weights // model_config.n_layer)
        # Embeddings, final norm and head are gathered in float32. We count the blocks' biases and
        # gains with them.
        return itemsize * num_gathered_weights + FLOAT32_BYTES * num_other_weights
    if itemsize < FLOAT32_BYTES and effective_checkpointing(options) == "none":
        # autograd keeps the copies of autocast for the backward pass
        return itemsize * num_matrix_weights
    return 0


def gradient_bytes(
    options: ResolvedTrainOptions, model_config: GPTConfig, hardware: Hardware
) -> int:
    """Return the bytes of the gradients that a process keeps from micro-step to micro-step."""
    data_parallel, num_shards = hardware.parallel_degrees(options)  # num_shards: 1 under DDP
    # of the float32 gradients of a process before sharding
    unsharded_bytes = FLOAT32_BYTES * sum(count_weights(model_config, options.tensor_parallel))
    has_ddp = not uses_fsdp(options, hardware) and data_parallel > 1
    if has_ddp and hardware.count_micro_steps(options) > 1:
        # DDP's buckets need their own memory, beside the sums of earlier micro-steps.
        return 2 * unsharded_bytes
    if sums_unsharded_gradients(options, hardware):
        return unsharded_bytes
    return unsharded_bytes // num_shards


def backward_bytes(
    options: ResolvedTrainOptions,
    model_config: GPTConfig,
    hardware: Hardware,
    recomputed_bytes: int,
) -> int:
    """Return the bytes that the backward pass of a block holds beside those of gradient_bytes:
    three float32 gradients of the residual stream, the gradient of the head, which is kept until
    the embedding's backward pass, `recomputed_bytes` of activations for each sequence and, with
    FSDP2, gradients of one or two blocks that are not sharded yet."""
    num_sequences = options.sequences_per_pass  # of the micro-batch of a process
    num_tokens = num_sequences * model_config.block_size
    head_and_stream_bytes = (
        FLOAT32_BYTES * model_config.n_embd * (3 * num_tokens + model_config.padded_vocab_size)
    )
    held_bytes = num_sequences * recomputed_bytes  # of one block
    if uses_fsdp(options, hardware):
        num_matrix_weights, _ = count_weights(model_config, options.tensor_parallel)
        block_weights = num_matrix_weights // model_config.n_layer  # matrix weights of one block
        # A block's unsharded gradients, in the dtype of matmuls, are complete when its activations
        # are freed, so only the larger of both counts.
        held_bytes = max(held_bytes, hardware.dtype.itemsize * block_weights)
        if not sums_unsharded_gradients(options, hardware):
            # float32 gradients of the previous block, in a buffer that is sent at the same time
            held_bytes += FLOAT32_BYTES * block_weights
    return head_and_stream_bytes + held_bytes


def forecast_memory(
    options: ResolvedTrainOptions, recipe: Recipe, model_config: GPTConfig, hardware: Hardware
) -> dict[str, int]:
    """Return the peak bytes of one process by use. The sum must fit; --dry_run prints the uses."""
    _, num_shards = hardware.parallel_degrees(options)  # of a copy of the state; 1 under DDP
    # of a process before sharding; matrix: in the blocks' matrices; other: embeddings, head, biases
    # and gains
    num_matrix_weights, num_other_weights = count_weights(model_config, options.tensor_parallel)
    num_weights = num_matrix_weights + num_other_weights
    # float32 numbers of optimizer state per process, before sharding
    num_moments = ADAMW_MOMENTS * num_other_weights
    num_moments += matrix_optimizer(recipe).moments * num_matrix_weights  # 2 by AdamW, 1 by Muon

    num_sequences = options.sequences_per_pass  # of the micro-batch of a process
    num_tokens = num_sequences * model_config.block_size
    # of one sequence; the recomputed activations are of one block
    block_bytes, recomputed_bytes = sequence_bytes(options, model_config, hardware)
    final_norm_bytes = FLOAT32_BYTES * model_config.n_embd * model_config.block_size  # its input
    bytes_by_use = {
        "weights": FLOAT32_BYTES * num_weights // num_shards,
        "weights cast or gathered for compute": copies_bytes(options, model_config, hardware),
        "gradients": gradient_bytes(options, model_config, hardware),
        "optimizer": FLOAT32_BYTES * num_moments // num_shards,
        "activations": num_sequences * (block_bytes + final_norm_bytes),
        # The loss ends before the backward pass of the blocks, so only the larger of both counts.
        "head and logits, or one block's backward pass": max(
            head_bytes(model_config, num_tokens, hardware, options.use_torch_compile),
            backward_bytes(options, model_config, hardware, recomputed_bytes),
        ),
    }
    if hardware.device.type == "cpu":
        # A save copies weights and optimizer state, on a CPU within the memory of the process. Then
        # it splits the weights into bfloat16 and the exact rest, which takes their bytes once more.
        bytes_by_use["copy for saving"] = (
            FLOAT32_BYTES * (2 * num_weights + num_moments) // num_shards
        )
    return bytes_by_use
