"""What bench.py measures, each kind in a process of its own: `python -m utils.measure KIND JSON`.

A worker warms up, says how long its start took, then does one repeat for each line that it reads
and answers with its rate; at the end of the input it says how much memory it took at most. So a
worker and its peer take turns under the same conditions, repeat by repeat.
"""

import importlib
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from model.config import GPTConfig
from utils import distributed, parallel
from utils.throughput import peak_memory


@dataclass(frozen=True)
class Job:
    """What to measure with: settings of bench.py, as far as the kind needs them."""

    shape: dict | None = None
    """Of a GPTConfig."""
    batch: int = 1
    """Sequences at a time."""
    dtype: str = "float32"
    device: str = "auto"
    compile: bool = False
    activation_checkpointing: str = "none"
    threads: int = 2
    peer: str | None = None
    files: tuple[str, ...] = ()

    @property
    def config(self) -> GPTConfig:
        return GPTConfig(**self.shape)


Repeat = Callable[[], int]  # does the work once, gives how many units of it that was


def training(job: Job, model: nn.Module, loss_of: Callable, optimizer) -> Repeat:
    """Steps of one micro-batch of random tokens: forward, backward, clip, update; as many as take a
    second, so that what ran in between is forgotten."""
    device = next(model.parameters()).device
    size = (job.batch, job.config.block_size)
    dtype = distributed.pick_dtype(job.dtype, device)
    tokens = torch.randint(job.config.vocab_size, (2, *size), device=device)

    def step() -> None:
        with distributed.autocast(device, dtype, keep_weights=False):
            loss = loss_of(*tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    step()  # the first compiles and makes the optimizer's state
    began = time.perf_counter()
    step()
    count = math.ceil(1 / (time.perf_counter() - began))

    def steps() -> int:
        for _ in range(count):
            step()
        return count * tokens[0].numel()

    return steps


def train(job: Job) -> Repeat:
    """Tokens of training steps as train.py does them."""
    from model.gpt import GPT
    from utils.optim import make_optimizer

    model = GPT(job.config).to(distributed.start(job.device).device)
    parallel.recompute(model, job.activation_checkpointing)
    optimizer = make_optimizer(model, weight_decay=0.1, betas=(0.9, 0.95))
    return training(job, model, torch.compile(model) if job.compile else model, optimizer)


def train_nanogpt(job: Job) -> Repeat:
    """The same with the model and the optimizer of a nanoGPT checkout."""
    sys.path.insert(0, job.peer)
    sys.modules.pop("model", None)
    theirs = importlib.import_module("model")  # its model.py, not our package
    shape = {**job.shape, "vocab_size": -(-job.config.vocab_size // 64) * 64}
    model = theirs.GPT(theirs.GPTConfig(bias=True, **shape))
    device = distributed.pick_device(job.device)
    torch.set_float32_matmul_precision("high")  # as its train.py
    model.to(device)
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device.type)
    module = torch.compile(model) if job.compile else model
    return training(job, model, lambda idx, targets: module(idx, targets)[1], optimizer)


def matrix(job: Job) -> Repeat:
    """FLOPs of matrix products at the shapes of a training step, forward and backward, in its
    dtype: three blocks' and their share of the head's."""
    device, config = distributed.pick_device(job.device), job.config
    dtype = distributed.pick_dtype(job.dtype, device)
    rows, C = job.batch * config.block_size, config.n_embd
    layers = [(3 * C, C), (C, C), (4 * C, C), (C, 4 * C)]
    pairs = [(out, into, rows) for out, into in layers] * 3
    pairs += [(config.padded_vocab_size, C, max(1, rows * 3 // config.n_layer))]
    made = [
        [torch.randn(*s, device=device).to(dtype) for s in ((n, i), (o, i), (n, o))]
        for o, i, n in pairs
    ]

    @torch.no_grad()
    def products() -> int:
        for x, weight, grad in made:
            F.linear(x, weight)
            grad @ weight
            grad.T @ x
        synchronize(device)
        return sum(6 * x.numel() * len(weight) for x, weight, _ in made)

    return products


def copy(job: Job) -> Repeat:
    """Bytes read and written by copies of 256 MB in memory."""
    device = distributed.pick_device(job.device)
    source = torch.ones(2**26, device=device)
    target = torch.empty_like(source)

    def copies() -> int:
        for _ in range(10):
            target.copy_(source)
        synchronize(device)
        return 10 * 2 * source.nbytes

    return copies


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


NEW_TOKENS = 128


def sample(job: Job) -> Repeat:
    """Tokens of sampling with the key/value cache, `batch` prompts of 16 tokens."""
    from model.generate import generate
    from model.gpt import GPT
    from model.packed import packed

    device = distributed.pick_device(job.device)
    dtype = distributed.pick_dtype(job.dtype, device)
    model = packed(GPT(job.config).to(device).eval(), dtype)
    prompts = torch.randint(job.config.vocab_size, (job.batch, 16)).tolist()

    def texts() -> int:
        with distributed.autocast(device, dtype):
            tokens = torch.stack(list(generate(model, prompts, NEW_TOKENS, top_k=50)))
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


def evaluate(job: Job) -> Repeat:
    """Examples of HellaSwag by the command evaluate.py, start and all."""
    folder, rows = job.files
    command = ["evaluate.py", "--model", folder, "--tasks", "hellaswag", "--data", rows]
    command += ["--hellaswag_protocols", "lm-eval", "--dtype", job.dtype, "--device", job.device]
    command += ["--out", f"{folder}/evaluation.json"]
    return evaluation(job, [sys.executable, *command])


def evaluate_harness(job: Job) -> Repeat:
    """The same by lm-evaluation-harness, which the interpreter `peer` has."""
    return evaluation(job, [job.peer, "scripts/harness.py", *job.files])


def evaluation(job: Job, command: list[str]) -> Repeat:
    with open(job.files[1]) as file:
        items = len(file.readlines())

    def examples() -> int:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return items

    return examples


KINDS = {
    f.__name__: f
    for f in (
        train,
        train_nanogpt,
        matrix,
        copy,
        sample,
        sample_transformers,
        data,
        data_tiktoken,
        evaluate,
        evaluate_harness,
    )
}


def main() -> None:
    began = time.perf_counter()
    job = Job(**json.loads(sys.argv[2]))
    repeat = KINDS[sys.argv[1]](job)
    repeat()  # warms up: compiles, fills caches, makes the optimizer's state
    print(json.dumps({"start_s": time.perf_counter() - began}), flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        units = repeat()
        print(json.dumps({"rate": units / (time.perf_counter() - began)}), flush=True)
    on_gpu = torch.cuda.is_available() and torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    started = unit * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(json.dumps({"peak_bytes": on_gpu or max(started, peak_memory())}), flush=True)


if __name__ == "__main__":
    main()
