"""--dry_run: print a run's size, memory, time and cost; --micro_batch_size auto: fit the memory."""

from dataclasses import replace

import torch

from config import ConfigError, TrainConfig
from data.loader import TokenStream
from data.shards import DataError
from data.tokenizer import TOKENIZERS
from model.config import GPTConfig
from model.gpt import empty_gpt
from training import forecast
from training.resume import initial_shape
from utils import distributed
from utils.throughput import peak_flops, peak_memory


def dry_run(config: TrainConfig, saved: dict | None) -> None:
    """Print what would be trained and its forecast; the last line is the folder of the shards.
    Needs neither data nor memory for the model."""
    device, world_size = distributed.pick_device(config.device), distributed.world_size()
    dtype, shape = distributed.pick_dtype(config.dtype, device), model_shape(config, saved)
    if config.micro_batch_size == "auto":
        free = distributed.free_memory(device)
        config.micro_batch_size = largest_micro_batch(
            config, saved, shape, dtype, world_size, device, free
        )
    accumulation = config.sequences_per_step(world_size) // config.micro_batch_size // world_size
    model = empty_gpt(shape)
    print(
        f"{model.num_parameters():,} parameters; {config.max_steps:,} steps of "
        f"{config.total_batch_size:,} tokens = {accumulation} x {config.micro_batch_size} x "
        f"{config.block_size} x {world_size} on {device.type}, {dtype}"
    )
    print_memory(config, shape, device.type, dtype, world_size)
    tokens = config.total_batch_size * (config.max_steps - (saved["step"] if saved else 0))
    peak = peak_flops(device, dtype)
    print_cost(config, tokens, tokens * model.flops_per_token(), peak, world_size)
    print(config.data_dir)


def print_memory(
    config: TrainConfig, shape: GPTConfig, device: str, dtype: torch.dtype, world_size: int
) -> None:
    """Print the forecast memory of one process by part and in total."""
    need, notes = forecast.forecast_memory(config, shape, device, dtype, world_size), []
    total = need.peak
    rows = {
        "weights": need.weights,
        "weights all-gathered or cast for compute": need.compute_weights,
        "gradients": need.gradients,
        "optimizer": need.optimizer,
        "activations": need.activations,
        "logits and head, or one block's backward pass": need.work,
    }
    if device == "cpu":
        python = peak_memory()
        total += python
        rows["fragmentation of malloc's heap, fitted to 124M"] = need.heap_holes
        rows["Python and its libraries (this process)"] = python
        rows["copy for saving, beside training unless only at the end"] = need.snapshot
    else:
        notes.append(
            "without the CUDA context, NCCL's buffers and fragmentation; saving takes "
            f"{need.snapshot / 1e9:.2f} of the main process's host memory, "
            f"{2 * need.snapshot / 1e9:.2f} while state is gathered"
        )
        if config.sharding != "none" and world_size > forecast.GPUS_PER_MACHINE:
            notes.append(f"machines of {forecast.GPUS_PER_MACHINE} GPUs")
    if config.dropout:
        notes.append("dropout's masks are not counted")
    print("peak memory of one process, GB of 1e9 bytes:")
    for name, value in rows.items():
        print(f"  {value / 1e9:8.2f}  {name}")
    print("; ".join([f"  total {total / 1e9:.2f}", *notes]))


def print_cost(
    config: TrainConfig, tokens: int, flops: float, peak: float | None, world_size: int
) -> None:
    """Print FLOPs, time and money with the assumptions behind them."""
    chip = "this GPU" if peak else f"{forecast.GPU}, assumed: no peak is known for this device"
    peak, rate = peak or forecast.PEAK_FLOPS, forecast.DOLLARS_PER_GPU_HOUR
    checkpointing = config.activation_checkpointing
    hours = forecast.training_seconds(flops, world_size, peak, checkpointing) / 3600
    print(
        f"{flops:.3g} FLOPs for {tokens:,} tokens: {hours:,.2f} hours on {world_size} GPU and "
        f"{hours * world_size * rate:,.2f} $, at {100 * forecast.MFU:.0f} % MFU of "
        f"{peak / 1e12:,.0f} TFLOP/s ({chip}) and {rate:.2f} $ per GPU hour"
        + (", a third longer for recomputed blocks" if checkpointing == "block" else "")
    )


def model_shape(config: TrainConfig, saved: dict | None) -> GPTConfig:
    """Return the architecture of the run, with the vocabulary of the checkpoint or of the shards,
    or GPT-2's where there are none yet."""
    if saved:
        return config.model_config(saved["model_config"]["vocab_size"])
    if config.init_from:
        return initial_shape(config)
    try:
        vocab_size = TokenStream(config.data_dir, "train").vocab_size
    except DataError:
        vocab_size = TOKENIZERS["gpt2"].vocab_size
    return config.model_config(vocab_size)


def largest_micro_batch(
    config: TrainConfig,
    saved: dict | None,
    shape: GPTConfig,
    dtype: torch.dtype,
    world_size: int,
    device: torch.device,
    free: int,
) -> int:
    """Return the largest number of sequences that divides a process's share of a step and whose
    forecast is within 90 % of the `free` bytes; that of the `saved` run where it is one of these.
    Raises ConfigError where not even one sequence fits."""
    if device.type == "mps":
        raise ConfigError(
            "--micro_batch_size auto has no forecast for Apple's GPUs; give a number of sequences"
        )
    share = replace(config, micro_batch_size=1).sequences_per_step(world_size) // world_size

    def peak(micro_batch_size: int) -> int:
        trial = replace(config, micro_batch_size=micro_batch_size)
        return forecast.forecast_memory(trial, shape, device.type, dtype, world_size).peak

    sizes = [n for n in range(1, share + 1) if share % n == 0 and peak(n) <= 0.9 * free]
    if not sizes:
        raise ConfigError(
            f"--micro_batch_size auto: one sequence needs {peak(1) / 1e9:.2f} GB, but a process "
            f"has {free / 1e9:.2f} GB free; see --dry_run, --activation_checkpointing, --sharding"
        )
    before = saved["train_config"]["micro_batch_size"] if saved else None
    return before if before in sizes else sizes[-1]


def resolve_micro_batch(
    config: TrainConfig, saved: dict | None, process: distributed.Process, dtype: torch.dtype
) -> None:
    """Replace --micro_batch_size auto by the largest that should fit on every process."""
    if config.micro_batch_size == "auto":
        device, shape = process.device, model_shape(config, saved)
        free = torch.tensor([distributed.free_memory(device)], device=device)
        least = int(process.min_max(free)[0])
        config.micro_batch_size = largest_micro_batch(
            config, saved, shape, dtype, process.world_size, device, least
        )
