"""Fine-tuning examples of the rows of a file, packed or padded into batches."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.chat import Example, encode_completion, encode_messages, encode_prompt
from data.chat_rows import LINE
from data.shards import DataError
from data.tokenizer import Tokenizer


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return indices of `lengths` in groups of at most `capacity` in all, few of them: the longest
    first, each into the group with the least room that suffices (best-fit decreasing)."""
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


def collate_packed(packs: list[list[Example]], block_size: int) -> dict[str, np.ndarray]:
    """Return inputs, targets and positions (B, T) of packed examples, and the mask (B, 1, T, T)
    that keeps each from seeing the others. Targets are -1 where nothing is learned.

    The examples "a b c" and "d e" of which "b", "c" and "e" are learned become

        idx        a  b  d  0        targets    b  c  e -1
        positions  0  1  0  0        part       1  1  2  0
    """
    shape = (len(packs), block_size)
    idx, positions, part = (np.zeros(shape, np.int64) for _ in range(3))
    targets = np.full(shape, -1)
    for b, examples in enumerate(packs):
        start = 0
        for number, example in enumerate(examples, 1):
            end = start + len(example.tokens) - 1
            idx[b, start:end], part[b, start:end] = example.tokens[:-1], number
            targets[b, start:end] = np.where(example.learned[1:], example.tokens[1:], -1)
            positions[b, start:end] = np.arange(end - start)
            start = end
    mask = np.tril(part[:, :, None] == part[:, None, :])[:, None]
    return {"idx": idx, "targets": targets, "positions": positions, "mask": mask}


def collate(examples: list[Example], block_size: int) -> dict[str, np.ndarray]:
    """Return tokens and targets (B, T) of examples, one per row, and the index (B,) of the last
    token of each. Padding on the right is never seen by causal attention. The target of a token is
    the one after it, -1 where that is not learned."""
    longest = max(len(example.tokens) for example in examples)
    T = min(-(-longest // 8) * 8, block_size)  # few different shapes
    idx, targets = np.zeros((len(examples), T), np.int64), np.full((len(examples), T), -1)
    last = np.array([len(example.tokens) - 1 for example in examples])
    for b, example in enumerate(examples):
        idx[b, : last[b] + 1] = example.tokens
        targets[b, : last[b]] = np.where(example.learned[1:], example.tokens[1:], -1)
    return {"idx": idx, "targets": targets, "last": last}


@dataclass
class ChatData:
    """The rows of a file as examples that fit a context.

    Its methods raise DataError, naming file and line, for a prompt that leaves no room.
    """

    rows: list[dict]
    path: Path
    tokenizer: Tokenizer
    chat: bool
    """True for turns of a chat, False for plain text."""
    block_size: int
    num_cut: int = 0
    """Examples that were cut to the context."""

    def __post_init__(self) -> None:
        for row in () if self.chat else self.rows:
            if "messages" in row or not isinstance(row["prompt"], str):
                raise DataError(
                    f"{self.path}, line {row[LINE]}: messages are of a chat, and this is plain text"
                )

    def dialogs(self) -> list[Example]:
        """Return the messages, or else prompt and completion, of each row."""
        return [
            self.fit(row, encode_messages(row["messages"], self.tokenizer))
            if "messages" in row
            else self.completion(row, "completion")
            for row in self.rows
        ]

    def pairs(self) -> list[tuple[Example, Example]]:
        """Return the prompt of each row with the chosen and with the rejected completion."""
        return [(self.completion(r, "chosen"), self.completion(r, "rejected")) for r in self.rows]

    def prompts(self, max_new_tokens: int) -> list[list[int]]:
        """Return the tokens of each prompt, which leave room for so many new ones."""
        found = []
        for row in self.rows:
            tokens = encode_prompt(row["prompt"], self.tokenizer, self.chat)
            if len(tokens) + max_new_tokens > self.block_size:
                raise DataError(
                    f"{self.path}, line {row[LINE]}: a prompt of {len(tokens)} tokens with "
                    f"--max_new_tokens {max_new_tokens} exceeds the context of {self.block_size}"
                )
            found.append(tokens)
        return found

    def completion(self, row: dict, field: str) -> Example:
        """Return the prompt of a row with the completion in `field`."""
        text = encode_completion(row["prompt"], row[field], self.tokenizer, self.chat)
        return self.fit(row, text)

    def fit(self, row: dict, example: Example) -> Example:
        """Return an example cut to the context."""
        T = self.block_size
        if not any(example.learned[:T]):
            raise DataError(
                f"{self.path}, line {row[LINE]}: the prompt has {example.learned.index(True)} "
                f"tokens, as many as the context of {T} or more; shorten it"
            )
        self.num_cut += len(example.tokens) > T
        return Example(example.tokens[:T], example.learned[:T])
