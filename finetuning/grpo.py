"""GRPO (Shao et al. 2024): completions that the model samples itself, compared within groups.

A step takes `batch_size` prompts, samples `group_size` completions of each, and makes one optimizer
step from them. The completions of a step have indices: number i belongs to prompt i // group_size.
The processes share the completions, so that a group can be spread over several of them.

Shapes: N completions of a batch, T tokens of prompt and completion with padding.
"""

import time
from itertools import chain

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from config import SamplingConfig
from finetuning.completions import Completion, complete_questions
from finetuning.examples import Batch, Example, Question
from finetuning.methods import Method, PreparedStep, Sums, token_logprobs
from finetuning.rewards import RewardFunction
from model.gpt import GPT
from utils.seeds import hash_seed


class GroupRelativePolicy(Method):
    """Completions become likelier the more their reward is above the mean of their group. The
    reference model, if there is one, adds a KL divergence to the loss. An example is a Question."""

    reward_function: RewardFunction  # never None: FinetuneOptions demands --reward

    def __post_init__(self) -> None:
        super().__post_init__()  # reads the questions
        # A reward function that fails ends the run here, before --overwrite removes the checkpoints
        # of another run. It is tried with the first row: a function of the user's gets the answer
        # of the row as the text of a completion, a reward model reads the tokens of the prompt.
        question = self.examples[0]
        example = Example.of_completion(question.prompt_ids, [])
        answer = str(question.row.get("answer", ""))
        self.reward_function([Completion(question.row, answer, example, is_cut=False)])

    def to_example(self, row: dict) -> Question:
        return self.encoder.question(
            row,
            self.options.max_new_tokens,
            has_answer=self.options.reward == "exact",  # a reward function may not need it
        )

    def prepare(self, model: GPT, step: int, example_ids: np.ndarray) -> PreparedStep:
        """Sample and reward the completions of a step, `group_size` to each question of
        `example_ids` (batch_size,), and return the batches of this process. Every process must
        call it."""
        group_size = self.options.group_size
        seed = hash_seed(f"{self.options.seed} {step}")

        def complete_micro_batch(indices: list[int]) -> list[Completion]:
            """Return the completions of a micro-batch, whose indices are consecutive."""
            # the same question for each completion of a group
            questions = [self.examples[example_ids[index // group_size]] for index in indices]
            # The random numbers of a completion depend on seed, step and index alone, so that any
            # number of processes samples the same.
            sampling = SamplingConfig(self.options.max_new_tokens, temperature=1.0, seed=seed)
            return self.complete_and_reward(model, questions, sampling, first_index=indices[0])

        # those of the whole step, as a group can have completions from several processes
        indices = list(range(len(example_ids) * group_size))
        start_seconds = time.perf_counter()
        # raises Stopped after a signal; a resumed run samples the same completions again
        micro_batches = self.process.map(complete_micro_batch, self.micro_batches(indices))
        rollout_seconds = time.perf_counter() - start_seconds
        completions = list(chain.from_iterable(micro_batches))  # in the order of indices
        # float64, so that the means over groups and over the step round less
        rewards = torch.tensor(
            [completion.reward for completion in completions], dtype=torch.float64
        )
        rewards_by_group = rewards.view(-1, group_size)  # (batch_size, group_size)
        advantages = group_advantages(rewards_by_group).flatten().tolist()
        for completion, advantage in zip(completions, advantages, strict=True):
            completion.advantage = advantage  # read by make_batch
        batches = [self.make_batch(micro_batch) for micro_batch in self.of_process(micro_batches)]

        # for samples.txt, the first group: its prompt, then reward and text of each completion
        sample = f"prompt: {completions[0].row['prompt']!r}"
        for completion in completions[:group_size]:
            sample += f"\n{completion.reward:g}  {completion.text!r}"
        # tokens of each completion, including its end
        lengths = [completion.example.loss_mask.sum() for completion in completions]
        metrics = {  # means over the completions of all processes
            "reward": rewards.mean().item(),
            "completion_tokens": float(np.mean(lengths)),
            "cut": float(np.mean([completion.is_cut for completion in completions])),
            "rollout_ms": 1000 * rollout_seconds,  # included in the step's ms
        }
        return PreparedStep(batches, len(completions), metrics, sample)

    def complete_and_reward(
        self, model: GPT, questions: list[Question], sampling: SamplingConfig, first_index: int = 0
    ) -> list[Completion]:
        """Return a completion of each question, with its reward. Every process must call it."""
        completions = complete_questions(
            model, questions, self.encoder, sampling, self.process, first_index
        )
        with self.process.together():  # an error of one process ends the run on all
            rewards = self.reward_function(completions)
        for completion, reward in zip(completions, rewards, strict=True):
            completion.reward = reward  # read by prepare and held_out_sums
        return completions

    @torch.no_grad()
    def make_batch(self, completions: list[Completion]) -> Batch:
        """Return N completions as a batch, with their advantages and, under the reference model,
        the log-probabilities of their tokens."""
        batch = super().make_batch([completion.example for completion in completions])
        advantages = torch.tensor([completion.advantage for completion in completions])
        batch.advantages = self.process.copy_to_device(advantages)  # (N,), float32
        if self.reference is not None:  # None with --kl 0
            with self.process.autocast():
                batch.ref_logprobs = token_logprobs(self.reference, batch)
        return batch

    def metric_sums(self, model: nn.Module, batch: Batch) -> Sums:
        # each completion counts by its mean over tokens, whatever its length
        is_target = batch.targets >= 0  # (N, T), True where the next token is of the completion
        logprobs = token_logprobs(model, batch)  # (N, T), 0 at the prompt and at padding
        assert batch.advantages is not None  # make_batch sets them
        losses = policy_losses(logprobs, batch.advantages)  # (N, T)
        sums: Sums = {}
        if batch.ref_logprobs is not None:
            kl = kl_estimate(logprobs, batch.ref_logprobs)  # (N, T), in nats
            sums["kl"] = mean_over_tokens(kl, is_target).sum()
            losses = losses + self.options.kl * kl
        sums["loss"] = mean_over_tokens(losses, is_target).sum()
        return sums

    def held_out_sums(self, model: GPT, questions: list[Question]) -> Sums:
        """Return the sum of the rewards of the likeliest completions, one for each question. There
        is no loss: it does not tell how good completions are."""
        sampling = SamplingConfig(self.options.max_new_tokens, temperature=0)  # greedy
        completions = self.complete_and_reward(model, questions, sampling)
        rewards = [completion.reward for completion in completions]
        return {"reward": torch.tensor(rewards, dtype=torch.float64).sum()}


# the formulas


def group_advantages(rewards: Tensor) -> Tensor:
    """Return (reward - mean) / standard deviation within each group, for rewards (groups,
    group_size) (Shao et al. 2024, section 4.1.2); 0 in a group of equal rewards."""
    mean = rewards.mean(dim=1, keepdim=True)  # (groups, 1)
    std = rewards.std(dim=1, keepdim=True)  # (groups, 1); divides by group_size - 1, as in trl
    advantages = (rewards - mean) / (std + 1e-4)  # 1e-4 as in trl
    # The mean of equal numbers can be rounded: without this, noise would be divided by 1e-4.
    is_equal = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)
    return advantages.masked_fill(is_equal, 0.0)


def policy_losses(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Return the policy gradient loss (N, T) of each token, for log-probabilities (N, T) and the
    advantages (N,) of the completions: its value is -advantage, its gradient that of
    -advantage * logprob.

    It is equation 3 of Shao et al. 2024 for one optimizer step with each completion: the policy is
    still the one that sampled, so that the ratio of their probabilities is 1 and never clipped.
    """
    # exp(x - x) is 1, and its derivative is that of x, because the second x is a constant here
    ratio = (logprobs - logprobs.detach()).exp()  # (N, T)
    return -advantages[:, None] * ratio  # all tokens of a completion have its advantage


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return exp(ref - logprob) - (ref - logprob) - 1, (N, T): an unbiased estimate of the KL
    divergence from the reference, never negative (Shao et al. 2024, equation 4)."""
    difference = ref_logprobs - logprobs  # log(reference / policy) of each token
    return difference.exp() - difference - 1


def mean_over_tokens(per_token: Tensor, is_target: Tensor) -> Tensor:
    """Return the mean (N,) of numbers per token (N, T) over the targets of each completion."""
    # A mean over the tokens of all completions would give the long ones more weight. Nothing is
    # divided by 0: a completion that ends at once has its end as a target.
    return (per_token * is_target).sum(1) / is_target.sum(1)
