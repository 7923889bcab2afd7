"""GRPO: completions that the model samples itself, rewarded and compared within groups."""

import time
import zlib
from collections.abc import Callable

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from finetuning.chat import Example, decode_completion
from finetuning.examples import Batch, collate_padded
from finetuning.methods import Method, token_logprobs
from finetuning.objectives import group_advantages, grpo_losses, kl_estimate, mean_over_tokens
from finetuning.rewards import Completion
from model.compile import compile_static
from model.generate import Sampling, complete, decode_token
from model.gpt import GPT
from utils.devices import autocast


class GroupRelativePolicy(Method):
    """GRPO: completions of a prompt become likelier the more their reward is above the mean of
    their group. Without a reference there is no KL term."""

    unit = "prompts"
    selects_best_by_loss = False

    @property
    def decode(self) -> Callable[..., Tensor] | None:
        """Step of sampling: compiled if asked for, unless forward passes are collectives."""
        compiled = self.options.use_torch_compile and self.options.sharding == "none"
        return compile_static(decode_token) if compiled else None

    def encode(self, row: dict) -> tuple[dict, list[int]]:
        exact = self.options.reward == "exact"
        return self.encoder.question(row, self.options.max_new_tokens, answered=exact)

    def divisor(self, ids: np.ndarray) -> int:
        return len(ids) * self.options.group_size

    def micro_batches(
        self, model: GPT, step: int, ids: np.ndarray
    ) -> tuple[list[Batch], dict[str, float]]:
        """Return sampled completions as batches, with advantages and log-probabilities."""
        began, size = time.perf_counter(), self.options.group_size
        # places of this process's completions in the step: (micro-steps, micro-batch)
        grid = self.options.slice_steps(self.process).rank_ids(np.arange(len(ids) * size))
        seed = zlib.crc32(f"{self.options.seed} {step}".encode())
        groups = [
            self.roll_out(model, ids[places // size], seed=seed, first_row=int(places[0]))
            for places in grid
        ]
        seconds = time.perf_counter() - began
        measured = torch.zeros(3, len(ids) * size, dtype=torch.float64)
        for places, group in zip(grid, groups, strict=True):
            lengths = [c.example.loss_mask.sum() for c in group]
            are_cut = [c.is_cut for c in group]
            values = [self.reward(group), lengths, are_cut]
            measured[:, places] = torch.tensor(values, dtype=torch.float64)
        rewards, lengths, are_cut = self.process.sum_float64(measured)
        advantages = group_advantages(rewards.view(-1, size)).flatten().float()
        batches = []
        for places, group in zip(grid, groups, strict=True):
            examples = [c.example for c in group]
            batch = collate_padded(examples, self.encoder.block_size)
            batch = self.on_device(batch | {"advantages": advantages[places]})
            with torch.no_grad(), autocast(self.process.device, self.dtype):
                if self.reference is not None:  # None without a KL term
                    batch["reference"] = token_logprobs(self.reference, batch)
                if self.options.updates > 1:
                    batch["old"] = token_logprobs(model, batch)
            batches.append(batch)
        self.sample = f"prompt: {groups[0][0].row['prompt']!r}"
        for place, completion in list(zip(grid[0], groups[0], strict=True))[:size]:
            self.sample += f"\n{rewards[place].item():g}  {completion.text!r}"
        figures = {
            "reward": rewards.mean().item(),
            "reward_std": rewards.view(-1, size).std(dim=1).mean().item(),
            "completion_tokens": lengths.mean().item(),
            "cut": are_cut.mean().item(),
            "rollout_ms": 1000 * seconds,
        }
        return batches, figures

    def roll_out(self, model: GPT, ids: np.ndarray, **options) -> list[Completion]:
        """Return a completion of the prompt of each of the examples `ids`; options of Sampling."""
        tokenizer, longest = self.encoder.tokenizer, self.options.max_new_tokens
        rows, prompts = zip(*(self.examples[i] for i in ids), strict=True)
        sampling, all_done = Sampling(longest, **options), self.process.all_done
        completions = []
        model.eval()
        with autocast(self.process.device, self.dtype):
            ends = tokenizer.end_ids
            texts = complete(model, list(prompts), ends, sampling, all_done, self.decode)
        model.train()
        for row, prompt, written in zip(rows, prompts, texts, strict=True):
            text = decode_completion(written.tokens, tokenizer, self.encoder.chat)
            is_cut = written.end_id is None
            tokens = written.tokens if is_cut else [*written.tokens, written.end_id]
            example = Example.join((prompt, False), (tokens, True))
            completions.append(Completion(row, text, example, is_cut))
        return completions

    def partial_means(self, model: nn.Module, batch: Batch, divisor: int) -> dict[str, Tensor]:
        logprobs, loss_mask = token_logprobs(model, batch), batch["targets"] >= 0
        old = batch.get("old", logprobs.detach())  # equal in the first update
        reference = batch.get("reference", logprobs.detach())
        factors = {"clip": self.options.clip, "kl": self.options.kl}
        figures = {"loss": grpo_losses(logprobs, old, reference, batch["advantages"], **factors)}
        if "reference" in batch:
            figures["kl"] = kl_estimate(logprobs.detach(), reference)
        return {k: mean_over_tokens(x, loss_mask).sum() / divisor for k, x in figures.items()}

    def held_out_means(self, model: GPT, ids: np.ndarray, divisor: int) -> dict[str, Tensor]:
        """Return the reward of the likeliest completions."""
        rewards = self.reward(self.roll_out(model, ids, temperature=0))
        return {"reward": torch.tensor(rewards, dtype=torch.float64).sum() / len(self)}
