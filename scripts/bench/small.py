"""Items of `bench_gpu.sh small`: a training step of 124M, whole and in parts, and short runs."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import profile

from config import TrainConfig, parse_recipe
from model import loss
from model.config import GPTConfig
from model.gpt import GPT
from model.loss import HeadCrossEntropy
from scripts.bench.gpu import (
    Bench,
    Item,
    Skipped,
    free_everything,
    measure_job,
    measure_step,
    measure_training,
    run_training,
)
from scripts.bench.report import nanogpt_job
from scripts.bench.worker import KINDS
from training.optim import make_optimizers
from training.parallel import compile_blocks
from utils.devices import autocast

BATCH = 32  # sequences for the parts
KERNELS = 20  # rows of the kernel table
STEPS = 1500


def nanogpt(bench: Bench) -> dict:
    """Measure training steps of nanoGPT's model and optimizer, compiled."""
    job = nanogpt_job(bench.job("train", use_torch_compile=True), bench.peer)
    if job is None:
        raise Skipped("no --peer")
    return measure_training(bench, job)


def kernels(bench: Bench) -> dict:
    """Profile compiled steps: milliseconds a step and share of the kernels that take longest."""
    job = bench.job("train", batch=2 if bench.tiny else BATCH, use_torch_compile=True)
    repeat = KINDS["train"](job)
    repeat()
    with profile() as profiler:
        steps = repeat() / (job.batch * job.config.block_size)
    rows = profiler.key_averages()
    name = "self_cpu_time_total"
    if bench.device.type == "cuda":  # the operations that launched a kernel have its time, too
        name = "self_device_time_total"
        rows = [r for r in rows if r.device_type is DeviceType.CUDA and not r.is_user_annotation]
    rows = sorted(rows, key=lambda row: -getattr(row, name))
    total = sum(getattr(row, name) for row in rows)
    table = [
        {
            "kernel": row.key[:90],
            "calls": row.count / steps,
            "ms": getattr(row, name) / 1000 / steps,
            "share": getattr(row, name) / total,
        }
        for row in rows[:KERNELS]
    ]
    return {"batch": job.batch, "ms": total / 1000 / steps, "kernels": table}


def measure_work(bench: Bench, work: Callable[[], object]) -> dict:
    """Return milliseconds and peak memory of `work`."""
    free_everything()
    return {"ms": bench.milliseconds(work), "peak_bytes": bench.peak_bytes()}


def block(bench: Bench) -> dict:
    """Measure a block forward and backward, compiled and eager, of either recipe."""
    return {
        f"{recipe}_{'compiled' if compiled else 'eager'}": time_block(bench, recipe, compiled)
        for recipe in ("gpt2", "modern")
        for compiled in (True, False)
    }


def time_block(bench: Bench, recipe: str, compiled: bool) -> dict:
    """Return milliseconds and peak memory of a block, with the norm and angles of its model."""
    config = GPTConfig(**bench.shape("gpt2") | {"n_layer": 1}, **parse_recipe(recipe).model)
    model = GPT(config).to(bench.device)
    if compiled:
        compile_blocks(model)
    shape = (2 if bench.tiny else BATCH, config.block_size, config.n_embd)
    x = torch.randn(shape, device=bench.device, requires_grad=True)
    grad = torch.randn_like(x)

    def work() -> None:
        with autocast(bench.device, bench.dtype, keep_weights=False):
            y = model.trunk(x)
        y.backward(grad)
        x.grad = None
        model.zero_grad()

    return measure_work(bench, work)


def head(bench: Bench) -> dict:
    """Measure the head and its loss, forward and backward, in each form."""
    config = GPTConfig(**bench.shape("gpt2"))
    rows = (2 if bench.tiny else BATCH) * config.block_size
    V, padded = config.vocab_size, config.padded_vocab_size
    x = torch.randn(rows, config.n_embd, device=bench.device, requires_grad=True)
    weight = (0.02 * torch.randn(padded, config.n_embd, device=bench.device)).requires_grad_()
    targets = torch.randint(V, (rows,), device=bench.device)
    ours, compiled = HeadCrossEntropy(V), HeadCrossEntropy(V)
    compiled.cross_entropy_ = torch.compile(loss.cross_entropy_, fullgraph=True, dynamic=False)

    def whole(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight), targets)

    forms = {"ours_compiled": compiled, "ours_eager": ours, "whole_compiled": torch.compile(whole)}
    if hasattr(F, "linear_cross_entropy"):
        forms["linear_cross_entropy"] = F.linear_cross_entropy
    found = {}
    for name, form in forms.items():

        def work(form=form) -> None:
            with autocast(bench.device, bench.dtype, keep_weights=False):
                nats = form(x, weight, targets)
            nats.backward()
            x.grad = weight.grad = None

        try:
            found[name] = measure_work(bench, work)
        except RuntimeError as error:  # out of memory, or a form that takes no such dtype
            found[name] = {"error": str(error).partition("\n")[0]}
    return found


def optimizers(bench: Bench) -> dict:
    """Measure the optimizer steps of either recipe."""
    found = {}
    for recipe in ("gpt2", "modern"):
        config = TrainConfig(recipe=recipe)
        model = GPT(GPTConfig(**bench.shape("gpt2"), **parse_recipe(recipe).model))
        model.to(bench.device)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        for optimizer in make_optimizers(model, config, bench.dtype):
            found[f"{recipe}_{type(optimizer).__name__}"] = measure_work(bench, optimizer.step)
    return found


def decoding(bench: Bench) -> dict:
    """Measure sampling in tokens/s of 1 and 8 prompts, eager and compiled."""
    found = {}
    for batch in (1, 8):
        for compiled in (False, True):
            job = bench.job("sample", batch=batch, use_torch_compile=compiled)
            found[f"{batch}_{'compiled' if compiled else 'eager'}"] = measure_job(bench, job)
            free_everything()
    return found


def learn(bench: Bench, recipe: str) -> dict:
    """Train on the shards of --data; return losses, validation losses and tokens/s."""
    if bench.data is None:
        raise Skipped("no --data")
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 64} if bench.tiny else {}
    batch = 2 if bench.tiny else BATCH
    steps = 10 if bench.tiny else STEPS
    config = TrainConfig(
        recipe=recipe, data_dir=bench.data, device=str(bench.device), use_torch_compile=True,
        micro_batch_size=batch, total_batch_size=batch * shape.get("block_size", 1024),
        max_steps=steps, warmup_steps=steps // 10, eval_every=steps // 10, val_tokens=2**18,
        save_every=0, sample_every=0, checkpoint_dir=bench.folder / recipe,
        log_dir=bench.logs / recipe, overwrite=True, **shape,
    )  # fmt: skip
    rows = run_training(config)
    every = steps // 10
    return {
        "train": [(r["step"], r["loss"]) for r in rows["train"] if r["step"] % every == 0],
        "val": [(r["step"], r["loss"]) for r in rows["val"]],
        "tokens_per_s": sorted(r["tokens_per_s"] for r in rows["train"])[steps // 2],
        "mfu": sorted(r["mfu"] or 0 for r in rows["train"])[steps // 2],
        "peak_bytes": bench.peak_bytes(),
    }


ITEMS: dict[str, Item] = {
    "step": measure_step,
    "nanogpt": nanogpt,
    "head": head,
    "kernels": kernels,
    "block": block,
    "step_modern": lambda bench: measure_step(bench, recipe="modern"),
    "step_eager": lambda bench: measure_step(bench, use_torch_compile=False),
    "optimizers": optimizers,
    "learn_gpt2": lambda bench: learn(bench, "gpt2"),
    "learn_modern": lambda bench: learn(bench, "modern"),
    "decoding": decoding,
}
