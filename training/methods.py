"""Methods of fine-tuning: the examples of each, and its loss on a batch of them.

The shares that a method returns for a batch are parts of means over all examples of a step: summed
over micro-batches and processes they are these means, whatever the number of either.
"""

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from data.chat import ChatData, Example, collate, collate_packed, decode_completion, pack
from model.generate import complete
from model.gpt import GPT
from training.objectives import dpo_loss, group_advantages, grpo_loss, kl_estimate, reward_loss
from training.rewards import Completion, Reward, RewardError, rewards_at_end
from utils.devices import autocast
from utils.distributed import Process
from utils.errors import UserError

Batch = dict[str, Tensor]
Shares = dict[str, Tensor]


class Method:
    """Base of all methods: examples by index, evaluated in order."""

    unit = "pairs"
    """Name of the examples that a step counts."""
    items_per_example = 1
    """Items of a micro-batch that an example gives."""

    def __init__(
        self, data: ChatData, process: Process, dtype: torch.dtype, micro_batch_size: int
    ) -> None:
        self.data, self.process, self.dtype = data, process, dtype
        self.micro_batch_size = micro_batch_size

    def __len__(self) -> int:
        return len(self.data.rows)

    def total(self, ids: np.ndarray) -> int:
        """Return what means over the examples `ids` are divided by."""
        return len(ids) * self.items_per_example

    def batch(self, ids: np.ndarray) -> Batch:
        """Return examples as tensors on the device."""
        raise NotImplementedError

    def shares(self, model: nn.Module, batch: Batch, total: int) -> Shares:
        """Return "loss" and other figures of a batch as shares of means."""
        raise NotImplementedError

    def micro_batches(
        self, model: GPT, step: int, ids: np.ndarray, grid: np.ndarray
    ) -> tuple[list[Batch], dict[str, float]]:
        """Return this process's batches of a step, and figures for the log. `grid` (micro-steps,
        micro-batch) are the positions of its items among those of the examples `ids` (G,)."""
        return [self.batch(ids[positions]) for positions in grid], {}

    def to_device(self, arrays: dict[str, np.ndarray]) -> Batch:
        """Return arrays as tensors on the device."""
        return {name: torch.from_numpy(x).to(self.process.device) for name, x in arrays.items()}

    def in_order(self) -> list[np.ndarray]:
        """Return the indices of all examples in batches."""
        n, size = len(self), self.micro_batch_size
        return np.array_split(np.arange(n), range(size, n, size))

    @torch.no_grad()
    def evaluate(self, model: GPT) -> dict[str, float]:
        """Return the mean of each figure over all examples; the processes share the work, and all
        run equally many forward passes."""
        model.eval()
        batches, total, sums = self.in_order(), self.total(np.arange(len(self))), {}
        for turn in range(0, len(batches), self.process.world_size):
            mine = turn + self.process.rank
            batch = self.batch(batches[min(mine, len(batches) - 1)])
            with autocast(self.process.device, self.dtype):
                shares = self.shares(model, batch, total)
            for name, share in shares.items():
                sums[name] = sums.get(name, 0.0) + share.item() * (mine < len(batches))
        model.train()
        values = self.process.sum_float64(torch.tensor([*sums.values()], dtype=torch.float64))
        return dict(zip(sums, values.tolist(), strict=True))


class SupervisedTuning(Method):
    """Cross-entropy of what the assistant says; dialogs are packed into sequences."""

    unit = "packed sequences"

    def __init__(self, data: ChatData, *setup) -> None:
        super().__init__(data, *setup)
        self.examples = data.dialogs()
        self.packs = pack([len(x.tokens) - 1 for x in self.examples], data.block_size)

    def __len__(self) -> int:
        return len(self.packs)

    def total(self, ids: np.ndarray) -> int:
        return sum(sum(x.learned[1:]) for i in ids for x in self.packed(i))

    def packed(self, i: int) -> list[Example]:
        """Return the examples of a sequence."""
        return [self.examples[number] for number in self.packs[i]]

    def batch(self, ids: np.ndarray) -> Batch:
        packs = [self.packed(i) for i in ids]
        return self.to_device(collate_packed(packs, self.data.block_size))

    def shares(self, model: nn.Module, batch: Batch, total: int) -> Shares:
        learned = (batch["targets"] >= 0).sum()
        return {"loss": model(**batch) * learned / total}


class PairMethod(Method):
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

    def shares(self, model: nn.Module, batch: Batch, total: int) -> Shares:
        chosen, rejected = rewards_at_end(model, batch).chunk(2)
        figures = {
            "loss": reward_loss(chosen, rejected),
            "accuracy": (chosen > rejected).float(),
            "margin": chosen - rejected,
        }
        return {name: values.sum() / total for name, values in figures.items()}


class DirectPreference(PairMethod):
    """DPO: the chosen completion becomes likelier than the rejected one, by comparison with a
    reference model, whose log-probabilities are computed once."""

    def __init__(self, data: ChatData, *setup, reference: GPT, beta: float) -> None:
        super().__init__(data, *setup)
        self.beta = beta
        self.reference = self.score(reference)  # (2, pairs)

    @torch.no_grad()
    def score(self, reference: GPT) -> Tensor:
        """Return the log-probabilities of all completions; the processes share the work."""
        found = torch.zeros(2, len(self), dtype=torch.float64)
        for ids in self.in_order()[self.process.rank :: self.process.world_size]:
            with autocast(self.process.device, self.dtype):
                logprobs = token_logprobs(reference, super().batch(ids)).sum(1)
            found[:, ids] = logprobs.view(2, -1).double().cpu()
        return self.process.sum_float64(found)

    def batch(self, ids: np.ndarray) -> Batch:
        reference = self.reference[:, ids].flatten().float().to(self.process.device)
        return super().batch(ids) | {"reference": reference}

    def shares(self, model: nn.Module, batch: Batch, total: int) -> Shares:
        chosen, rejected = token_logprobs(model, batch).sum(1).chunk(2)
        ref_chosen, ref_rejected = batch["reference"].chunk(2)
        margin = self.beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
        figures = {
            "loss": dpo_loss(chosen, rejected, ref_chosen, ref_rejected, self.beta),
            "accuracy": (margin > 0).float(),
            "margin": margin,
            "preferred": (chosen > rejected).float(),
        }
        return {name: values.sum() / total for name, values in figures.items()}


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


def token_logprobs(model: nn.Module, batch: Batch) -> Tensor:
    """Return the log-probability (B, T) of each token that is learned, 0 elsewhere."""
    return -model(batch["idx"], batch["targets"], reduction="none")
