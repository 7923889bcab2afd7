"""Rewards of completions: by the row's answer, a function of the user's, or a reward model."""

import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from data.tokenizer import tokenizer_identity
from finetuning.chat import Example, is_chat
from finetuning.examples import Batch, TextEncoder, collate_padded
from model.config import GPTConfig
from model.gpt import GPT
from training.checkpoint import find_checkpoint, load_model
from utils.devices import autocast
from utils.errors import UserError


class RewardModel(GPT):
    """GPT with a head for the reward of the text so far in place of the tokens' (config: tied)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.reward_head = nn.Linear(config.n_embd, 1, bias=False)
        nn.init.zeros_(self.reward_head.weight)

    @classmethod
    def from_gpt(cls, model: GPT) -> "RewardModel":
        """Return a reward model with the weights of a model and a head of zeros."""
        scorer = cls(replace(model.config, tied=True))
        scorer.load_state_dict(model.state_dict(), strict=False)  # the heads differ
        return scorer

    def logits(self, x: Tensor) -> Tensor:
        """Return rewards (B, T, 1) of hidden states (B, T, C), in float32."""
        return (x.float() * self.reward_head.weight.float()).sum(-1, keepdim=True)


def rewards_at_end(model: nn.Module, batch: Batch) -> Tensor:
    """Return the rewards (B,) in float32 of whole texts, read after the last token of each."""
    rewards = model(batch["idx"]).float().squeeze(-1)  # (B, T)
    return rewards.gather(1, batch["last"][:, None]).squeeze(1)


class Completion(NamedTuple):
    """Completion of a row's prompt."""

    row: dict
    text: str
    example: Example | None = None
    """Its tokens, with the one that ended it, after those of the prompt; None of a question."""
    is_cut: bool = False
    """True if it has the longest length, and no end."""


Reward = Callable[[list[Completion]], list[float]]


def is_exact(completion: Completion) -> bool:
    """Return True if a completion is the row's answer, apart from white space around either. One
    that was cut is none: it may be the beginning of another answer."""
    answer = str(completion.row["answer"])
    return not completion.is_cut and completion.text.strip() == answer.strip()


def load_reward(
    name: str, encoder: TextEncoder, device: torch.device, dtype: torch.dtype
) -> Reward:
    """Return the reward of --reward `name` for texts of `encoder`."""
    if name == "exact":
        return lambda completions: [float(is_exact(c)) for c in completions]
    file, _, function = name.rpartition(":")
    if file.endswith(".py"):
        sys.path.append(str(Path(file).resolve().parent))  # modules beside it can be imported
        try:
            score = runpy.run_path(file)[function]
        except Exception as error:
            raise UserError(f"--reward {name} cannot be loaded: {error!r}") from error
        return lambda completions: [
            float(score(c.row["prompt"], c.text, c.row)) for c in completions
        ]
    path = None if name.endswith(".py") else find_checkpoint(name)
    if path is None:
        raise UserError(
            f"--reward {name} is none of exact, FILE.py:FUNCTION, and a checkpoint of --method "
            "reward or its folder"
        )
    model, saved = load_model(path, RewardModel, exact=True)
    tokenizer = saved["tokenizer"]
    text_format = tokenizer_identity(tokenizer), is_chat(saved, name, tokenizer)
    same_text = text_format == (encoder.tokenizer.identity, encoder.chat)
    if not same_text or model.config.block_size < encoder.block_size:
        problem = "another tokenizer, another kind of text (--plain), or a shorter context"
        raise UserError(f"--reward {name} has {problem} than this run")
    return partial(rate, model.to(device), dtype)


def check_reward(name: str, reward: Reward, row: dict, prompt: list[int], eot: int) -> None:
    """Raise UserError if a reward fails for a first completion, the answer of the row if it has
    one: called before a run removes anything."""
    tokens = Example.join((prompt, False), ([eot], True))
    completion = Completion(row, str(row.get("answer", "")), tokens)
    try:
        reward([completion])
    except Exception as error:
        problem = f"fails for the first row and the completion {completion.text!r}: {error!r}"
        raise UserError(f"--reward {name} {problem}") from error


@torch.no_grad()
def rate(model: RewardModel, dtype: torch.dtype, completions: list[Completion]) -> list[float]:
    """Return the rewards of completions by a reward model."""
    device = model.reward_head.weight.device
    batch = collate_padded([c.example for c in completions], model.config.block_size)
    batch = {name: x.to(device) for name, x in batch.items()}
    with autocast(device, dtype):
        return rewards_at_end(model, batch).tolist()
