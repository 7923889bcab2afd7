"""Measure training steps on this machine, beside nanoGPT.

    python scripts/bench.py --use_torch_compile --peer ../nanoGPT

Each measurement is a process of its own, which takes some steps to warm up and then counts for some
seconds. This project and nanoGPT take turns, and medians count: so a machine that gets slower for a
while slows both. The last line of the output is the comparison as JSON.
"""

import json
import multiprocessing
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import util
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Python puts scripts/ there instead

import numpy as np
import torch
import torch.nn as nn

from config import MachineOptions, ModelOptions, OptimizerOptions
from data.tokenizer import GPT2Tokenizer
from model.config import GPTConfig
from model.execution import Execution
from model.gpt import GPT, build_without_weights
from model.recipes import parse_recipe
from training.optim import make_optimizers
from utils.cli import start_script
from utils.devices import autocast, describe, pick_device, pick_dtype
from utils.throughput import peak_flops

WARMUP_STEPS = 3  # the first one compiles

Optimizers = list[torch.optim.Optimizer]


@dataclass(frozen=True)
class BenchOptions:
    """Measurements and peer."""

    repeats: int = 5
    """Measurements of each side; the median counts."""
    seconds: float = 5.0
    """Length of a measurement; it has one step at least."""
    micro_batch_size: int = 4
    """Sequences in a training step."""
    peer: Path | None = None
    """Checkout of nanoGPT, whose model.py trains in turn with this project's model."""


@dataclass(frozen=True)
class BenchConfig(MachineOptions, ModelOptions, BenchOptions):
    """Measure training steps on this machine, beside nanoGPT."""

    @property
    def shape(self) -> GPTConfig:
        """Architecture of this project's model."""
        return self.model_config(parse_recipe(self.recipe), GPT2Tokenizer.vocab_size)


def build_ours(
    config: BenchConfig, device: torch.device, dtype: torch.dtype
) -> tuple[nn.Module, Optimizers]:
    """Return this project's model and optimizers, as train.py makes them."""
    recipe = parse_recipe(config.recipe)
    execution = Execution(config.activation_checkpointing, config.use_torch_compile)
    model = GPT(config.shape, execution).to(device)
    # The learning rates stay those of PyTorch: they do not change the time of a step.
    options = OptimizerOptions(weight_decay=recipe.weight_decay)
    return model, make_optimizers(model, options, recipe, dtype)


def build_nanogpt(config: BenchConfig, device: torch.device) -> tuple[nn.Module, Optimizers]:
    """Return nanoGPT's model and optimizer, as its train.py makes them."""
    # Load its model.py under another name, as `model` is this project's package.
    spec = util.spec_from_file_location("nanogpt", config.peer / "model.py")
    nanogpt = util.module_from_spec(spec)
    sys.modules["nanogpt"] = nanogpt  # where torch.compile looks for the globals of its functions
    spec.loader.exec_module(nanogpt)

    shape = config.shape
    model_config = nanogpt.GPTConfig(
        block_size=shape.block_size,
        vocab_size=shape.padded_vocab_size,
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        n_embd=shape.n_embd,
        bias=True,  # as OpenAI's GPT-2 has them
    )
    torch.set_float32_matmul_precision("high")  # its train.py allows TF32
    model = nanogpt.GPT(model_config).to(device)
    # the weight decay, learning rate and betas of its train.py
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device.type)
    if config.use_torch_compile:  # this project's Execution compiles its model
        model = torch.compile(model)
    return model, [optimizer]


def measure(config: BenchConfig, side: str) -> tuple[float, int]:
    """Train "ours" or "nanogpt" on one random batch; return tokens/s and the peak memory in bytes.

    The memory is that of the whole process, which has to be a new one.
    """
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    if side == "ours":
        model, optimizers = build_ours(config, device, dtype)
    else:
        model, optimizers = build_nanogpt(config, device)
    # The ids are random: the time of a step does not depend on them.
    size = (2, config.micro_batch_size, config.block_size)
    idx, targets = torch.randint(config.shape.vocab_size, size, device=device)  # (B, T) each

    num_steps = -WARMUP_STEPS  # negative: not counted
    start_seconds = time.perf_counter()
    while num_steps < 1 or time.perf_counter() < start_seconds + config.seconds:
        if num_steps == 0:  # the warmup is over: measure from here
            start_seconds = time.perf_counter()
        # as train.py does: the cast weights of a step are of no use to the next one
        with autocast(device, dtype, keep_weights=False):
            loss = model(idx, targets)
        if side == "nanogpt":
            _, loss = loss  # its model returns logits, too
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # as both train.py do
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        loss.item()  # waits until a GPU has done the step
        num_steps += 1  # from -3 to 0 in the warmup
    rate = num_steps * idx.numel() / (time.perf_counter() - start_seconds)

    if device.type == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated()  # of tensors, without the CUDA context
    else:  # the most that this process had in memory at one time; Linux counts it in KiB
        peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return rate, peak_bytes


def main(config: BenchConfig) -> None:
    sides = ["ours"]  # in the order in which they take turns
    if config.peer is not None:
        sides.append("nanogpt")
    # by side, for each repeat: tokens/s, peak memory
    figures: dict[str, list[tuple[float, int]]] = {side: [] for side in sides}
    # "spawn" starts a new Python; a fork would begin with the memory of this process
    context = multiprocessing.get_context("spawn")
    for _ in range(config.repeats):
        for side in sides:
            with ProcessPoolExecutor(max_workers=1, mp_context=context) as process:
                figures[side].append(process.submit(measure, config, side).result())

    # Only now: a process that uses a GPU takes some of its memory from the measurements.
    device = pick_device(config.device)
    peak = peak_flops(device, pick_dtype(config.dtype, device))
    # of this project's model: nanoGPT's has the same matmuls
    flops_per_token = build_without_weights(config.shape).flops_per_token()
    measured: dict[str, dict[str, float | None]] = {}
    for side in sides:
        rate, peak_bytes = np.median(figures[side], axis=0)  # over the repeats
        mfu = None  # for CPUs, and GPUs whose peak is not known
        if peak is not None:
            mfu = rate * flops_per_token / peak
        measured[side] = {"rate": rate, "peak_bytes": peak_bytes, "mfu": mfu}

    row = {**describe(device), "unit": "tokens/s", "measured": measured, "options": vars(config)}
    if config.peer is not None:
        ours = measured["ours"]
        theirs = measured["nanogpt"]
        row["ratio"] = ours["rate"] / theirs["rate"]
        row["memory_ratio"] = ours["peak_bytes"] / theirs["peak_bytes"]
    print(json.dumps(row, default=str))  # default: writes a path as text


if __name__ == "__main__":
    start_script(main, BenchConfig)
