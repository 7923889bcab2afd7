"""Rows of .jsonl files, in the formats of docs/FINETUNING.md, as examples and batches."""

import json
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.tokenizer import Tokenizer
from finetuning.chat import ROLES, Example, encode_completion, encode_messages, encode_prompt
from utils.errors import UserError

Batch = dict[str, Tensor]  # on the CPU until a method copies it to its device


def read_jsonl(path: Path, encode: Callable[[dict], Any]) -> list:
    """Encode each row of a .jsonl file; raise UserError with file and line if one is wrong."""
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


def field(row: dict, name: str, *kinds: type) -> Any:
    """Return a field of a row; raise ValueError unless it is there and of one of the kinds."""
    if not isinstance(row.get(name), kinds):
        types = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f'there is no "{name}" of type {types}, but fields {", ".join(row)}')
    return row[name]


@dataclass
class TextEncoder:
    """Encodes rows of a chat or of plain text, cut to a context; counts the cuts, and raises
    ValueError for a row that it cannot encode."""

    tokenizer: Tokenizer
    chat: bool
    block_size: int
    num_cut: int = 0

    def example(self, row: dict, name: str = "completion") -> Example:
        """Return a row's messages, or its prompt and field `name`, cut to the context; a row may
        have the fields of Alpaca instead: instruction, input and output."""
        if "instruction" in row:
            prompt = "\n".join(filter(None, (row["instruction"], row.get("input"))))
            row = {"prompt": prompt, "completion": row.get("output")}
        if self.chat and "messages" in row and name == "completion":
            whole = encode_messages(self.text(row, "messages"), self.tokenizer)
        else:
            texts = self.text(row, "prompt"), field(row, name, str)
            whole = encode_completion(*texts, self.tokenizer, self.chat)
        cut = Example(whole.tokens[: self.block_size], whole.loss_mask[: self.block_size])
        if not cut.loss_mask.any():
            raise ValueError(f"the first {self.block_size} tokens, the context, have no answer")
        self.num_cut += len(cut.tokens) < len(whole.tokens)
        return cut

    def question(self, row: dict, room: int, *, answered: bool) -> tuple[dict, list[int]]:
        """Return a row, which has an answer if `answered`, and its prompt; `room` tokens fit."""
        if answered:
            field(row, "answer", str, int, float)
        tokens = encode_prompt(self.text(row, "prompt"), self.tokenizer, self.chat)
        if len(tokens) + room > self.block_size:
            asked = f"a prompt of {len(tokens)} tokens and --max_new_tokens {room}"
            raise ValueError(f"{asked} exceed the context of {self.block_size}")
        return row, tokens

    def text(self, row: dict, name: str) -> str | list[dict]:
        """Return a field with a text or, in a chat, messages."""
        found = field(row, name, *([str, list] if self.chat else [str]))
        for message in found if isinstance(found, list) else ():
            field(message, "content", str)
            if (role := field(message, "role", str)) not in ROLES:
                raise ValueError(f"{role} is none of the roles {', '.join(ROLES)}")
        return found


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return indices of `lengths` in few groups of at most `capacity` in all: the longest first,
    each into the group with the least room that suffices (best-fit decreasing)."""
    groups: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room, group), sorted
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect_left(rooms, (lengths[i], -1))
        room, group = rooms.pop(place) if place < len(rooms) else (capacity, len(groups))
        if group == len(groups):
            groups.append([])
        groups[group].append(i)
        insort(rooms, (room - lengths[i], group))
    return groups


def collate_packed(rows: list[list[Example]], block_size: int, compiled: bool = False) -> Batch:
    """Return inputs, targets and positions (B, T) of packed examples, the `part` (B, T) of its row
    that each token belongs to, and the number of targets () that count, float32.

    The examples "a b c" and "d e", of which the first tokens do not count in the loss, become

        idx        a  b  d  0        targets    b  c  e -1
        positions  0  1  0  0        part       1  1  2  0
    """
    lengths = [sum(len(example.tokens) - 1 for example in row) for row in rows]
    shape = (len(rows), padded_length(max(lengths), block_size, compiled))
    idx, positions, part = np.zeros((3, *shape), np.int64)
    targets = np.full(shape, -1)
    for b, examples in enumerate(rows):
        start = 0
        for number, example in enumerate(examples, 1):
            end = start + len(example.tokens) - 1
            idx[b, start:end], part[b, start:end] = example.tokens[:-1], number
            targets[b, start:end] = targets_of(example)
            positions[b, start:end] = np.arange(end - start)
            start = end
    count = np.array((targets >= 0).sum(), np.float32)
    arrays = {"idx": idx, "targets": targets, "positions": positions, "part": part, "count": count}
    return {name: torch.from_numpy(x) for name, x in arrays.items()}


def packed_mask(part: Tensor) -> Tensor:
    """Return the causal mask (B, 1, T, T) that hides the parts (B, T) of a row from each other."""
    return (part[:, None, :, None] == part[:, None, None, :]).tril()


def collate_padded(examples: list[Example], block_size: int, compiled: bool = False) -> Batch:
    """Return tokens and targets (B, T) of examples, one per row, and the index (B,) of the last
    token of each. Causal attention never sees padding on the right."""
    last = np.array([len(example.tokens) - 1 for example in examples])
    T = padded_length(int(last.max()) + 1, block_size, compiled)
    idx, targets = np.zeros((len(examples), T), np.int64), np.full((len(examples), T), -1)
    for b, example in enumerate(examples):
        idx[b, : last[b] + 1] = example.tokens
        targets[b, : last[b]] = targets_of(example)
    arrays = {"idx": idx, "targets": targets, "last": last}
    return {name: torch.from_numpy(x) for name, x in arrays.items()}


def padded_length(tokens: int, block_size: int, compiled: bool) -> int:
    """Return the length of the rows of a batch whose longest has so many tokens: a multiple of 8,
    and if each shape is `compiled` a power of 2, but at most `block_size`."""
    length = max(8, -(-tokens // 8) * 8)
    if compiled:
        length = power_of_2(length)
    return min(length, block_size)


def power_of_2(least: int) -> int:
    """Return the smallest power of 2 that is at least `least`."""
    return 1 << (least - 1).bit_length()


def targets_of(example: Example) -> np.ndarray:
    """Return the token after each but the last, -1 where it does not count in the loss."""
    return np.where(example.loss_mask[1:], example.tokens[1:].astype(np.int64), -1)
