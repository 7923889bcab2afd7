"""Measure this machine: training, sampling, data and evaluation beside limits and peers.

    python bench.py all --peer ../nanoGPT
    python bench.py train --peer ../nanoGPT --micro_batch_size 4 --dtype bfloat16
    python bench.py data --input novels-00000-of-00002.parquet novels-00001-of-00002.parquet

Each measurement runs in a process of its own (scripts/bench/); on a CPU the compared ones take
turns, repeat by repeat. Prints medians, and as the last line all figures as JSON.
"""

import json
import os
import random
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from data.tokenizer import GPT2Tokenizer, load_tokenizer, save_tokenizer
from evaluation.tasks import read_rows
from model.config import SIZES, GPTConfig
from model.gpt import GPT
from model.huggingface import save_pretrained
from scripts.bench import report
from scripts.bench.harness import with_all_fields
from scripts.bench.measure import Job
from utils.cli import run
from utils.devices import is_emulated, pick_device
from utils.errors import UserError

VOCABULARY = GPT2Tokenizer.vocab_size
# nanoGPT's documented configuration for a CPU: float32, not compiled
SMALL = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "vocab_size": 257}
SMALL_BATCH = 12
HELLASWAG_EXAMPLES = 160
Comparison = tuple[str, Job, Job | None]  # title, job of this project, job of its peer


@dataclass
class BenchConfig:
    """Measure this machine: this project beside the limits of the hardware and beside peers."""

    what: Literal["train", "data", "sample", "eval", "all"]
    """Part to measure."""
    peer: Path | None = None
    """Checkout of nanoGPT, whose model.py trains in turn with this project's model."""
    repeats: int = 5
    """Repeats of each measurement; the median counts."""
    model_type: Literal["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"] = "gpt2"
    """Named size: 124M, 350M, 774M, 1558M parameters."""
    block_size: int = 1024
    """Tokens in a sequence."""
    micro_batch_size: int = 4
    """Sequences in a training step."""
    use_torch_compile: bool = False
    """Compile this project's model of the named size; nanoGPT always is, transformers never."""
    activation_checkpointing: Literal["none", "cheap", "block"] = "none"
    """Activations to recompute in the backward pass, as in train.py."""
    input: tuple[Path, ...] = ()
    """Text files to shard: .parquet, .jsonl or .txt; random common words unless given."""
    num_workers: int = os.cpu_count() or 1
    """Threads that tokenize."""
    hellaswag: Path | None = None
    """HellaSwag .jsonl in the original format; made-up examples of its size unless given."""
    harness: Path | None = None
    """Python interpreter with lm-evaluation-harness, which scores in turn with evaluate.py."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    dtype: Literal["auto", "float32", "bfloat16"] = "bfloat16"
    """Dtype of matmuls in training and sampling."""
    out: Path = Path("logs/bench.json")
    """JSON file for all figures."""


def model_job(kind: str, config: BenchConfig, batch: int) -> Job:
    """Return a job of `batch` sequences of the model of the named size."""
    shape = {**SIZES[config.model_type], "block_size": config.block_size, "vocab_size": VOCABULARY}
    return Job(kind, shape, batch, config.dtype, config.device, config.use_torch_compile)


def compare_training(config: BenchConfig, _: Path) -> Iterator[Comparison]:
    """Yield training steps of the named size and, on a CPU, of nanoGPT's small configuration."""
    options = {"activation_checkpointing": config.activation_checkpointing}
    job = replace(model_job("train", config, config.micro_batch_size), **options)
    peer = report.nanogpt_job(replace(job, use_torch_compile=True), config.peer)
    yield report.training_title(config.model_type, job, peer), job, peer
    device = pick_device(config.device)
    if device.type == "cpu":
        slow = Job("train", SMALL, SMALL_BATCH, "float32", config.device)
        dtype = "float32" if is_emulated(torch.bfloat16, device) else "bfloat16"
        peer = report.nanogpt_job(slow, config.peer)
        for job in (slow, replace(slow, dtype=dtype, use_torch_compile=True)):
            yield report.training_title("4 layers of 128", job, peer), job, peer


def compare_sampling(config: BenchConfig, _: Path) -> Iterator[Comparison]:
    """Yield sampling of 128 tokens after each of 1 and of 8 prompts, beside transformers."""
    for batch in (1, 8):
        job = model_job("sample", config, batch)
        peer = replace(job, kind="sample_transformers", use_torch_compile=False)
        modes = report.format_modes(job, peer)
        yield f"sampling {config.model_type}, batch {batch}, {modes}", job, peer


def compare_data(config: BenchConfig, folder: Path) -> Iterator[Comparison]:
    """Yield sharding of text, beside tiktoken on text in memory, and reading of shards."""
    words = ({"text": random_words(n, 1000)} for n in range(4000))
    files = config.input or [write_rows(folder, words)]
    job = Job(
        "data", files=tuple(str(path.resolve()) for path in files), threads=config.num_workers
    )
    yield f"sharding, {config.num_workers} threads", job, replace(job, kind="data_tiktoken")
    yield compare_reading(folder)


def compare_reading(folder: Path) -> Comparison:
    """Return the reading of batches by 8 processes from shards of random tokens in `folder`."""
    for split, shards in (("train", 4), ("val", 1)):
        for i in range(shards):
            tokens = np.random.default_rng(i).integers(0, VOCABULARY, 10_000_000, np.uint16)
            np.save(folder / f"{split}_{i:06d}.npy", tokens)
    return "batches of 8 processes", Job("read", files=(str(folder),)), None


def compare_evaluation(config: BenchConfig, folder: Path) -> Iterator[Comparison]:
    """Yield evaluate.py on HellaSwag with a random model in each dtype, beside the harness."""
    rows = hellaswag_rows(config.hellaswag)
    model, data = str(folder / "model"), str(write_rows(folder, rows))
    gpt = GPT(GPTConfig(**SIZES[config.model_type], vocab_size=VOCABULARY))
    save_pretrained(gpt, Path(model))
    save_tokenizer(load_tokenizer("gpt2"), Path(model), gpt.config.block_size)
    flags = ["--model", model, "--tasks", "hellaswag", "--data", data, "--device", config.device]
    flags += ["--hellaswag_protocols", "lm-eval", "--out", str(folder / "evaluation.json")]
    job = Job("evaluate", device=config.device, units=len(rows), unit="examples")
    peer = None
    if config.harness:
        command = (str(config.harness.absolute()), "scripts/bench/harness.py", model, data)
        peer = replace(job, kind="evaluate_harness", command=command)
    for dtype in ("float32", "bfloat16"):
        title = f"HellaSwag {config.model_type}, {len(rows)} examples as a command, {dtype}"
        command = (sys.executable, "evaluate.py", *flags, "--dtype", dtype)
        yield title, replace(job, command=command), peer


def hellaswag_rows(path: Path | None) -> list[dict]:
    """Return the first rows of a HellaSwag file, or made-up ones, with all fields."""
    if path:
        return [with_all_fields(row) for row in read_rows("hellaswag", path)[:HELLASWAG_EXAMPLES]]
    rows = []
    for n in range(HELLASWAG_EXAMPLES):
        endings = [random_words(4 * n + i, 18) for i in range(4)]
        context = f"{random_words(0, 20)} {random_words(1, 8)}"
        rows.append(with_all_fields({"ctx": context, "endings": endings, "label": n % 4}))
    return rows


def write_rows(folder: Path, rows: Iterable[dict]) -> Path:
    """Write rows as lines of JSON to rows.jsonl and return its path."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def random_words(seed: int, count: int) -> str:
    """Return a sentence of `count` random common words."""
    common = "the of and to in is was for that on with as by at from his her it not are".split()
    return " ".join(random.Random(seed).choices(common, k=count)) + "."


PARTS = {
    "train": compare_training,
    "sample": compare_sampling,
    "data": compare_data,
    "eval": compare_evaluation,
}


def main(config: BenchConfig) -> None:
    for name in ("repeats", "block_size", "micro_batch_size", "num_workers"):
        if getattr(config, name) < 1:
            raise UserError(f"--{name} {getattr(config, name)} must be at least 1")
    results = report.start_report(pick_device(config.device))
    with tempfile.TemporaryDirectory() as folder:
        for part in PARTS if config.what == "all" else [config.what]:
            for title, job, peer in PARTS[part](config, Path(folder)):
                row = report.measure_row(title, job, peer, config.repeats)
                results["rows"].append(row)
                print(report.format_row(row), flush=True)
    report.finish_report(results, config.out)


if __name__ == "__main__":
    run(main, BenchConfig, positional=True)
