"""Measure this machine: training, data, sampling and evaluation beside limits and peers.

    python bench.py all --peer ../nanoGPT
    python bench.py train --peer ../nanoGPT --micro_batch_size 4 --dtype bfloat16
    python bench.py data --input novels-00000-of-00002.parquet novels-00001-of-00002.parquet

Each measurement runs in a process of its own (scripts/bench/measure.py); on a CPU those compared
take turns, repeat by repeat. Prints medians, then all of it as one line of JSON.
"""

import json
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from config import BenchConfig, ConfigError
from data.tokenizer import GPT2Tokenizer, load_tokenizer
from evaluation.tasks import read_rows
from model.config import SIZES, GPTConfig
from model.gpt import GPT
from model.huggingface import save_pretrained
from scripts.bench.harness import complete
from scripts.bench.measure import Job, Measurement
from scripts.bench.report import Comparison, figures, hardware, line, mode, steps
from utils.cli import run
from utils.distributed import is_emulated, pick_device
from utils.files import atomic_write

VOCABULARY = GPT2Tokenizer.vocab_size
SMALL = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "vocab_size": 257}
SMALL_BATCH = 12  # nanoGPT's documented configuration for a CPU, in float32 and not compiled
EXAMPLES = 160  # of HellaSwag


def training(config: BenchConfig) -> Comparison:
    """Training steps of the named size; the peer's are compiled."""
    shape = {**SIZES[config.model_type], "block_size": config.block_size}
    ours = Job(
        {**shape, "vocab_size": VOCABULARY},
        config.micro_batch_size,
        config.dtype,
        config.device,
        compile=config.use_torch_compile,
        activation_checkpointing=config.activation_checkpointing,
    )
    return steps(config.model_type, ours, replace(ours, compile=True), config.peer)


def small_training(config: BenchConfig, *, fast: bool) -> Comparison:
    """The shape of nanoGPT's documented configuration for a CPU, which is float32 and not compiled;
    ours too, or as fast as it goes."""
    ours = theirs = Job(SMALL, SMALL_BATCH, "float32", config.device)
    if fast:
        slow = is_emulated(torch.bfloat16, pick_device(config.device))
        ours = replace(theirs, dtype="float32" if slow else "bfloat16", compile=True)
    return steps("4 layers of 128", ours, theirs, config.peer)


def sampling(config: BenchConfig, batch: int) -> Comparison:
    """128 tokens after each of `batch` prompts, beside transformers."""
    shape = {**SIZES[config.model_type], "block_size": config.block_size, "vocab_size": VOCABULARY}
    job = Job(shape, batch, config.dtype, config.device, compile=config.use_torch_compile)
    what = f"sampling {config.model_type}, batch {batch}, {mode(job)}"
    what += f" (peer: {config.dtype})" if job.compile else ""
    peer = Measurement("sample_transformers", job)
    return Comparison(what, "tokens", Measurement("sample", job), peer)


def sharding(config: BenchConfig, folder: Path) -> Comparison:
    """Text files to shards of GPT-2 tokens, beside tiktoken on the same text in memory."""
    files = [str(path.resolve()) for path in config.input]
    if not files:
        files = [str(folder / "words.jsonl")]
        lines = (json.dumps({"text": words(n, 1000)}) + "\n" for n in range(4000))
        Path(files[0]).write_text("".join(lines))
    job = Job(files=tuple(files), threads=config.num_workers)
    what = f"sharding, {config.num_workers} threads"
    return Comparison(what, "tokens", Measurement("data", job), Measurement("data_tiktoken", job))


def reading(folder: Path) -> Comparison:
    """Batches of 8 processes from one disk, from shards of random tokens."""
    for split, shards in (("train", 4), ("val", 1)):
        for i in range(shards):
            tokens = np.random.default_rng(i).integers(0, VOCABULARY, 10_000_000, np.uint16)
            np.save(folder / f"{split}_{i:06d}.npy", tokens)
    job = Job(files=(str(folder),))
    return Comparison("batches of 8 processes", "tokens", Measurement("read", job))


def evaluation(config: BenchConfig, folder: Path) -> list[Comparison]:
    """The command evaluate.py on HellaSwag in both dtypes, with a random model of the named size,
    beside lm-evaluation-harness in float32."""
    if config.hellaswag:
        rows = [complete(row) for row in read_rows("hellaswag", config.hellaswag)[:EXAMPLES]]
    else:
        parts = {"activity_label": "Words", "ctx_a": words(0, 20), "ctx_b": words(1, 8), "ctx": ""}
        rows = [
            {**parts, "endings": [words(4 * n + i, 18) for i in range(4)], "label": n % 4}
            for n in range(EXAMPLES)
        ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = GPT(GPTConfig(**SIZES[config.model_type], vocab_size=VOCABULARY))
    save_pretrained(model, folder / "model", load_tokenizer("gpt2"))
    files = (str(folder / "model"), str(folder / "rows.jsonl"))
    job = Job(files=files, device=config.device)
    harness = None
    if config.harness:
        theirs = replace(job, peer=str(config.harness.absolute()))
        harness = Measurement("evaluate_harness", theirs)
    return [
        Comparison(
            f"HellaSwag {config.model_type}, {len(rows)} examples as a command, {dtype}",
            "examples",
            Measurement("evaluate", replace(job, dtype=dtype)),
            harness,
        )
        for dtype in ("float32", "bfloat16")
    ]


def words(seed: int, count: int) -> str:
    """Made-up text of common words."""
    common = "the of and to in is was for that on with as by at from his her it not are".split()
    return " ".join(random.Random(seed).choices(common, k=count)) + "."


def main(config: BenchConfig) -> None:
    for name in ("repeats", "block_size", "micro_batch_size", "num_workers"):
        if getattr(config, name) < 1:
            raise ConfigError(f"--{name} {getattr(config, name)} must be at least 1")
    if config.peer and not (config.peer / "model.py").is_file():
        raise ConfigError(f"--peer {config.peer} has no model.py; give a checkout of nanoGPT")
    device = pick_device(config.device)
    on_cpu = device.type == "cpu"
    report = {"hardware": hardware(device), "rows": []}
    print(", ".join(f"{key} {value}" for key, value in report["hardware"].items()))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = {
            "train": lambda: [
                training(config),
                *(small_training(config, fast=fast) for fast in (False, True) if on_cpu),
            ],
            "sample": lambda: [sampling(config, batch) for batch in (1, 8)],
            "data": lambda: [sharding(config, folder), reading(folder)],
            "eval": lambda: evaluation(config, folder),
        }
        for part, comparisons in parts.items():
            for comparison in comparisons() if config.what in (part, "all") else ():
                report["rows"].append(figures(comparison, config.repeats))
                print(line(report["rows"][-1]), flush=True)
    config.out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(config.out) as file:
        file.write(json.dumps(report, indent=1).encode())
    print(json.dumps(report))


if __name__ == "__main__":
    run(main, BenchConfig, positional=True)
