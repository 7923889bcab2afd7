"""Measure one job in a process of its own: `python -m scripts.bench.worker JOB`, JOB as JSON.

The worker warms up and prints the seconds that this took, repeats its work for each line of
standard input and prints the rate, and at the end of the input prints its peak memory. Under
torchrun the main process reads and prints for all.
"""

import gc
import importlib
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from config import DataConfig
from data.loader import Sequences, Slicing, TokenStream, train_batches
from data.source import Source
from model import cpu
from model.generate import generate
from model.gpt import GPT
from scripts.bench.compute import matmul, memory_copy, train, train_nanogpt
from scripts.bench.measure import Job, Repeat
from utils import distributed
from utils.devices import autocast, pick_device, pick_dtype
from utils.throughput import peak_memory

NEW_TOKENS = 128
READERS = 8


def sample(job: Job) -> Repeat:
    """Prepare sampling after `batch` prompts of 16 tokens; units are tokens."""
    device = pick_device(job.device)
    dtype = pick_dtype(job.dtype, device)
    model = GPT(job.config).to(device).eval()
    if device.type == "cpu" and not job.use_torch_compile:
        cpu.for_inference(model, dtype)
    options = {"top_k": 50, "use_torch_compile": job.use_torch_compile}
    prompts = torch.randint(job.config.vocab_size, (job.batch, 16)).tolist()

    def repeat() -> int:
        with autocast(device, dtype):
            tokens = torch.stack(list(generate(model, prompts, NEW_TOKENS, **options)))
        return len(tokens.tolist()) * job.batch

    return repeat


def sample_transformers(job: Job) -> Repeat:
    """Prepare the sampling of `sample` with transformers' generate; units are tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config, device = job.config, pick_device(job.device)
    shape = {"n_positions": config.block_size, "vocab_size": config.vocab_size}
    shape |= {"n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.n_embd}
    dtype = pick_dtype(job.dtype, device)
    model = GPT2LMHeadModel(GPT2Config(**shape)).to(device, dtype).eval()
    prompt = torch.randint(config.vocab_size, (job.batch, 16), device=device)
    options = {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0}
    options |= {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS}

    def repeat() -> int:
        tokens = model.generate(prompt, do_sample=True, top_k=50, **options)
        return tokens[:, prompt.size(1) :].numel()

    return repeat


def data(job: Job) -> Repeat:
    """Prepare data/fineweb-edu.py on `files`, from text to shards; units are tokens."""
    prepare = importlib.import_module("data.fineweb-edu").prepare
    settings = {"input": tuple(job.files), "num_workers": job.threads, "shard_size": 1_000_000}

    def repeat() -> int:
        with tempfile.TemporaryDirectory() as folder:
            return prepare(DataConfig(Path(folder), **settings))[1]

    return repeat


def data_tiktoken(job: Job) -> Repeat:
    """Prepare tiktoken's batch call on the documents of `files` in memory; units are tokens."""
    import tiktoken

    encoding = tiktoken.get_encoding("gpt2")
    batches = Source(tuple(job.files), "", "").batches(None)
    texts = [text for _, texts, _ in batches for text in texts if text]

    def repeat() -> int:
        documents = encoding.encode_ordinary_batch(texts, num_threads=job.threads)
        return sum(map(len, documents)) + len(documents)

    return repeat


def read_batches(job: Job) -> Repeat:
    """Prepare the batches of READERS processes that share a disk; units are tokens.

    On Linux they come from the disk, as each repeat drops the shards from the page cache.
    """
    readers = ProcessPoolExecutor(READERS, multiprocessing.get_context("spawn"))
    (folder,) = job.files

    def repeat() -> int:
        for path in Path(folder).glob("*.npy"):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return sum(readers.map(count_batch_tokens, [folder] * READERS, range(READERS)))

    return repeat


def count_batch_tokens(folder: str, rank: int) -> int:
    """Read the batches of 30 steps of one process and return their number of tokens."""
    sequences = Sequences(TokenStream(folder, "train"), 1024)
    batches = train_batches(sequences, Slicing(512, 16, rank, READERS), 1, range(30))
    tokens = sum(idx.size for idx, _ in batches)
    del sequences, batches
    gc.collect()  # unmaps the shards: mapped pages would stay in the page cache
    return tokens


def run_command(job: Job) -> Repeat:
    """Prepare a run of `command`, start included; it does `units` units."""

    def repeat() -> int:
        subprocess.run(job.command, check=True, stdout=subprocess.DEVNULL)
        return job.units

    return repeat


KINDS = {
    "train": train,
    "train_nanogpt": train_nanogpt,
    "matrix": matmul,
    "copy": memory_copy,
    "sample": sample,
    "sample_transformers": sample_transformers,
    "data": data,
    "data_tiktoken": data_tiktoken,
    "read": read_batches,
    "evaluate": run_command,
    "evaluate_harness": run_command,
}


def is_asked_again(process: distributed.Process | None) -> bool:
    """Wait for a line of the main process's standard input; False on all processes at its end."""
    asked = process is not None and not process.is_main or bool(sys.stdin.readline())
    return asked if process is None else process.all_agree(asked)


def peak_bytes() -> int:
    """Return the peak memory: the GPU's if one was used, else of this process or a child."""
    if on_gpu := torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return on_gpu
    unit = 1 if sys.platform == "darwin" else 1024
    return max(unit * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, peak_memory())


def answer(**figures: float) -> None:
    """Print figures as a line of JSON on the main process."""
    if distributed.is_main():
        print(json.dumps(figures), flush=True)


def main() -> None:
    began = time.perf_counter()
    job = Job(**json.loads(sys.argv[1]))
    repeat = KINDS[job.kind](job)
    repeat()  # warms up: compiles, fills caches
    answer(start_s=time.perf_counter() - began)
    process = distributed.start(job.device) if job.processes > 1 else None
    while is_asked_again(process):
        began = time.perf_counter()
        units = repeat() * job.processes
        answer(rate=units / (time.perf_counter() - began))
    answer(peak_bytes=peak_bytes())
    distributed.stop()


if __name__ == "__main__":
    main()
