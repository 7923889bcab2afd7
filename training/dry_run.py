"""The forecast of a run that --dry_run prints: shape, memory, time and cost."""

import os
from dataclasses import replace

from config import TrainConfig
from data.mixture import Mixture
from data.tokenizer import TOKENIZERS
from model.config import GPTConfig
from model.gpt import build_without_weights
from model.recipes import Recipe
from training.checkpoint import open_model
from training.options import model_shape
from training.plan import USABLE, Hardware, choose_micro_batch, forecast_memory
from utils.devices import seconds_on_cpu
from utils.errors import UserError
from utils.throughput import peak_flops

MFU = 0.40  # llm.c's 124M on eight H100: 140 ms for 524,288 tokens (modded-nanogpt, 2024-10-13)
DOLLARS_PER_GPU_HOUR = 2.50


def print_forecast(config: TrainConfig, recipe: Recipe, saved: dict | None) -> None:
    """Print what would be trained and its forecast; on the main process, for all."""
    if os.environ.get("RANK", "0") != "0":
        return
    hardware, shape = Hardware.of(config), planned_shape(config, recipe, saved)
    world_size, gpu = hardware.world_size, hardware.gpu
    model = build_without_weights(shape)
    if config.micro_batch_size == "auto":
        size, sentence = choose_micro_batch(config, recipe, shape, hardware, saved)
        print(sentence)
        config = replace(config, micro_batch_size=size)
    micro_steps = config.sequences_per_step(world_size) // config.micro_batch_size // world_size
    print(
        f"{model.num_parameters():,} parameters; {config.max_steps:,} steps of "
        f"{config.total_batch_size:,} tokens = {micro_steps} micro-steps x "
        f"{config.micro_batch_size} sequences x {config.block_size} tokens x {world_size} on "
        f"{gpu.name if gpu else hardware.device.type}, {hardware.dtype}"
    )
    parts = forecast_memory(config, recipe, shape, hardware)
    print("peak memory of one process in GB, without Python, CUDA's context and dropout's masks:")
    for name, value in parts.items():
        print(f"  {value / 1e9:8.2f}  {name}")
    need = sum(parts.values())
    fits = "fits" if need <= USABLE * hardware.free else "does not fit"
    print(f"  {need / 1e9:8.2f}  in all: {fits} {hardware.free / 1e9:.2f} GB")

    tokens = config.total_batch_size * (config.max_steps - (saved["step"] if saved else 0))
    recompute = 4 / 3 if config.activation_checkpointing == "block" else 1
    flops = recompute * tokens * model.flops_per_token()
    took = ""
    if peak := gpu.peak if gpu else peak_flops(hardware.device, hardware.dtype):
        hours = flops / (peak * MFU) / 3600
        took = (
            f": {hours / world_size:,.2f} hours on {world_size} GPU and "
            f"{hours * DOLLARS_PER_GPU_HOUR:,.2f} $, at {MFU:.0%} MFU of {peak / 1e12:,.0f} "
            f"TFLOP/s and {DOLLARS_PER_GPU_HOUR:.2f} $ per GPU hour"
        )
    elif hardware.device.type == "cpu":
        took = f": about {seconds_on_cpu(flops, hardware.dtype) / 3600:,.2f} h on this processor"
    print(f"{flops:.3g} FLOPs for {tokens:,} tokens{took}")
    for folder in () if gpu else config.data_dir:  # train.sh makes missing ones
        print(f"data_dir: {folder}")
    print("This was a dry run: nothing was trained or written.")


def planned_shape(config: TrainConfig, recipe: Recipe, checkpoint: dict | None) -> GPTConfig:
    """Return the architecture of the run, with GPT-2's vocabulary where there are no shards yet."""
    weights, vocab_size = None, TOKENIZERS["gpt2"].vocab_size
    if checkpoint:
        weights = GPTConfig(**checkpoint["model_config"])
    elif config.init_from:
        weights = open_model(config.init_from)[0].config
    else:
        try:
            data = Mixture(config.data_dir, "train", config.block_size)
            vocab_size = data.stream.vocab_size
            print(data.describe_epochs(config.max_steps * config.total_batch_size))
        except UserError as error:
            print(error)
    return model_shape(config, recipe, vocab_size, weights)
