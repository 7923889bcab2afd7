"""Measure training steps on this machine, beside nanoGPT.

    python scripts/bench.py --use_torch_compile --peer ../nanoGPT

Each repeat of a job is a process of its own, which warms up and then counts for some seconds. Jobs
that are compared take turns, repeat by repeat; medians count. The comparison is printed and
appended to --out as a line of JSON.
"""

import importlib
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Python puts scripts/ there instead

import torch
import torch._dynamo.utils
import torch.nn as nn
from torch import Tensor

from config.options import MachineOptions, ModelOptions, TrainConfig, resolve_from_recipe
from config.recipes import parse_recipe
from data.tokenizer import GPT2Tokenizer
from model.config import GPTConfig
from model.execution import Execution
from model.gpt import GPT, build_without_weights
from training.optim import make_optimizers
from training.parallel import clip_grad_norm
from utils.cli import start_script, to_flags
from utils.devices import autocast, describe, pick_device, pick_dtype
from utils.errors import UserError
from utils.throughput import peak_flops

VOCABULARY = GPT2Tokenizer.vocab_size
SECONDS = 5  # that a repeat counts, at least one unit of work
Work = Callable[[], int]  # does the work of a job once and returns how many units that was


@dataclass(frozen=True)
class BenchOptions:
    """Measurements and peers."""

    repeats: int = 5
    """Repeats of each measurement; the median counts."""
    micro_batch_size: int = 4
    """Sequences in a training step."""
    peer: Path | None = None
    """Checkout of nanoGPT, whose model.py trains in turn with this project's model."""
    out: Path = Path("logs/bench.jsonl")
    """JSON lines file to append to."""
    profile: bool = False
    """Trace a step into trace.json, for ui.perfetto.dev, and print its slowest operations."""
    worker: str | None = None
    """Run one repeat of this job alone."""


@dataclass(frozen=True)
class BenchConfig(MachineOptions, ModelOptions, BenchOptions):
    """Measure training steps on this machine, beside nanoGPT."""

    @property
    def training(self) -> TrainConfig:
        """The options of train.py that these stand for."""
        shared = [f.name for f in fields(TrainConfig) if hasattr(self, f.name)]
        options = TrainConfig(**{name: getattr(self, name) for name in shared})
        return resolve_from_recipe(options, parse_recipe(self.recipe))

    @property
    def shape(self) -> GPTConfig:
        """Architecture of the model."""
        return self.training.model_config(parse_recipe(self.recipe), VOCABULARY)

    @property
    def device_and_dtype(self) -> tuple[torch.device, torch.dtype]:
        """Device, and dtype of its matmuls."""
        device = pick_device(self.device)
        return device, pick_dtype(self.dtype, device)


def train(config: BenchConfig) -> Work:
    """Prepare training steps with this project's model and optimizers."""
    device, dtype = config.device_and_dtype
    execution = Execution(config.activation_checkpointing, config.use_torch_compile)
    model = GPT(config.shape, execution).to(device)
    optimizers = make_optimizers(model, config.training, parse_recipe(config.recipe), dtype)
    return training_step(config, model, partial(clip_grad_norm, model, 1.0), optimizers)


def train_nanogpt(config: BenchConfig) -> Work:
    """Prepare training steps with the model and optimizer of nanoGPT."""
    sys.path.insert(0, str(config.peer))
    ours = sys.modules.pop("model")
    nanogpt = importlib.import_module("model")  # its model.py instead of this project's package
    sys.modules["model"] = ours
    shape = {name: getattr(config.shape, name) for name in ("n_layer", "n_head", "n_embd")}
    shape |= {"block_size": config.block_size, "vocab_size": config.shape.padded_vocab_size}
    model = nanogpt.GPT(nanogpt.GPTConfig(bias=True, **shape))
    device = pick_device(config.device)
    torch.set_float32_matmul_precision("high")  # as its train.py
    optimizer = model.to(device).configure_optimizers(0.1, 6e-4, (0.9, 0.95), device.type)
    module = torch.compile(model) if config.use_torch_compile else model
    clip = partial(nn.utils.clip_grad_norm_, [*model.parameters()], 1.0)
    return training_step(config, lambda *batch: module(*batch)[1], clip, [optimizer])


def training_step(
    config: BenchConfig,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    clip: Callable[[], object],
    optimizers: list[torch.optim.Optimizer],
) -> Work:
    """Return a step on one micro-batch of random tokens: forward, backward, clip, update."""
    device, dtype = config.device_and_dtype
    tokens = torch.randint(VOCABULARY, (2, config.micro_batch_size, config.block_size)).to(device)

    def step() -> int:
        with autocast(device, dtype, keep_weights=False):
            loss = loss_of(*tokens)
        loss.backward()
        clip()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        loss.item()  # waits for the device
        return tokens[0].numel()

    return step


JOBS: dict[str, Callable[[BenchConfig], Work]] = {"train": train, "nanogpt": train_nanogpt}


def num_compiled_graphs() -> int:
    """Return how many graphs torch.compile has made in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def work(config: BenchConfig) -> None:
    """Be the worker of a job: print seconds of warm-up, units per second and peak memory."""
    began = time.perf_counter()
    once = JOBS[config.worker](config)
    graphs = -1
    while graphs < num_compiled_graphs():  # the second step compiles more of Muon
        graphs = num_compiled_graphs()
        once()
    ready, units = time.perf_counter(), 0
    while time.perf_counter() < ready + SECONDS:
        units += once()
    rate = units / (time.perf_counter() - ready)
    on_gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    own = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())  # not its parent's
    peak = on_gpu or 1024 * int(own[1])
    print(json.dumps({"rate": rate, "start_s": ready - began, "peak_bytes": peak}))


def profile_step(config: BenchConfig) -> None:
    """Profile a training step after another."""
    (step := train(config))()
    with torch.profiler.profile() as profiler:
        step()
    profiler.export_chrome_trace("trace.json")
    key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    print(profiler.key_averages().table(sort_by=key, row_limit=15))


def measure(config: BenchConfig, jobs: list[str]) -> dict[str, dict]:
    """Return the medians of what the workers of each job print; the jobs take turns."""
    found: dict[str, list[dict]] = {job: [] for job in jobs}
    for _ in range(config.repeats):
        for job, figures in found.items():
            command = [sys.executable, __file__, *to_flags(vars(replace(config, worker=job)))]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                raise UserError(f"the job {job} failed; its error is above")
            figures.append(json.loads(done.stdout.splitlines()[-1]))
    return {
        job: {name: statistics.median(x[name] for x in figures) for name in figures[0]}
        for job, figures in found.items()
    }


def main(config: BenchConfig) -> None:
    if config.worker:
        return work(config)
    if config.profile:
        return profile_step(config)
    if config.peer and not (config.peer / "model.py").is_file():
        raise UserError(f"--peer {config.peer} has no model.py; give a checkout of nanoGPT")
    measured = measure(config, ["train"] if config.peer is None else ["train", "nanogpt"])
    row = describe(pick_device(config.device)) | {"unit": "tokens/s", "measured": measured}
    row["options"] = {name: value for name, value in vars(config).items() if value}
    if peak := peak_flops(*config.device_and_dtype):
        flops = build_without_weights(config.shape).flops_per_token()
        for figures in measured.values():
            figures["mfu"] = flops * figures["rate"] / peak
    if config.peer:
        ours, theirs = measured.values()
        row["ratio"] = ours["rate"] / theirs["rate"]
        row["memory_ratio"] = ours["peak_bytes"] / theirs["peak_bytes"]
    line = json.dumps(row, default=str)
    config.out.parent.mkdir(parents=True, exist_ok=True)
    with open(config.out, "a") as file:
        file.write(line + "\n")
    print(line)


if __name__ == "__main__":
    start_script(main, BenchConfig)
