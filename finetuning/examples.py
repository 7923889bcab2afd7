"""Rows of .jsonl files as examples of a model's context, packed or padded into batches.

docs/FINETUNING.md describes the fields of a row.
"""

import json
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from data.tokenizer import Tokenizer
from finetuning.chat import ROLES, Example, encode_completion, encode_messages, encode_prompt
from utils.errors import UserError

Encoded = TypeVar("Encoded")


def read_jsonl(path: Path, encode: Callable[[dict], Encoded]) -> list[Encoded]:
    """Return what `encode` makes of each row of a .jsonl file; raise UserError naming file and line
    for whatever is wrong with one."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeError) as error:
        raise UserError(f"{path} cannot be read as UTF-8 text: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                found.append(encode(json.loads(line)))
        except Exception as error:
            raise UserError(f"{path}, line {number}: {error}") from error
    if not found:
        raise UserError(f"{path} holds no rows; give one JSON object per line")
    return found


def expect(condition: bool, problem: str) -> None:
    """Raise ValueError with the problem unless the condition holds."""
    if not condition:
        raise ValueError(problem)


def field(row: dict, name: str, *kinds: type) -> Any:
    """Return a field of a row; raise ValueError unless it is there and of one of the kinds."""
    expect(isinstance(row, dict), "expected a JSON object")
    expect(name in row, f'there is no "{name}", but {", ".join(row) or "nothing"}')
    expect(isinstance(row[name], kinds), f'"{name}" is of a wrong type, {type(row[name]).__name__}')
    return row[name]


@dataclass
class TextEncoder:
    """Encodes rows as examples that fit a context; raises ValueError for a row that it cannot."""

    tokenizer: Tokenizer
    chat: bool
    """True for turns of a chat, False for plain text."""
    block_size: int
    num_cut: int = 0
    """Examples that were cut to the context."""

    def dialog(self, row: dict) -> Example:
        """Return the messages of a row, or else its prompt and completion."""
        if self.chat and "messages" in row:
            return self.cut(encode_messages(self.messages(row, "messages"), self.tokenizer))
        return self.completion(row, "completion")

    def completion(self, row: dict, name: str) -> Example:
        """Return the prompt of a row, followed by the completion in the field `name`."""
        texts = self.messages(row, "prompt"), field(row, name, str)
        return self.cut(encode_completion(*texts, self.tokenizer, self.chat))

    def question(self, row: dict, room: int, *, answered: bool) -> tuple[dict, list[int]]:
        """Return a row, which has an answer if it must be `answered`, with the tokens of its
        prompt, which must leave room for `room` more."""
        if answered:
            field(row, "answer", str, int, float)
        tokens = encode_prompt(self.messages(row, "prompt"), self.tokenizer, self.chat)
        problem = f"a prompt of {len(tokens)} tokens and --max_new_tokens {room} exceed the context"
        expect(len(tokens) + room <= self.block_size, f"{problem} of {self.block_size}")
        return row, tokens

    def messages(self, row: dict, name: str) -> str | list[dict]:
        """Return a field with a text or, in a chat, messages."""
        found = field(row, name, *([str] * (name == "prompt") + [list] * self.chat))
        for message in found if isinstance(found, list) else ():
            role, _ = field(message, "role", str), field(message, "content", str)
            expect(role in ROLES, f"{role} is none of the roles {', '.join(ROLES)}")
        return found

    def cut(self, example: Example) -> Example:
        """Return an example cut to the context."""
        tokens, loss_mask = example.tokens[: self.block_size], example.loss_mask[: self.block_size]
        expect(loss_mask.any(), f"the first {self.block_size} tokens, the context, have no answer")
        self.num_cut += len(tokens) < len(example)
        return Example(tokens, loss_mask)


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return indices of `lengths` in few groups of at most `capacity` in all: the longest first,
    each into the group with the least room that suffices (best-fit decreasing)."""
    groups: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room, group), sorted
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        assert lengths[i] <= capacity
        place = bisect_left(rooms, (lengths[i], -1))
        room, group = rooms.pop(place) if place < len(rooms) else (capacity, len(groups))
        if group == len(groups):
            groups.append([])
        groups[group].append(i)
        insort(rooms, (room - lengths[i], group))
    return groups


def collate_packed(
    packs: list[list[Example]], block_size: int, device: torch.device
) -> dict[str, Tensor]:
    """Return inputs, targets and positions (B, T) of packed examples, and a mask (B, 1, T, T) that
    hides them from each other. Targets are -1 where they do not count in the loss.

    The examples "a b c" and "d e" of which "b", "c" and "e" count become

        idx        a  b  d  0        targets    b  c  e -1
        positions  0  1  0  0        part       1  1  2  0
    """
    shape = (len(packs), block_size)
    idx, positions, part = (np.zeros(shape, np.int64) for _ in range(3))
    targets = np.full(shape, -1)
    for b, examples in enumerate(packs):
        start = 0
        for number, example in enumerate(examples, 1):
            end = start + len(example) - 1
            idx[b, start:end], part[b, start:end] = example.tokens[:-1], number
            targets[b, start:end] = targets_of(example)
            positions[b, start:end] = np.arange(end - start)
            start = end
    arrays = {"idx": idx, "targets": targets, "positions": positions, "part": part}
    batch = {name: torch.from_numpy(x).to(device) for name, x in arrays.items()}
    part = batch.pop("part")
    mask = (part[:, :, None] == part[:, None, :]).tril()  # (B, T, T)
    return batch | {"mask": mask[:, None]}


def collate_padded(
    examples: list[Example], block_size: int, device: torch.device
) -> dict[str, Tensor]:
    """Return tokens and targets (B, T) of examples, one per row, and the index (B,) of the last
    token of each. Causal attention never sees padding on the right."""
    T = min(-(-max(map(len, examples)) // 8) * 8, block_size)  # few different shapes
    idx, targets = np.zeros((len(examples), T), np.int64), np.full((len(examples), T), -1)
    last = np.array([len(example) - 1 for example in examples])
    for b, example in enumerate(examples):
        idx[b, : last[b] + 1] = example.tokens
        targets[b, : last[b]] = targets_of(example)
    arrays = {"idx": idx, "targets": targets, "last": last}
    return {name: torch.from_numpy(x).to(device) for name, x in arrays.items()}


def targets_of(example: Example) -> np.ndarray:
    """Return the token after each but the last, -1 where it does not count in the loss."""
    return np.where(example.loss_mask[1:], example.tokens[1:].astype(np.int64), -1)
