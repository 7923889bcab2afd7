"""Rows of .jsonl files, in the formats of docs/FINETUNING.md, as examples and as batches of them.

Not about what a row's text becomes: see finetuning/chat.py. A batch is made in NumPy on the CPU
and copied to the device as a whole.
"""

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
from finetuning.chat import ROLES, Messages, Segment, as_messages, encode_prompt, encode_turns
from utils.distributed import Process
from utils.errors import UserError

NO_TARGET = -1  # the loss of model/gpt.py leaves out targets of this value


@dataclass(frozen=True, eq=False)
class Example:
    """Token ids (T,) of a text, uint16, and a bool mask (T,), true where they count in the loss."""

    tokens: np.ndarray
    loss_mask: np.ndarray

    @classmethod
    def join(cls, segments: list[Segment]) -> "Example":
        """Join the segments of a text."""
        tokens = np.concatenate([segment.tokens for segment in segments]).astype(np.uint16)
        # a value for each segment becomes one for each of its tokens
        lengths = [len(segment.tokens) for segment in segments]
        loss_mask = np.repeat([segment.is_learned for segment in segments], lengths)
        return cls(tokens, loss_mask)


def encode_messages(messages: Messages, tokenizer: Tokenizer) -> Example:
    """Encode a dialog of which the assistant's turns count in the loss; raise ValueError where the
    chat template does not let one of them be found."""
    segments = encode_turns(messages, tokenizer)
    # An answer in an unlearned segment would be lost for training without a word.
    num_answers = sum(message["role"] == "assistant" for message in messages)
    if sum(segment.is_learned for segment in segments) < num_answers:
        raise ValueError("the chat template changes earlier turns with later ones")
    return Example.join(segments)


def encode_completion(
    prompt: str | Messages, completion: str, tokenizer: Tokenizer, chat: bool
) -> Example:
    """Encode a prompt, which does not count in the loss, and a completion with the token that ends
    it, which do. Nothing of what a chat template writes after that token is part of it."""
    prompt_ids = encode_prompt(prompt, tokenizer, chat)
    if chat:
        answer = {"role": "assistant", "content": completion}
        dialog = Example.join(encode_turns([*as_messages(prompt), answer], tokenizer))
        # The answer is what is learned after the prompt's ids: earlier answers are part of these.
        learned = np.flatnonzero(dialog.loss_mask)
        start = len(prompt_ids)
        end = learned[-1] + 1 if len(learned) else 0
        if dialog.tokens[:start].tolist() != prompt_ids or end <= start:
            raise ValueError("the chat template changes earlier turns with later ones")
        completion_ids = dialog.tokens[start:end]
    else:
        completion_ids = [*tokenizer.encode_continuation(completion), tokenizer.eot]
    return Example.join([Segment(prompt_ids, False), Segment(completion_ids, True)])


def read_lines(path: Path) -> list[tuple[int, str]]:
    """Return the lines of a file of UTF-8 text that are not empty, each with its number from 1."""
    try:
        # without the mark that Windows puts first; splitlines would also split at U+2028 in a text
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeError) as error:
        raise UserError(f"{path} cannot be read as UTF-8 text: {error}") from error
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def read_jsonl(path: Path, encode: Callable[[dict], Any]) -> list:
    """Return what `encode` makes of each row of a .jsonl file; raise UserError with file and line
    for a row that it raises for."""
    examples = []
    for number, line in read_lines(path):
        try:
            examples.append(encode(json.loads(line)))
        except Exception as error:  # a row can be wrong in any way
            raise UserError(f"{path}, line {number}: {error}") from error
    if not examples:
        raise UserError(f"{path} holds no rows; give one JSON object per line")
    return examples


def get_field(row: dict, name: str, *types: type) -> Any:
    """Return a field of a row; raise ValueError unless it is there and of one of the types."""
    if not isinstance(row.get(name), types):  # None where the field is missing
        type_names = " or ".join(one.__name__ for one in types)
        raise ValueError(f'there is no "{name}" of type {type_names}, but fields {", ".join(row)}')
    return row[name]


@dataclass
class Question:
    """A row with a "prompt", and the token ids that a completion of it follows."""

    row: dict
    prompt_ids: list[int]


@dataclass
class TextEncoder:
    """Encodes rows of chats, or of plain text, for a model with a context of `block_size` tokens.
    Each method raises ValueError for a row that it cannot encode."""

    tokenizer: Tokenizer
    chat: bool
    block_size: int
    num_cut: int = 0
    """Examples so far that were longer than the context."""

    def dialog(self, row: dict) -> Example:
        """Encode the "messages" of a row, or its "prompt" and "completion"."""
        # plain text has no turns to write messages with: there, such a row needs a prompt
        if self.chat and "messages" in row:
            messages = self.get_text(row, "messages")
            return self.cut(encode_messages(messages, self.tokenizer))
        return self.completion(row, "completion")

    def completion(self, row: dict, name: str) -> Example:
        """Encode the "prompt" of a row and the completion in its field `name`."""
        prompt = self.get_text(row, "prompt")  # a text or messages
        completion = get_field(row, name, str)
        return self.cut(encode_completion(prompt, completion, self.tokenizer, self.chat))

    def cut(self, example: Example) -> Example:
        """Return the beginning of an example that fits into the context, and count it if it is
        not the whole; raise ValueError if nothing in it counts in the loss."""
        T = self.block_size
        # such a row would teach nothing, and a mean over its targets would be NaN
        if not example.loss_mask[:T].any():
            raise ValueError(f"the first {T} tokens, the context, have no answer")
        if len(example.tokens) > T:  # finetune.py warns of their number
            self.num_cut += 1
        return Example(example.tokens[:T], example.loss_mask[:T])

    def question(self, row: dict, max_new_tokens: int, *, has_answer: bool) -> Question:
        """Encode the "prompt" of a row, after which `max_new_tokens` must fit into the context.
        With `has_answer` the row must have an "answer" to compare with."""
        if has_answer:
            get_field(row, "answer", str, int, float)
        prompt_ids = encode_prompt(self.get_text(row, "prompt"), self.tokenizer, self.chat)
        # sampling would drop the beginning of the prompt where the context is full
        if len(prompt_ids) + max_new_tokens > self.block_size:
            raise ValueError(
                f"a prompt of {len(prompt_ids)} tokens and --max_new_tokens {max_new_tokens} "
                f"exceed the context of {self.block_size}"
            )
        return Question(row, prompt_ids)

    def get_text(self, row: dict, name: str) -> str | Messages:
        """Return a field that holds a text or, in a chat, messages."""
        if not self.chat:  # without turns there is nothing to write messages with
            return get_field(row, name, str)
        value = get_field(row, name, str, list)
        if isinstance(value, list):
            for message in value:  # one turn of the dialog
                get_field(message, "content", str)
                role = get_field(message, "role", str)
                if role not in ROLES:
                    raise ValueError(f"{role} is none of the roles {', '.join(ROLES)}")
        return value


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Distribute texts of the given lengths over few rows of at most `capacity` tokens.

    Best-fit decreasing: the longest text comes first, each goes into the fullest row that has room
    for it. Return the indices of the texts in each row.
    """
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens that are free, index of the row), sorted
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        # the row with the least room that is enough; (n, 0) sorts before every row of room n
        place = bisect_left(rooms, (lengths[i], 0))
        if place < len(rooms):
            room, row = rooms.pop(place)
        else:  # no row has room: a new one
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(i)
        insort(rooms, (room - lengths[i], row))
    return rows


@dataclass
class Batch:
    """Texts in B rows of T tokens. Fields that a method does not need are None."""

    idx: Tensor
    """Token ids (B, T)."""
    targets: Tensor
    """Next token (B, T) of each token; NO_TARGET where it does not count in the loss."""
    positions: Tensor | None = None
    """sft: place (B, T) of each token in its dialog, several of which share a row."""
    dialog: Tensor | None = None
    """sft: number (B, T) of the dialog within the row, from 1; 0 is padding."""
    num_targets: Tensor | None = None
    """sft: number () of targets that count, float32."""
    last: Tensor | None = None
    """Index (B,) of the last token of each text, for rows of one text."""
    advantages: Tensor | None = None
    """grpo: advantage (B,) of each completion."""
    old_logprobs: Tensor | None = None
    """grpo: log-probabilities (B, T) of the targets when they were sampled; None: the current."""
    ref_logprobs: Tensor | None = None
    """Log-probabilities under the reference model: of targets (B, T) for grpo, of texts (B,) for
    dpo."""

    def to_device(self, process: Process) -> "Batch":
        """Copy all tensors to the process's device, without waiting for a copy to a GPU."""
        tensors = {name: x for name, x in vars(self).items() if x is not None}
        return Batch(**{name: process.copy(x) for name, x in tensors.items()})


def collate_packed(rows: list[list[Example]], block_size: int, compiled: bool = False) -> Batch:
    """Put the dialogs of each row one after another.

    The dialogs "a b c" and "d e", of which the first tokens do not count in the loss, become

        idx        a  b  d  0        targets    b  c  e -1
        positions  0  1  0  0        dialog     1  1  2  0
    """
    # Only inputs need a column: the last token of a dialog is a target alone.
    row_lengths = [sum(len(example.tokens) - 1 for example in row) for row in rows]
    shape = (len(rows), padded_length(max(row_lengths), block_size, compiled))
    idx = np.zeros(shape, np.int64)
    targets = np.full(shape, NO_TARGET)  # also where nothing is written below: padding
    positions = np.zeros(shape, np.int64)
    dialog = np.zeros(shape, np.int64)
    for b, examples in enumerate(rows):
        start = 0
        for number, example in enumerate(examples, 1):
            end = start + len(example.tokens) - 1  # of the row's columns for this dialog
            idx[b, start:end] = example.tokens[:-1]
            targets[b, start:end] = targets_of(example)
            positions[b, start:end] = np.arange(end - start)  # as if it stood alone
            dialog[b, start:end] = number
            start = end
    return Batch(
        torch.from_numpy(idx),
        torch.from_numpy(targets),
        positions=torch.from_numpy(positions),
        dialog=torch.from_numpy(dialog),
        num_targets=torch.from_numpy(np.array((targets >= 0).sum(), np.float32)),
    )


def dialog_mask(dialog: Tensor) -> Tensor:
    """Return the causal mask (B, 1, T, T) that hides the dialogs of a row from each other, by the
    number (B, T) of each token's dialog."""
    # query rows against key columns; all heads share the mask
    same_dialog = dialog[:, None, :, None] == dialog[:, None, None, :]  # (B, 1, T, T)
    return same_dialog.tril()  # no token sees later ones; padding sees padding, and no NaN arises


def collate_padded(examples: list[Example], block_size: int, compiled: bool = False) -> Batch:
    """Give each example a row of its own, with padding on the right, which no token attends to."""
    last = np.array([len(example.tokens) - 1 for example in examples])  # column of the last token
    shape = (len(examples), padded_length(int(last.max()) + 1, block_size, compiled))
    idx = np.zeros(shape, np.int64)
    targets = np.full(shape, NO_TARGET)
    for b, example in enumerate(examples):
        # The whole text is input: a reward model reads its value at the last token.
        idx[b, : last[b] + 1] = example.tokens
        targets[b, : last[b]] = targets_of(example)
    return Batch(torch.from_numpy(idx), torch.from_numpy(targets), last=torch.from_numpy(last))


def padded_length(longest: int, block_size: int, compiled: bool) -> int:
    """Return the T of a batch whose longest row has `longest` tokens: a multiple of 8, at most
    `block_size`. With `compiled` it is a power of 2, as each shape costs a compilation."""
    padded = 8 * max(1, -(-longest // 8))  # sizes that suit tensor cores
    if compiled:
        padded = power_of_2(padded)
    return min(padded, block_size)


def power_of_2(least: int) -> int:
    """Return the smallest power of 2 that is at least `least`."""
    return 1 << (least - 1).bit_length()


def targets_of(example: Example) -> np.ndarray:
    """Return the next token (T - 1,) of each token but the last, as int64."""
    next_tokens = example.tokens[1:].astype(np.int64)  # from uint16, which has no -1
    return np.where(example.loss_mask[1:], next_tokens, NO_TARGET)
