"""Methods of fine-tuning: the examples of each, and its loss on a batch of them. GRPO, which makes
its own examples, is in grpo.py.

A method's figures for a batch are parts of means over a step: summed over micro-batches and
processes they are these means, whatever the number of either.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from finetuning.chat import Example
from finetuning.examples import ChatData, collate, collate_packed, pack
from finetuning.objectives import dpo_loss, reward_loss
from finetuning.options import FinetuneConfig
from finetuning.rewards import rewards_at_end
from model.gpt import GPT
from utils.devices import autocast
from utils.distributed import Process

Batch = dict[str, Tensor]


class Method(ABC):
    """Base of all methods: examples by index, evaluated in order."""

    fields: tuple[str, ...] = ("prompt", "chosen", "rejected")
    """Fields of a row."""
    unit = "pairs"
    """Name of the examples that a step counts."""
    selects_best_by_loss = True
    """False where a lower loss does not mean a better model: no model_best.pt, no plot."""

    def __init__(
        self, data: ChatData, options: FinetuneConfig, process: Process, dtype: torch.dtype
    ) -> None:
        self.data, self.options, self.process, self.dtype = data, options, process, dtype

    def __len__(self) -> int:
        return len(self.data.rows)

    @abstractmethod
    def divisor(self, ids: np.ndarray) -> int:
        """Return the number of tokens, pairs or completions in the examples `ids`, by which sums
        over a step are divided."""

    @abstractmethod
    def micro_batches(
        self, model: GPT, step: int, ids: np.ndarray, grid: np.ndarray
    ) -> tuple[Iterable[Batch], dict[str, float]]:
        """Return this process's batches of a step, and figures for the log. `grid` (micro-steps,
        micro-batch) holds places in a global batch of the examples `ids`, in that order."""

    @abstractmethod
    def partial_means(self, model: nn.Module, batch: Batch, divisor: int) -> dict[str, Tensor]:
        """Return the loss and metrics of a batch, summed and divided by `divisor`: summed over the
        batches and processes of a step they are its means."""

    @abstractmethod
    def evaluate(self, model: GPT) -> dict[str, float]:
        """Return the mean of each figure over all examples, on every process."""

    def sample_text(self) -> str | None:
        """Return text of the newest step for samples.txt, if the method writes any."""
        return None

    def to_device(self, arrays: dict[str, np.ndarray]) -> Batch:
        """Return arrays as tensors on the device."""
        return {name: torch.from_numpy(x).to(self.process.device) for name, x in arrays.items()}

    def batches_in_order(self) -> list[np.ndarray]:
        """Return the indices of all examples in batches."""
        n, size = len(self), self.options.resolved_micro_batch()
        return np.array_split(np.arange(n), range(size, n, size))


class StoredExamples(Method):
    """Base of the methods whose examples are those of the file."""

    @abstractmethod
    def batch(self, ids: np.ndarray) -> Batch:
        """Return examples as tensors on the device."""

    def divisor(self, ids: np.ndarray) -> int:
        return len(ids)

    def micro_batches(
        self, model: GPT, step: int, ids: np.ndarray, grid: np.ndarray
    ) -> tuple[Iterable[Batch], dict[str, float]]:
        return (self.batch(ids[places]) for places in grid), {}

    @torch.no_grad()
    def evaluate(self, model: GPT) -> dict[str, float]:
        """Return the mean of each figure over all examples; the processes share the work, and all
        run equally many forward passes."""
        model.eval()
        divisor, sums = self.divisor(np.arange(len(self))), {}
        for _, ids, counts in self.process.share(self.batches_in_order()):
            batch = self.batch(ids)
            with autocast(self.process.device, self.dtype):
                parts = self.partial_means(model, batch, divisor)
            for name, part in parts.items():
                sums[name] = sums.get(name, 0.0) + part.item() * counts
        model.train()
        values = self.process.sum_float64(torch.tensor([*sums.values()], dtype=torch.float64))
        return dict(zip(sums, values.tolist(), strict=True))


class SupervisedTuning(StoredExamples):
    """Mean cross-entropy of what the assistant says; dialogs are packed into sequences."""

    fields = ("messages", "prompt", "completion")
    unit = "packed sequences"

    def __init__(self, data: ChatData, *setup) -> None:
        super().__init__(data, *setup)
        self.examples = data.dialogs()
        self.packs = pack([len(example) - 1 for example in self.examples], data.block_size)

    def __len__(self) -> int:
        return len(self.packs)

    def divisor(self, ids: np.ndarray) -> int:
        return sum(int(x.loss_mask[1:].sum()) for i in ids for x in self.examples_of(i))

    def examples_of(self, i: int) -> list[Example]:
        """Return the examples of a packed sequence."""
        return [self.examples[number] for number in self.packs[i]]

    def batch(self, ids: np.ndarray) -> Batch:
        packs = [self.examples_of(i) for i in ids]
        batch = self.to_device(collate_packed(packs, self.data.block_size))
        part = batch.pop("part")  # (B, T)
        mask = (part[:, :, None] == part[:, None, :]).tril()  # (B, T, T)
        return batch | {"mask": mask[:, None]}

    def partial_means(self, model: nn.Module, batch: Batch, divisor: int) -> dict[str, Tensor]:
        return {"loss": model(**batch) * (batch["targets"] >= 0).sum() / divisor}


class PairMethod(StoredExamples):
    """Base of the methods that compare a chosen completion with a rejected one."""

    def __init__(self, data: ChatData, *setup) -> None:
        super().__init__(data, *setup)
        self.pairs = data.pairs()

    def batch(self, ids: np.ndarray) -> Batch:
        """Return the chosen completions of the pairs `ids`, then the rejected ones."""
        examples = [self.pairs[i][side] for side in (0, 1) for i in ids]
        return self.to_device(collate(examples, self.data.block_size))


class RewardModeling(PairMethod):
    """Reward model: of two completions the chosen one gets the higher reward."""

    def partial_means(self, model: nn.Module, batch: Batch, divisor: int) -> dict[str, Tensor]:
        chosen, rejected = rewards_at_end(model, batch).chunk(2)
        figures = {
            "loss": reward_loss(chosen, rejected),
            "accuracy": (chosen > rejected).float(),
            "margin": chosen - rejected,
        }
        return {name: values.sum() / divisor for name, values in figures.items()}


class DirectPreference(PairMethod):
    """DPO: the chosen completion becomes likelier than the rejected one, by comparison with a
    reference model, whose log-probabilities are computed once."""

    def __init__(self, data: ChatData, *setup, reference: GPT) -> None:
        super().__init__(data, *setup)
        self.reference = self.score(reference)  # (2, pairs)

    @torch.no_grad()
    def score(self, reference: GPT) -> Tensor:
        """Return the log-probabilities of all completions; the processes share the work."""
        found = torch.zeros(2, len(self), dtype=torch.float64)
        for ids in self.batches_in_order()[self.process.rank :: self.process.world_size]:
            with autocast(self.process.device, self.dtype):
                logprobs = token_logprobs(reference, super().batch(ids)).sum(1)
            found[:, ids] = logprobs.view(2, -1).double().cpu()
        return self.process.sum_float64(found)

    def batch(self, ids: np.ndarray) -> Batch:
        reference = self.reference[:, ids].flatten().float().to(self.process.device)
        return super().batch(ids) | {"reference": reference}

    def partial_means(self, model: nn.Module, batch: Batch, divisor: int) -> dict[str, Tensor]:
        chosen, rejected = token_logprobs(model, batch).sum(1).chunk(2)
        ref_chosen, ref_rejected = batch["reference"].chunk(2)
        beta = self.options.beta
        margin = beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
        figures = {
            "loss": dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta),
            "accuracy": (margin > 0).float(),
            "margin": margin,
            "preferred": (chosen > rejected).float(),
        }
        return {name: values.sum() / divisor for name, values in figures.items()}


def token_logprobs(model: nn.Module, batch: Batch) -> Tensor:
    """Return the log-probability (B, T) of each target, 0 where there is none."""
    return -model(batch["idx"], batch["targets"], reduction="none")
