"""What scripts/bench/worker.py measures beside training: sampling, data, evaluation."""

import gc
import importlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from data.loader import Sequences, Slicing, TokenStream, train_batches
from scripts.bench.measure import Job, Repeat
from utils import distributed

NEW_TOKENS = 128


def sample(job: Job) -> Repeat:
    """Tokens of sampling with the key/value cache, `batch` prompts of 16 tokens."""
    from model.generate import generate
    from model.gpt import GPT
    from model.packed import packed

    device = distributed.pick_device(job.device)
    dtype = distributed.pick_dtype(job.dtype, device)
    model = GPT(job.config).to(device).eval()
    if not job.compile:
        model = packed(model, dtype)
    options = {"top_k": 50, "use_torch_compile": job.compile}
    prompts = torch.randint(job.config.vocab_size, (job.batch, 16)).tolist()

    def texts() -> int:
        with distributed.autocast(device, dtype):
            tokens = torch.stack(list(generate(model, prompts, NEW_TOKENS, **options)))
        return len(tokens.tolist()) * job.batch

    return texts


def sample_transformers(job: Job) -> Repeat:
    """The same with transformers' generate."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config, device = job.config, distributed.pick_device(job.device)
    shape = {"n_positions": config.block_size, "vocab_size": config.vocab_size}
    shape |= {"n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.n_embd}
    dtype = distributed.pick_dtype(job.dtype, device)
    model = GPT2LMHeadModel(GPT2Config(**shape)).to(device, dtype).eval()
    prompt = torch.randint(config.vocab_size, (job.batch, 16), device=device)

    def texts() -> int:
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            min_new_tokens=NEW_TOKENS,
            max_new_tokens=NEW_TOKENS,
            do_sample=True,
            top_k=50,
            pad_token_id=0,
        )
        return out[:, prompt.size(1) :].numel()

    return texts


def data(job: Job) -> Repeat:
    """Tokens of data/fineweb-edu.py, from files to shards."""
    from config import DataConfig

    prepare = importlib.import_module("data.fineweb-edu").prepare

    def shards() -> int:
        with tempfile.TemporaryDirectory() as folder:
            files, settings = tuple(job.files), {"shard_size": 1_000_000}
            config = DataConfig(Path(folder), input=files, num_workers=job.threads, **settings)
            return prepare(config)[1]

    return shards


def data_tiktoken(job: Job) -> Repeat:
    """The same documents in memory through tiktoken's own batch call, and nothing else."""
    import tiktoken

    from data.source import Source

    encoding = tiktoken.get_encoding("gpt2")
    texts = [t for _, texts in Source(tuple(job.files), "", "").read(None) for t in texts if t]

    def tokens() -> int:
        batch = encoding.encode_ordinary_batch(texts, num_threads=job.threads)
        return sum(map(len, batch)) + len(batch)

    return tokens


READERS = 8


def read(job: Job) -> Repeat:
    """Tokens that the batches of 8 processes hold, which read shards from one disk at once; on
    Linux from the disk itself, not from what the system keeps of it in memory."""
    readers = ProcessPoolExecutor(READERS, multiprocessing.get_context("spawn"))
    (folder,) = job.files

    def tokens() -> int:
        for path in Path(folder).glob("*.npy"):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return sum(readers.map(read_share, [folder] * READERS, range(READERS)))

    return tokens


def read_share(folder: str, rank: int) -> int:
    """Tokens in one process's batches of 30 steps."""
    sequences = Sequences(TokenStream(folder, "train"), 1024)
    batches = train_batches(sequences, Slicing(512, 16, rank, READERS), 1, range(30))
    tokens = sum(idx.size for idx, _ in batches)
    del sequences, batches
    gc.collect()  # closes the shards: the system keeps what a process has mapped
    return tokens


def evaluate(job: Job) -> Repeat:
    """Examples of HellaSwag by the command evaluate.py, start and all."""
    folder, rows = job.files
    command = ["evaluate.py", "--model", folder, "--tasks", "hellaswag", "--data", rows]
    command += ["--hellaswag_protocols", "lm-eval", "--dtype", job.dtype, "--device", job.device]
    command += ["--out", f"{folder}/evaluation.json"]
    return evaluation(job, [sys.executable, *command])


def evaluate_harness(job: Job) -> Repeat:
    """The same by lm-evaluation-harness, which the interpreter `peer` has."""
    return evaluation(job, [job.peer, "scripts/bench/harness.py", *job.files])


def evaluation(job: Job, command: list[str]) -> Repeat:
    with open(job.files[1]) as file:
        items = len(file.readlines())

    def examples() -> int:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return items

    return examples
