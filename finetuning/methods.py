"""The methods of fine-tuning but GRPO, which is in grpo.py: how each encodes the rows of a file,
makes the batches of a step, and computes its loss.

A step takes `batch_size` examples, which all processes share. The loss of one batch is a part of
the mean over the step: its sum divided by the `divisor` of the whole step. Summed over micro-steps
and processes these parts are the mean, whatever the number of either.
"""

import math
from dataclasses import dataclass, field
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
    batch(ids), and partial_means(model, batch, divisor), which returns "loss" and further metrics,
    each summed over the batch and divided by `divisor`.
    """

    unit = "pairs"  # the examples that --batch_size counts
    selects_best_by_loss = True  # a lower loss on --eval_data means a better model

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

    def divisor(self, ids: np.ndarray) -> int:
        """Return what the metrics of the examples `ids` are a mean over."""
        return len(ids)

    def prepare(self, model: GPT, step: int, ids: np.ndarray) -> PreparedStep:
        """Return the data of step number `step`, which takes the examples `ids` (batch_size,)."""
        batches = []
        # as in pre-training: one micro-batch after another, each process its own share
        for places in self.slice(len(ids), self.config.micro_batch_size):
            batches.append(self.batch(ids[places]))
        return PreparedStep(batches, self.divisor(ids))

    def slice(self, num_items: int, micro_batch_size: int) -> np.ndarray:
        """Return the indices (micro-steps, micro-batch) of this process's share of the items of a
        step."""
        process = self.process
        slicing = Slicing(num_items, micro_batch_size, process.rank, process.world_size)
        return slicing.rank_ids(np.arange(num_items))

    @torch.no_grad()
    def evaluate(self, model: GPT) -> dict[str, float]:
        """Return the mean of each metric over all examples, the same on every process."""
        model.eval()
        divisor = self.divisor(np.arange(len(self)))
        sums: dict[str, float] = {}  # of this process's batches, by name of the metric
        for _, items, is_counted in self.process.share(self.evaluation_batches()):
            with autocast(self.process.device, self.dtype):
                means = self.held_out_means(model, items, divisor)
            for name, mean in means.items():
                # A batch that only keeps the processes in step is computed, and counts as 0.
                sums[name] = sums.get(name, 0.0) + mean.item() * is_counted
        model.train()
        # float64: a sum over many batches keeps its digits
        totals = self.process.sum_float64(torch.tensor(list(sums.values()), dtype=torch.float64))
        return dict(zip(sums, totals.tolist(), strict=True))

    def evaluation_batches(self) -> list:
        """Return the indices of all examples in order, in arrays of at most a micro-batch."""
        size = self.config.micro_batch_size
        return np.array_split(np.arange(len(self)), range(size, len(self), size))

    def held_out_means(self, model: GPT, items: np.ndarray, divisor: int) -> dict[str, Tensor]:
        """Return the metrics of one of the evaluation_batches, each a part of its mean."""
        return self.partial_means(model, self.batch(items), divisor)


class SupervisedTuning(Method):
    """Mean cross-entropy of what the assistant says. The dialogs of a step are packed into rows of
    up to block_size tokens, and a micro-batch has some of these rows."""

    unit = "dialogs"

    def encode(self, row: dict) -> Example:
        return self.encoder.dialog(row)

    def divisor(self, ids: np.ndarray) -> int:
        # targets: the first token of a text follows nothing, so it is none
        return sum(int(self.examples[i].loss_mask[1:].sum()) for i in ids)

    def pack_rows(self, ids: np.ndarray) -> list[list[Example]]:
        """Return the dialogs `ids` in few rows."""
        dialogs = [self.examples[i] for i in ids]
        lengths = [len(dialog.tokens) - 1 for dialog in dialogs]  # without the last, a target alone
        rows = pack(lengths, self.encoder.block_size)
        return [[dialogs[i] for i in row] for row in rows]

    def prepare(self, model: GPT, step: int, ids: np.ndarray) -> PreparedStep:
        rows = self.pack_rows(ids)
        world_size = self.process.world_size
        # How many rows a step has depends on its dialogs. They are divided anew each time.
        rows_per_process = math.ceil(len(rows) / world_size)
        if self.config.use_torch_compile:
            rows_per_process = power_of_2(rows_per_process)  # each shape costs a compilation
        micro_batch_size = min(rows_per_process, self.config.micro_batch_size)
        micro_steps = math.ceil(rows_per_process / micro_batch_size)
        # Empty rows give each process equally many batches of one size: forward passes can be
        # collectives, in which a process without a batch would block the others.
        num_rows = micro_steps * micro_batch_size * world_size
        rows += [[]] * (num_rows - len(rows))
        batches = []
        for places in self.slice(num_rows, micro_batch_size):
            batches.append(self.batch([rows[i] for i in places]))
        return PreparedStep(batches, self.divisor(ids))

    def batch(self, rows: list[list[Example]]) -> Batch:
        """Return rows of dialogs as a batch."""
        batch = collate_packed(rows, self.encoder.block_size, self.config.use_torch_compile)
        if batch.num_targets == 0:
            # The mean over no target is NaN. With one it is finite, and num_targets makes it 0.
            batch.targets[0, 0] = 0
        return batch.to_device(self.process)

    def evaluation_batches(self) -> list[list[list[Example]]]:
        """Return the rows of all dialogs, in lists of at most a micro-batch."""
        rows = self.pack_rows(np.arange(len(self)))
        size = self.config.micro_batch_size
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def partial_means(self, model: nn.Module, batch: Batch, divisor: int) -> dict[str, Tensor]:
        mask = dialog_mask(batch.dialog)
        loss = model(batch.idx, batch.targets, positions=batch.positions, mask=mask)
        # the model's loss is a mean over the targets of this batch: times their number it is a sum
        return {"loss": loss * batch.num_targets / divisor}


class RewardModeling(Method):
    """Reward model: of two completions the chosen one gets the higher reward (Ouyang et al. 2022,
    equation 1)."""

    def encode(self, row: dict) -> tuple[Example, Example]:
        chosen = self.encoder.completion(row, "chosen")
        return chosen, self.encoder.completion(row, "rejected")

    def batch(self, ids: np.ndarray) -> Batch:
        """Return the chosen texts of the pairs `ids` (N,), then the rejected ones: 2 N rows."""
        chosen = [self.examples[i][0] for i in ids]
        rejected = [self.examples[i][1] for i in ids]
        block_size = self.encoder.block_size
        batch = collate_padded(chosen + rejected, block_size, self.config.use_torch_compile)
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
        metrics["accuracy"] = (margin > 0).float()
        return {name: values.sum() / divisor for name, values in metrics.items()}


class DirectPreference(RewardModeling):
    """DPO (Rafailov et al. 2023): the reward of a completion is its log-probability less that under
    the reference model. The latter is computed once, at the start."""

    @torch.no_grad()
    def __post_init__(self) -> None:
        super().__post_init__()
        logprobs = torch.zeros(2, len(self), dtype=torch.float64)  # of chosen and rejected texts
        # each process computes some of the pairs and leaves zeros for the sum at the others
        batches = self.evaluation_batches()
        for ids in batches[self.process.rank :: self.process.world_size]:
            with autocast(self.process.device, self.dtype):
                # super: the batch method of this class would look up what is computed here
                batch = super().batch(ids)
                text_logprobs = token_logprobs(self.reference, batch).sum(1)  # (2 N,)
            pair_logprobs = text_logprobs.view(2, -1)  # (2, N): of the chosen, of the rejected
            logprobs[:, ids] = pair_logprobs.cpu().double()
        self.ref_logprobs = self.process.sum_float64(logprobs).float()  # (2, pairs)
        self.reference = None  # frees its memory

    def batch(self, ids: np.ndarray) -> Batch:
        batch = super().batch(ids)
        # flattened as the texts of a batch are: all chosen ones, then all rejected ones
        batch.ref_logprobs = self.process.copy(self.ref_logprobs[:, ids].flatten())
        return batch

    def compare(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        chosen, rejected = token_logprobs(model, batch).sum(1).chunk(2)  # (N,) each, of texts
        ref_chosen, ref_rejected = batch.ref_logprobs.chunk(2)
        margin = dpo_margin(chosen, rejected, ref_chosen, ref_rejected, self.config.beta)
        # preferred: likelier as such; accuracy, of the margin: likelier than under the reference
        return {"margin": margin, "preferred": (chosen > rejected).float()}


def token_logprobs(model: nn.Module, batch: Batch) -> Tensor:
    """Return the log-probability (B, T) of each target in nats, 0 where there is none."""
    return -model(batch.idx, batch.targets, reduction="none")
