"""Hardware of a run, and the forecast of its memory by use.

Weights, gradients and optimizer state are counted (not NorMuon's, of one number a row).
Activations, cast weights and logits are sums of terms, one for each tensor that is alive at the
peak; docs/SCALING.md says how far they are off. Nothing is allocated: models here are on the device
"meta". What a process sends is training/forecast/step_time.py, and what fits
training/forecast/advice.py.
"""

import functools
from dataclasses import dataclass

import torch

from config import MachineOptions, ResolvedTrainOptions
from model import loss
from model.config import GPTConfig
from model.gpt import GPT
from model.initial_weights import build_without_weights
from recipes import Recipe
from training.optimizers import MOMENTS
from utils.devices import host_memory, pick_device, pick_dtype
from utils.distributed import count_shards, launched
from utils.throughput import GPU, NAMED_GPUS, gpu_of

FLOAT32_BYTES = 4
GPUS_PER_MACHINE = 8  # where a launcher does not say how many processes a machine has
# Share of the free memory that a micro-batch may fill by the forecast, which is not exact.
USABLE = 0.9


@dataclass(frozen=True)
class Hardware:
    """Devices of a run, and the number of its processes. How these divide the work follows from the
    options of the run: see parallel_degrees."""

    device: torch.device
    dtype: torch.dtype
    """Dtype of matmuls."""
    free_bytes: int
    """Bytes that each process can allocate."""
    world_size: int = 1
    per_machine: int = 1
    """Processes of a machine."""
    gpu: GPU | None = None
    """GPU that --device names, which need not be here, or that of this machine; None for CPUs and
    for GPUs whose peak in `dtype` is not known."""

    @classmethod
    def of(cls, options: ResolvedTrainOptions) -> "Hardware":
        """Return the hardware that the options name: a GPU by name, or that of this machine."""
        gpu = NAMED_GPUS.get(options.device)  # None for a device of this machine, such as cuda
        if gpu is not None:
            device = torch.device("cuda")
            free_bytes = gpu.memory_gb * 10**9  # from GB; all of it counts as free
            dtype_name = gpu.dtype if options.dtype == "auto" else options.dtype
            dtype = getattr(torch, dtype_name)
            if dtype_name not in ("float16", gpu.dtype):  # its peak is not known
                gpu = None
        else:
            # `launched` reads torchrun's environment; without torchrun it returns 0 or the default.
            device = pick_device(options.device, launched("LOCAL_RANK"))
            free_bytes = free_memory(device)
            dtype = pick_dtype(options.dtype, device)  # on a CPU, "auto" times matmuls
            gpu = gpu_of(device, dtype)
        # Without a launcher, the run has one tensor-parallel group.
        world_size = launched("WORLD_SIZE", options.tensor_parallel)
        # For --dry_run a person may set WORLD_SIZE alone.
        per_machine = launched("LOCAL_WORLD_SIZE", min(GPUS_PER_MACHINE, world_size))
        return cls(device, dtype, free_bytes, world_size, per_machine, gpu)

    def parallel_degrees(self, options: MachineOptions) -> tuple[int, int]:
        """Return data_parallel, the number of parts of the data, and num_shards, that of the
        processes that divide one copy of what each process of a tensor group holds: 1 without
        sharding. Raises UserError for options that do not divide the processes."""
        # Processes that share each block read the same part.
        data_parallel = self.world_size // options.tensor_parallel
        # Called without sharding, too, as count_shards raises the UserError.
        num_shards = count_shards(
            self.world_size, self.per_machine, options.tensor_parallel, options.shard_across
        )
        return data_parallel, num_shards if options.sharding != "none" else 1

    def count_micro_steps(self, options: ResolvedTrainOptions) -> int:
        """Return the micro-batches that a process takes in a step. Raises UserError for a
        --total_batch_size that does not divide into them."""
        data_parallel, _ = self.parallel_degrees(options)
        return options.micro_steps(data_parallel)


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process can allocate: on its GPU, or its share of the host."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    # Half of all memory: the system, other programs and the page cache have the rest.
    free_bytes = host_memory() // 2
    processes_here = launched("LOCAL_WORLD_SIZE", launched("WORLD_SIZE", 1))
    return free_bytes // processes_here


def checkpointing(options: ResolvedTrainOptions) -> str:
    """Return --activation_checkpointing as the blocks follow it: with dropout, "cheap" is the same
    as "block" unless it is compiled (choose_block of model/execution.py)."""
    if options.dropout > 0 and not options.use_torch_compile:
        return options.activation_checkpointing.replace("cheap", "block")
    return options.activation_checkpointing


def block_activations(
    model_config: GPTConfig, itemsize: int, mode: str, tensor_parallel: int = 1
) -> int:
    """Return the bytes per token that autograd keeps of one block for the backward pass, in each of
    `tensor_parallel` processes that share it.

    `itemsize` is the bytes of a number in matmuls, 2 or 4; norms and the residual stream are
    float32. `mode` is that of `checkpointing`.
    """
    C = model_config.n_embd
    residual = FLOAT32_BYTES * C  # whole on each process
    if mode == "block":
        return residual  # the block's input

    # channels per process of each tensor
    inner = model_config.inner // tensor_parallel
    attention = C // tensor_parallel  # queries, and the output of the heads
    keys = model_config.kv_heads * model_config.head_size // tensor_parallel  # values have as many
    qkv = attention + 2 * keys  # c_attn's output
    c_fc_output = 2 * inner if model_config.is_gated else inner  # c_fc's output
    if mode == "cheap":
        # the block's input, and the outputs of the four linear layers and of attention
        projections = 2 * C  # outputs of both c_proj, whole on each process
        return residual + itemsize * (qkv + attention + c_fc_output + projections)

    residuals = 2 * residual  # inputs of the two norms
    normed = 2 * C  # inputs of c_attn and c_fc
    # Attention reads views of c_attn's output, or copies.
    is_grouped = keys < attention
    if is_grouped and model_config.position == "rotary" and not model_config.qk_norm:
        qkv = 0  # of which nothing but the copies below is read again
    if is_grouped:
        qkv += 2 * attention  # a key and a value for each query
    if model_config.position == "rotary" or model_config.qk_norm:
        qkv += attention + keys  # queries and keys, rotated or normalized
    activated = inner  # input of the MLP's c_proj
    if model_config.is_gated:
        activated += inner  # SiLU of the gate, which multiplies the other half
    return residuals + itemsize * (normed + qkv + attention + c_fc_output + activated)


def head_memory(
    model_config: GPTConfig, num_tokens: int, hardware: Hardware, compiled: bool
) -> int:
    """Return the bytes that the loss of `tokens` tokens, those of a micro-batch, holds at its peak
    (model/loss.py), from the output of the final norm on."""
    itemsize = hardware.dtype.itemsize
    C = model_config.n_embd
    V = model_config.padded_vocab_size
    hidden = FLOAT32_BYTES * num_tokens * C  # output of the final norm
    # The loss computes the gradients of hidden states and head in its forward pass.
    gradients = FLOAT32_BYTES * (num_tokens * C + V * C)
    cast_bytes = 0
    if itemsize < FLOAT32_BYTES:
        # in the dtype of matmuls: hidden states, their gradient and the head's weight
        cast_bytes = itemsize * (2 * num_tokens * C + V * C)
    # Logits exist for one chunk of tokens at a time, whose float32 logits would fit chunk_bytes.
    max_tokens = loss.rows_within(loss.chunk_bytes(hardware.device), FLOAT32_BYTES * V)
    logits = itemsize * loss.tokens_per_chunk(num_tokens, max_tokens) * V
    # Without the compiler, the loss also holds a float32 copy of some rows of the chunk and their
    # softmax. A CPU works on too few rows at a time to count.
    if not compiled and hardware.device.type != "cpu":
        logits += 2 * loss.SOFTMAX_BYTES
    return hidden + gradients + cast_bytes + logits


# Cached: it builds the model, and `advise` asks for the same one hundreds of times.
@functools.cache
def count_weights(model_config: GPTConfig) -> tuple[int, int]:
    """Return the number of weights in the matrices of the blocks, which a recipe's optimizer
    trains, and of all others: embeddings, head, biases and gains."""
    model = build_without_weights(GPT, model_config)
    num_weights = sum(p.numel() for p in model.parameters())
    num_matrix_weights = sum(p.numel() for p in model.transformer.h.parameters() if p.dim() >= 2)
    return num_matrix_weights, num_weights - num_matrix_weights


def forecast_memory(
    options: ResolvedTrainOptions, recipe: Recipe, model_config: GPTConfig, hardware: Hardware
) -> dict[str, int]:
    """Return the bytes of one process at its peak, by what they are for. Their sum has to fit; the
    names are printed by --dry_run."""
    itemsize = hardware.dtype.itemsize  # bytes per number in matmuls
    tensor_parallel = options.tensor_parallel  # processes that share each block
    data_parallel, num_shards = hardware.parallel_degrees(options)
    num_matrix_weights, num_other_weights = count_weights(model_config)
    num_matrix_weights //= tensor_parallel  # per process from here on
    block_weights = num_matrix_weights // model_config.n_layer
    num_weights = num_matrix_weights + num_other_weights
    # float32 numbers of optimizer state, before sharding
    num_moments = MOMENTS["adamw"] * num_other_weights
    num_moments += MOMENTS[recipe.optimizer] * num_matrix_weights
    micro_steps = hardware.count_micro_steps(options)
    mode = checkpointing(options)
    # A single process trains the plain model. With tensor parallelism FSDP2 may shard over a group
    # of one process, and still gathers weights into copies.
    uses_fsdp = options.sharding != "none" and hardware.world_size > 1
    # zero1 sums whole gradients until the last micro-step reduces them.
    sums_gradients = options.sharding == "zero1" and micro_steps > 1

    gradients = FLOAT32_BYTES * num_weights
    if not uses_fsdp and data_parallel > 1 and micro_steps > 1:
        # DDP's buckets lie apart from the sums of earlier micro-steps.
        gradients *= 2
    if not sums_gradients:
        gradients //= num_shards

    compute_weights = 0  # bytes of the copies that matmuls read
    if uses_fsdp:
        gathered = num_matrix_weights  # all blocks
        if options.sharding == "zero3":
            gathered = 2 * block_weights  # the current block and the next one
        # Embeddings, final norm and head are gathered in float32. The blocks' small vectors count
        # with them.
        compute_weights = itemsize * gathered + FLOAT32_BYTES * num_other_weights
    elif itemsize < FLOAT32_BYTES and mode == "none":
        # Autograd keeps autocast's copies for the backward pass.
        compute_weights = itemsize * num_matrix_weights

    num_tokens = options.sequences_per_pass * model_config.block_size  # in a micro-batch
    per_block = block_activations(model_config, itemsize, mode, tensor_parallel)  # bytes per token
    final_norm = FLOAT32_BYTES * model_config.n_embd  # bytes of its input per token

    # The backward pass of a block holds its recomputed activations, three float32 gradients of the
    # residual stream, and the head's gradient, which waits for that of the embedding.
    all_of_block = block_activations(model_config, itemsize, "none", tensor_parallel)
    recomputed = num_tokens * (all_of_block - per_block)
    block_backward = (
        FLOAT32_BYTES * model_config.n_embd * (3 * num_tokens + model_config.padded_vocab_size)
    )
    if uses_fsdp:
        # Gradients of whole matrices are complete when the activations are used up.
        recomputed = max(recomputed, itemsize * block_weights)
        if not sums_gradients:
            # those of the block before, cast into a buffer that is sent meanwhile
            block_backward += FLOAT32_BYTES * block_weights
    forecast = {
        "weights": FLOAT32_BYTES * num_weights // num_shards,
        "weights cast or gathered for compute": compute_weights,
        "gradients": gradients,  # per process already
        "optimizer": FLOAT32_BYTES * num_moments // num_shards,
        "activations": num_tokens * (model_config.n_layer * per_block + final_norm),
        # The loss is over before the blocks' backward pass, so only the larger of the two counts.
        "head and logits, or one block's backward pass": max(
            head_memory(model_config, num_tokens, hardware, options.use_torch_compile),
            block_backward + recomputed,
        ),
    }
    if hardware.device.type == "cpu":
        # A save copies weights and optimizer state, then splits the weights into bfloat16 and rest.
        forecast["copy for saving"] = FLOAT32_BYTES * (2 * num_weights + num_moments) // num_shards
    return forecast
