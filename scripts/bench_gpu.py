"""Measure training on GPUs; scripts/bench_gpu.sh says what is measured."""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Python puts scripts/ there instead

import torch

from config import ConfigError, TrainConfig
from data.tokenizer import GPT2Tokenizer
from model.config import SIZES
from scripts.bench import report
from scripts.bench.measure import Job, MeasurementError
from training.dry_run import Hardware, largest_micro_batch
from utils.distributed import free_memory, pick_device, pick_dtype

TINY = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 64, "vocab_size": 257}
SEQUENCES = 64  # sequences of a process in a step: micro-batches are powers of two


def parse_args() -> argparse.Namespace:
    """Parse the command line with argparse: the script runs without tyro."""
    parser = argparse.ArgumentParser(prog="bench_gpu.sh", description=__doc__)
    parser.add_argument("--model_types", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--peer", type=Path, help="checkout of nanoGPT")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file for all figures")
    parser.add_argument("--tiny", action="store_true", help="a small model, not compiled")
    return parser.parse_args()


def list_jobs(args: argparse.Namespace) -> Iterator[tuple[str, Job]]:
    """Yield the name and the job of each row. Raises ConfigError if --peer has no model.py."""
    gpus = torch.cuda.device_count()
    rest = {"block_size": 1024, "vocab_size": GPT2Tokenizer.vocab_size}
    shapes = {"tiny": TINY} if args.tiny else {n: SIZES[n] | rest for n in args.model_types}
    for name, shape in shapes.items():
        job = Job("train", shape, dtype="auto", use_torch_compile=not args.tiny)
        yield name, job
        if args.peer:
            yield f"{name} by nanoGPT", report.nanogpt_job(job, args.peer)
        for sharding in ("none", "zero2") if gpus > 1 else ():
            yield name, replace(job, sharding=sharding, processes=gpus)


def largest_batch(job: Job) -> int:
    """Return the micro-batch size that should fit. Raises ConfigError where not even 1 does."""
    device, shape = pick_device(job.device), job.config
    config = TrainConfig(
        block_size=shape.block_size,
        total_batch_size=SEQUENCES * job.processes * shape.block_size,
        sharding=job.sharding,
        save_every=0,
        eval_every=0,
    )
    dtype, free = pick_dtype(job.dtype, device), free_memory(device)
    return largest_micro_batch(config, None, shape, Hardware(device, dtype, free, job.processes))


def measure_at(batch: int, name: str, job: Job, repeats: int) -> dict:
    """Return the row of a job at micro-batch size `batch`, its half or its quarter."""
    smallest = max(1, batch // 4)  # an error there is not for lack of memory
    while True:
        sized = replace(job, batch=batch)
        try:
            return report.measure_row(report.training_title(name, sized), sized, None, repeats)
        except MeasurementError:
            if batch == smallest:
                raise
        batch //= 2
        print(f"{name} failed at micro-batch size {2 * batch}: trying {batch}", flush=True)


def main() -> None:
    args = parse_args()
    jobs = list(list_jobs(args))
    results = report.start_report(pick_device("auto"))
    for name, job in jobs:
        try:
            row = measure_at(largest_batch(job), name, job, args.repeats)
            print(report.format_row(row), flush=True)
        except (ConfigError, MeasurementError) as error:  # the other rows are still measured
            row = {"what": f"training {name}, {report.format_modes(job)}", "error": str(error)}
            print(f"{row['what']}: {error}", flush=True)
        results["rows"].append(row)
    report.finish_report(results, args.out)


if __name__ == "__main__":
    main()
