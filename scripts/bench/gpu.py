"""Shared by the items of scripts/bench_gpu.py: the device, times, and whole training runs."""

import gc
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

import train
from config import TrainConfig
from data.tokenizer import GPT2Tokenizer
from model.config import SIZES
from model.empty import empty_gpt
from scripts.bench.measure import Job
from scripts.bench.worker import KINDS
from training import checkpoint as ckpt
from training.dry_run import Hardware, forecast_memory, largest_micro_batch
from training.resume import resolve_run
from utils.devices import pick_dtype
from utils.distributed import free_memory
from utils.errors import UserError
from utils.log_files import read_metrics
from utils.throughput import peak_flops

TINY = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 64, "vocab_size": 257}
SEQUENCES = 64  # most sequences in a micro-batch


class Skipped(Exception):
    """An item that cannot be measured here; the message says why."""


@dataclass(frozen=True)
class Bench:
    """Where and on what the items are measured."""

    device: torch.device
    folder: Path
    """Temporary folder for shards, checkpoints and logs."""
    logs: Path
    """Folder for logs that outlive a call that is cut."""
    tiny: bool
    """Small shapes and few steps, to see that the items run."""
    peer: Path | None
    """Checkout of nanoGPT."""
    data: Path | None
    """Folder of shards."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that training takes here."""
        return pick_dtype("auto", self.device)

    def shape(self, size: str) -> dict:
        """Return the fields of a GPTConfig of a named size."""
        if self.tiny:
            return TINY
        return {**SIZES[size], "block_size": 1024, "vocab_size": GPT2Tokenizer.vocab_size}

    def job(self, kind: str, size: str = "gpt2", **options: object) -> Job:
        """Return a job on this device, in the dtype of training."""
        return Job(kind, self.shape(size), device=str(self.device), dtype="auto", **options)

    def milliseconds(self, work: Callable[[], object], repeats: int = 10) -> float:
        """Return the median time of `work` on the device, after it has run twice."""
        work(), work()
        times = []
        for _ in range(2 if self.tiny else repeats):
            if self.device.type == "cuda":
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                work()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end))
            else:
                began = time.perf_counter()
                work()
                times.append(1000 * (time.perf_counter() - began))
        return statistics.median(times)

    def peak_bytes(self) -> int | None:
        """Return the peak of the device's memory since free_everything; None on a CPU."""
        cuda = self.device.type == "cuda"
        return torch.cuda.max_memory_allocated(self.device) if cuda else None


Item = Callable[[Bench], dict]


def free_everything() -> None:
    """Give back the memory of the item before, and what was compiled for it."""
    torch.compiler.reset()
    torch.set_float32_matmul_precision("highest")  # nanoGPT changes it
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure_job(bench: Bench, job: Job) -> dict:
    """Return the rate of a job in units/s, after a warm-up, and its peak memory."""
    began = time.perf_counter()
    repeat = KINDS[job.kind](job)
    units = repeat()
    start_s = time.perf_counter() - began
    figures = {"rate": 1000 * units / bench.milliseconds(repeat, repeats=5), "start_s": start_s}
    if job.kind.startswith("train"):
        flops = figures["rate"] * empty_gpt(job.config).flops_per_token()
        peak = peak_flops(bench.device, bench.dtype)
        figures |= {"batch": job.batch, "flops": flops, "mfu": flops / peak if peak else None}
    return figures | {"peak_bytes": bench.peak_bytes()}


def run_config(job: Job, sequences: int) -> TrainConfig:
    """Return the options of train.py that a training job stands for, with steps of `sequences`."""
    return TrainConfig(
        recipe=job.recipe,
        block_size=job.config.block_size,
        micro_batch_size=job.batch,
        total_batch_size=sequences * job.config.block_size,
        sharding=job.sharding,
        activation_checkpointing=job.activation_checkpointing,
        save_every=0,
        eval_every=0,
    )


def measure_training(bench: Bench, job: Job) -> dict:
    """Return the figures of training steps at the largest micro-batch that fits, beside the
    forecast of their memory, if there is one."""
    hardware = Hardware(bench.device, bench.dtype, free_memory(bench.device), 1)
    batch = largest_micro_batch(run_config(job, SEQUENCES), None, job.config, hardware)
    while (figures := figures_if_it_fits(bench, replace(job, batch=batch))) is None:
        if batch == 1:
            raise UserError("one sequence does not fit the memory")
        batch //= 2
        free_everything()
    if job.kind == "train" and job.sharding == "none":
        run = run_config(replace(job, batch=batch), sequences=batch)
        figures["forecast_bytes"] = forecast_memory(run, job.config, hardware).peak
    return figures


def measure_step(bench: Bench, size: str = "gpt2", **options: object) -> dict:
    """Measure whole training steps, compiled unless `options` of the job say otherwise."""
    options = {"use_torch_compile": True, **options}
    return measure_training(bench, bench.job("train", size, **options))


def figures_if_it_fits(bench: Bench, job: Job) -> dict | None:
    """Return the figures of a job, None if it runs out of memory. What the job holds is free after
    the return, when the traceback is gone."""
    try:
        return measure_job(bench, job)
    except torch.OutOfMemoryError:
        return None


@contextmanager
def process_group_of_one(bench: Bench) -> Iterator[None]:
    """Let ParallelModel use DDP or FSDP2 in this process alone."""
    backend = "nccl" if bench.device.type == "cuda" else "gloo"
    store = f"file://{bench.folder / 'store'}"
    dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def instead_of_command_line(config: TrainConfig, saved: dict | None) -> Iterator[None]:
    """Let train.py take these options, and folders that this process has locked before; put back
    the signal handlers that it replaces."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    lock_folders = train.lock_folders
    train.resume.resolve_run, train.lock_folders = lambda: (config, saved), lambda *_: []
    try:
        yield
    finally:
        train.resume.resolve_run, train.lock_folders = resolve_run, lock_folders
        for number, handler in handlers.items():
            signal.signal(number, handler)


def run_training(config: TrainConfig) -> dict[str, list[dict]]:
    """Run train.py with these options; return the rows of its metrics.jsonl by split."""
    saved = ckpt.load_checkpoint(Path(config.resume)) if config.resume else None
    config.check()
    with instead_of_command_line(config, saved):
        try:
            train.main()
        except SystemExit as end:
            if end.code != 128 + signal.SIGTERM:
                raise
    return read_metrics(config.log_dir)
