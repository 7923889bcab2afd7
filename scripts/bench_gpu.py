"""The work of scripts/bench_gpu.sh, which says how to use it."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from config import ConfigError, TrainConfig  # noqa: E402
from data.tokenizer import GPT2Tokenizer  # noqa: E402
from model.config import SIZES  # noqa: E402
from scripts.bench.measure import Job, Measurement, MeasurementError, measure  # noqa: E402
from scripts.bench.report import figures, hardware, line, mode, steps  # noqa: E402
from training.dry_run import largest_micro_batch  # noqa: E402
from utils.distributed import free_memory, pick_device, pick_dtype  # noqa: E402

VOCABULARY = GPT2Tokenizer.vocab_size
TINY = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 64, "vocab_size": 257}
SEQUENCES = 64  # of a process in a step, so that micro-batches are powers of two
# What the compiler does only if its own variables ask for it, for train.py too; but a graph's
# gradients are gone with its next replay, so CUDA graphs are for steps of one micro-batch alone.
COMPILER = {"max-autotune": "TORCHINDUCTOR_MAX_AUTOTUNE", "CUDA graphs": "TORCHINDUCTOR_CUDAGRAPHS"}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model_types", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--peer", type=Path, help="a checkout of nanoGPT")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file for all figures")
    parser.add_argument("--tiny", action="store_true", help="a small model, not compiled")
    return parser.parse_args()


def shapes(asked: argparse.Namespace) -> dict[str, dict]:
    if asked.tiny:
        return {"tiny": TINY}
    rest = {"block_size": 1024, "vocab_size": VOCABULARY}
    return {name: SIZES[name] | rest for name in asked.model_types}


def runs(asked: argparse.Namespace) -> Iterator[tuple[str, Job, dict[str, str], Path | None]]:
    """What is measured: its name, its job, variables of its environment, the peer beside it."""
    gpus = torch.cuda.device_count()
    for number, (name, shape) in enumerate(shapes(asked).items()):
        job = Job(shape, dtype="auto", compile=not asked.tiny)
        yield name, job, {}, asked.peer
        if number == 0 and job.compile:
            for way, variable in COMPILER.items():
                yield f"{name}, {way}", job, {variable: "1"}, None
        for sharding in ("none", "zero2") if gpus > 1 else ():
            yield name, replace(job, sharding=sharding, processes=gpus), {}, None


def first_that_fits(micro_batch_size: int, measured: Callable[[int], dict]) -> tuple[dict, int]:
    """What `measured` gives for the micro-batch, its half or its quarter, and which it was."""
    least = max(1, micro_batch_size // 4)  # what fails at a quarter fails for another reason
    while True:
        try:
            return measured(micro_batch_size), micro_batch_size
        except MeasurementError:
            if micro_batch_size == least:
                raise
            micro_batch_size //= 2
            print(f"does not fit: trying {micro_batch_size}", flush=True)


def compare(name: str, job: Job, repeats: int, peer: Path | None) -> dict:
    """A row: ours beside limits, then the peer's at its own largest micro-batch."""
    device = pick_device(job.device)
    shape, dtype = job.config, pick_dtype(job.dtype, device)
    config = TrainConfig(
        block_size=shape.block_size,
        total_batch_size=SEQUENCES * job.processes * shape.block_size,
        sharding=job.sharding,
        save_every=0,
        eval_every=0,
    )
    most = largest_micro_batch(
        config, None, shape, dtype, job.processes, device, free_memory(device)
    )

    def ours(batch: int) -> dict:
        sized = replace(job, batch=batch)
        return figures(steps(name, sized, sized, None), repeats)

    def theirs(batch: int) -> dict:
        beside = replace(job, batch=batch, peer=str(peer.resolve()))
        return measure([Measurement("train_nanogpt", beside)], repeats, in_turn=True)[0]

    row, most = first_that_fits(most, ours)
    print(line(row), flush=True)
    if peer:
        try:
            other, batch = first_that_fits(most, theirs)
        except MeasurementError as error:
            print(f"  nanoGPT: {error}")
            return row | {"nanogpt": {"error": str(error)}}
        row |= {"nanogpt": other, "ratio": row["measured"]["train"]["rate"] / other["rate"]}
        print(
            f"  nanoGPT at {batch}: {other['rate']:,.0f} tokens/s: {row['ratio']:.2f}x", flush=True
        )
    return row


def train_itself(shape: dict, tiny: bool) -> dict | None:
    """train.py on shards of random tokens: its own tokens/s and its share of waiting for data."""
    if find_spec("tyro") is None:
        print("train.py itself: not measured, it needs tyro")
        return None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for split in ("train", "val"):
            tokens = np.random.default_rng(0).integers(0, 257 if tiny else VOCABULARY, 4_000_000)
            np.save(folder / f"{split}_000000.npy", tokens.astype(np.uint16))
        command = [sys.executable, ROOT / "train.py", "--data_dir", folder, "--max_steps", 16]
        command += ["--checkpoint_dir", folder / "checkpoints", "--log_dir", folder / "logs"]
        command += ["--eval_every", 0, "--save_every", 0, "--sample_every", 0, "--val_tokens", 8192]
        for flag in ("n_layer", "n_head", "n_embd", "block_size"):
            command += [f"--{flag}", shape[flag]]
        command += ["--micro_batch_size", "auto"]
        command += ["--total_batch_size", SEQUENCES * shape["block_size"]]
        command += [] if tiny else ["--use_torch_compile"]
        done = subprocess.run([str(part) for part in command], stdout=subprocess.DEVNULL)
        if done.returncode:
            print("train.py itself: failed; its error is above")
            return None
        rows = [json.loads(text) for text in open(folder / "logs" / "metrics.jsonl")]
    rows = [row for row in rows if row["split"] == "train"][6:]  # compiled by then
    rate = statistics.median(row["tokens_per_s"] for row in rows)
    waited = sum(row["data_ms"] for row in rows) / sum(row["ms"] for row in rows)
    print(f"train.py itself: {rate:,.0f} tokens/s, {waited:.2%} of the time waiting for data")
    return {"what": "train.py", "rate": rate, "mfu": rows[-1]["mfu"], "data_share": waited}


def main() -> None:
    asked = options()
    if asked.peer and not (asked.peer / "model.py").is_file():
        sys.exit(f"--peer {asked.peer} has no model.py; give a checkout of nanoGPT")
    device = pick_device("auto")
    report = {"hardware": hardware(device), "rows": []}
    print(", ".join(f"{key} {value}" for key, value in report["hardware"].items()))
    for name, job, variables, peer in runs(asked):
        try:
            with patch.dict(os.environ, variables):
                report["rows"].append(compare(name, job, asked.repeats, peer))
        except (ConfigError, MeasurementError) as error:  # the other rows count all the same
            what = f"training {name}, {mode(job)}"
            report["rows"].append({"what": what, "error": str(error)})
            print(f"{what}: {error}", flush=True)
    report["train.py"] = train_itself(next(iter(shapes(asked).values())), asked.tiny)
    if asked.out:
        asked.out.write_text(json.dumps(report, indent=1))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
