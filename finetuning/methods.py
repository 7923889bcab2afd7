"""Methods of fine-tuning: the examples of each, and its loss on a batch; GRPO is in grpo.py.

A method's figures for a batch are parts of means over a step: summed over micro-batches and
processes they are these means, whatever the number of either.
"""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from data.loader import Slicing
from finetuning.chat import Example
from finetuning.examples import (
    Batch,
    TextEncoder,
    collate_packed,
    collate_padded,
    pack,
    packed_mask,
    power_of_2,
    read_jsonl,
)
from finetuning.objectives import dpo_margin
from finetuning.rewards import Reward, rewards_at_end
from model.gpt import GPT
from training.run import Run
from utils.devices import autocast


class Method:
    """Base of all methods: the examples of a file by index. A subclass adds encode(row), which
    raises ValueError for a row that it cannot learn from, batch(ids), and partial_means(model,
    batch, divisor): the loss and metrics of a batch, summed and divided by `divisor`."""

    unit = "pairs"  # the examples that a step counts
    selects_best_by_loss = True  # a lower loss means a better model
    sample: str | None = None  # text of the newest step for samples.txt

    def __init__(
        self, run: Run, encoder: TextEncoder, path: Path, ref: GPT | None, reward: Reward | None
    ) -> None:
        self.options, self.process, self.dtype = run.config, run.process, run.dtype
        self.encoder, self.reference, self.reward = encoder, ref, reward
        self.examples = read_jsonl(path, self.encode)

    def __len__(self) -> int:
        return len(self.examples)

    def divisor(self, ids: np.ndarray) -> int:
        """Return the number of tokens, pairs or completions in the examples `ids`."""
        return len(ids)

    def micro_batches(
        self, model: GPT, step: int, ids: np.ndarray
    ) -> tuple[list[Batch], dict[str, float]]:
        """Return this process's batches of a step on the examples `ids`, as many as every other
        process has, and figures for the log."""
        grid = self.options.slice_steps(self.process).rank_ids(ids)  # (micro-steps, micro-batch)
        return [self.batch(mine) for mine in grid], {}

    def on_device(self, batch: Batch) -> Batch:
        """Return a batch of the CPU on the device, without waiting for a copy to a GPU."""
        return {name: self.process.copy(x) for name, x in batch.items()}

    def held_out_means(self, model: GPT, ids: np.ndarray, divisor: int) -> dict[str, Tensor]:
        """Return the figures of held-out examples, summed and divided by `divisor`."""
        return self.partial_means(model, self.batch(ids), divisor)

    @torch.no_grad()
    def evaluate(self, model: GPT) -> dict[str, float]:
        """Return the mean of each figure over all examples, on every process."""
        model.eval()
        divisor, sums = self.divisor(np.arange(len(self))), Counter()
        for _, ids, counts in self.process.share(self.batches_in_order()):
            with autocast(self.process.device, self.dtype):
                parts = self.held_out_means(model, ids, divisor)
            sums.update({name: part.item() * counts for name, part in parts.items()})
        model.train()
        values = self.process.sum_float64(torch.tensor([*sums.values()], dtype=torch.float64))
        return dict(zip(sums, values.tolist(), strict=True))

    def batches_in_order(self) -> list[np.ndarray]:
        """Return the indices of all examples in batches."""
        n, size = len(self), self.options.micro_batch_size
        return np.array_split(np.arange(n), range(size, n, size))


class SupervisedTuning(Method):
    """Mean cross-entropy of what the assistant says. A step takes `batch_size` dialogs and packs
    them into rows of up to block_size tokens."""

    unit = "dialogs"

    def encode(self, row: dict) -> Example:
        return self.encoder.example(row)

    def divisor(self, ids: np.ndarray) -> int:
        return sum(int(self.examples[i].loss_mask[1:].sum()) for i in ids)

    def pack_rows(self, ids: np.ndarray) -> list[list[Example]]:
        """Return the dialogs `ids` in few rows."""
        dialogs = [self.examples[i] for i in ids]
        groups = pack([len(dialog.tokens) - 1 for dialog in dialogs], self.encoder.block_size)
        return [[dialogs[i] for i in group] for group in groups]

    def micro_batches(
        self, model: GPT, step: int, ids: np.ndarray
    ) -> tuple[list[Batch], dict[str, float]]:
        rows, world_size = self.pack_rows(ids), self.process.world_size
        per_process = math.ceil(len(rows) / world_size)
        if self.options.use_torch_compile:
            per_process = power_of_2(per_process)  # a compiler sees few shapes
        size = min(per_process, self.options.micro_batch_size)
        micro_steps = math.ceil(per_process / size)
        # empty rows fill the batches up: forward passes can be collectives
        rows += [[]] * (micro_steps * size * world_size - len(rows))
        slicing = Slicing(len(rows), size, self.process.rank, world_size)
        grid = slicing.rank_ids(np.arange(len(rows)))  # (micro-steps, rows of a micro-batch)
        return [self.batch([rows[i] for i in mine]) for mine in grid], {}

    def batch(self, rows: list[list[Example]]) -> Batch:
        """Return rows of dialogs as a batch."""
        options = self.options
        batch = collate_packed(rows, self.encoder.block_size, options.use_torch_compile)
        if batch["count"] == 0:
            batch["targets"][0, 0] = 0  # a mean over nothing is NaN; times `count` this one is 0
        return self.on_device(batch)

    def batches_in_order(self) -> list[list[list[Example]]]:
        rows, size = self.pack_rows(np.arange(len(self))), self.options.micro_batch_size
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def partial_means(self, model: nn.Module, batch: Batch, divisor: int) -> dict[str, Tensor]:
        where = {"positions": batch["positions"], "mask": packed_mask(batch["part"])}
        loss = model(batch["idx"], batch["targets"], **where)
        return {"loss": loss * batch["count"] / divisor}


class RewardModeling(Method):
    """Reward model: of two completions the chosen one gets the higher reward (Ouyang et al.)."""

    def encode(self, row: dict) -> tuple[Example, Example]:
        return self.encoder.example(row, "chosen"), self.encoder.example(row, "rejected")

    def batch(self, ids: np.ndarray) -> Batch:
        """Return the chosen completions of the pairs `ids`, then the rejected ones."""
        texts = [self.examples[i][side] for side in (0, 1) for i in ids]
        sizes = (self.encoder.block_size, self.options.use_torch_compile)
        return self.on_device(collate_padded(texts, *sizes))

    def compare(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return the "margin" (N,) by which each pair prefers the chosen one, and more figures."""
        chosen, rejected = rewards_at_end(model, batch).chunk(2)
        return {"margin": chosen - rejected}

    def partial_means(self, model: nn.Module, batch: Batch, divisor: int) -> dict[str, Tensor]:
        figures = self.compare(model, batch)
        margin = figures["margin"]
        figures["loss"] = -F.logsigmoid(margin)
        figures["accuracy"] = (margin > 0).float()
        return {name: values.sum() / divisor for name, values in figures.items()}


class DirectPreference(RewardModeling):
    """DPO: the implicit reward of a completion is its log-probability less that of a reference
    model, which is computed once; the processes share the work."""

    @torch.no_grad()
    def __init__(self, *setup) -> None:
        super().__init__(*setup)
        logprobs = torch.zeros(2, len(self), dtype=torch.float64)  # of chosen, of rejected
        for ids in self.batches_in_order()[self.process.rank :: self.process.world_size]:
            with autocast(self.process.device, self.dtype):
                of_texts = token_logprobs(self.reference, super().batch(ids)).sum(1)
            logprobs[:, ids] = of_texts.view(2, -1).cpu().double()
        self.reference = self.process.sum_float64(logprobs)  # (2, pairs), in the model's place

    def batch(self, ids: np.ndarray) -> Batch:
        reference = {"reference": self.reference[:, ids].flatten().float()}
        return super().batch(ids) | self.on_device(reference)

    def compare(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        chosen, rejected = token_logprobs(model, batch).sum(1).chunk(2)
        margin = dpo_margin(chosen, rejected, *batch["reference"].chunk(2), self.options.beta)
        return {"margin": margin, "preferred": (chosen > rejected).float()}


def token_logprobs(model: nn.Module, batch: Batch) -> Tensor:
    """Return the log-probability (B, T) of each target, 0 where there is none."""
    return -model(batch["idx"], batch["targets"], reduction="none")
