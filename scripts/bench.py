"""Measure this machine: training beside nanoGPT, sampling beside transformers.

    python scripts/bench.py --parts train --use_torch_compile --peer ../nanoGPT

Each repeat of a job is a process of its own, which warms up and then counts for some seconds. Jobs
that are compared take turns, repeat by repeat; medians count. Each comparison is printed and
appended to --out as a line of JSON; the last line of output is all of them as JSON.
"""

import importlib
import json
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Python puts scripts/ there instead

import torch
import torch.nn as nn
from torch import Tensor

from config import MachineOptions, ModelOptions, TrainConfig
from data.tokenizer import GPT2Tokenizer
from model.config import GPTConfig
from model.empty import empty_gpt
from model.generate import Sampling, generate
from model.gpt import GPT
from model.huggingface import save_pretrained
from model.packed import for_inference
from model.replace import for_training
from training.optim import make_optimizers
from training.parallel import clip_grad_norm
from utils.cli import run, to_flags
from utils.devices import autocast, pick_device, pick_dtype
from utils.errors import UserError
from utils.throughput import peak_flops

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = GPT2Tokenizer.vocab_size
NEW_TOKENS = 128  # of sampling
SECONDS = 5  # that a repeat counts, at least one unit of work
PEERS = {"train": "nanogpt", "sample": "transformers"}
Work = Callable[[], int]  # does the work of a job once and returns how many units that was


@dataclass
class BenchOptions:
    """Measurements and peers."""

    parts: tuple[Literal["train", "sample"], ...] = ("train", "sample")
    """Parts to measure."""
    repeats: int = 5
    """Repeats of each measurement; the median counts."""
    micro_batch_size: int = 4
    """Sequences in a training step."""
    peer: Path | None = None
    """Checkout of nanoGPT, whose model.py trains in turn with this project's model."""
    out: Path = Path("logs/bench.jsonl")
    """JSON lines file to append to."""
    worker: str | None = None
    """Run one repeat of this job alone."""


@dataclass
class BenchConfig(MachineOptions, ModelOptions, BenchOptions):
    """Measure this machine: training beside nanoGPT, sampling beside transformers."""

    @property
    def training(self) -> TrainConfig:
        """The options of train.py that these stand for."""
        shared = [f.name for f in fields(TrainConfig) if hasattr(self, f.name)]
        return TrainConfig(**{name: getattr(self, name) for name in shared})

    @property
    def shape(self) -> GPTConfig:
        """Architecture of the model."""
        return self.training.model_config(VOCABULARY)

    @property
    def device_and_dtype(self) -> tuple[torch.device, torch.dtype]:
        """Device, and dtype of its matmuls."""
        device = pick_device(self.device)
        return device, pick_dtype(self.dtype, device)


def train(config: BenchConfig) -> Work:
    """Prepare training steps with this project's model and optimizers."""
    device, dtype = config.device_and_dtype
    model = GPT(config.shape).to(device)
    for_training(model, device, config.activation_checkpointing, config.use_torch_compile)
    optimizers = make_optimizers(model, config.training, config.training.parsed_recipe, dtype)
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
    clip = partial(nn.utils.clip_grad_norm_, model.parameters(), 1.0)
    return training_step(config, lambda *batch: module(*batch)[1], clip, [optimizer])


def training_step(
    config: BenchConfig,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    clip: Callable[[], object],
    optimizers: list[torch.optim.Optimizer],
) -> Work:
    """Return a step on one micro-batch of random tokens: forward, backward, clip, update."""
    device, dtype = config.device_and_dtype
    size = (2, config.micro_batch_size, config.block_size)
    tokens = torch.randint(VOCABULARY, size, device=device)

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


def sample(config: BenchConfig) -> Work:
    """Prepare sampling of NEW_TOKENS tokens after each of --micro_batch_size prompts of 16."""
    device, dtype = config.device_and_dtype
    model = GPT(config.shape).to(device).eval()
    for_inference(model, device, dtype)
    sampling = Sampling(NEW_TOKENS, top_k=50)
    prompts = torch.randint(VOCABULARY, (config.micro_batch_size, 16)).tolist()

    def once() -> int:
        with autocast(device, dtype):
            return torch.stack(list(generate(model, prompts, sampling))).cpu().numel()

    return once


def sample_transformers(config: BenchConfig) -> Work:
    """Prepare the sampling of `sample` with a GPT-2 of transformers."""
    from transformers import GPT2LMHeadModel

    device, dtype = config.device_and_dtype
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(GPT(config.shape), Path(folder))
        model = GPT2LMHeadModel.from_pretrained(folder, dtype=dtype).to(device).eval()
    prompt = torch.randint(VOCABULARY, (config.micro_batch_size, 16), device=device)
    options = {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0}
    options |= {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS}

    def once() -> int:
        tokens = model.generate(prompt, do_sample=True, top_k=50, **options)
        return tokens[:, prompt.size(1) :].numel()

    return once


JOBS: dict[str, Callable[[BenchConfig], Work]] = {"train": train, "sample": sample}
JOBS |= {"nanogpt": train_nanogpt, "transformers": sample_transformers}


def work(config: BenchConfig) -> None:
    """Be the worker of a job: print seconds of warm-up, units per second and peak memory."""
    began = time.perf_counter()
    once = JOBS[config.worker](config)
    once()  # compiles, fills caches
    ready, units = time.perf_counter(), 0
    while time.perf_counter() < ready + SECONDS:
        units += once()
    rate = units / (time.perf_counter() - ready)
    on_gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    own = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())  # not its parent's
    peak = on_gpu or 1024 * int(own[1])
    print(json.dumps({"rate": rate, "start_s": ready - began, "peak_bytes": peak}))


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


def compare(config: BenchConfig, part: str, jobs: list[str]) -> dict:
    """Return a row: the options and figures of a part's jobs, the first beside the second."""
    measured = measure(config, jobs)
    row = {"part": part, "unit": "tokens/s"}
    row |= {"options": {k: v for k, v in vars(config).items() if v}, "measured": measured}
    if part == "train" and (peak := peak_flops(*config.device_and_dtype)):
        flops = empty_gpt(config.shape).flops_per_token()
        for figures in measured.values():
            figures["mfu"] = flops * figures["rate"] / peak
    if len(jobs) == 2:
        ours, theirs = measured.values()
        row["ratio"] = ours["rate"] / theirs["rate"]
        row["memory_ratio"] = ours["peak_bytes"] / theirs["peak_bytes"]
    return row


def main(config: BenchConfig) -> None:
    if config.worker:
        return work(config)
    if config.peer and not (config.peer / "model.py").is_file():
        raise UserError(f"--peer {config.peer} has no model.py; give a checkout of nanoGPT")
    device, _ = config.device_and_dtype
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    hardware = {"device": f"{device.type} {name}".strip(), "torch": str(torch.__version__)}
    config.out.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for part in config.parts:
        jobs = [part] if part == "train" and config.peer is None else [part, PEERS[part]]
        for batch in (1, 8) if part == "sample" else (config.micro_batch_size,):
            rows.append(hardware | compare(replace(config, micro_batch_size=batch), part, jobs))
            line = json.dumps(rows[-1], default=str)
            print(line, flush=True)
            with open(config.out, "a") as file:
                file.write(line + "\n")
    print(json.dumps(rows, default=str))


if __name__ == "__main__":
    run(main, BenchConfig)
