"""The methods of fine-tuning but GRPO, which is in grpo.py: how each encodes the rows of a file,
makes the batches of a step, and computes its loss.

A step takes `batch_size` examples, which all processes share. The loss of one batch is a part of
the mean over the step: its sum divided by the `divisor` of the whole step. Summed over micro-steps
and processes these parts are the mean, whatever the number of either.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from data.loader import Slicing
from finetuning.examples import (
    Batch,
    Example,
    TextEncoder,
    collate_packed,
    collate_padded,
    dialog_mask,
    pack,
    power_of_2,
    read_jsonl,
)
from finetuning.objectives import dpo_margin
from finetuning.options import FinetuneConfig
from finetuning.rewards import Reward, rewards_at_end
from model.gpt import GPT
from utils.devices import autocast
from utils.distributed import Process


@dataclass
class PreparedStep:
    """The data of one training step."""

    batches: list[Batch]
    """Batches of this process, one for each micro-step; every process has equally many."""
    divisor: int
    """Tokens (sft), pairs or completions (grpo) in the batches of all processes."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Further values for the row of the log."""
    sample: str | None = None
    """Text for samples.txt."""


@dataclass(eq=False)
class Method:
    """Base of the methods: the encoded rows of a file, and their batches.

    A subclass adds encode(row), which raises ValueError for a row that it cannot learn from,
    batch(items), and partial_means(model, batch, divisor), which returns "loss" and further
    metrics, each summed over the batch and divided by `divisor`.
    """

    unit = "pairs"  # the examples that --batch_size counts

    config: FinetuneConfig
    process: Process
    dtype: torch.dtype
    """Autocast dtype of matmuls."""
    encoder: TextEncoder
    reference: GPT | None
    """dpo, grpo with --kl: the model of --init_from, which is not trained."""
    reward: Reward | None
    """grpo: --reward."""
    path: Path
    """File of rows."""

    def __post_init__(self) -> None:
        self.examples = read_jsonl(self.path, self.encode)

    def __len__(self) -> int:
        return len(self.examples)

    def items(self, examples: list) -> list:
        """Return what batches are made of: the examples themselves, or with sft rows of them."""
        return examples

    def divisor(self, examples: list) -> int:
        """Return what the metrics of these examples are a mean over."""
        return len(examples)

    def prepare(self, model: GPT, step: int, ids: np.ndarray) -> PreparedStep:
        """Return the data of step number `step`, which takes the examples `ids` (batch_size,)."""
        examples = [self.examples[i] for i in ids]
        micro_batches = self.divide(self.items(examples), self.config.micro_batch_size)
        batches = [self.batch(items) for items in micro_batches]
        return PreparedStep(batches, self.divisor(examples))

    def divide(self, items: Sequence, size: int) -> list[list]:
        """Return this process's share of the items of a step: `size` items for each micro-step."""
        process = self.process
        # as in pre-training: one micro-batch after another, each process its own share
        slicing = Slicing(len(items), size, process.rank, process.world_size)
        micro_batches = []
        for places in slicing.rank_ids(np.arange(len(items))):  # (micro-steps, size)
            micro_batches.append([items[place] for place in places])
        return micro_batches

    @torch.no_grad()
    def evaluate(self, model: GPT) -> dict[str, float]:
        """Return the mean of each metric over all examples, the same on every process."""
        model.eval()  # without dropout
        divisor = self.divisor(self.examples)
        micro_batches = self.micro_batches(self.items(self.examples))
        sums: dict[str, float] = {}  # of this process's batches, by name of the metric
        # raises Stopped between two batches after a signal
        for _, items, is_counted in self.process.share(micro_batches):
            with autocast(self.process.device, self.dtype):
                means = self.held_out_means(model, items, divisor)
            for name, mean in means.items():
                # A batch that only keeps the processes in step is computed, and counts as 0.
                sums[name] = sums.get(name, 0.0) + mean.item() * is_counted
        model.train()
        # float64: a sum over many batches keeps its digits
        totals = self.process.sum_float64(torch.tensor(list(sums.values()), dtype=torch.float64))
        return dict(zip(sums, totals.tolist(), strict=True))

    def micro_batches(self, items: list) -> list[list]:
        """Return the items in order, in lists of at most --micro_batch_size."""
        size = self.config.micro_batch_size
        return [items[start : start + size] for start in range(0, len(items), size)]

    def held_out_means(self, model: GPT, items: list, divisor: int) -> dict[str, Tensor]:
        """Return the metrics of a micro-batch of held-out items, each a part of its mean."""
        return self.partial_means(model, self.batch(items), divisor)


class SupervisedTuning(Method):
    """Mean cross-entropy of what the assistant says. The dialogs of a step are packed into rows of
    up to block_size tokens, and a micro-batch has some of these rows."""

    unit = "dialogs"

    def encode(self, row: dict) -> Example:
        return self.encoder.dialog(row)

    def divisor(self, examples: list[Example]) -> int:
        # targets: the first token of a text follows nothing, so it is none
        return sum(int(example.loss_mask[1:].sum()) for example in examples)

    def items(self, examples: list[Example]) -> list[list[Example]]:
        """Return the dialogs in few rows."""
        # without the last token, which is a target alone
        lengths = [len(example.tokens) - 1 for example in examples]
        rows = pack(lengths, self.encoder.block_size)
        return [[examples[i] for i in row] for row in rows]

    def divide(self, rows: list[list[Example]], size: int) -> list[list[list[Example]]]:
        """Return this process's share of the rows of a step, with empty rows beside them."""
        # How many rows a step has depends on its dialogs. They are divided anew each time.
        world_size = self.process.world_size
        rows_per_process = math.ceil(len(rows) / world_size)
        if self.config.use_torch_compile:
            rows_per_process = power_of_2(rows_per_process)  # each shape costs a compilation
        size = min(rows_per_process, size)
        # Empty rows give each process equally many batches of one size: forward passes can be
        # collectives, in which a process without a batch would block the others.
        num_rows = math.ceil(rows_per_process / size) * size * world_size
        padding = [[]] * (num_rows - len(rows))
        return super().divide(rows + padding, size)

    def batch(self, rows: list[list[Example]]) -> Batch:
        """Return rows of dialogs as a batch."""
        batch = collate_packed(rows, self.encoder.block_size, self.config.use_torch_compile)
        if batch.num_targets == 0:
            # The mean over no target is NaN. With one it is finite, and num_targets makes it 0.
            batch.targets[0, 0] = 0
        return batch.to_device(self.process)

    def partial_means(self, model: nn.Module, batch: Batch, divisor: int) -> dict[str, Tensor]:
        # dialogs that share a row do not attend to each other, and each has positions from 0
        mask = dialog_mask(batch.dialog)
        loss = model(batch.idx, batch.targets, positions=batch.positions, mask=mask)
        # the model's loss is a mean over the targets of this batch: times their number it is a sum
        return {"loss": loss * batch.num_targets / divisor}


@dataclass
class Pair:
    """A chosen and a rejected completion of a prompt."""

    chosen: Example
    rejected: Example
    ref_logprobs: Tensor | None = None
    """dpo: log-probabilities (2,) of both under the reference model, float32."""


class RewardModeling(Method):
    """Reward model: of two completions the chosen one gets the higher reward (Ouyang et al. 2022,
    equation 1)."""

    def encode(self, row: dict) -> Pair:
        # the prompt is in both texts, and counts in neither
        chosen = self.encoder.completion(row, "chosen")
        return Pair(chosen, self.encoder.completion(row, "rejected"))

    def batch(self, pairs: list[Pair]) -> Batch:
        """Return the chosen texts of N pairs, then the rejected ones: 2 N rows."""
        texts = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
        batch = collate_padded(texts, self.encoder.block_size, self.config.use_torch_compile)
        if pairs[0].ref_logprobs is not None:
            # flattened as the texts are: all chosen ones, then all rejected ones
            batch.ref_logprobs = torch.stack([pair.ref_logprobs for pair in pairs], 1).flatten()
        return batch.to_device(self.process)

    def compare(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return "margin" (N,), by how much the model prefers the chosen text of each pair, and
        further metrics (N,)."""
        chosen, rejected = rewards_at_end(model, batch).chunk(2)  # (N,) each
        return {"margin": chosen - rejected}

    def partial_means(self, model: nn.Module, batch: Batch, divisor: int) -> dict[str, Tensor]:
        metrics = self.compare(model, batch)
        margin = metrics["margin"]  # (N,)
        # Bradley-Terry: sigmoid(margin) is the probability that a human prefers the chosen text
        metrics["loss"] = -F.logsigmoid(margin)
        metrics["accuracy"] = (margin > 0).float()  # a tie is wrong
        return {name: values.sum() / divisor for name, values in metrics.items()}


class DirectPreference(RewardModeling):
    """DPO (Rafailov et al. 2023): the reward of a completion is its log-probability less that under
    the reference model. The latter is computed once, at the start."""

    @torch.no_grad()
    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.config.micro_batch_size
        starts = range(0, len(self), size)  # of the batches of pairs
        logprobs = torch.zeros(2, len(self), dtype=torch.float64)  # of chosen and rejected texts
        # each process computes some of the pairs and leaves zeros for the sum at the others
        for start in starts[self.process.rank :: self.process.world_size]:
            batch = self.batch(self.examples[start : start + size])
            with autocast(self.process.device, self.dtype):
                text_logprobs = token_logprobs(self.reference, batch).sum(1)  # (2 N,)
            logprobs[:, start : start + size] = text_logprobs.view(2, -1)
        sums = self.process.sum_float64(logprobs).float()  # (2, pairs)
        for i, pair in enumerate(self.examples):
            pair.ref_logprobs = sums[:, i]
        self.reference = None  # frees its memory

    def compare(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        chosen, rejected = token_logprobs(model, batch).sum(1).chunk(2)  # (N,) each, of texts
        ref_chosen, ref_rejected = batch.ref_logprobs.chunk(2)
        margin = dpo_margin(chosen, rejected, ref_chosen, ref_rejected, self.config.beta)
        # preferred: likelier as such; accuracy, of the margin: likelier than under the reference
        return {"margin": margin, "preferred": (chosen > rejected).float()}


def token_logprobs(model: nn.Module, batch: Batch) -> Tensor:
    """Return the log-probability (B, T) of each target in nats, 0 where there is none."""
    # the model's loss of a token is its cross-entropy; where there is no target it is 0
    return -model(batch.idx, batch.targets, reduction="none")
