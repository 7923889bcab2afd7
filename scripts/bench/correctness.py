"""Items of `bench_gpu.sh correctness`: whether the device computes what it should."""

import importlib
import importlib.util
import platform
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

import train
from config import DataConfig, TrainConfig
from model import loss
from model.config import GPTConfig
from model.generate import generate
from model.gpt import GPT
from scripts.bench import kernels
from scripts.bench.gpu import (
    Bench,
    Item,
    Skipped,
    free_everything,
    measure_job,
    process_group_of_one,
    run_training,
)
from scripts.bench.report import cpu_name
from training import checkpoint as ckpt
from training.parallel import ParallelModel
from utils.distributed import Process

ROOT = Path(__file__).resolve().parents[2]
TESTS = (
    "tests/model/test_gpt.py",
    "tests/training/test_optim.py",
    "tests/training/test_parallel.py",
)
STEPS = 30


def hardware(bench: Bench) -> dict:
    """Return versions, and the rates of matmuls in FLOP/s and of copies in bytes/s."""
    cuda = bench.device.type == "cuda"
    job = replace(bench.job("matrix", batch=1 if bench.tiny else 32), dtype="bfloat16")
    found = {
        "device": torch.cuda.get_device_name(bench.device) if cuda else cpu_name(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "addmm_to_float32": loss.accumulates_in_float32(bench.device, torch.bfloat16),
    }
    found["bfloat16_flops"] = measure_job(bench, job)["rate"]
    found["float32_flops"] = measure_job(bench, replace(job, dtype="float32"))["rate"]
    return found | {"copy_bytes_per_s": measure_job(bench, bench.job("copy"))["rate"]}


def unit_tests(bench: Bench) -> dict:
    """Run the tests of model, optimizers and parallelism with tensors on the device."""
    if importlib.util.find_spec("pytest") is None:
        raise Skipped("pytest is not installed")
    files = TESTS[1:2] if bench.tiny else TESTS
    command = [sys.executable, "-m", "pytest", "--tb=line", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--device", str(bench.device), "-m", "not slow", *files],
        cwd=ROOT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"ok": done.returncode == 0, "summary": lines[-1:], "failures": failures}


def small_run(bench: Bench, name: str, **options: object) -> TrainConfig:
    """Return the options of a small run on the bytes of this project's code."""
    shards = bench.folder / "shards"
    if not shards.exists():
        prepare = importlib.import_module("data.fineweb-edu").prepare
        texts = (str(ROOT / "model"), str(ROOT / "training"))
        prepare(DataConfig(shards, input=texts, tokenizer="bytes", val_fraction=0.1))
    defaults = {
        "n_layer": 2 if bench.tiny else 4, "n_head": 4, "n_embd": 32 if bench.tiny else 256,
        "block_size": 64, "micro_batch_size": 4, "total_batch_size": 512, "warmup_steps": 5,
        "max_steps": 6 if bench.tiny else STEPS, "max_lr": 1e-3, "dtype": "float32",
        "val_tokens": 1024, "eval_every": 0, "save_every": 0, "sample_every": 0,
    }  # fmt: skip
    folders = {"checkpoint_dir": bench.folder / name, "log_dir": bench.folder / name / "logs"}
    options = defaults | folders | {"data_dir": shards, "device": str(bench.device)} | options
    return TrainConfig(**options)


def losses(config: TrainConfig) -> list[float]:
    """Return the loss of each step of a run."""
    return [row["loss"] for row in run_training(config)["train"]]


def largest_difference(a: list[float], b: list[float]) -> float:
    """Return the largest difference between the losses of two runs."""
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def devices(bench: Bench) -> dict:
    """Compare the losses of a small run on the CPU, on the device and compiled there."""
    exact = losses(small_run(bench, "cpu", device="cpu"))
    found, ok = {}, True
    for dtype, bound in (("float32", 1e-4), ("bfloat16", 1e-2)):
        for compiled in (False, True):
            name = f"{dtype}_{'compiled' if compiled else 'eager'}"
            free_everything()
            run = small_run(bench, name, dtype=dtype, use_torch_compile=compiled)
            found[name] = largest_difference(losses(run), exact)
            ok &= found[name] <= bound
    return {"ok": ok, "steps": len(exact), "largest_difference": found}


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Let PyTorch take kernels that give the same bits each time."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def run_and_resume(config: TrainConfig) -> list[float]:
    """Stop a run by SIGTERM in the middle and resume it; return the loss of each step."""
    train_step, steps = train.train_step, []

    def stopping(*args: object) -> tuple:
        steps.append(None)
        if len(steps) == config.max_steps // 2:
            signal.raise_signal(signal.SIGTERM)
        return train_step(*args)

    train.train_step = stopping
    try:
        run_training(config)
    finally:
        train.train_step = train_step
    last = config.checkpoint_dir / "model_last.pt"
    assert ckpt.load_checkpoint(last)["step"] == config.max_steps // 2, "the signal came to nothing"
    return losses(replace(config, resume=str(last)))


def resume_after_signal(bench: Bench) -> dict:
    """Compare a run that was stopped and resumed with one that never stopped, to the bit."""
    options = {"use_torch_compile": True, "dtype": "bfloat16"}
    whole, parts = (small_run(bench, name, **options) for name in ("whole", "parts"))
    with deterministic_kernels():
        reference, found = losses(whole), run_and_resume(parts)
    a, b = (ckpt.load_checkpoint(run.checkpoint_dir / "model_last.pt") for run in (whole, parts))
    halves = [(part, name) for part in ("model", "model_low") for name in a["model"]]
    equal = all(torch.equal(a[part][name], b[part][name]) for part, name in halves)
    difference = largest_difference(found, reference)
    ok = equal and difference == 0
    return {"ok": ok, "largest_difference": difference, "weights_equal": equal}


def shardings(bench: Bench) -> dict:
    """Train, save, resume and sample with DDP and FSDP2 in a process group of one, compiled."""
    options = {"use_torch_compile": True, "dtype": "bfloat16"}
    reference = losses(small_run(bench, "alone", **options))
    found, ok = {}, True
    with process_group_of_one(bench):
        for sharding in ("none", "zero1", "zero2", "zero3"):
            torch.compiler.reset()
            run = small_run(bench, sharding, sharding=sharding, **options)
            difference = largest_difference(run_and_resume(run), reference)
            model, _ = ckpt.load_model(run.checkpoint_dir / "model_last.pt")
            model.to(bench.device).eval()
            tokens = [t.item() for t in generate(model, [[1, 2, 3]], 16, seed=1)]
            found[sharding] = {"largest_difference": difference, "sample": tokens}
            ok &= difference <= 1e-2
    return {"ok": ok, "shardings": found}


def host_syncs(bench: Bench) -> dict:
    """Count the host syncs of two micro-steps: there should be none."""
    if bench.device.type != "cuda":
        raise Skipped("a CPU has no host syncs")
    config = TrainConfig(use_torch_compile=True)
    process = Process(0, 0, 1, bench.device)
    engine = ParallelModel(GPT(GPTConfig(**bench.shape("gpt2"))), config, process, bench.dtype)
    idx = torch.zeros(4, 256, dtype=torch.long, device=bench.device)
    engine.micro_step(idx, idx, 2, last=False)  # compiles
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for last in (False, True):
                engine.micro_step(idx, idx, 2, last=last)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    syncs = [str(w.message) for w in caught if "synchroniz" in str(w.message)]
    return {"ok": not syncs, "syncs": syncs}


ITEMS: dict[str, Item] = {
    "hardware": hardware,
    "head": kernels.head,
    "devices": devices,
    "shardings": shardings,
    "attention": kernels.attention,
    "resumed": resume_after_signal,
    "host_syncs": host_syncs,
    "unit_tests": unit_tests,
}
