"""Rewards of completions: by the row's answer, a function of the user's, or a reward model."""

import copy
import importlib.util
import sys
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from reprlib import repr as brief
from typing import NamedTuple

import torch
from training.checkpoint_folder import find_best, is_chat

from data.tokenizer import Tokenizer
from finetuning.chat import Example, is_exact
from finetuning.examples import collate
from finetuning.rows import Row
from model.gpt import GPT
from training.checkpoint import load_model
from utils.devices import autocast
from utils.errors import UserError


class Completion(NamedTuple):
    """A completion of a row's prompt: its text, and its tokens after those of the prompt."""

    row: Row
    text: str
    example: Example


Reward = Callable[[list[Completion]], list[float]]
LARGEST = 1e100  # so that the variance of a group is finite


def load_reward(
    name: str, tokenizer: Tokenizer, chat: bool, device: torch.device, dtype: torch.dtype
) -> Reward:
    """Return the reward called `name`: "exact", FILE.py:FUNCTION, or a reward model's checkpoint,
    for the turns of a chat or for plain text. Raises UserError if it cannot be used."""
    if name == "exact":
        return lambda completions: [float(is_exact(c.text, c.row["answer"])) for c in completions]
    file, _, function = name.rpartition(":")
    if name.endswith(".py"):
        raise UserError(f"--reward {name} names no function: give {name}:FUNCTION")
    if file.endswith(".py"):
        return reward_of_function(load_function(Path(file), function), name)
    model, saved = load_model(find_best(Path(name)), exact=True)
    if not model.config.reward_head:
        raise UserError(f"--reward {name} is no reward model: make one by --method reward")
    if saved["tokenizer"] != tokenizer.name:
        tokenizers = f"{saved['tokenizer']} tokens, the model {tokenizer.name}"
        raise UserError(f"--reward {name} has {tokenizers}")
    if is_chat(saved) != chat:
        kinds = ("a chat", "plain text") if is_chat(saved) else ("plain text", "a chat")
        raise UserError(f"--reward {name} has learned {kinds[0]}, and this run is of {kinds[1]}")
    return reward_of_model(model.to(device), dtype)


def load_function(path: Path, name: str) -> Callable:
    """Return a function of a Python file."""
    if not path.is_file():
        raise UserError(f"--reward {path}:{name}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for their module there
    sys.path.append(str(path.resolve().parent))  # what stands beside the file can be imported
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UserError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{path} has no function {name!r}; give --reward FILE.py:FUNCTION")
    return function


def reward_of_function(function: Callable, name: str) -> Reward:
    """Return a reward by function(prompt, completion, row) -> number."""

    def reward(completions: list[Completion]) -> list[float]:
        found = []
        for row, text, _ in completions:
            where = f"{name}, for {row.where}, and the completion {text!a}"
            given = copy.deepcopy(dict(row))  # the function may change it
            try:
                value = function(given["prompt"], text, given)
                value = value.item() if hasattr(value, "item") else value  # of numpy and torch
            except (Exception, SystemExit) as error:
                raise UserError(f"{where}: {type(error).__name__}: {error}") from error
            if not isinstance(value, Real) or not -LARGEST <= value <= LARGEST:
                expected = f"expected a number from {-LARGEST:g} to {LARGEST:g}"
                raise UserError(f"{where}: returned {brief(value)}; {expected}")
            found.append(float(value))
        return found

    return reward


def reward_of_model(model: GPT, dtype: torch.dtype) -> Reward:
    """Return a reward by a reward model."""

    @torch.no_grad()
    def reward(completions: list[Completion]) -> list[float]:
        examples = [completion.example for completion in completions]
        longest = max(map(len, examples))
        if longest > model.config.block_size:
            raise UserError(
                f"a completion with its prompt is {longest} tokens long, more than the context of "
                f"the reward model, {model.config.block_size}; lower --max_new_tokens"
            )
        device = model.transformer.wte.weight.device
        batch = {
            k: torch.from_numpy(x).to(device)
            for k, x in collate(examples, model.config.block_size).items()
        }
        with autocast(device, dtype):
            return rewards_at_end(model, batch).tolist()

    return reward


def rewards_at_end(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the rewards (B,) in float32 of whole texts: those after the last token of each."""
    rewards = model(batch["idx"]).float().squeeze(-1)  # (B, T)
    return rewards.gather(1, batch["last"][:, None]).squeeze(1)
