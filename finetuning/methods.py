"""The methods of fine-tuning but GRPO, which is in grpo.py: how each encodes the rows of a file,
makes the batches of a step, and computes its loss.

A step takes `batch_size` examples, which all processes share. The loss of the step is a mean over
all of its targets, pairs or completions, whatever the number of micro-steps and processes. So a
method returns the sum over one batch, and finetune.py divides it by the step's `divisor`.

Shapes: B sequences of a batch, T tokens of each with padding, N pairs, which are 2 N sequences.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from evaluation.tasks import batched
from finetuning.examples import Batch, Example, TextEncoder, collate_padded, read_examples
from finetuning.options import ResolvedFinetuneOptions
from finetuning.rewards import RewardFunction, rewards_at_end
from model.gpt import GPT
from utils.distributed import Process

# Sum of each metric over a batch, a tensor (), by the metric's name; in training "loss" is one.
Sums = dict[str, Tensor]


@dataclass
class PreparedStep:
    """The data of one training step."""

    batches: list[Batch]
    """Batches of this process, one for each micro-step; every process has equally many."""
    divisor: int
    """Targets (sft), pairs (dpo, reward) or completions (grpo) in the batches of all processes, by
    which finetune.py divides the sums of Method.metric_sums."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Further metrics to log, means over the step; of grpo alone."""
    sample: str | None = None
    """Text for samples.txt; of grpo alone."""


@dataclass(eq=False)
class Method(ABC):
    """Base of the methods: the examples of a run, their batches, and the loss of a batch.

    What an example is depends on the method: an Example for sft, a Pair for dpo and reward, a
    Question for grpo.
    """

    options: ResolvedFinetuneOptions
    process: Process
    encoder: TextEncoder
    """Encodes the fields of rows as token ids."""
    reference: GPT | None
    """dpo, grpo with --kl: the model of --init_from, which is not trained."""
    reward_function: RewardFunction | None
    """grpo: --reward."""

    def __post_init__(self) -> None:
        # one example for each row, in the order of the file, so that an id is the index of a row
        self.examples = read_examples(self.options.data, self.to_example)
        eval_data = self.options.eval_data
        # those of --eval_data; finetune.py evaluates if there are any
        self.held_out = read_examples(eval_data, self.to_example) if eval_data else []

    @abstractmethod
    def to_example(self, row: dict) -> object:
        """Return the example of a row; raise ValueError for a row that it cannot learn from."""

    @abstractmethod
    def metric_sums(self, model: nn.Module, batch: Batch) -> Sums:
        """Return the sum of the losses in a batch, "loss", and those of further metrics. `model` is
        the one to train, as DDP or FSDP2 has wrapped it, or in an evaluation the plain one."""

    def divisor(self, examples: list) -> int:
        """Return the number to divide sums over these examples by: the number of examples, for sft
        of targets."""
        return len(examples)

    def prepare(self, model: GPT, step: int, example_ids: np.ndarray) -> PreparedStep:
        """Return the data of step number `step`, which takes the examples with the indices
        `example_ids` (batch_size,)."""
        # every process collects the whole step, as the divisor counts all of it, and makes batches
        # of its own micro-batches alone
        examples = [self.examples[i] for i in example_ids]
        micro_batches = self.of_process(self.micro_batches(examples))
        batches = [self.make_batch(micro_batch) for micro_batch in micro_batches]
        return PreparedStep(batches, self.divisor(examples))

    def micro_batches(self, examples: list) -> list[list]:
        """Return examples in lists of micro_batch_size, for all processes together: those of a step
        (for grpo the indices of its completions), or all that are evaluated."""
        return batched(examples, self.options.micro_batch_size)

    def of_process(self, micro_batches: list) -> list:
        """Return the micro-batches of a step that this process trains on."""
        # micro-step i takes consecutive micro-batches, one for each process, as in pre-training
        return micro_batches[self.process.data_rank :: self.process.data_parallel]

    def make_batch(self, examples: list) -> Batch:
        """Return examples as a batch on the device. Methods whose examples are not of the class
        Example override this."""
        return collate_padded(
            examples, self.encoder.block_size, self.process, self.options.use_torch_compile
        )

    @torch.no_grad()
    def evaluate(self, model: GPT) -> dict[str, float]:
        """Return the mean of each metric over the held-out examples, the same on every process.
        Every process must call it; leaves the model in training mode, and raises Stopped after a
        signal."""
        model.eval()
        divisor = self.divisor(self.held_out)

        def addends_of(micro_batch: list) -> dict[str, float]:
            """Return what a micro-batch adds to each mean."""
            with self.process.autocast():
                sums = self.held_out_sums(model, micro_batch)
            return {name: (value / divisor).item() for name, value in sums.items()}

        # Every process gets the addends of all micro-batches in one order, so that all sums are
        # equal.
        addends = self.process.map(addends_of, self.micro_batches(self.held_out))
        model.train()
        means: dict[str, float] = {}
        for addend in addends:
            for name, value in addend.items():
                means[name] = means.get(name, 0.0) + value
        return means

    def held_out_sums(self, model: GPT, examples: list) -> Sums:
        """Return the sums of the metrics of a micro-batch of held-out examples; grpo has others
        than in training."""
        return self.metric_sums(model, self.make_batch(examples))


class SupervisedTuning(Method):
    """Mean cross-entropy, in nats per token, of what the assistant says. An example is a dialog, or
    in plain text a prompt and a completion."""

    def to_example(self, row: dict) -> Example:
        return self.encoder.dialog(row)

    def micro_batches(self, dialogs: list[Example]) -> list[list[Example]]:
        """Return dialogs in micro-batches by their length: each then needs little padding."""
        # no bias: the loss is a mean over the whole step, however its dialogs are batched
        return super().micro_batches(sorted(dialogs, key=lambda dialog: len(dialog.tokens)))

    def divisor(self, dialogs: list[Example]) -> int:
        # the first token of a dialog is not a target, as no token predicts it
        return sum(int(dialog.loss_mask[1:].sum()) for dialog in dialogs)

    def metric_sums(self, model: nn.Module, batch: Batch) -> Sums:
        # Mean over the targets of this batch. With reduction="none" the model would compute large
        # logits again in the backward pass (model/loss.py).
        mean_loss = model(batch.idx, batch.targets)
        # times their number, the mean is a sum, so that each target of the step has equal weight
        num_targets = (batch.targets >= 0).sum()  # the others are NO_TARGET, -1
        return {"loss": mean_loss * num_targets}


@dataclass
class Pair:
    """A chosen and a rejected completion of a prompt, each after the tokens of the prompt."""

    chosen: Example
    rejected: Example
    ref_logprobs: Tensor | None = None
    """dpo: log-probabilities (2,) of both under the reference model, in nats, float32 on the CPU;
    None until DirectPreference.__post_init__ computes them."""


class RewardModeling(Method):
    """Reward model: of two completions the chosen one gets the higher reward (Ouyang et al. 2022,
    equation 1)."""

    def to_example(self, row: dict) -> Pair:
        # the prompt is in both examples, and does not count in the loss
        chosen = self.encoder.completion(row, "chosen")
        rejected = self.encoder.completion(row, "rejected")
        return Pair(chosen, rejected)

    def make_batch(self, pairs: list[Pair]) -> Batch:
        """Return the chosen sequences of N pairs, then the rejected ones: 2 N sequences."""
        # Method.make_batch of 2 N examples, as one batch: DDP expects one forward pass for each
        # backward pass
        chosen = [pair.chosen for pair in pairs]
        rejected = [pair.rejected for pair in pairs]
        batch = super().make_batch(chosen + rejected)
        # (2,) for each pair; empty for reward, and for dpo until reference_logprobs has run
        columns = [pair.ref_logprobs for pair in pairs if pair.ref_logprobs is not None]
        if columns:
            # (2, N), then (2 N,) in the order of the batch: chosen 0, ..., rejected 0, ...
            batch.ref_logprobs = self.process.copy_to_device(torch.stack(columns, 1).flatten())
        return batch

    def margin(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the reward of the chosen sequence of each pair less that of the rejected one,
        (N,)."""
        chosen, rejected = rewards_at_end(model, batch).chunk(2)  # (N,) each
        return chosen - rejected

    def metric_sums(self, model: nn.Module, batch: Batch) -> Sums:
        margin = self.margin(model, batch)  # (N,)
        return {
            "margin": margin.sum(),
            # Bradley-Terry: sigmoid(margin) is the probability that a human prefers the chosen one
            "loss": -F.logsigmoid(margin).sum(),
            "accuracy": (margin > 0).float().sum(),  # a tie counts as wrong
        }


class DirectPreference(RewardModeling):
    """DPO (Rafailov et al. 2023, equation 7): the reward of a completion is beta times its
    log-probability less that under the reference model, which is computed once, at the start."""

    @torch.no_grad()
    def __post_init__(self) -> None:
        super().__post_init__()  # reads the pairs
        # stop=None: a signal must not raise Stopped here, as only the loop of the run catches it.
        process = replace(self.process, stop=None)
        pairs: list[Pair] = self.examples + self.held_out
        # every process gets those of all pairs, as a step may give it any of them
        logprobs = process.map(self.reference_logprobs, self.micro_batches(pairs))
        # cat joins the (N, 2) of all micro-batches: one row (2,) for each pair
        for pair, ref_logprobs in zip(pairs, torch.cat(logprobs), strict=True):
            pair.ref_logprobs = ref_logprobs
        self.reference = None  # frees its memory

    def reference_logprobs(self, pairs: list[Pair]) -> Tensor:
        """Return the log-probabilities (N, 2) of chosen and rejected completions of N pairs under
        the reference model, in nats, summed over tokens, on the CPU."""
        assert self.reference  # open_data in finetune.py gives dpo one
        batch = self.make_batch(pairs)
        with self.process.autocast():
            logprobs = token_logprobs(self.reference, batch).sum(1)  # (2 N,)
        # The view is (2, N), as all chosen sequences come first. On the CPU, as process.map sends
        # the result to all processes.
        return logprobs.view(2, -1).T.cpu()

    def margin(self, model: nn.Module, batch: Batch) -> Tensor:
        logprobs = token_logprobs(model, batch).sum(1)  # (2 N,), sums over completions
        assert batch.ref_logprobs is not None  # __post_init__ computes them, make_batch copies them
        # log ratio of policy and reference; times beta it is the implicit reward
        chosen, rejected = (logprobs - batch.ref_logprobs).chunk(2)  # (N,) each
        return self.options.beta * (chosen - rejected)


def token_logprobs(model: nn.Module, batch: Batch) -> Tensor:
    """Return the log-probability (B, T) of each target in nats, 0 where there is none; the sum of a
    row is that of its completion."""
    # the loss of a token is its negative log-probability, and 0 without a target
    return -model(batch.idx, batch.targets, reduction="none")
