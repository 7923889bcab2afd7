"""GRPO (Shao et al. 2024): completions that the model samples itself, compared within groups.

A step takes `batch_size` prompts, samples `group_size` completions of each, and makes one update
from them. Completion p of the step, its place, belongs to prompt p // group_size. The processes
share the places, so that a group can be spread over several of them.

Shapes: N completions of a batch, T tokens.
"""

import zlib

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from finetuning.completions import Completion, complete_questions
from finetuning.examples import Batch, Question
from finetuning.methods import Method, PreparedStep, Sums, token_logprobs
from finetuning.rewards import RewardFunction
from model.generate import Sampling
from model.gpt import GPT
from utils.devices import autocast


class GroupRelativePolicy(Method):
    """Completions become likelier the more their reward is above the mean of their group. The
    reference model, if there is one, adds a KL divergence to the loss."""

    reward_function: RewardFunction  # never None: the options demand --reward

    def encode(self, row: dict) -> Question:
        return self.encoder.question(
            row,
            self.config.max_new_tokens,
            has_answer=self.config.reward == "exact",  # a reward function may do without
        )

    def prepare(self, model: GPT, step: int, example_ids: np.ndarray) -> PreparedStep:
        """Sample and reward the completions of a step, and return those of this process."""
        group_size = self.config.group_size
        num_completions = len(example_ids) * group_size
        places = self.places(num_completions)  # those of this process

        # Sample and reward the completions. The random numbers of one depend on seed, step and
        # place alone, so that any number of processes samples the same. Each process leaves zeros
        # at the places of others, for the sum below.
        seed = zlib.crc32(f"{self.config.seed} {step}".encode())
        values = torch.zeros(3, num_completions, dtype=torch.float64)
        completions: list[list[Completion]] = []  # for each micro-step
        for micro_places in places:
            prompt_ids = example_ids[micro_places // group_size]
            questions = [self.examples[i] for i in prompt_ids]
            # the places of a micro-step are consecutive: row i of it is place first_row + i
            first_row = int(micro_places[0])
            sampling = Sampling(self.config.max_new_tokens, seed=seed, first_row=first_row)
            micro_completions = complete_questions(
                model, questions, self.encoder, sampling, self.process, self.dtype
            )
            completions.append(micro_completions)
            columns = [
                self.reward_function(micro_completions),
                [completion.example.loss_mask.sum() for completion in micro_completions],
                [completion.is_cut for completion in micro_completions],
            ]
            values[:, micro_places] = torch.tensor(columns, dtype=torch.float64)

        # a group can have completions of several processes: its mean needs the rewards of all
        rewards, lengths, are_cut = self.process.sum_float64(values)  # (num_completions,) each
        groups = rewards.view(-1, group_size)  # (prompts, group_size): places follow each other
        advantages = group_advantages(groups).flatten().float()  # (num_completions,)

        batches = []
        for micro_places, micro_completions in zip(places, completions, strict=True):
            batches.append(self.completion_batch(micro_completions, advantages[micro_places]))

        # for samples.txt, the first group of the main process, as far as it is in one micro-batch
        sample = f"prompt: {completions[0][0].row['prompt']!r}"
        # the main process has the places from 0 on, so that these are its rewards
        for place, completion in enumerate(completions[0][:group_size]):
            sample += f"\n{rewards[place].item():g}  {completion.text!r}"
        metrics = {
            "reward": rewards.mean().item(),
            "completion_tokens": lengths.mean().item(),
            "cut": are_cut.mean().item(),
        }
        return PreparedStep(batches, num_completions, metrics, sample)

    @torch.no_grad()
    def completion_batch(self, completions: list[Completion], advantages: Tensor) -> Batch:
        """Return N completions and their advantages (N,) as a batch."""
        batch = self.batch([completion.example for completion in completions])
        batch.advantages = self.process.copy(advantages)
        if self.reference is not None:  # None with --kl 0
            with autocast(self.process.device, self.dtype):
                batch.ref_logprobs = token_logprobs(self.reference, batch)
        return batch

    def metric_sums(self, model: nn.Module, batch: Batch) -> Sums:
        is_target = batch.targets >= 0  # (N, T): the completion's tokens
        logprobs = token_logprobs(model, batch)  # (N, T), 0 at the prompt and at padding
        assert batch.advantages is not None  # of completion_batch
        losses = policy_losses(logprobs, batch.advantages)  # (N, T)
        sums: Sums = {}
        if batch.ref_logprobs is not None:
            kl = kl_estimate(logprobs, batch.ref_logprobs)  # (N, T)
            sums["kl"] = mean_over_tokens(kl, is_target).sum()
            losses = losses + self.config.kl * kl
        sums["loss"] = mean_over_tokens(losses, is_target).sum()
        return sums

    def held_out_sums(self, model: GPT, questions: list[Question]) -> Sums:
        """Return the reward of the likeliest completions."""
        sampling = Sampling(self.config.max_new_tokens, temperature=0)  # no random numbers
        completions = complete_questions(
            model, questions, self.encoder, sampling, self.process, self.dtype
        )
        rewards = torch.tensor(self.reward_function(completions), dtype=torch.float64)
        return {"reward": rewards.sum()}


# the formulas


def group_advantages(rewards: Tensor) -> Tensor:
    """Return (reward - mean) / standard deviation within each group, for rewards (groups, size)
    (Shao et al. 2024, section 4.1.2); 0 in a group of equal rewards."""
    mean = rewards.mean(dim=1, keepdim=True)  # (groups, 1)
    std = rewards.std(dim=1, keepdim=True)
    advantages = (rewards - mean) / (std + 1e-4)  # 1e-4 as in trl
    # The mean of equal numbers can be rounded: without this, noise would be divided by 1e-4.
    is_equal = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)
    return advantages.masked_fill(is_equal, 0.0)


def policy_losses(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Return the policy gradient loss (N, T) of each token, for log-probabilities (N, T) and the
    advantages (N,) of the completions: its value is -advantage, its gradient that of
    -advantage * logprob.

    It is equation 3 of Shao et al. 2024 for one update with each completion: the policy is still
    the one that sampled, so that the ratio of their probabilities is 1 and never clipped.
    """
    # exp(x - x) is 1, and its derivative is that of x, because the second x is a constant here
    ratio = (logprobs - logprobs.detach()).exp()  # (N, T)
    return -advantages[:, None] * ratio  # all tokens of a completion have its advantage


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return exp(ref - logprob) - (ref - logprob) - 1, (N, T): an unbiased estimate of the KL
    divergence from the reference, never negative (Shao et al. 2024, equation 4)."""
    difference = ref_logprobs - logprobs
    return difference.exp() - difference - 1


def mean_over_tokens(values: Tensor, is_target: Tensor) -> Tensor:
    """Return the mean (N,) of values (N, T) over the targets of each completion."""
    # a mean over the tokens of all completions would give the long ones more weight
    return (values * is_target).sum(1) / is_target.sum(1)
