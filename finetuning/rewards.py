"""Rewards of completions, by the row's answer, by a function of the user, or by a reward model."""

import math
import sys
import zlib
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

import torch
import torch.nn as nn
from torch import Tensor

from data.tokenizer import load_tokenizer, tokenizer_identity
from finetuning.chat import is_chat
from finetuning.completions import Completion, is_exact
from finetuning.examples import Batch, TextEncoder, collate_padded
from model.config import GPTConfig
from model.formats.checkpoint import Checkpoint, find_checkpoint, load_checkpoint, load_model
from model.gpt import GPT
from training.start import crc32_of
from utils.distributed import Process
from utils.errors import UserError

# Takes completions and returns one reward for each: [1.0, 0.0, ...] by "exact".
RewardFunction = Callable[[list[Completion]], list[float]]


class RewardError(UserError):
    """A reward function has failed. Every process raises it at the same place, so that all can save
    before they end."""


class RewardModel(GPT):
    """GPT whose head returns, in place of logits, the reward of the text up to each token. `config`
    must be tied, so that there is no second head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.reward_head = nn.Linear(config.n_embd, 1, bias=False)  # weight (1, C)

    def logits(self, x: Tensor) -> Tensor:
        """Return rewards (B, T, 1) of hidden states (B, T, C), in float32 even under autocast."""
        # Not a matmul: autocast would round it to bfloat16, in which close rewards become equal.
        return (x.float() * self.reward_head.weight.float()).sum(-1, keepdim=True)

    def token_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the rewards (N,) as they are: a reward model has no loss of tokens, and
        refuse_wrong_division (tensor parallelism) compares these."""
        return logits.squeeze(-1)


def rewards_at_end(model: nn.Module, batch: Batch) -> Tensor:
    """Return the rewards (B,), float32, that a RewardModel gives to whole sequences: those at the
    last token of each sequence."""
    # without targets the model returns its "logits", here the reward of the text up to each token
    rewards = model(batch.idx).float().squeeze(-1)  # (B, T)
    return rewards.gather(1, batch.last_columns[:, None]).squeeze(1)


def import_file(path: Path) -> ModuleType:
    """Import a Python file of the user. Its imports find modules in its own folder first, even if
    this project has modules of the same names, such as utils."""
    spec = spec_from_file_location(path.stem, path)
    # The caller passes the name of a .py file, for which importlib always has a loader.
    assert spec and spec.loader
    module = module_from_spec(spec)  # empty until exec_module below
    folder_of_file = str(path.resolve().parent)
    module_names = {info.name for info in iter_modules([folder_of_file])}  # {"utils"}
    # already loaded modules with these names, such as this project's; restored below
    shadowed: dict[str, ModuleType] = {}
    for name in list(sys.modules):
        if name.partition(".")[0] in module_names:  # a model.py also shadows model.gpt
            shadowed[name] = sys.modules.pop(name)
    # For process pools, which look up functions by the module's name. If `shadowed` has that name,
    # the old module gets it back below.
    sys.modules[path.stem] = module
    sys.path.insert(0, folder_of_file)
    try:
        spec.loader.exec_module(module)  # runs the file
    finally:
        # Keep the folder for later imports of the file, but last: this project's own come first.
        sys.path.remove(folder_of_file)
        sys.path.append(folder_of_file)
        sys.modules.update(shadowed)  # this project's again: {"utils": ..., "utils.files": ...}
    return module


def find_reward(reward_spec: str) -> Path | None:
    """Return the file of --reward: a file of Python or a checkpoint; None for exact. Raise
    UserError for any other text."""
    if reward_spec == "exact":
        return None
    # split FILE.py:FUNCTION at the last colon, because a path can contain colons
    file_name, _, _ = reward_spec.rpartition(":")
    if file_name.endswith(".py") and not Path(reward_spec).exists():
        return Path(file_name)
    path = find_checkpoint(reward_spec)  # None for a model of another project
    if path is None:
        raise UserError(
            f"the reward {reward_spec} is none of exact, FILE.py:FUNCTION, and a checkpoint of a "
            "reward model or its folder"
        )
    return path


def reward_checksum(reward_spec: str) -> int:
    """Return the checksum of the file of --reward, 0 for exact, to compare processes and a resumed
    run: another reward teaches something else."""
    path = find_reward(reward_spec)
    if path is None:
        return 0
    if path.suffix == ".py":
        _, _, function_name = reward_spec.rpartition(":")
        # of the file and the function's name: two functions of one file are two rewards
        return zlib.crc32(function_name.encode(), zlib.crc32(path.read_bytes()))
    return crc32_of(load_checkpoint(path)["checksums"])


def load_reward_function(
    reward_spec: str, encoder: TextEncoder, process: Process
) -> RewardFunction:
    """Return the function that rewards completions, for `reward_spec` from --reward: exact,
    FILE.py:FUNCTION, or a reward model. `encoder` encodes the prompts of this run; a reward model
    must have its tokenizer, its chat format or plain text, and at least its context. Raise
    UserError otherwise, or if `reward_spec` cannot be loaded."""
    path = find_reward(reward_spec)
    if path is None:  # "exact"
        # 1.0 if the completion has ended and equals the "answer" of its row, except for white space
        # around them, else 0.0
        return lambda completions: [float(is_exact(completion)) for completion in completions]
    # the functions below, made by `partial`, take the completions
    if path.suffix == ".py":
        _, _, function_name = reward_spec.rpartition(":")
        try:
            function = getattr(import_file(path), function_name)  # runs the file
        except Exception as error:
            raise UserError(f"the reward {reward_spec} cannot be loaded: {error!r}") from error
        return partial(rewards_of_function, reward_spec, function)

    # The reward model stays in memory beside the trained model, in float32 like the weights that
    # were trained. load_model raises UserError for a checkpoint without a reward head.
    model, checkpoint = load_model(path, RewardModel, float32=True)
    if not reads_same_text(checkpoint, encoder) or model.config.block_size < encoder.block_size:
        raise UserError(
            f"the reward model {reward_spec} has another tokenizer, another kind of text (chats or "
            "plain text), another chat template, or a shorter context than this run"
        )
    return partial(rewards_of_model, model.to(process.device), process)


def reads_same_text(checkpoint: Checkpoint, encoder: TextEncoder) -> bool:
    """Return whether a reward model reads the token ids of `encoder` as the same text, and was
    trained on the same format: chats with the same template, or plain text."""
    tokenizer_spec = checkpoint["tokenizer"]  # "gpt2", "bytes", or JSON
    if tokenizer_identity(tokenizer_spec) != encoder.tokenizer.identity:
        return False
    if is_chat(checkpoint, tokenizer_spec) != encoder.chat:
        return False
    if not encoder.chat:  # plain text uses no template
        return True
    # Both may have None: User: and Assistant: turns.
    return load_tokenizer(tokenizer_spec).chat_template == encoder.tokenizer.chat_template


def rewards_of_function(
    reward_spec: str, function: Callable, completions: list[Completion]
) -> list[float]:
    """Return the reward that the user's function gives to each completion; it takes the prompt, the
    completion's text and the row. Raise UserError, which names it by `reward_spec`, if it fails or
    does not return a finite number."""
    rewards: list[float] = []
    for completion in completions:
        prompt = completion.row["prompt"]  # a text, or messages of a chat
        try:
            # a copy of the row: the function may change it, and other completions share the row
            reward = function(prompt, completion.text, deepcopy(completion.row))
            reward = float(reward)  # from a bool or a NumPy number
            if not math.isfinite(reward):
                raise ValueError(f"it returned {reward}")
            rewards.append(reward)
        except Exception as error:
            raise UserError(
                f"the reward {reward_spec} fails for the prompt {prompt!r} and the completion "
                f"{completion.text!r}: {error!r}"
            ) from error
    return rewards


@torch.no_grad()
def rewards_of_model(model: GPT, process: Process, completions: list[Completion]) -> list[float]:
    """Return the reward that `model`, a RewardModel, gives to each completion, in one pass."""
    examples = [completion.example for completion in completions]  # prompt and completion
    # the examples fit: load_reward_function has compared the context with this run's
    batch = collate_padded(examples, model.config.block_size, process)
    with process.autocast(keep_weights=False):  # for one forward pass only
        return rewards_at_end(model, batch).tolist()
