"""Measure this machine: training, sampling, sharding and HellaSwag beside other projects.

    python scripts/bench.py --parts train --use_torch_compile --peer ../nanoGPT
    python scripts/bench.py --parts data --input novels-00000-of-00002.parquet
    python scripts/bench.py --parts eval --hellaswag hellaswag.jsonl --harness lm-eval/bin/python

Each repeat of a job is a process of its own, which warms up and then counts for some seconds. Jobs
that are compared take turns, repeat by repeat; medians count. Each comparison is printed and
appended to --out as a line of JSON; the last line of output is all of them as JSON.
"""

import contextlib
import importlib
import json
import os
import platform
import re
import resource
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
from data.file_tokenizer import save_tokenizer
from data.shards import read_manifest
from data.tokenizer import GPT2Tokenizer, load_tokenizer
from model.config import GPTConfig
from model.empty import empty_gpt
from model.generate import Sampling, generate
from model.gpt import GPT
from model.huggingface import save_pretrained
from model.packed import for_inference
from model.replace import for_training
from scripts.harness import with_all_fields
from training.optim import make_optimizers
from training.parallel import clip_grad_norm
from utils.cli import run, to_flags
from utils.devices import autocast, pick_device, pick_dtype
from utils.errors import UserError
from utils.throughput import peak_flops

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = GPT2Tokenizer.vocab_size
NEW_TOKENS, EXAMPLES = 128, 160  # of sampling, of HellaSwag
SECONDS = 5  # that a repeat counts, at least one unit of work
PEERS = {"train": "nanogpt", "sample": "transformers", "data": "tiktoken", "eval": "harness"}
Work = Callable[[], int]  # does the work of a job once and returns how many units that was


@dataclass
class BenchOptions:
    """Measurements and peers."""

    parts: tuple[Literal["train", "sample", "data", "eval"], ...] = ("train", "sample")
    """Parts to measure; data needs --input, eval needs --hellaswag."""
    repeats: int = 5
    """Repeats of each measurement; the median counts."""
    micro_batch_size: int = 4
    """Sequences in a training step."""
    peer: Path | None = None
    """Checkout of nanoGPT, whose model.py trains in turn with this project's model."""
    input: tuple[Path, ...] = ()
    """Text files to shard, all .parquet, .jsonl or .txt."""
    num_workers: int = os.cpu_count() or 1
    """Threads that tokenize."""
    hellaswag: Path | None = None
    """HellaSwag .jsonl in the original format."""
    harness: Path | None = None
    """Python interpreter with lm-evaluation-harness, which scores in turn with evaluate.py."""
    out: Path = Path("logs/bench.jsonl")
    """JSON lines file to append to."""
    worker: str | None = None
    """Run one repeat of this job alone."""


@dataclass
class BenchConfig(MachineOptions, ModelOptions, BenchOptions):
    """Measure this machine: training, sampling, sharding and HellaSwag beside other projects."""

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


def shard(config: BenchConfig) -> Work:
    """Prepare data/fineweb-edu.py on --input, from text to shards."""
    sharding = importlib.import_module("data.fineweb-edu")
    files = tuple(map(str, config.input))
    settings = {"input": files, "num_workers": config.num_workers, "shard_size": 1_000_000}

    def once() -> int:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
            sharding.main(sharding.DataConfig(local_dir=Path(folder), **settings))
            return sum(shard["tokens"] for shard in read_manifest(Path(folder))["shards"])

    return once


def tokenize(config: BenchConfig) -> Work:
    """Prepare tiktoken's batch call on the documents of --input, which are in memory."""
    import datasets
    import tiktoken

    builder = {".parquet": "parquet", ".jsonl": "json"}.get(config.input[0].suffix, "text")
    options = {"sample_by": "document"} if builder == "text" else {}
    options |= {"data_files": list(map(str, config.input)), "split": "train"}
    texts = list(datasets.load_dataset(builder, **options)["text"])
    encode = tiktoken.get_encoding("gpt2").encode_ordinary_batch

    def once() -> int:
        documents = encode(texts, num_threads=config.num_workers)
        return sum(map(len, documents)) + len(documents)

    return once


def evaluate(config: BenchConfig) -> Work:
    """Prepare HellaSwag on a random model by a command: evaluate.py, or the harness in float32."""
    folder = tempfile.TemporaryDirectory()
    save_pretrained(GPT(config.shape), Path(folder.name))
    save_tokenizer(load_tokenizer("gpt2"), Path(folder.name), config.block_size)
    lines = list(filter(None, config.hellaswag.read_text().split("\n")))[:EXAMPLES]
    rows = f"{folder.name}/rows.jsonl"
    Path(rows).write_text("\n".join(json.dumps(with_all_fields(json.loads(x))) for x in lines))
    command = [str(config.harness), "scripts/harness.py", rows]
    if config.worker == "eval":
        command = [sys.executable, "evaluate.py", "--tasks", "hellaswag", "--data", rows]
        command += ["--protocols", "lm-eval", "--device", config.device, "--dtype", config.dtype]
        command += ["--out", f"{rows}.json", "--model"]

    def once() -> int:
        subprocess.run([*command, folder.name], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        return len(lines)

    return once


JOBS: dict[str, Callable[[BenchConfig], Work]] = {
    **{"train": train, "sample": sample, "data": shard, "eval": evaluate},
    **{"nanogpt": train_nanogpt, "transformers": sample_transformers},
    **{"tiktoken": tokenize, "harness": evaluate},
}


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
    of_command = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024  # KiB on Linux
    own = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())  # not its parent's
    peak = on_gpu or max(of_command, 1024 * int(own[1]))
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
    row = {"part": part, "unit": "examples/s" if part == "eval" else "tokens/s"}
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
    for part, flag in (("data", "input"), ("eval", "hellaswag")):
        if part in config.parts and not getattr(config, flag):
            raise UserError(f"--parts {part} needs --{flag}")
    device, _ = config.device_and_dtype
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    hardware = {"device": f"{device.type} {name}".strip(), "torch": str(torch.__version__)}
    absent = {"train": config.peer is None, "eval": config.harness is None}
    config.out.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for part in config.parts:
        jobs = [part] if absent.get(part) else [part, PEERS[part]]
        for batch in (1, 8) if part == "sample" else (config.micro_batch_size,):
            rows.append(hardware | compare(replace(config, micro_batch_size=batch), part, jobs))
            line = json.dumps(rows[-1], default=str)
            print(line, flush=True)
            with open(config.out, "a") as file:
                file.write(line + "\n")
    print(json.dumps(rows, default=str))


if __name__ == "__main__":
    run(main, BenchConfig)
