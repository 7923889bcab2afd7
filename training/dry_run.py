"""What --dry_run prints: what would be trained, and what it takes in memory, time and money. And
the micro-batch that should fit."""

from dataclasses import replace

import torch

from config import ConfigError, TrainConfig
from data.loader import TokenStream
from data.shards import DataError
from data.tokenizer import TOKENIZERS
from model.config import GPTConfig
from model.gpt import skeleton
from model.huggingface import find_folder, read_config
from training import forecast
from training.resume import fitting
from utils import distributed
from utils.throughput import flops_per_token, peak_flops, peak_memory


def dry_run(config: TrainConfig, saved: dict | None) -> None:
    """Needs no data and no memory for the model. The folder of shards is the last line."""
    device, world_size = distributed.pick_device(config.device), distributed.world_size()
    dtype = distributed.pick_dtype(config.dtype, device)
    shape = model_shape(config, saved)
    if config.micro_batch_size == "auto":
        free = distributed.free_memory(device)
        config.micro_batch_size = largest_micro_batch(
            config, saved, shape, dtype, world_size, device, free
        )
    accumulation = config.sequences_per_step(world_size) // config.micro_batch_size // world_size
    model = skeleton(shape)
    steps = config.max_steps - (saved["step"] if saved else 0)
    print(
        f"{model.num_parameters():,} parameters; {config.max_steps:,} steps of "
        f"{config.total_batch_size:,} tokens = {accumulation} x {config.micro_batch_size} x "
        f"{config.block_size} x {world_size} on {device.type}, {dtype}"
    )
    need = memory(config, shape, device.type, dtype.itemsize, world_size)
    print("\n".join(memory_lines(config, need, device.type, world_size)))
    flops = flops_per_token(
        model.num_multiplying(), shape.n_layer, shape.n_embd, config.block_size
    ) * (steps * config.total_batch_size)
    print(cost_line(config, steps, flops, peak_flops(device, dtype), world_size))
    print(config.data_dir)


def vocab_size(config: TrainConfig, saved: dict | None) -> int:
    """That of the checkpoint or of the shards; GPT-2's where there is neither yet."""
    if saved:
        return saved["model_config"]["vocab_size"]
    try:
        return TokenStream(config.data_dir, "train").vocab_size
    except DataError:
        return TOKENIZERS["gpt2"].vocab_size


def model_shape(config: TrainConfig, saved: dict | None) -> GPTConfig:
    """The architecture of the run."""
    if config.init_from and not saved:
        return fitting(config, read_config(find_folder(config.init_from)))
    return config.model_config(vocab_size(config, saved))


def largest_micro_batch(
    config: TrainConfig,
    saved: dict | None,
    shape: GPTConfig,
    dtype: torch.dtype,
    world_size: int,
    device: torch.device,
    free: int,
) -> int:
    """The most sequences at a time of which a whole number makes a step and that should fit `free`
    bytes of one process, with a tenth to spare; that of the `saved` run where it still does.
    ConfigError where not even one fits."""
    if device.type == "mps":
        raise ConfigError(
            "--micro_batch_size auto: not for Apple's GPUs, whose memory is unmeasured"
        )
    one = replace(config, micro_batch_size=1)
    share = one.sequences_per_step(world_size) // world_size

    def needed(micro_batch_size: int) -> int:
        trial = replace(config, micro_batch_size=micro_batch_size)
        need = memory(trial, shape, device.type, dtype.itemsize, world_size)
        return need.peak_with_saves(saves_during(config)) if device.type == "cpu" else need.peak

    sizes = [n for n in range(1, share + 1) if share % n == 0 and needed(n) <= 0.9 * free]
    if not sizes:
        raise ConfigError(
            f"--micro_batch_size auto: one sequence takes {needed(1) / 1e9:.2f} GB, of which a "
            f"process has {free / 1e9:.2f}; see --dry_run, --activation_checkpointing, --sharding"
        )
    before = saved["train_config"]["micro_batch_size"] if saved else None
    return before if before in sizes else sizes[-1]


def saves_during(config: TrainConfig) -> bool:
    """Whether checkpoints are written while training goes on."""
    return any(0 < every < config.max_steps for every in (config.save_every, config.eval_every))


def memory(
    config: TrainConfig, shape: GPTConfig, device: str, e: int, world_size: int
) -> forecast.Memory:
    """The forecast for one process of a run; GPUs are taken to stand in machines of eight."""
    accumulation = config.sequences_per_step(world_size) // config.micro_batch_size // world_size
    return forecast.memory(
        shape,
        muon=config.chosen.optimizer == "muon",
        micro_batch_size=config.micro_batch_size,
        accumulation=accumulation,
        world_size=world_size,
        shards=min(world_size, forecast.GPUS_PER_MACHINE) if device != "cpu" else world_size,
        sharding=config.sharding,
        e=e,
        checkpointing=config.activation_checkpointing,
        device=device,
    )


def memory_lines(
    config: TrainConfig, need: forecast.Memory, device: str, world_size: int
) -> list[str]:
    """The memory of one process by part. On a CPU that of saving comes on top."""
    rows = {
        "weights": need.weights,
        "weights gathered or cast for compute": need.gathered,
        "gradients": need.gradients,
        "optimizer": need.optimizer,
        "activations": need.activations,
        "logits and head, or a block's backward": need.work,
    }
    saving = f"{need.snapshot / 1e9:.2f}, {2 * need.snapshot / 1e9:.2f} while it is gathered"
    if device == "cpu":
        python = peak_memory()
        total = python + need.peak_with_saves(saves_during(config))
        rows["holes in malloc's heap, as measured for 124M"] = need.holes
        rows["Python and its libraries (this process)"] = python
        rows["copy for saving, beside training if before the end"] = need.snapshot
        ending = f"total {total / 1e9:.2f}"
    else:
        ending = (
            f"total {need.peak / 1e9:.2f}, and the CUDA context, NCCL's buffers and fragmentation; "
            f"host memory of the main process for saving: {saving}"
        )
    lines = [f"  {value / 1e9:8.2f}  {name}" for name, value in rows.items()]
    if config.dropout:
        lines.append("  dropout's masks are not counted")
    if config.sharding != "none" and world_size > forecast.GPUS_PER_MACHINE and device != "cpu":
        ending += "; machines of 8 GPUs"
    return ["memory of one process at its worst moment, GB of 1e9 bytes:", *lines, f"  {ending}"]


def cost_line(
    config: TrainConfig, steps: int, flops: float, peak: float | None, world_size: int
) -> str:
    """FLOPs, time and money, with what is assumed, so that a reader can scale them."""
    chip = "this GPU" if peak else f"{forecast.GPU}, assumed: this device is in no table of peaks"
    peak, rate = peak or forecast.PEAK_FLOPS, forecast.DOLLARS_PER_GPU_HOUR
    hours = forecast.seconds(flops, world_size, peak, config.activation_checkpointing) / 3600
    again = ", a third longer for blocks computed again"
    return (
        f"{flops:.3g} FLOPs for {steps * config.total_batch_size:,} tokens: {hours:,.2f} hours on "
        f"{world_size} GPU and {hours * world_size * rate:,.2f} $, at {100 * forecast.MFU:.0f} % "
        f"MFU of {peak / 1e12:,.0f} TFLOP/s ({chip}) and {rate:.2f} $ per GPU hour"
        + (again if config.activation_checkpointing == "block" else "")
    )
