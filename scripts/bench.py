"""Measure training steps on this machine, beside nanoGPT.

    python scripts/bench.py --use_torch_compile --peer ../nanoGPT

Each measurement is a process of its own, which takes some steps to warm up and then counts for some
seconds. This project and nanoGPT take turns, and medians count: so a machine that gets slower for a
while slows both. The comparison is printed and appended to --out as a line of JSON.
"""

import importlib
import json
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Python puts scripts/ there instead

import torch
import torch.nn as nn
from torch import Tensor

from config import MachineOptions, ModelOptions, TrainConfig, resolve_from_recipe
from data.tokenizer import GPT2Tokenizer
from model.config import GPTConfig
from model.execution import Execution
from model.gpt import GPT, build_without_weights
from model.recipes import parse_recipe
from training.optim import make_optimizers
from utils.cli import start_script, to_flags
from utils.devices import autocast, describe, pick_device, pick_dtype
from utils.errors import UserError
from utils.throughput import peak_flops

VOCAB_SIZE = GPT2Tokenizer.vocab_size
WARMUP_STEPS = 3  # the first one compiles


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
    out: Path = Path("logs/bench.jsonl")
    """JSON lines file to append to."""
    profile: bool = False
    """Trace a step into trace.json, for ui.perfetto.dev, and print its slowest operations."""
    worker: Literal["ours", "nanogpt"] | None = None
    """Make one measurement of this side alone, and print it."""


@dataclass(frozen=True)
class BenchConfig(MachineOptions, ModelOptions, BenchOptions):
    """Measure training steps on this machine, beside nanoGPT."""

    @property
    def train_options(self) -> TrainConfig:
        """Options of train.py with the values of these."""
        names = [field.name for field in fields(TrainConfig) if hasattr(self, field.name)]
        options = TrainConfig(**{name: getattr(self, name) for name in names})
        return resolve_from_recipe(options, parse_recipe(self.recipe))

    @property
    def shape(self) -> GPTConfig:
        """Architecture of the model."""
        return self.train_options.model_config(parse_recipe(self.recipe), VOCAB_SIZE)


class Trainer:
    """A model with what a training step on random tokens needs."""

    def __init__(self, config: BenchConfig) -> None:
        self.device = pick_device(config.device)
        self.dtype = pick_dtype(config.dtype, self.device)
        shape = (config.micro_batch_size, config.block_size)
        self.idx = torch.randint(VOCAB_SIZE, shape, device=self.device)  # (B, T)
        self.targets = torch.randint(VOCAB_SIZE, shape, device=self.device)  # (B, T)
        self.optimizers: list[torch.optim.Optimizer] = []
        self.model: nn.Module
        if config.worker == "nanogpt":
            self.build_nanogpt(config)
        else:
            self.build_ours(config)

    def build_ours(self, config: BenchConfig) -> None:
        """Make this project's model and optimizers."""
        execution = Execution(config.activation_checkpointing, config.use_torch_compile)
        self.model = GPT(config.shape, execution).to(self.device)
        recipe = parse_recipe(config.recipe)
        self.optimizers = make_optimizers(self.model, config.train_options, recipe, self.dtype)

    def build_nanogpt(self, config: BenchConfig) -> None:
        """Make nanoGPT's model and optimizer, as its train.py does."""
        # its model.py has the name of this project's package, which is in use already
        ours = sys.modules.pop("model")
        sys.path.insert(0, str(config.peer))
        nanogpt = importlib.import_module("model")
        sys.modules["model"] = ours

        shape = config.shape
        model_config = nanogpt.GPTConfig(
            block_size=config.block_size,
            vocab_size=shape.padded_vocab_size,
            n_layer=shape.n_layer,
            n_head=shape.n_head,
            n_embd=shape.n_embd,
            bias=True,
        )
        torch.set_float32_matmul_precision("high")
        model = nanogpt.GPT(model_config).to(self.device)
        optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), self.device.type)
        self.optimizers = [optimizer]
        self.model = torch.compile(model) if config.use_torch_compile else model

    def loss(self) -> Tensor:
        """Return the loss of the batch; nanoGPT's model returns logits, too."""
        outputs = self.model(self.idx, self.targets)
        return outputs[1] if isinstance(outputs, tuple) else outputs

    def step(self) -> None:
        """Take a step: forward, backward, clip, update; wait for the device."""
        with autocast(self.device, self.dtype, keep_weights=False):
            loss = self.loss()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        loss.item()  # waits for the device


def measure_here(config: BenchConfig) -> None:
    """Measure one side in this process; print tokens/s, seconds of warm-up and peak memory."""
    start_seconds = time.perf_counter()
    trainer = Trainer(config)
    for _ in range(WARMUP_STEPS):
        trainer.step()
    warm_seconds = time.perf_counter()
    num_tokens = 0
    while num_tokens == 0 or time.perf_counter() < warm_seconds + config.seconds:
        trainer.step()
        num_tokens += trainer.idx.numel()
    seconds = time.perf_counter() - warm_seconds
    if trainer.device.type == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated()
    else:
        # the most that this process had in memory; getrusage gives that of its parent, if larger
        status = Path("/proc/self/status").read_text()
        peak_bytes = 1024 * int(re.search(r"VmHWM:\s*(\d+)", status)[1])
    warmup_seconds = warm_seconds - start_seconds
    figures = {"rate": num_tokens / seconds, "start_s": warmup_seconds, "peak_bytes": peak_bytes}
    print(json.dumps(figures))


def measure(config: BenchConfig, sides: list[str]) -> dict[str, dict[str, float]]:
    """Return the medians of the figures of each side, which take turns."""
    figures: dict[str, list[dict]] = {side: [] for side in sides}
    for _ in range(config.repeats):
        for side in sides:
            flags = to_flags(vars(replace(config, worker=side)))
            done = subprocess.run(
                [sys.executable, __file__, *flags], stdout=subprocess.PIPE, text=True
            )
            if done.returncode:
                raise UserError(f"the measurement of {side} failed; its error is above")
            # the last line, as a model may print something, too
            figures[side].append(json.loads(done.stdout.splitlines()[-1]))
    medians: dict[str, dict[str, float]] = {}
    for side, rows in figures.items():
        medians[side] = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    return medians


def profile_step(config: BenchConfig) -> None:
    """Trace a step into trace.json, and print its slowest operations."""
    trainer = Trainer(config)
    trainer.step()
    with torch.profiler.profile() as profiler:
        trainer.step()
    profiler.export_chrome_trace("trace.json")
    key = f"self_{trainer.device.type}_time_total"
    print(profiler.key_averages().table(sort_by=key, row_limit=15))


def main(config: BenchConfig) -> None:
    if config.worker:
        return measure_here(config)
    if config.profile:
        return profile_step(config)
    sides = ["ours"]
    if config.peer is not None:
        if not (config.peer / "model.py").is_file():
            raise UserError(f"--peer {config.peer} has no model.py; give a checkout of nanoGPT")
        sides.append("nanogpt")
    measured = measure(config, sides)

    device = pick_device(config.device)
    peak = peak_flops(device, pick_dtype(config.dtype, device))
    if peak is not None:
        flops = build_without_weights(config.shape).flops_per_token()
        for figures in measured.values():
            figures["mfu"] = flops * figures["rate"] / peak
    row = {**describe(device), "unit": "tokens/s", "measured": measured}
    row["options"] = {name: value for name, value in vars(config).items() if value}
    if config.peer is not None:
        ours = measured["ours"]
        theirs = measured["nanogpt"]
        row["ratio"] = ours["rate"] / theirs["rate"]
        row["memory_ratio"] = ours["peak_bytes"] / theirs["peak_bytes"]
    line = json.dumps(row, default=str)  # paths as text
    config.out.parent.mkdir(parents=True, exist_ok=True)
    with open(config.out, "a") as file:
        file.write(line + "\n")
    print(line)


if __name__ == "__main__":
    start_script(main, BenchConfig)
