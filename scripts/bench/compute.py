"""Training steps of this project and of nanoGPT, and the matmuls and copies that limit them."""

import importlib
import math
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from config import TrainConfig
from model.gpt import GPT
from scripts.bench.measure import Job, Repeat
from training.optim import make_optimizers
from training.parallel import ParallelModel, clip_grad_norm
from utils import distributed, malloc
from utils.devices import autocast, pick_device, pick_dtype


def train(job: Job) -> Repeat:
    """Prepare training steps as train.py does them; units are tokens."""
    process = distributed.start(job.device)
    dtype = pick_dtype(job.dtype, process.device)
    model = GPT(job.config)
    names = ("recipe", "sharding", "activation_checkpointing", "use_torch_compile")
    config = TrainConfig(**{name: getattr(job, name) for name in names})
    engine = ParallelModel(model, config, process, dtype)
    optimizers = make_optimizers(model, config, dtype)
    clip = partial(clip_grad_norm, model, 1.0)
    return training_steps(job, process, engine.wrapped, clip, optimizers)


def train_nanogpt(job: Job) -> Repeat:
    """Prepare training steps of the model and optimizer of nanoGPT; units are tokens."""
    sys.path.insert(0, job.peer)
    ours = sys.modules.pop("model")
    nanogpt = importlib.import_module("model")  # its model.py instead of this project's package
    sys.modules["model"] = ours
    shape = {**job.shape, "vocab_size": job.config.padded_vocab_size}
    model = nanogpt.GPT(nanogpt.GPTConfig(bias=True, **shape))
    process = distributed.Process(0, 0, 1, pick_device(job.device))
    torch.set_float32_matmul_precision("high")  # as its train.py
    model.to(process.device)
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), process.device.type)
    module = torch.compile(model) if job.use_torch_compile else model
    clip = partial(nn.utils.clip_grad_norm_, model.parameters(), 1.0)
    return training_steps(job, process, lambda *batch: module(*batch)[1], clip, [optimizer])


def training_steps(
    job: Job,
    process: distributed.Process,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    clip: Callable[[], Tensor],
    optimizers: list[torch.optim.Optimizer],
) -> Repeat:
    """Return steps of one micro-batch of random tokens: forward, backward, clip, update.

    A repeat is as many steps as take a second, so that a job that ran before is out of the caches.
    """
    device, dtype = process.device, pick_dtype(job.dtype, process.device)
    size = (2, job.batch, job.config.block_size)
    tokens = torch.randint(job.config.vocab_size, size, device=device)

    def step() -> None:
        with autocast(device, dtype, keep_weights=False):
            loss = loss_of(*tokens)
        loss.backward()
        clip()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        loss.item()

    step()  # compiles and makes the optimizer's state
    malloc.reuse_freed_memory()
    began = time.perf_counter()
    step()
    seconds = torch.tensor([time.perf_counter() - began], device=device)
    count = math.ceil(1 / process.min_max(seconds)[1].item())  # equal on all processes

    def repeat() -> int:
        for _ in range(count):
            step()
        return count * tokens[0].numel()

    return repeat


def matmul(job: Job) -> Repeat:
    """Prepare the matmuls of three blocks and their share of the head; units are FLOPs.

    They have the shapes and dtype of a training step: forward, input gradient, weight gradient.
    """
    device, config = pick_device(job.device), job.config
    dtype = pick_dtype(job.dtype, device)
    rows, C = job.batch * config.block_size, config.n_embd
    shapes = [(rows, 3 * C, C), (rows, C, C), (rows, 4 * C, C), (rows, C, 4 * C)] * 3
    shapes += [(max(1, rows * 3 // config.n_layer), config.padded_vocab_size, C)]
    operands = [
        [torch.randn(*size, device=device).to(dtype) for size in ((n, i), (o, i), (n, o))]
        for n, o, i in shapes
    ]

    @torch.no_grad()
    def repeat() -> int:
        for x, weight, grad in operands:
            F.linear(x, weight)
            grad @ weight
            last = grad.T @ x
        last[0, 0].item()  # waits for the device
        return sum(6 * n * o * i for n, o, i in shapes)

    return repeat


def memory_copy(job: Job) -> Repeat:
    """Prepare copies of 256 MiB in memory; units are bytes, each read and written."""
    source = torch.ones(2**26, device=pick_device(job.device))
    target = torch.empty_like(source)

    def repeat() -> int:
        for _ in range(10):
            target.copy_(source)
        target[0].item()  # waits for the device
        return 10 * 2 * source.nbytes

    return repeat
