"""GRPO: completions that the model samples itself, rewarded and compared within groups."""

import time
import zlib
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from finetuning.chat import Example, decode_completion
from finetuning.examples import ChatData, collate
from finetuning.methods import Batch, Method, token_logprobs
from finetuning.objectives import group_advantages, grpo_loss, kl_estimate
from finetuning.rewards import Completion, Reward
from model.generate import complete
from model.gpt import GPT
from utils.devices import autocast
from utils.errors import UserError


class GroupRelativePolicy(Method):
    """GRPO: completions of a prompt become likelier the more their reward is above the mean of
    their group. Without a reference there is no KL term."""

    fields = ("prompt",)
    unit = "prompts"
    selects_best_by_loss = False

    def __init__(self, data: ChatData, *setup, reference: GPT | None, reward: Reward) -> None:
        super().__init__(data, *setup)
        self.reference, self.reward = reference, reward
        self.prompts = data.prompts(self.options.max_new_tokens)
        self.newest: list[tuple[float, Completion]] = []

    def divisor(self, ids: np.ndarray) -> int:
        return len(ids) * self.options.group_size

    def micro_batches(
        self, model: GPT, step: int, ids: np.ndarray, grid: np.ndarray
    ) -> tuple[list[Batch], dict[str, float]]:
        """Return sampled completions as batches, with advantages and log-probabilities."""
        began, size = time.perf_counter(), self.options.group_size
        seed = zlib.crc32(f"{self.options.seed} {step}".encode())
        groups = [
            self.roll_out(model, ids[places // size], first_row=int(places[0]), seed=seed)
            for places in grid
        ]
        sampled = time.perf_counter()
        rewards = self.all_rewards(groups, grid, len(ids) * size)
        advantages = group_advantages(rewards.view(-1, size)).flatten().float()
        batches = [self.with_logprobs(model, group) for group in groups]
        for batch, places in zip(batches, grid, strict=True):
            batch["advantages"] = advantages[places].to(self.process.device)
        self.newest = list(zip(rewards[grid[0]].tolist(), groups[0], strict=True))
        tokens = torch.tensor([sum(c.example.loss_mask.sum() for group in groups for c in group)])
        if self.process.device.type == "cuda":
            torch.cuda.synchronize()  # for the time of scoring
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

    def roll_out(self, model: GPT, ids: np.ndarray, **sampling) -> list[Completion]:
        """Return a completion of the prompt of each of the examples `ids`; options of generate."""
        tokenizer, longest = self.data.tokenizer, self.options.max_new_tokens
        prompts = [self.prompts[i] for i in ids]
        sampling |= {"max_new_tokens": longest, "all_done": self.process.all_agree}
        model.eval()
        with autocast(self.process.device, self.dtype):
            found = complete(model, prompts, tokenizer.eot, **sampling)
        model.train()
        completions = []
        for i, prompt, tokens in zip(ids, prompts, found, strict=True):
            text = decode_completion(tokens, tokenizer, self.data.chat)
            said = tokens + [tokenizer.eot] * (len(tokens) < longest)
            example = Example.join([(np.array(prompt), False), (np.array(said), True)])
            completions.append(Completion(self.data.rows[i], text, example))
        return completions

    def all_rewards(
        self, groups: list[list[Completion]], positions: Sequence[np.ndarray], count: int
    ) -> Tensor:
        """Return the rewards (count,) of the completions of all processes, of which this one has
        `groups` at `positions`."""
        rewards, problem = torch.zeros(count, dtype=torch.float64), None
        try:
            for places, group in zip(positions, groups, strict=True):
                rewards[places] = torch.tensor(self.reward(group), dtype=torch.float64)
        except UserError as error:
            problem = error
        if not self.process.all_agree(problem is None):
            raise problem or UserError("another process could not compute a reward")
        return self.process.sum_float64(rewards)

    @torch.no_grad()
    def with_logprobs(self, model: GPT, completions: list[Completion]) -> Batch:
        """Return completions as a batch with the log-probabilities that the loss compares with."""
        batch = self.to_device(collate([c.example for c in completions], self.data.block_size))
        compared = {"reference": self.reference}  # None without a KL term
        compared["old"] = model if self.options.updates > 1 else None
        with autocast(self.process.device, self.dtype):
            scores = {k: token_logprobs(m, batch) for k, m in compared.items() if m is not None}
        return batch | scores

    def partial_means(self, model: nn.Module, batch: Batch, divisor: int) -> dict[str, Tensor]:
        logprobs, loss_mask = token_logprobs(model, batch), batch["targets"] >= 0
        old = batch.get("old", logprobs.detach())  # equal in the first update
        reference = batch.get("reference", logprobs.detach())
        factors = {"clip": self.options.clip, "kl": self.options.kl}
        losses = grpo_loss(logprobs, old, reference, batch["advantages"], loss_mask, **factors)
        figures = {"loss": losses.sum() / divisor}
        if "reference" in batch:
            kl = kl_estimate(logprobs.detach(), reference) * loss_mask
            figures["kl"] = (kl.sum(1) / loss_mask.sum(1)).sum() / divisor
        return figures

    def sample_text(self) -> str:
        """Return the first group of the newest step with its rewards."""
        group = self.newest[: self.options.group_size]
        lines = [f"{reward:g}  {completion.text!r}" for reward, completion in group]
        return "\n".join([f"prompt: {group[0][1].row['prompt']!r}", *lines])

    @torch.no_grad()
    def evaluate(self, model: GPT) -> dict[str, float]:
        """Return the mean reward of the likeliest completion of each prompt."""
        groups, positions = [], []
        for _, ids, counts in self.process.share(self.batches_in_order()):
            found = self.roll_out(model, ids, temperature=0)
            if counts:
                groups.append(found)
                positions.append(ids)
        return {"reward": self.all_rewards(groups, positions, len(self)).mean().item()}
