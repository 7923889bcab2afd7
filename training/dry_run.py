"""--dry_run: print a run's size, memory, time and cost; --micro_batch_size auto: fit the memory."""

from dataclasses import dataclass, replace

import torch

from config import TrainConfig
from data.loader import TokenStream
from data.tokenizer import TOKENIZERS
from model.config import GPTConfig
from model.empty import empty_gpt
from training import forecast
from training.initial_model import initial_shape
from utils import distributed
from utils.devices import pick_device, pick_dtype
from utils.errors import UserError
from utils.gpus import GPU, NAMED_GPUS
from utils.throughput import peak_flops, peak_memory

USABLE = 0.9  # share of the free memory that a micro-batch is chosen for


@dataclass(frozen=True)
class Hardware:
    """Devices of a run."""

    device: torch.device
    dtype: torch.dtype
    free: int
    """Bytes that a process can allocate."""
    world_size: int
    nodes: int = 1
    """Machines with several processes each."""
    gpu: GPU | None = None
    """GPU that --device names; this machine need not have it."""


def planned_hardware(config: TrainConfig) -> Hardware:
    """Return the hardware to forecast for: a GPU by name, or that of this machine. A machine has as
    many GPUs as the launcher says, or else GPUS_PER_MACHINE."""
    if gpu := NAMED_GPUS.get(config.device):
        device, free = torch.device("cuda"), gpu.memory * 10**9
        dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
    else:
        device = pick_device(config.device)
        dtype, free = pick_dtype(config.dtype, device), distributed.free_memory(device)
    nodes = distributed.num_nodes(forecast.GPUS_PER_MACHINE if device.type == "cuda" else 1)
    return Hardware(device, dtype, free, distributed.world_size(), nodes, gpu)


def forecast_memory(config: TrainConfig, shape: GPTConfig, hardware: Hardware) -> forecast.Memory:
    """Return the memory of one process."""
    device, dtype = hardware.device.type, hardware.dtype
    return forecast.forecast_memory(
        config, shape, device, dtype, hardware.world_size, hardware.nodes
    )


def dry_run(config: TrainConfig, saved: dict | None) -> None:
    """Print what would be trained and its forecast. Needs neither data nor memory for the model."""
    if not distributed.is_main():
        return  # the main process prints for all
    hardware, shape = planned_hardware(config), model_shape(config, saved)
    notes = choose_micro_batch(config, saved, shape, hardware)
    model, world_size = empty_gpt(shape), hardware.world_size
    accumulation = config.sequences_per_step(world_size) // config.micro_batch_size // world_size
    device = hardware.gpu.name if hardware.gpu else hardware.device.type
    print(
        f"{model.num_parameters():,} parameters; {config.max_steps:,} steps of "
        f"{config.total_batch_size:,} tokens = {accumulation} x {config.micro_batch_size} x "
        f"{config.block_size} x {world_size} on {device}, {hardware.dtype}"
    )
    print_memory(config, shape, hardware)
    tokens = config.total_batch_size * (config.max_steps - (saved["step"] if saved else 0))
    print_cost(config, tokens, tokens * model.flops_per_token(), hardware)
    try:
        TokenStream(config.data_dir, "train")
    except UserError as error:
        notes.append(str(error))
    if not hardware.gpu:  # train.sh makes the shards of a run on this machine
        notes.append(f"data_dir: {config.data_dir}")
    print(*notes, "This was a dry run: nothing was trained or written.", sep="\n")


def print_memory(config: TrainConfig, shape: GPTConfig, hardware: Hardware) -> None:
    """Print the forecast memory of one process by part and in total, and whether it fits."""
    need, notes = forecast_memory(config, shape, hardware), []
    total = need.peak
    rows = {
        "weights": need.weights,
        "weights all-gathered or cast for compute": need.compute_weights,
        "gradients": need.gradients,
        "optimizer": need.optimizer,
        "activations": need.activations,
        "logits and head, or one block's backward pass": need.work,
    }
    if hardware.device.type == "cpu":
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
    if config.sharding != "none" and hardware.nodes > 1:
        shards = hardware.world_size // hardware.nodes
        notes.append(f"state is divided among the {shards} processes of a machine")
    if config.dropout:
        notes.append("dropout's masks are not counted")
    print("peak memory of one process, GB of 1e9 bytes:")
    for name, value in rows.items():
        print(f"  {value / 1e9:8.2f}  {name}")
    print("; ".join([f"  total {total / 1e9:.2f}", *notes]))
    print_fit(need.peak, hardware)


def print_fit(need: int, hardware: Hardware) -> None:
    """Print whether `need` bytes of a process fit its device."""
    where = f"of one {hardware.gpu.name}" if hardware.gpu else f"free on {hardware.device}"
    room = f"{need / 1e9:.2f} of the {hardware.free / 1e9:.2f} GB {where}"
    if need <= USABLE * hardware.free:
        print(f"fits: {room}")
    else:
        print(
            f"does not fit: {room}, of which {100 * USABLE:.0f} % are planned for; lower "
            "--micro_batch_size, or see --activation_checkpointing and --sharding"
        )


def print_cost(config: TrainConfig, tokens: int, flops: float, hardware: Hardware) -> None:
    """Print FLOPs, time and money with the assumptions behind them."""
    world_size, rate = hardware.world_size, forecast.DOLLARS_PER_GPU_HOUR
    if hardware.gpu:
        peak, chip = hardware.gpu.peak, f"{hardware.gpu.name} in bfloat16"
    elif peak := peak_flops(hardware.device, hardware.dtype):
        chip = "this GPU"
    else:
        assumed = NAMED_GPUS[forecast.ASSUMED_GPU]
        peak, chip = assumed.peak, f"{assumed.name}, assumed: no peak is known for this device"
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
    except UserError:
        vocab_size = TOKENIZERS["gpt2"].vocab_size
    return config.model_config(vocab_size)


def largest_micro_batch(
    config: TrainConfig, saved: dict | None, shape: GPTConfig, hardware: Hardware
) -> int:
    """Return the largest number of sequences that divides a process's share of a step and whose
    forecast is within USABLE of the free memory; that of the `saved` run where it is one of these.
    Raises UserError where not even one sequence fits."""
    if hardware.device.type == "mps":
        raise UserError(
            "--micro_batch_size auto has no forecast for Apple's GPUs; give a number of sequences"
        )
    one = replace(config, micro_batch_size=1)
    share = one.sequences_per_step(hardware.world_size) // hardware.world_size

    def fits(micro_batch_size: int) -> bool:
        trial = replace(config, micro_batch_size=micro_batch_size)
        return forecast_memory(trial, shape, hardware).peak <= USABLE * hardware.free

    sizes = [n for n in range(1, share + 1) if share % n == 0 and fits(n)]
    if not sizes:
        need = forecast_memory(one, shape, hardware).peak
        raise UserError(
            f"--micro_batch_size auto: one sequence needs {need / 1e9:.2f} GB, but a process has "
            f"{hardware.free / 1e9:.2f} GB free; see --dry_run, --activation_checkpointing, "
            "--sharding"
        )
    before = saved["train_config"]["micro_batch_size"] if saved else None
    return before if before in sizes else sizes[-1]


def choose_micro_batch(
    config: TrainConfig, saved: dict | None, shape: GPTConfig, hardware: Hardware
) -> list[str]:
    """Replace --micro_batch_size auto in the options, and return a sentence that explains it."""
    if config.micro_batch_size != "auto":
        return []
    config.micro_batch_size = largest_micro_batch(config, saved, shape, hardware)
    resumed = saved and saved["train_config"]["micro_batch_size"] == config.micro_batch_size
    reason = "as in the checkpoint" if resumed else "the most that divide its share and fit"
    need = forecast_memory(config, shape, hardware).peak
    return [
        f"--micro_batch_size auto: {config.micro_batch_size} sequences a process ({reason}), by "
        f"forecast {need / 1e9:.2f} GB of {hardware.free / 1e9:.2f} GB free"
    ]


def resolve_micro_batch(
    config: TrainConfig, saved: dict | None, process: distributed.Process, dtype: torch.dtype
) -> list[str]:
    """Replace --micro_batch_size auto by the largest that should fit on every process, and return a
    sentence that explains it."""
    if config.micro_batch_size != "auto":
        return []
    device = process.device
    free = torch.tensor([distributed.free_memory(device)], device=device)
    least = int(process.min_max(free)[0])
    hardware = Hardware(device, dtype, least, process.world_size, process.nodes)
    return choose_micro_batch(config, saved, model_shape(config, saved), hardware)
