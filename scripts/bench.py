"""Measure training steps on this machine, beside nanoGPT.

    python scripts/bench.py --use_torch_compile --peer ../nanoGPT

scripts/measure.py says how. The last line of the output is the comparison as JSON.
"""

import json
import sys
from dataclasses import dataclass, replace
from importlib import util
from pathlib import Path

# Python puts scripts/ on the path, not the project's folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import utils.environment  # noqa: F401 (first: it says what to type without PyTorch)

import torch

from config import MachineOptions, ModelOptions, OptimizerOptions
from data.named_tokenizer import GPT2Tokenizer
from model import chunked_loss
from model.config import GPTConfig
from model.execution import Execution, execute
from model.gpt import GPT
from model.initial_weights import build_without_weights
from recipes import parse_recipe
from scripts.kernels import measure_and_profile, summarize
from scripts.measure import (
    Measurement,
    MeasureOptions,
    Program,
    in_new_process,
    measure_in_turn,
    print_measurement,
)
from training.optimizers import make_optimizers
from utils.cli import start_script
from utils.devices import describe_device, pick_device, pick_dtype
from utils.errors import UserError
from utils.ranges import Count
from utils.throughput import gpu_of


@dataclass(frozen=True)
class PeerOptions(MeasureOptions):
    """Measurements and peer."""

    peer: Path | None = None
    """Checkout of nanoGPT, whose model.py trains in turn with this project's model."""
    profile: bool = False
    """Measure once, without --repeats, and also the kernels of a step: milliseconds by kind, and
    the longest kernels."""
    logits_bytes: Count | None = None
    """Largest float32 logits of a chunk on a GPU; default: LOGITS_BYTES of chunked_loss.py."""


@dataclass(frozen=True)
class BenchModelOptions(ModelOptions):
    """Architecture: sizes from --model_type or from these options, the rest from --recipe."""

    block_size: Count = 1024  # train.py's default for GPT-2's sizes
    """Tokens per sequence."""


@dataclass(frozen=True)
class BenchOptions(MachineOptions, BenchModelOptions, PeerOptions):
    """Measure training steps on this machine, beside nanoGPT."""

    @property
    def bench_config(self) -> GPTConfig:
        """Architecture of this project's model."""
        # model_config of ModelOptions: sizes from --model_type or flags, the rest from the recipe.
        return self.model_config(parse_recipe(self.recipe), GPT2Tokenizer.vocab_size)  # 50257


def build_ours(options: BenchOptions) -> Program:
    """Return this project's model, optimizers and dtype, as train.py makes them. It runs in a
    process of its own, which scripts/measure.py starts."""
    device = pick_device(options.device)
    dtype = pick_dtype(options.dtype, device)
    recipe = parse_recipe(options.recipe)  # a Recipe, of "gpt2" or "modern,qk_norm=False"
    if options.logits_bytes is not None:
        chunked_loss.LOGITS_BYTES = options.logits_bytes  # read at each call, in this process alone
    # Random weights: their values do not change the time of a step.
    model = GPT(options.bench_config).to(device)
    # in place: activation checkpointing ("none", "cheap" or "block") and torch.compile
    execute(model, Execution(options.activation_checkpointing, options.use_torch_compile))
    # The learning rates do not change the time either: they stay at the optimizers' defaults.
    # make_optimizers needs a weight decay, whose default is None. Muon multiplies in `dtype`.
    optimizer_options = OptimizerOptions(weight_decay=recipe.weight_decay)
    return model, make_optimizers(model, optimizer_options, recipe, dtype), dtype


def build_nanogpt(options: BenchOptions) -> Program:
    """Return the model and optimizer of a checkout of nanoGPT, as its train.py makes them, and the
    dtype of matmuls. It runs in a process of its own, as build_ours."""
    assert options.peer is not None  # `main` has checked that model.py is there
    # Load its model.py under another name, as `model` is this project's package.
    spec = util.spec_from_file_location("nanogpt", options.peer / "model.py")
    # for mypy: never None for a .py file, for which importlib has a loader
    assert spec is not None and spec.loader is not None
    nanogpt = util.module_from_spec(spec)  # the module model.py
    # torch.compile looks for the globals of nanoGPT's functions there.
    sys.modules["nanogpt"] = nanogpt
    spec.loader.exec_module(nanogpt)

    # the sizes of this project's model, padding of the vocabulary included
    model_config = options.bench_config
    nanogpt_config = nanogpt.GPTConfig(
        block_size=model_config.block_size,
        vocab_size=model_config.padded_vocab_size,
        n_layer=model_config.n_layer,
        n_head=model_config.n_head,
        n_embd=model_config.n_embd,
        bias=True,  # as in OpenAI's GPT-2
    )
    torch.set_float32_matmul_precision("high")  # nanoGPT's train.py allows TF32
    device = pick_device(options.device)
    model = nanogpt.GPT(nanogpt_config).to(device)
    # weight decay, learning rate and betas of nanoGPT's train.py
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device.type)
    if options.use_torch_compile:
        model = torch.compile(model)
    # nanoGPT returns logits and loss. The hook's result takes their place: the loss alone, which
    # this project's model returns.
    model.register_forward_hook(lambda module, inputs, outputs: outputs[1])
    return model, [optimizer], pick_dtype(options.dtype, device)


def speed_and_memory(
    measurements: dict[str, Measurement], options: BenchOptions, device: torch.device
) -> dict[str, dict]:
    """Return tokens/s, peak memory and MFU of each program, for the JSON: {"ours": {"rate": 1.2e5,
    "peak_bytes": 7.1e9, "mfu": 0.41}, "nanogpt": {...}}."""
    gpu = gpu_of(device, pick_dtype(options.dtype, device))  # None if its peak is not known
    # FLOPs of forward and backward pass. With --recipe gpt2 nanoGPT's model has the same matmuls.
    flops_per_token = build_without_weights(GPT, options.bench_config).flops_per_token()
    tokens_per_step = options.micro_batch_size * options.block_size
    measured: dict[str, dict] = {}
    for name, measurement in measurements.items():
        tokens_per_second = tokens_per_step / measurement.step_seconds
        mfu = None
        if gpu is not None:
            mfu = tokens_per_second * flops_per_token / gpu.peak_flops
        peak_bytes = measurement.peak_bytes
        measured[name] = {"rate": tokens_per_second, "peak_bytes": peak_bytes, "mfu": mfu}
    return measured


def main(options: BenchOptions) -> None:
    programs = {"ours": build_ours}
    peer = options.peer
    if peer is not None:
        if not (peer / "model.py").is_file():
            raise UserError(
                f"--peer {peer} holds no model.py: git clone "
                f"https://github.com/karpathy/nanoGPT {peer}"
            )
        programs["nanogpt"] = build_nanogpt
    measurements: dict[str, Measurement] = {}  # by the name of the program
    # {"ours": {"nvjet_hsh_128x256_64x4": 31.5, ...}, "nanogpt": {...}} with --profile, else empty
    kernel_ms_by_program: dict[str, dict[str, float]] = {}
    if options.profile:
        options = replace(options, repeats=1)  # for the JSON below, which records the options
        for name, build in programs.items():
            measurements[name], kernel_ms_by_program[name] = in_new_process(
                measure_and_profile, build, options
            )
            print_measurement(name, measurements[name])
    else:
        measurements = measure_in_turn(programs, options)  # prints each, returns medians

    # Only now: a process that uses a GPU takes some of its memory from the measurements.
    device = pick_device(options.device)
    measured = speed_and_memory(measurements, options, device)
    for name, kernel_ms in kernel_ms_by_program.items():
        # adds "kind_ms": {"attention": 12.1, ..., "waiting": 3.0} and "kernel_ms": {...}
        measured[name] |= summarize(kernel_ms, 1000 * measurements[name].step_seconds)
    comparison: dict[str, object] = {
        **describe_device(device),  # {"device": "NVIDIA H200", "torch": "2.13.0+cu130"}
        "unit": "tokens/s",
        "measured": measured,
        "options": vars(options),
    }
    if peer is not None:
        # Ours to nanoGPT's: the ratio of tokens per second is the inverse ratio of times. Above 1
        # ours is faster, and takes more memory.
        ours, theirs = measurements["ours"], measurements["nanogpt"]
        comparison["ratio"] = theirs.step_seconds / ours.step_seconds
        comparison["memory_ratio"] = ours.peak_bytes / theirs.peak_bytes
    print(json.dumps(comparison, default=str))  # default=str: for paths


if __name__ == "__main__":
    start_script(main, BenchOptions)
