"""Measure this machine: training, data, sampling and evaluation beside limits and peers.

    python bench.py all --peer ../nanoGPT
    python bench.py train --peer ../nanoGPT --micro_batch_size 4 --dtype bfloat16
    python bench.py data --input novels-00000-of-00002.parquet novels-00001-of-00002.parquet

Each measurement runs in a process of its own (utils/workers.py); on a CPU those that are compared
take turns, repeat by repeat. Prints medians, then all of it as one line of JSON.
"""

import json
import platform
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from cli import run
from config import BenchConfig, ConfigError
from data.benchmarks import read_rows
from data.shards import atomic_write
from data.tokenizer import load_tokenizer
from model.config import SIZES, GPTConfig
from model.gpt import GPT, skeleton
from model.huggingface import save_pretrained
from scripts.harness import complete
from utils.distributed import pick_device, pick_dtype
from utils.throughput import flops_per_token, peak_flops
from utils.workers import Measurement, measure

VOCABULARY = 50257
SMALL = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "vocab_size": 257}
SMALL_BATCH = 12  # nanoGPT's documented configuration for a CPU, in float32 and not compiled
EXAMPLES = 160  # of HellaSwag


@dataclass(frozen=True)
class Comparison:
    """What ours reaches, beside a peer and beside limits: "matrix", in FLOP/s, and "copy"."""

    what: str
    unit: str
    ours: Measurement
    peer: Measurement | None = None
    limits: tuple[Measurement, ...] = ()
    flops: int = 0
    """Arithmetic of one unit."""


def training(config: BenchConfig, *, small: bool) -> Comparison:
    """Training steps of the named size, or of nanoGPT's configuration for CPUs."""
    name, batch, dtype = config.model_type, config.micro_batch_size, config.dtype
    shape = {**SIZES[name], "block_size": config.block_size, "vocab_size": VOCABULARY}
    if small:
        name, batch, dtype, shape = "4 layers of 128", SMALL_BATCH, "float32", SMALL
    job = {"shape": shape, "batch": batch, "dtype": dtype, "device": config.device}
    ours = job | {
        "activation_checkpointing": config.activation_checkpointing,
        "compile": config.use_torch_compile and not small,
    }
    theirs = job | {"peer": str(config.peer and config.peer.resolve()), "compile": not small}
    parameters = skeleton(GPTConfig(**shape)).num_parameters()
    return Comparison(
        f"training {name}, {batch} x {shape['block_size']}, {dtype}",
        "tokens",
        Measurement("train", ours),
        Measurement("train_nanogpt", theirs) if config.peer else None,
        (Measurement("matrix", job), Measurement("copy", job)),
        flops_per_token(parameters, shape["n_layer"], shape["n_embd"], shape["block_size"]),
    )


def sampling(config: BenchConfig, batch: int) -> Comparison:
    """128 tokens after each of `batch` prompts, beside transformers."""
    shape = {**SIZES[config.model_type], "block_size": config.block_size, "vocab_size": VOCABULARY}
    job = {"shape": shape, "batch": batch, "dtype": config.dtype, "device": config.device}
    what = f"sampling {config.model_type}, batch {batch}, {config.dtype}"
    peer = Measurement("sample_transformers", job)
    return Comparison(what, "tokens", Measurement("sample", job), peer)


def sharding(config: BenchConfig, folder: Path) -> Comparison:
    """Text files to shards of GPT-2 tokens, beside tiktoken on the same text in memory."""
    files = [str(path.resolve()) for path in config.input]
    if not files:
        files = [str(folder / "words.jsonl")]
        lines = (json.dumps({"text": words(n, 1000)}) + "\n" for n in range(4000))
        Path(files[0]).write_text("".join(lines))
    job = {"files": files, "threads": config.num_workers}
    what = f"sharding, {config.num_workers} threads"
    return Comparison(what, "tokens", Measurement("data", job), Measurement("data_tiktoken", job))


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
    job = {"files": [str(folder / "model"), str(folder / "rows.jsonl")], "device": config.device}
    theirs = job | {"peer": str(config.harness and config.harness.absolute())}
    return [
        Comparison(
            f"HellaSwag {config.model_type}, {len(rows)} examples as a command, {dtype}",
            "examples",
            Measurement("evaluate", job | {"dtype": dtype}),
            Measurement("evaluate_harness", theirs) if config.harness else None,
        )
        for dtype in ("float32", "bfloat16")
    ]


def words(seed: int, count: int) -> str:
    """Made-up text of common words."""
    common = "the of and to in is was for that on with as by at from his her it not are".split()
    return " ".join(random.Random(seed).choices(common, k=count)) + "."


def figures(comparison: Comparison, config: BenchConfig) -> dict:
    """A row of the report."""
    device = pick_device(config.device)
    others = [comparison.peer] if comparison.peer else []
    all_of_it = [comparison.ours, *others, *comparison.limits]
    found = measure(all_of_it, config.repeats, in_turn=device.type == "cpu")
    by_kind = dict(zip((m.kind for m in all_of_it), found, strict=True))
    ours = found[0]
    row = {"what": comparison.what, "unit": comparison.unit, "measured": by_kind}
    if comparison.peer:
        row["peer"] = comparison.peer.kind
        row["ratio"] = ours["rate"] / found[1]["rate"]
        row["memory_ratio"] = ours["peak_bytes"] / found[1]["peak_bytes"]
    if comparison.flops:
        reached = ours["rate"] * comparison.flops
        row["share_of_matrix"] = reached / by_kind["matrix"]["rate"]
        peak = peak_flops(device, pick_dtype(comparison.ours.job["dtype"], device))
        row["mfu"] = reached / peak if peak else None
    return row


def line(row: dict) -> str:
    """A row as text."""
    ours, *_ = row["measured"].values()
    text = f"{row['what']}: {ours['rate']:,.4g} {row['unit']}/s, {ours['peak_bytes'] / 1e9:.2f} GB"
    if "peer" in row:
        theirs = row["measured"][row["peer"]]
        text += (
            f"; {row['peer']} {theirs['rate']:,.4g} {row['unit']}/s, "
            f"{theirs['peak_bytes'] / 1e9:.2f} GB: {row['ratio']:.2f}x the speed, "
            f"{row['memory_ratio']:.2f}x the memory"
        )
    if "share_of_matrix" in row:
        matrix, copy = (row["measured"][kind]["rate"] for kind in ("matrix", "copy"))
        text += (
            f"; {row['share_of_matrix']:.0%} of the {matrix / 1e9:,.0f} GFLOP/s of its matrix "
            f"products alone, memory copies {copy / 1e9:.1f} GB/s"
        )
        text += f"; MFU {row['mfu']:.1%}" if row["mfu"] else ""
    return text


def hardware(device: torch.device) -> dict:
    """What the figures are of."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    return {
        "device": f"{device.type} {name}".strip(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def main(config: BenchConfig) -> None:
    for name in ("repeats", "block_size", "micro_batch_size", "num_workers"):
        if getattr(config, name) < 1:
            raise ConfigError(f"--{name} {getattr(config, name)} must be at least 1")
    if config.peer and not (config.peer / "model.py").is_file():
        raise ConfigError(f"--peer {config.peer} has no model.py; give a checkout of nanoGPT")
    device = pick_device(config.device)
    report = {"hardware": hardware(device), "rows": []}
    print(", ".join(f"{key} {value}" for key, value in report["hardware"].items()))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = {
            "train": lambda: [
                training(config, small=small)
                for small in ((False, True) if device.type == "cpu" else (False,))
            ],
            "sample": lambda: [sampling(config, batch) for batch in (1, 8)],
            "data": lambda: [sharding(config, folder)],
            "eval": lambda: evaluation(config, folder),
        }
        for part, comparisons in parts.items():
            for comparison in comparisons() if config.what in (part, "all") else ():
                report["rows"].append(figures(comparison, config))
                print(line(report["rows"][-1]), flush=True)
    config.out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(config.out) as file:
        file.write(json.dumps(report, indent=1).encode())
    print(json.dumps(report))


if __name__ == "__main__":
    run(main, BenchConfig)
