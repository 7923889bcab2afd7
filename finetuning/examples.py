"""Fine-tuning examples of the rows of a file, packed or padded into batches."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data.tokenizer import Tokenizer
from finetuning.chat import Example, encode_completion, encode_messages, encode_prompt
from finetuning.rows import Row
from utils.errors import UserError


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
    """Return inputs, targets and positions (B, T) of packed examples, and the number (B, T) of the
    example that a token is of. Targets are -1 where they do not count in the loss.

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
    return {"idx": idx, "targets": targets, "positions": positions, "part": part}


def targets_of(example: Example) -> np.ndarray:
    """Return the token after each but the last, -1 where it does not count in the loss."""
    return np.where(example.loss_mask[1:], example.tokens[1:].astype(np.int64), -1)


def collate(examples: list[Example], block_size: int) -> dict[str, np.ndarray]:
    """Return tokens and targets (B, T) of examples, one per row, and the index (B,) of the last
    token of each. Padding on the right is never seen by causal attention."""
    longest = max(map(len, examples))
    T = min(-(-longest // 8) * 8, block_size)  # few different shapes
    idx, targets = np.zeros((len(examples), T), np.int64), np.full((len(examples), T), -1)
    last = np.array([len(example) - 1 for example in examples])
    for b, example in enumerate(examples):
        idx[b, : last[b] + 1] = example.tokens
        targets[b, : last[b]] = targets_of(example)
    return {"idx": idx, "targets": targets, "last": last}


@dataclass
class ChatData:
    """The rows of a file as examples that fit a context.

    Its methods raise UserError, naming file and line, for a prompt that leaves no room.
    """

    rows: list[Row]
    tokenizer: Tokenizer
    chat: bool
    """True for turns of a chat, False for plain text."""
    block_size: int
    num_cut: int = 0
    """Examples that were cut to the context."""

    def __post_init__(self) -> None:
        for row in () if self.chat else self.rows:
            if "messages" in row or not isinstance(row["prompt"], str):
                raise UserError(f"{row.where}: messages are of a chat, and this is plain text")

    def dialogs(self) -> list[Example]:
        """Return the messages, or else prompt and completion, of each row."""
        return [
            self.truncate(row, encode_messages(row["messages"], self.tokenizer))
            if "messages" in row
            else self.encode(row, "completion")
            for row in self.rows
        ]

    def pairs(self) -> list[tuple[Example, Example]]:
        """Return the prompt of each row with the chosen and with the rejected completion."""
        return [(self.encode(row, "chosen"), self.encode(row, "rejected")) for row in self.rows]

    def prompts(self, max_new_tokens: int) -> list[list[int]]:
        """Return the tokens of each prompt; raise UserError for one that leaves no room for
        `max_new_tokens`."""
        found = []
        for row in self.rows:
            tokens = encode_prompt(row["prompt"], self.tokenizer, self.chat)
            if len(tokens) + max_new_tokens > self.block_size:
                raise UserError(
                    f"{row.where}: a prompt of {len(tokens)} tokens with --max_new_tokens "
                    f"{max_new_tokens} exceeds the context of {self.block_size}"
                )
            found.append(tokens)
        return found

    def encode(self, row: Row, field: str) -> Example:
        """Return the prompt of a row, followed by the completion in `field`."""
        example = encode_completion(row["prompt"], row[field], self.tokenizer, self.chat)
        return self.truncate(row, example)

    def truncate(self, row: Row, example: Example) -> Example:
        """Return an example cut to the context."""
        T = self.block_size
        if not example.loss_mask[:T].any():
            raise UserError(
                f"{row.where}: the prompt has {example.loss_mask.argmax()} tokens, as many as the "
                f"context of {T} or more; shorten it"
            )
        self.num_cut += len(example) > T
        return Example(example.tokens[:T], example.loss_mask[:T])
