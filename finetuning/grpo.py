"""GRPO (Shao et al. 2024): completions that the model samples itself, compared within groups.

A step takes `batch_size` prompts and samples `group_size` completions of each. Completion p of the
step, its place, belongs to prompt p // group_size. The processes share the places, so that a group
can be spread over several of them.
"""

import time
import zlib

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from finetuning.completions import Completion, complete_questions
from finetuning.examples import Batch, Question, collate_padded
from finetuning.methods import Method, PreparedStep, token_logprobs
from finetuning.objectives import group_advantages, grpo_losses, kl_estimate, mean_over_tokens
from model.generate import Sampling
from model.gpt import GPT
from utils.devices import autocast


class GroupRelativePolicy(Method):
    """Completions become likelier the more their reward is above the mean of their group. The
    reference model, if there is one, adds a KL divergence to the loss."""

    unit = "prompts"

    def encode(self, row: dict) -> Question:
        # a reward function may do without an answer
        has_answer = self.config.reward == "exact"
        return self.encoder.question(row, self.config.max_new_tokens, has_answer=has_answer)

    def roll_out(
        self, model: GPT, questions: list[Question], sampling: Sampling
    ) -> list[Completion]:
        """Return a completion of each question."""
        return complete_questions(
            model, questions, self.encoder, sampling, self.process, self.dtype
        )

    def prepare(self, model: GPT, step: int, ids: np.ndarray) -> PreparedStep:
        group_size = self.config.group_size
        num_completions = len(ids) * group_size
        # places of this process, a list for each micro-step
        places = self.divide(range(num_completions), self.config.micro_batch_size)

        # Sample the completions. The random numbers of one depend on seed, step and place alone,
        # so that any number of processes samples the same.
        start_time = time.perf_counter()
        seed = zlib.crc32(f"{self.config.seed} {step}".encode())
        completions: list[list[Completion]] = []  # for each micro-step
        for micro_places in places:
            questions = [self.examples[ids[place // group_size]] for place in micro_places]
            length = self.config.max_new_tokens
            # the places of a micro-step are consecutive: row i of it is place first_row + i
            sampling = Sampling(length, seed=seed, first_row=micro_places[0])
            completions.append(self.roll_out(model, questions, sampling))
        rollout_seconds = time.perf_counter() - start_time

        # Reward them. Each process leaves zeros at the places of others, for the sum.
        values = torch.zeros(3, num_completions, dtype=torch.float64)
        for micro_places, written in zip(places, completions, strict=True):
            lengths = [completion.example.loss_mask.sum() for completion in written]
            are_cut = [completion.is_cut for completion in written]
            columns = [self.reward(written), lengths, are_cut]
            values[:, micro_places] = torch.tensor(columns, dtype=torch.float64)
        rewards, lengths, are_cut = self.process.sum_float64(values)  # (num_completions,) each
        groups = rewards.view(-1, group_size)  # (prompts, group_size): places follow each other
        advantages = group_advantages(groups).flatten().float()

        # The batches, and the first group of the main process as a sample
        batches = []
        for micro_places, written in zip(places, completions, strict=True):
            batches.append(self.batch(model, written, advantages[micro_places]))
        sample = f"prompt: {completions[0][0].row['prompt']!r}"
        # its places begin at 0, as those of `rewards`
        for place, completion in enumerate(completions[0][:group_size]):
            sample += f"\n{rewards[place].item():g}  {completion.text!r}"
        metrics = {
            "reward": rewards.mean().item(),
            "reward_std": groups.std(dim=1).mean().item(),
            "completion_tokens": lengths.mean().item(),
            "cut": are_cut.mean().item(),
            "rollout_ms": 1000 * rollout_seconds,
        }
        return PreparedStep(batches, num_completions, metrics, sample)

    @torch.no_grad()
    def batch(self, model: GPT, completions: list[Completion], advantages: Tensor) -> Batch:
        """Return completions (N) and their advantages (N,) as a batch."""
        examples = [completion.example for completion in completions]
        batch = collate_padded(examples, self.encoder.block_size)
        batch.advantages = advantages  # (N,)
        batch = batch.to_device(self.process)  # all that the micro-step needs
        with autocast(self.process.device, self.dtype):
            if self.reference is not None:
                batch.ref_logprobs = token_logprobs(self.reference, batch)
            if self.config.updates > 1:  # else the model is still the one that sampled
                batch.old_logprobs = token_logprobs(model, batch)
        return batch

    def partial_means(self, model: nn.Module, batch: Batch, divisor: int) -> dict[str, Tensor]:
        logprobs = token_logprobs(model, batch)  # (N, T), 0 at the prompt and at padding
        current = logprobs.detach()
        old = current if batch.old_logprobs is None else batch.old_logprobs
        ref = current if batch.ref_logprobs is None else batch.ref_logprobs
        clip, kl = self.config.clip, self.config.kl
        # the ratio of equal models is 1 and their KL divergence 0: then only advantages are left
        metrics = {"loss": grpo_losses(logprobs, old, ref, batch.advantages, clip=clip, kl=kl)}
        if batch.ref_logprobs is not None:
            metrics["kl"] = kl_estimate(current, ref)
        loss_mask = batch.targets >= 0  # (N, T): the completion's tokens
        return {
            name: mean_over_tokens(values, loss_mask).sum() / divisor
            for name, values in metrics.items()
        }

    def held_out_means(
        self, model: GPT, questions: list[Question], divisor: int
    ) -> dict[str, Tensor]:
        """Return the reward of the likeliest completions."""
        sampling = Sampling(self.config.max_new_tokens, temperature=0)  # no random numbers
        rewards = self.reward(self.roll_out(model, questions, sampling))
        return {"reward": torch.tensor(rewards, dtype=torch.float64).sum() / divisor}
