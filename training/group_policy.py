"""GRPO: completions that the model samples itself, rewarded and compared within groups."""

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from data.chat import Example, decode_completion
from data.chat_examples import ChatData, collate
from model.generate import complete
from model.gpt import GPT
from training.methods import Batch, Method, Shares, token_logprobs
from training.objectives import group_advantages, grpo_loss, kl_estimate
from training.rewards import Completion, Reward, RewardError
from utils.devices import autocast
from utils.errors import UserError


@dataclass(frozen=True)
class Rollout:
    """How completions are sampled for GRPO."""

    group_size: int
    max_new_tokens: int
    seed: int
    updates: int


class GroupRelativePolicy(Method):
    """GRPO: completions of a prompt become likelier the more their reward is above the mean of
    their group. Without a reference there is no KL term."""

    unit = "prompts"

    def __init__(
        self,
        data: ChatData,
        *setup,
        rollout: Rollout,
        reward: Reward,
        reference: GPT | None,
        clip: float,
        kl: float,
    ) -> None:
        super().__init__(data, *setup)
        self.rollout, self.reward, self.reference = rollout, reward, reference
        self.clip, self.kl = clip, kl
        self.items_per_example = rollout.group_size
        self.prompts = data.prompts(rollout.max_new_tokens)
        self.newest: list[tuple[float, Completion]] = []

    def micro_batches(
        self, model: GPT, step: int, ids: np.ndarray, grid: np.ndarray
    ) -> tuple[list[Batch], dict[str, float]]:
        """Return sampled completions as batches, with advantages and log-probabilities."""
        began, size = time.perf_counter(), self.rollout.group_size
        seed = zlib.crc32(f"{self.rollout.seed} {step}".encode())
        groups = [
            self.complete(model, ids[some // size], first_row=int(some[0]), seed=seed)
            for some in grid
        ]
        sampled = time.perf_counter()
        rewards = self.all_rewards(groups, grid, len(ids) * size)
        advantages = group_advantages(rewards.view(-1, size)).flatten().float()
        batches = [self.scored(model, group) for group in groups]
        for batch, some in zip(batches, grid, strict=True):
            batch["advantages"] = advantages[some].to(self.process.device)
        self.newest = list(zip(rewards[grid[0]].tolist(), groups[0], strict=True))
        tokens = torch.tensor([sum(sum(c.example.learned) for group in groups for c in group)])
        seconds = sampled - began
        figures = {
            "reward": rewards.mean().item(),
            "reward_std": rewards.view(-1, size).std(dim=1).mean().item(),
            "completion_tokens": self.process.sum_float64(tokens.double()).item() / len(rewards),
            "rollout_tokens_per_s": self.process.world_size * tokens.item() / seconds,
            "rollout_ms": 1000 * seconds,
            "scoring_ms": 1000 * (time.perf_counter() - sampled),
        }
        return batches, figures

    def complete(self, model: GPT, ids: np.ndarray, **options) -> list[Completion]:
        """Return a completion of the prompt of each of the examples `ids`."""
        tokenizer, longest = self.data.tokenizer, self.rollout.max_new_tokens
        prompts = [self.prompts[i] for i in ids]
        options |= {"max_new_tokens": longest, "all_done": self.process.all_agree}
        model.eval()
        with autocast(self.process.device, self.dtype):
            found = complete(model, prompts, tokenizer.eot, **options)
        model.train()
        completions = []
        for i, prompt, tokens in zip(ids, prompts, found, strict=True):
            text = decode_completion(tokens, tokenizer, self.data.chat)
            said = tokens + [tokenizer.eot] * (len(tokens) < longest)
            learned = [False] * len(prompt) + [True] * len(said)
            example = Example(prompt + said, learned)
            completions.append(Completion(self.data.rows[i], text, example))
        return completions

    def all_rewards(
        self, groups: list[list[Completion]], positions: Sequence[np.ndarray], count: int
    ) -> Tensor:
        """Return the rewards (count,) of the completions of all processes, of which this one has
        `groups` at `positions`."""
        rewards, problem = torch.zeros(count, dtype=torch.float64), None
        try:
            for some, group in zip(positions, groups, strict=True):
                rewards[some] = torch.tensor(self.reward(group), dtype=torch.float64)
        except UserError as error:
            problem = error
        if not self.process.all_agree(problem is None):
            raise problem or RewardError("another process could not compute a reward")
        return self.process.sum_float64(rewards)

    @torch.no_grad()
    def scored(self, model: GPT, completions: list[Completion]) -> Batch:
        """Return completions as a batch with the log-probabilities that the loss compares with."""
        batch = self.to_device(collate([c.example for c in completions], self.data.block_size))
        compared = {"reference": self.reference}  # None without a KL term
        compared["old"] = model if self.rollout.updates > 1 else None
        with autocast(self.process.device, self.dtype):
            scores = {k: token_logprobs(m, batch) for k, m in compared.items() if m is not None}
        return batch | scores

    def shares(self, model: nn.Module, batch: Batch, total: int) -> Shares:
        logprobs, learned = token_logprobs(model, batch), batch["targets"] >= 0
        old = batch.get("old", logprobs.detach())  # equal in the first update
        reference = batch.get("reference", logprobs.detach())
        options = {"clip": self.clip, "kl": self.kl}
        losses = grpo_loss(logprobs, old, reference, batch["advantages"], learned, **options)
        kl = (kl_estimate(logprobs.detach(), reference) * learned).sum(1) / learned.sum(1)
        return {"loss": losses.sum() / total, "kl": kl.sum() / total}

    def describe_newest(self) -> str:
        """Return the first group of the newest step with its rewards, for samples.txt."""
        group = self.newest[: self.rollout.group_size]
        lines = [f"{reward:g}  {completion.text!r}" for reward, completion in group]
        return "\n".join([f"prompt: {group[0][1].row['prompt']!r}", *lines])

    @torch.no_grad()
    def evaluate(self, model: GPT) -> dict[str, float]:
        """Return the mean reward of the likeliest completion of each prompt."""
        batches, groups, positions = self.in_order(), [], []
        for turn in range(0, len(batches), self.process.world_size):
            mine = turn + self.process.rank
            ids = batches[min(mine, len(batches) - 1)]
            found = self.complete(model, ids, temperature=0)
            if mine < len(batches):
                groups.append(found)
                positions.append(ids)
        return {"reward": self.all_rewards(groups, positions, len(self)).mean().item()}
