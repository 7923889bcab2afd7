"""The fine-tuning methods except GRPO (grpo.py): how each method encodes the rows of a file, makes
the batches of a step, and computes its loss.

A step takes `batch_size` examples, which the processes share. The loss of the step is the mean over
all its targets, pairs or completions, for any number of micro-steps and processes. A method
therefore returns the sum over one batch, and finetune.py divides it by the step's `divisor`.

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

# Sum of each metric over a batch, a tensor () each; has "loss" in training:
# {"margin": 3.1, "loss": 5.2, "accuracy": 7.0} for the 8 pairs of a reward model
Sums = dict[str, Tensor]


@dataclass
class PreparedStep:
    """The data of one training step."""

    batches: list[Batch]
    """Batches of this process, one per micro-step; every process has the same number of them."""
    divisor: int
    """Number of targets (sft), pairs (dpo, reward) or completions (grpo) in the step on all
    processes. finetune.py divides the sums of Method.metric_sums by it."""
    metrics: dict[str, float] = field(default_factory=dict)
    """grpo: further metrics of the step for the log."""
    sample: str | None = None
    """grpo: text for samples.txt."""


@dataclass(eq=False)
class Method(ABC):
    """Base class of the methods: the examples of a run, their batches, and the loss of a batch.

    The class of an example depends on the method: Example for sft, Pair for dpo and reward,
    Question for grpo.
    """

    options: ResolvedFinetuneOptions
    process: Process
    encoder: TextEncoder
    """Encodes the fields of rows as token ids."""
    reference: GPT | None
    """dpo, grpo with --kl: a frozen copy of the model of --init_from; else None."""
    reward_function: RewardFunction | None
    """grpo: the function of --reward; else None."""

    def __post_init__(self) -> None:
        # One example per row, in the order of the file: an example's id is the index of its row.
        # UserError for a row that to_example refuses.
        self.examples = read_examples(self.options.data, self.to_example)
        eval_data = self.options.eval_data  # Path of a .jsonl file, or None
        # examples of --eval_data; finetune.py evaluates them, unless the list is empty
        self.held_out = read_examples(eval_data, self.to_example) if eval_data else []

    @abstractmethod
    def to_example(self, row: dict) -> object:
        """Return the example of a row, {"prompt": "2+3?", ...}. Raise ValueError for a row that the
        method cannot use."""

    @abstractmethod
    def metric_sums(self, model: nn.Module, batch: Batch) -> Sums:
        """Return the sums over a batch of the loss, as "loss", and of further metrics. `model` is
        the trained model: in training as DDP or FSDP2 wraps it, in an evaluation the plain GPT."""

    def count_divisor(self, examples: list) -> int:
        """Return the number that turns sums over these examples into means: the number of examples,
        or for sft of targets."""
        return len(examples)

    def prepare(self, model: GPT, step: int, example_ids: np.ndarray) -> PreparedStep:
        """Return the data of step number `step` as batches of this process. `example_ids`
        (batch_size,) are the indices of its rows of --data."""
        # Every process collects the examples of the whole step, because the divisor counts them,
        # but makes batches only of its own micro-batches.
        examples = [self.examples[i] for i in example_ids]  # list[Example] or list[Pair]
        micro_batches = self.own_micro_batches(self.to_micro_batches(examples))
        batches = [self.make_batch(micro_batch) for micro_batch in micro_batches]
        return PreparedStep(batches, self.count_divisor(examples))  # examples of all processes

    def to_micro_batches(self, examples: list) -> list[list]:
        """Divide examples among the micro-batches of all processes, in lists of micro_batch_size
        (the last list may be shorter). The examples are a step's (for grpo, indices of its
        completions), all held-out ones, or for dpo's reference all pairs."""
        return batched(examples, self.options.micro_batch_size)

    def own_micro_batches(self, micro_batches: list) -> list:
        """Return this process's share of a list of micro-batches, or of their indices."""
        # Micro-step i takes consecutive micro-batches, one per process, as in pre-training: of two
        # processes, the first has the micro-batches 0, 2, 4, ...
        return micro_batches[self.process.data_rank :: self.process.data_parallel]

    def make_batch(self, examples: list) -> Batch:
        """Return Examples as a batch on the device: idx and targets (B, T), last_columns (B,).
        Methods with another class than Example override this."""
        return collate_padded(
            examples,
            self.encoder.block_size,  # T, the length with padding, is at most this
            self.process,
            compiled=self.options.use_torch_compile,  # T is then a power of 2 or block_size
        )

    @torch.no_grad()
    def evaluate(self, model: GPT) -> dict[str, float]:
        """Return the mean of each metric over the held-out examples, the same on every process.
        Every process must call it. It leaves the model in training mode, and raises Stopped after a
        signal. grpo overrides it with another metric than in training."""
        model.eval()
        # number of examples, for sft of targets
        held_out_divisor = self.count_divisor(self.held_out)

        def addends_of(micro_batch: list) -> dict[str, float]:
            """Return what a micro-batch adds to each mean, such as {"loss": 0.21}."""
            # one forward pass, as in training: cached casts of the weights would only take memory
            with self.process.autocast(keep_weights=False):
                sums = self.metric_sums(model, self.make_batch(micro_batch))
            return {name: (value / held_out_divisor).item() for name, value in sums.items()}

        # Every process gets the addends of all micro-batches, [{"loss": 0.21}, ...], in the same
        # order, and so adds up the same means.
        addends = self.process.map_across_processes(
            addends_of, self.to_micro_batches(self.held_out)
        )
        model.train()
        means: dict[str, float] = {}
        for addend in addends:
            for name, value in addend.items():
                means[name] = means.get(name, 0.0) + value
        return means


class SupervisedTuning(Method):
    """Supervised fine-tuning: mean cross-entropy of the assistant's tokens, in nats per token. An
    example is a dialog, or in plain text a prompt and a completion."""

    def to_example(self, row: dict) -> Example:
        return self.encoder.dialog(row)

    def to_micro_batches(self, dialogs: list[Example]) -> list[list[Example]]:
        """Divide dialogs among micro-batches, sorted by length, so that each has little padding."""
        # The order adds no bias: the loss is a mean over the whole step.
        return super().to_micro_batches(sorted(dialogs, key=lambda dialog: len(dialog.tokens)))

    def count_divisor(self, dialogs: list[Example]) -> int:
        # the first token of a dialog is not a target, because no token predicts it
        return sum(int(dialog.loss_mask[1:].sum()) for dialog in dialogs)

    def metric_sums(self, model: nn.Module, batch: Batch) -> Sums:
        # The model's default is the mean over the targets of this batch. With reduction="none" the
        # backward pass of a large batch would compute its logits again (model/loss.py).
        mean_loss = model(batch.idx, batch.targets)
        # From the mean back to the sum, so that each target of the step has equal weight.
        num_targets = (batch.targets >= 0).sum()  # other positions hold NO_TARGET, -1
        return {"loss": mean_loss * num_targets}


@dataclass
class Pair:
    """A chosen and a rejected completion of one prompt; both examples begin with the prompt."""

    chosen: Example
    rejected: Example
    ref_logprobs: Tensor = field(init=False, repr=False, compare=False)
    """dpo: log-probabilities (2,) of chosen and rejected under the reference model, in nats,
    float32 on the CPU. Unset until DirectPreference.__post_init__ computes them."""


class RewardModeling(Method):
    """Reward model: learns to give the chosen completion of a pair a higher reward than the
    rejected one (Ouyang et al. 2022, equation 1)."""

    def to_example(self, row: dict) -> Pair:  # {"prompt": "2+3?", "chosen": "5", "rejected": "6"}
        # each has prompt and completion, cut to the context; loss_mask is True for the completion
        chosen = self.encoder.completion(row, "chosen")
        rejected = self.encoder.completion(row, "rejected")
        # they may be equal after the cut, or after a chat template has stripped a text
        if np.array_equal(chosen.tokens, rejected.tokens):
            raise ValueError(
                f"chosen and rejected are the same {len(chosen.tokens)} tokens in a context of "
                f"{self.encoder.block_size}: nothing can be learned from them"
            )
        return Pair(chosen, rejected)

    def make_batch(self, pairs: list[Pair]) -> Batch:
        """Return the chosen sequences of N pairs, then the rejected ones: 2 N sequences."""
        # A single batch, because DDP expects one forward pass for each backward pass.
        chosen = [pair.chosen for pair in pairs]
        rejected = [pair.rejected for pair in pairs]
        return super().make_batch(chosen + rejected)  # Examples, which it pads to one length

    def margin(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the margin (N,) of each pair: the reward of the chosen sequence minus the reward
        of the rejected one."""
        # make_batch puts all chosen sequences before all rejected ones
        chosen, rejected = rewards_at_end(model, batch).chunk(2)  # (N,) each
        return chosen - rejected

    def metric_sums(self, model: nn.Module, batch: Batch) -> Sums:
        margins = self.margin(model, batch)  # (N,): reward of chosen - reward of rejected
        return {
            "margin": margins.sum(),
            # Bradley-Terry model: a human prefers the chosen one with probability sigmoid(margin)
            "loss": -F.logsigmoid(margins).sum(),
            "accuracy": (margins > 0).float().sum(),  # a tie counts as wrong
        }


class DirectPreference(RewardModeling):
    """DPO (Rafailov et al. 2023, equation 7). The reward of a completion is beta * (its
    log-probability - its log-probability under the reference model). The second term is computed
    once, at the start."""

    @torch.no_grad()
    def __post_init__(self) -> None:
        super().__post_init__()  # reads the pairs
        # Without the StopSignal: after a signal map_across_processes would raise Stopped, which
        # only the loop of finetune.py catches.
        process = replace(self.process, stop=None)
        pairs: list[Pair] = self.examples + self.held_out
        # [(N, 2), ...] of all micro-batches, on every process: a step may give it any pair
        logprobs = process.map_across_processes(
            self.reference_logprobs, self.to_micro_batches(pairs)
        )
        # cat joins them to one row (2,) per pair
        for pair, ref_logprobs in zip(pairs, torch.cat(logprobs), strict=True):
            pair.ref_logprobs = ref_logprobs
        self.reference = None  # frees its memory

    def reference_logprobs(self, pairs: list[Pair]) -> Tensor:
        """Return the log-probabilities (N, 2) of the chosen and the rejected completions of N pairs
        under the reference model, in nats, summed over tokens, on the CPU."""
        assert self.reference  # open_method in finetune.py opens one for dpo
        batch = super().make_batch(pairs)  # without ref_logprobs, which are computed here
        with self.process.autocast(keep_weights=False):  # for one forward pass only
            logprobs = token_logprobs(self.reference, batch).sum(1)  # (2 N,)
        # The view is (2, N), because all chosen sequences come first in the batch. The result moves
        # to the CPU, because map_across_processes pickles it to send it to all processes.
        return logprobs.view(2, -1).T.cpu()

    def make_batch(self, pairs: list[Pair]) -> Batch:
        """Return the batch of N pairs, with the reference model's log-probabilities (2 N,)."""
        batch = super().make_batch(pairs)
        logprobs = torch.stack([pair.ref_logprobs for pair in pairs], 1)  # (2, N)
        # (2 N,) in the order of the batch: chosen 0, ..., rejected 0, ...
        batch.ref_logprobs = self.process.copy_to_device(logprobs.flatten())
        return batch

    def margin(self, model: nn.Module, batch: Batch) -> Tensor:
        logprobs = token_logprobs(model, batch).sum(1)  # (2 N,): one sum per completion
        assert batch.ref_logprobs is not None  # make_batch sets it
        # log(policy / reference) of each completion; beta times it is the implicit reward
        chosen, rejected = (logprobs - batch.ref_logprobs).chunk(2)  # (N,) each, chosen first
        return self.options.beta * (chosen - rejected)


def token_logprobs(model: nn.Module, batch: Batch) -> Tensor:
    """Return the log-probability (B, T) of each target, in nats, and 0 where there is no target.
    The sum of a row is the log-probability of its completion."""
    # The model's loss at a position is the negative log-probability of the target, 0 without one.
    return -model(batch.idx, batch.targets, reduction="none")
