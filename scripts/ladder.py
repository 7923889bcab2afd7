"""Climb from the GPT-2 of a tutorial to this project's, one change at a time, on this machine.

    python scripts/ladder.py                                            # minutes on two cores
    python scripts/ladder.py --n_layer 12 --n_head 12 --n_embd 768 --block_size 1024    # 124M

Each rung trains this project's model with the change of its name and the changes of all rungs
before it. This file has the plain parts that no option of train.py brings back, written as in a
tutorial. docs/LADDER.md says what each change does, where its code is, and on which device it pays.
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

# Python puts scripts/ on the path, not the project's folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import utils.environment  # noqa: F401 (first: it says what to type without PyTorch)

import torch
import torch.nn as nn
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from config import OptimizerOptions
from data.named_tokenizer import GPT2Tokenizer
from evaluation.figure import WIDTH, save_picture
from model.config import GPTConfig
from model.execution import Execution, execute
from model.gpt import GPT
from model.initial_weights import rebuild
from recipes import Recipe
from scripts.measure import Measurement, MeasureOptions, Program, measure_in_turn
from training.optimizers import make_optimizers
from utils.cli import start_script
from utils.devices import pick_device
from utils.ranges import Count, NonNegative

# Each name is a change to the rung before it. `build` tests for the names.
RUNGS = [
    "start",
    "padded vocabulary",
    "fused attention",
    "chunked loss",
    "fused AdamW",
    "bfloat16",
    "compile",
    "activation checkpointing",
]


@dataclass(frozen=True)
class RungOptions:
    """Model, device and picture."""

    n_layer: Count = 4
    """Transformer blocks."""
    n_head: Count = 4
    """Attention heads."""
    n_embd: Count = 128
    """Channels of the residual stream."""
    block_size: Count = 512
    """Tokens per sequence."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps."""
    out: Path = Path("plots/ladder.png")
    """Picture to write."""


@dataclass(frozen=True)
class LadderOptions(MeasureOptions, RungOptions):
    """Measure the changes between a tutorial's GPT-2 and this one."""

    # Smaller than the defaults of MeasureOptions, so that eight rungs take minutes on two cores.
    repeats: Count = 3
    seconds: NonNegative = 1.0
    micro_batch_size: Count = 2


# the plain parts that later rungs replace


class UnpaddedConfig(GPTConfig):
    """Architecture whose embedding has one row per token, without padding."""

    @property
    def padded_vocab_size(self) -> int:
        return self.vocab_size  # GPTConfig rounds the size up to a multiple of 64


class PlainAttention(nn.Module):
    """Attention softmax(q k^T / sqrt(D)) v, with the weights of all pairs of tokens in memory."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        # (B, H, T, D) each; `mask` is None in training
        scores = q @ k.mT / q.size(-1) ** 0.5  # (B, H, T, T)
        # -inf above the diagonal: no token attends to later tokens
        causal_mask = torch.full_like(scores[0, 0], -torch.inf).triu(1)  # (T, T)
        weights = (scores + causal_mask).softmax(-1)
        return weights @ v  # (B, H, T, D)


class PlainLoss(nn.Module):
    """Cross-entropy of the logits of all tokens at once, with several copies in memory."""

    def forward(self, model: GPT, x: Tensor, targets: Tensor, reduction: str) -> Tensor:
        # x (N, C); targets (N,), none of them -1
        weight = model.head_weight  # (padded V, C)
        # A bias of -inf removes the padding of the vocabulary from the softmax.
        bias = weight.new_zeros(len(weight))  # (padded V,); the padding begins at row 50257
        bias[GPT2Tokenizer.vocab_size :] = -torch.inf
        logits = F.linear(x, weight, bias)  # (N, padded V)
        return F.cross_entropy(logits, targets, reduction=reduction)


class PlainAdamW(torch.optim.Optimizer):
    """AdamW as in the paper (Loshchilov and Hutter 2019), one parameter after another."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no closure
        # The parameter groups are of torch.optim.AdamW: they have lr, betas, eps and weight_decay.
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                # The paper's names: step t, and moving averages of the gradient (m) and its
                # square (v), both of the shape of p.
                t, m, v = self.state.get(p, (0, 0, 0))
                t += 1
                m = beta1 * m + (1 - beta1) * p.grad
                v = beta2 * v + (1 - beta2) * p.grad**2
                self.state[p] = (t, m, v)
                # Bias correction, because the averages begin at 0.
                m = m / (1 - beta1**t)
                v = v / (1 - beta2**t)
                direction = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * p
                p -= group["lr"] * direction


def build(rung: str, options: LadderOptions) -> Program:
    """Return the program of a rung: this project's model, with a plain part in place of each later
    change. scripts/measure.py calls this function in a process of its own for each measurement."""
    changes = RUNGS[: RUNGS.index(rung) + 1]  # this rung's change and all earlier ones
    model_config = GPTConfig(
        block_size=options.block_size,
        n_layer=options.n_layer,
        n_head=options.n_head,
        n_embd=options.n_embd,
    )
    checkpointing = "block" if "activation checkpointing" in changes else "none"
    model = GPT(model_config)
    if "padded vocabulary" not in changes:
        # All rungs begin with the same weights, because scripts/measure.py seeds before `build`.
        # `rebuild` drops only the padding rows.
        model = rebuild(model, UnpaddedConfig(**vars(model_config)))
    # sets how the blocks run in training: activation checkpointing, torch.compile
    execute(model, Execution(checkpointing, "compile" in changes))
    # PlainAttention replaces the module `attend` of Attention, PlainLoss the module `loss` of GPT
    # (model/gpt.py). Both take the same arguments as the modules that they replace.
    if "fused attention" not in changes:
        for block in model.transformer.h:
            block.set_submodule("attn.attend", PlainAttention())
    if "chunked loss" not in changes:
        model.set_submodule("loss", PlainLoss())
    model.to(pick_device(options.device))

    dtype = torch.bfloat16 if "bfloat16" in changes else torch.float32
    # One AdamW for each group of parameters; the default recipe has no Muon. make_optimizers needs
    # a weight decay. Nothing sets the learning rate, so it stays at PyTorch's default, 1e-3.
    optimizers = make_optimizers(model, OptimizerOptions(weight_decay=0.1), Recipe())
    if "fused AdamW" not in changes:
        # {}: no defaults, because the groups have all options already. There is no optimizer state
        # to take over before the first step.
        optimizers = [PlainAdamW(optimizer.param_groups, {}) for optimizer in optimizers]
    return model, optimizers, dtype


def draw_step_times(medians: dict[str, Measurement], out: Path) -> None:
    """Draw the milliseconds per step of each rung as horizontal bars into the picture `out`."""
    picture = Figure(figsize=(WIDTH, 3), layout="constrained")
    axes = picture.subplots()
    step_ms = [1000 * median.step_seconds for median in medians.values()]
    bars = axes.barh(list(medians), step_ms)
    axes.bar_label(bars, fmt="%.0f")
    axes.invert_yaxis()  # the first rung at the top, where barh has the last one
    save_picture(picture, out, "milliseconds per training step")


def main(options: LadderOptions) -> None:
    # rung -> Measurement (seconds per step, peak bytes, loss), in the order of RUNGS
    medians = measure_in_turn({rung: partial(build, rung) for rung in RUNGS}, options)
    loss_before = medians["start"].loss  # loss of the previous rung
    print("\n| rung | ms a step | peak GB | loss | change of the loss |")
    print("|---|---|---|---|---|")
    for rung, (step_seconds, peak_bytes, loss) in medians.items():
        # All rungs train the same model on the same batch, so only rounding may change the loss.
        loss_cells = f"{loss:.6f} | {loss - loss_before:+.6f}"
        print(f"| {rung} | {1000 * step_seconds:.0f} | {peak_bytes / 1e9:.2f} | {loss_cells} |")
        loss_before = loss
    draw_step_times(medians, options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    start_script(main, LadderOptions)
