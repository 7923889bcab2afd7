"""What bench.py measures, each in a process of its own: `python -m scripts.bench.worker KIND JSON`.

A worker warms up, says how long its start took, then does one repeat for each line that it reads
and answers with its rate; at the end of the input it says how much memory it took at most. So a
worker and its peer take turns under the same conditions, repeat by repeat. Under torchrun the main
process reads and answers for all.
"""

import importlib
import json
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from scripts.bench import worker_text
from scripts.bench.measure import Job, Repeat
from training import parallel
from training.attention import fastest_kernel, preferring
from utils import distributed, malloc
from utils.throughput import peak_memory


def training(
    job: Job,
    process: distributed.Process,
    model: nn.Module,
    loss_of: Callable,
    optimizer: torch.optim.Optimizer,
    clip: Callable[[nn.Module], Tensor],
    attention: str | None = None,
) -> Repeat:
    """Steps of one micro-batch of random tokens: forward, backward, clip, update; as many as take a
    second, so that what ran in between is forgotten. `attention` is the kernel for it."""
    device = process.device
    size = (job.batch, job.config.block_size)
    dtype = distributed.pick_dtype(job.dtype, device)
    tokens = torch.randint(job.config.vocab_size, (2, *size), device=device)

    def step() -> None:
        with preferring(attention):
            with distributed.autocast(device, dtype, keep_weights=False):
                loss = loss_of(*tokens)
            loss.backward()
        clip(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    step()  # the first compiles and makes the optimizer's state
    malloc.shared()
    began = time.perf_counter()
    step()
    seconds = torch.tensor([time.perf_counter() - began], device=device)
    count = math.ceil(1 / process.extremes(seconds)[1].item())  # the same on all processes

    def steps() -> int:
        for _ in range(count):
            step()
        return count * tokens[0].numel()

    return steps


def train(job: Job) -> Repeat:
    """Tokens of training steps as train.py does them."""
    from model.gpt import GPT
    from training.optim import make_optimizers

    process = distributed.start(job.device)
    model = GPT(job.config)
    parallel.recompute(model, job.activation_checkpointing, compiled=job.compile)
    dtype = distributed.pick_dtype(job.dtype, process.device)
    attention, notes = fastest_kernel(job.config, job.batch, dtype, process)
    if notes and process.is_main:
        print(*notes, file=sys.stderr)
    module = parallel.wrap(model, process, job.sharding, dtype)
    (optimizer,) = make_optimizers(model, weight_decay=0.1, betas=(0.9, 0.95))
    module = torch.compile(module) if job.compile else module

    def clip(model: nn.Module) -> Tensor:
        return parallel.clip_grad_norm(model, 1.0)

    return training(job, process, model, module, optimizer, clip, attention)


def train_nanogpt(job: Job) -> Repeat:
    """The same with the model and the optimizer of a nanoGPT checkout."""
    sys.path.insert(0, job.peer)
    sys.modules.pop("model", None)
    theirs = importlib.import_module("model")  # its model.py, not our package
    shape = {**job.shape, "vocab_size": -(-job.config.vocab_size // 64) * 64}
    model = theirs.GPT(theirs.GPTConfig(bias=True, **shape))
    process = distributed.Process(0, 0, 1, distributed.pick_device(job.device))
    torch.set_float32_matmul_precision("high")  # as its train.py
    model.to(process.device)
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), process.device.type)
    module = torch.compile(model) if job.compile else model

    def clip(model: nn.Module) -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def loss_of(idx: Tensor, targets: Tensor) -> Tensor:
        return module(idx, targets)[1]

    return training(job, process, model, loss_of, optimizer, clip)


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


KINDS = {
    f.__name__: f
    for f in (
        train,
        train_nanogpt,
        matrix,
        copy,
        worker_text.sample,
        worker_text.sample_transformers,
        worker_text.data,
        worker_text.data_tiktoken,
        worker_text.read,
        worker_text.evaluate,
        worker_text.evaluate_harness,
    )
}


def asked(job: Job) -> Iterator[None]:
    """One item for each line of the main process's input, on all processes."""
    if job.processes == 1:
        for _ in sys.stdin:
            yield
        return
    process = distributed.start(job.device)
    while process.all(not process.is_main or bool(sys.stdin.readline())):
        yield


def main() -> None:
    began = time.perf_counter()
    job = Job(**json.loads(sys.argv[2]))
    repeat = KINDS[sys.argv[1]](job)

    def answer(**figures: float) -> None:
        if distributed.is_main():
            print(json.dumps(figures), flush=True)

    repeat()  # warms up: compiles, fills caches, makes the optimizer's state
    answer(start_s=time.perf_counter() - began)
    for _ in asked(job):
        began = time.perf_counter()
        units = repeat() * job.processes
        answer(rate=units / (time.perf_counter() - began))
    on_gpu = torch.cuda.is_available() and torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    started = unit * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    answer(peak_bytes=on_gpu or max(started, peak_memory()))
    distributed.stop()


if __name__ == "__main__":
    main()
