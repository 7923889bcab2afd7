"""Forecast of the time of a step: the compute of each GPU, and the bytes that it sends to others.

Formulas are those of ring algorithms, without latencies. A step of `a` micro-steps and N parameters
sends about these bytes from each of the W GPUs of a machine, times (W - 1) / W. (The code below
also counts what is gathered once a step, in float32: embeddings, biases and gains.)

    none    8 N          one all-reduce of float32 gradients, which counts twice
    zero1   6 N          one all-gather of bfloat16 weights, one reduce-scatter of gradients
    zero2   4 N a + 2 N  a reduce-scatter in each micro-step
    zero3   8 N a        also two all-gathers in each micro-step

Between M machines each GPU then sends 8 N / W * (M - 1) / M. Sending is hidden if compute takes
longer. With F FLOP/s and S bytes/s of a GPU, "none" hides behind one backward pass of 4 N FLOPs per
token: 8 N / S < 4 N tokens / F, so a micro-batch needs 2 F / S tokens, under "zero2" F / S, under
"zero3" 4 F / 3 S. The gradients that are ready last cannot be hidden: of 124M, the 154 MB of the
tied embedding, 0.6 ms by NVLink.
"""

from dataclasses import dataclass

import torch

from config import ResolvedTrainOptions
from model.config import GPTConfig
from model.execution import Execution
from training.forecast.blocks import measure_blocks
from training.forecast.memory import FLOAT32_BYTES, Hardware, count_weights, effective_checkpointing
from utils.throughput import NETWORK_BANDWIDTH

# Fraction of the peak FLOP/s that a forecast assumes. llm.c's 124M reached it on eight H100: 140 ms
# for 524,288 tokens (modded-nanogpt, 2024-10-13).
ASSUMED_UTILIZATION = 0.40


@dataclass(frozen=True)
class StepForecast:
    """Forecast of one step on one GPU: its compute time, and the bytes that it sends."""

    compute_seconds: float
    """Seconds for the GPU's FLOPs at ASSUMED_UTILIZATION, without waiting for other GPUs."""
    machine_bytes: float
    """Bytes of weights and gradients that the GPU sends within its machine."""
    network_bytes: float
    """Bytes of weights and gradients that the GPU sends to other machines."""
    activation_bytes: float
    """Bytes of activations that tensor parallelism sends to GPUs of the same machine."""
    bandwidth: float
    """Bytes/s that the GPU sends within its machine."""

    @property
    def sending_seconds(self) -> float:
        """Seconds to send weights and gradients; both links work at the same time."""
        # NETWORK_BANDWIDTH: 50e9 bytes/s, of a network card for each GPU
        return max(self.machine_bytes / self.bandwidth, self.network_bytes / NETWORK_BANDWIDTH)

    @property
    def seconds(self) -> float:
        """Least seconds of a step. Weights and gradients are sent during compute, but each layer
        waits for its activations."""
        overlapped = max(self.compute_seconds, self.sending_seconds)
        # activation_bytes are of tensor parallelism, `bandwidth` is bytes/s within the machine
        return overlapped + self.activation_bytes / self.bandwidth


def step_flops(options: ResolvedTrainOptions, model_config: GPTConfig) -> int:
    """Return the FLOPs of a step, summed over all devices: those of the blocks, which are measured
    (training/forecast/blocks.py), with recomputation, and those of the head."""
    # The cost of each block for one sequence. FLOPs do not depend on device and dtype.
    plain_execution = Execution()  # without activation checkpointing and compiler
    block_costs = measure_blocks(model_config, plain_execution, "cpu", torch.float32)
    # A backward pass takes twice as many as a forward pass.
    sequence_flops = 3 * sum(cost.flops for cost in block_costs)
    if effective_checkpointing(options) == "block":
        sequence_flops += sum(cost.recomputed_flops for cost in block_costs)
    # For each token, a weight of the head takes 2 FLOPs forward and 4 backward. Each process of a
    # tensor-parallel group computes the whole head.
    head_flops_per_token = 6 * model_config.vocab_size * model_config.n_embd
    head_flops_per_token *= options.tensor_parallel
    sequence_flops += head_flops_per_token * model_config.block_size
    # total_batch_size is in tokens: divided by block_size it is the sequences of a step
    return options.total_batch_size * sequence_flops // model_config.block_size


def forecast_step(
    options: ResolvedTrainOptions, model_config: GPTConfig, hardware: Hardware
) -> StepForecast | None:
    """Return the forecast of one step, or None for devices whose peak or bandwidth is not known.

    A GPU sends for three reasons: it gathers and reduces the shards of its copy of the training
    state, averages gradients over the copies, and sums activations within its tensor-parallel
    group.
    """
    gpu = hardware.gpu
    if gpu is None or gpu.bandwidth == 0:
        return None
    # A tensor-parallel group has consecutive ranks in one machine, and holds one shard of a copy of
    # the training state. On 16 H100 in two machines, with --sharding zero3 and with none:
    #
    #                  zero3  none
    #   data_parallel     16    16  parts of the data
    #   num_shards         8     1  shards of a copy of the state
    #   num_replicas       2    16  copies of the state
    #   groups_here        8     8  tensor-parallel groups in a machine, here of one process each
    #   shards_here        8     1  shards of one copy in a machine
    #   replicas_here      1     8  copies in a machine
    data_parallel, num_shards = hardware.parallel_degrees(options)
    num_replicas = data_parallel // num_shards
    groups_here = hardware.processes_per_machine // options.tensor_parallel
    shards_here = min(num_shards, groups_here)
    replicas_here = groups_here // shards_here

    shard_bytes = bytes_of_shards(options, model_config, hardware)  # of a step; 0 under DDP
    shard_machine_bytes, shard_network_bytes = split_by_link(shard_bytes, num_shards, shards_here)
    # Each process averages its shard of the float32 gradients over the replicas.
    replica_bytes = bytes_of_average(options, model_config) / num_shards
    replica_machine_bytes, replica_network_bytes = split_by_link(
        replica_bytes, num_replicas, replicas_here
    )
    group_bytes = bytes_of_activations(options, model_config, hardware)
    # 0 for a group of one process; _ is 0, because a group is in one machine
    activation_bytes, _ = split_by_link(
        group_bytes, options.tensor_parallel, options.tensor_parallel
    )
    # FLOP/s of all GPUs together, because step_flops counts the FLOPs of all; bytes are of one GPU
    flops_per_second = hardware.world_size * gpu.peak_flops * ASSUMED_UTILIZATION
    return StepForecast(
        compute_seconds=step_flops(options, model_config) / flops_per_second,
        machine_bytes=shard_machine_bytes + replica_machine_bytes,
        network_bytes=shard_network_bytes + replica_network_bytes,
        activation_bytes=activation_bytes,
        bandwidth=gpu.bandwidth,
    )


def bytes_of_shards(
    options: ResolvedTrainOptions, model_config: GPTConfig, hardware: Hardware
) -> int:
    """Return the bytes that the all-gathers and reduce-scatters of FSDP2 collect in a step, for one
    copy of the training state; 0 under DDP."""
    if options.sharding == "none":
        return 0
    # For example 124M in 2 micro-steps under zero3: 4 gathers of 85M bfloat16 matrix weights, one
    # of 39M float32 others, and 2 reductions of 124M float32 gradients. These are the numbers of
    # weights of a process after tensor parallelism has divided them, before FSDP2 shards them:
    num_matrix_weights, num_other_weights = count_weights(model_config, options.tensor_parallel)
    micro_steps = hardware.count_micro_steps(options)  # passes of one process in a step
    # zero3 frees the blocks after the forward pass and gathers them again for the backward.
    num_gathers = 2 * micro_steps if options.sharding == "zero3" else 1
    num_reductions = 1 if options.sharding == "zero1" else micro_steps
    # FSDP2 gathers the blocks in the dtype of matmuls, the rest once a step in float32, and reduces
    # gradients in float32. We count the blocks' biases and gains with the rest.
    gathered_bytes = num_gathers * hardware.dtype.itemsize * num_matrix_weights
    gathered_bytes += FLOAT32_BYTES * num_other_weights
    return gathered_bytes + num_reductions * FLOAT32_BYTES * (
        num_matrix_weights + num_other_weights
    )


def bytes_of_average(options: ResolvedTrainOptions, model_config: GPTConfig) -> int:
    """Return the bytes of the all-reduce that averages the float32 gradients of a step over the
    copies of the training state (DDP, HSDP)."""
    # It is a reduce-scatter and an all-gather, so its bytes count twice. count_weights returns the
    # numbers of matrix weights and of other weights of a process.
    return 2 * FLOAT32_BYTES * sum(count_weights(model_config, options.tensor_parallel))


def bytes_of_activations(
    options: ResolvedTrainOptions, model_config: GPTConfig, hardware: Hardware
) -> int:
    """Return the bytes of the all-reduces in which a tensor-parallel group sums the activations of
    a step. split_by_link makes them 0 for a group of one process."""
    itemsize = hardware.dtype.itemsize  # bytes of a number in matmuls
    # Activations of shape (tokens, C) are reduced twice per block in each pass: in the dtype of
    # matmuls in the forward pass, in float32 in the backward pass.
    number_bytes = 2 * itemsize + 2 * FLOAT32_BYTES  # of each channel of a token in each block
    if effective_checkpointing(options) == "block":
        # Recomputation repeats the all-reduce after attention, and with dropout also the all-reduce
        # after the MLP. Under "cheap" the compiler keeps the results of both.
        number_bytes += itemsize if model_config.dropout == 0 else 2 * itemsize
    data_parallel, _ = hardware.parallel_degrees(options)  # number of parts of the data
    num_tokens = options.total_batch_size // data_parallel  # of the group, in a step
    num_channels = model_config.n_layer * model_config.n_embd  # of a token in all blocks
    # An all-reduce is a reduce-scatter and an all-gather, so its bytes count twice.
    return 2 * num_tokens * num_channels * number_bytes


def split_by_link(num_bytes: float, num_sharing: int, num_here: int) -> tuple[float, float]:
    """Return the bytes that a process sends within its machine and to other machines, in an
    all-gather or a reduce-scatter of `num_bytes` bytes among `num_sharing` processes.

    Each machine has `num_here` of these processes. Each process sends its part of the bytes through
    its own network card, as in NCCL's rings. Of 16 GB among 16 processes, 8 in each machine, it
    sends 14 GB within its machine and 1 GB to the other.
    """
    num_machines = num_sharing / num_here
    # In a ring of P processes each process sends (P - 1) / P of the bytes.
    machine_bytes = num_bytes * (num_here - 1) / num_here
    network_bytes = num_bytes / num_here * (num_machines - 1) / num_machines
    return machine_bytes, network_bytes
