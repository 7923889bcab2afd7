"""Rows of a .jsonl file for fine-tuning, as token ids of which some are to be learned.

A dialog is plain text. End of text precedes each turn, as it does each document of the shards, and
closes the last one; the model learns what the assistant says and the end of text after it:

    <|endoftext|>User: What is 2 + 3?<|endoftext|>Assistant: 5<|endoftext|>
                                                             ~~~~~~~~~~~~~~  (with the space)
"""

import json
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.shards import DataError
from data.tokenizer import Tokenizer

ROLES = {"system": "System", "user": "User", "assistant": "Assistant"}
# of tokenizer_config.json, for apply_chat_template of transformers
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ eos_token + message['role'] | capitalize + ': ' "
    "+ message['content'] }}{% endfor %}{{ eos_token }}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
Messages = list[dict[str, str]]
LINE = "\0line"  # key of a row's line number; no field of JSON is likely to have that name


@dataclass(frozen=True)
class Example:
    """Token ids of a text, and which of them a model learns to predict."""

    tokens: list[int]
    learned: list[bool]


def read_rows(path: Path, fields: Sequence[str]) -> list[dict]:
    """Return the rows of a .jsonl file, each with its LINE; raise DataError naming file and line
    for one that is no object, or whose `fields` are missing or not of the types of this module."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeError as error:
        raise DataError(f"{path} is not UTF-8 text: give a .jsonl file") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number}, is not JSON: {error}") from error
        if problem := find_problem(row, fields):
            raise DataError(f"{path}, line {number}: {problem}")
        rows.append({**row, LINE: number})
    if not rows:
        raise DataError(f"{path} holds no rows; give one JSON object per line")
    return rows


def find_problem(row: object, fields: Sequence[str]) -> str | None:
    """Return what is wrong with a row, None if nothing is."""
    if type(row) is not dict:
        return 'expected a JSON object, as {"prompt": ..., ...}'
    if "messages" in row and "messages" in fields:
        if problem := find_problem_of_messages(row["messages"]):
            return f'"messages" {problem}'
        spoken = any(message["role"] == "assistant" for message in row["messages"])
        return None if spoken else '"messages" has no turn of the role "assistant" to learn'
    for name in fields:
        if name == "messages":
            continue
        if name not in row:
            found = ", ".join(map(str, row)) or "nothing"
            either = ' ("messages", or all others)' if "messages" in fields else ""
            needed = " and ".join(f'"{field}"' for field in fields)
            return f'there is no "{name}"; a row needs {needed}{either}, and this one has {found}'
        value = row[name]
        if name == "prompt" and type(value) is list:
            if problem := find_problem_of_messages(value):
                return f'"prompt" {problem}'
            if value[-1]["role"] == "assistant":
                return '"prompt" ends with a turn of the assistant; it must end before it'
        elif name == "answer" and type(value) in (int, float):
            continue
        elif problem := find_problem_of_text(value):
            return f'"{name}" {problem}'
    return None


def find_problem_of_messages(messages: object) -> str | None:
    """Return what is wrong with a list of messages, None if nothing is."""
    if type(messages) is not list or not messages:
        return 'must be a list of messages, as [{"role": "user", "content": "..."}]'
    for message in messages:
        if type(message) is not dict or message.get("role") not in ROLES:
            return f'holds a message whose "role" is none of {", ".join(ROLES)}'
        if problem := find_problem_of_text(message.get("content")):
            return f'holds a message whose "content" {problem}'
    return None


def find_problem_of_text(text: object) -> str | None:
    """Return what is wrong with a text, None if nothing is."""
    if type(text) is not str:
        return f"must be a text, not {type(text).__name__}"
    try:
        text.encode()
    except UnicodeError:
        return "holds a lone surrogate, which is no character"
    return None


def encode_messages(messages: Messages, tokenizer: Tokenizer) -> Example:
    """Return a dialog, of which the assistant's turns are learned."""
    tokens: list[int] = []
    learned: list[bool] = []
    closes = False  # whether the next end of text closes a turn of the assistant
    for message in messages:
        head = tokenizer.encode(f"{ROLES[message['role']]}:").tolist()
        said = tokenizer.encode(f" {message['content']}").tolist()
        tokens += [tokenizer.eot, *head, *said]
        spoken = message["role"] == "assistant"
        learned += [closes, *[False] * len(head), *[spoken] * len(said)]
        closes = spoken
    return Example([*tokens, tokenizer.eot], [*learned, closes])


def as_messages(prompt: str | Messages) -> Messages:
    """Return a prompt as messages: a text is a turn of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def encode_prompt(prompt: str | Messages, tokenizer: Tokenizer, chat: bool) -> list[int]:
    """Return the token ids that a completion follows: up to "Assistant:" in a chat, else the text
    of the prompt after end of text."""
    if chat:
        opening = tokenizer.encode(f"{ROLES['assistant']}:").tolist()
        return encode_messages(as_messages(prompt), tokenizer).tokens + opening
    return [tokenizer.eot, *tokenizer.encode(prompt).tolist()]


def fit_history(
    messages: Messages, tokenizer: Tokenizer, block_size: int, max_new_tokens: int
) -> list[int]:
    """Return the token ids that the assistant's next turn follows, without the oldest turns where
    the context has no room for all and `max_new_tokens` more, or half of it."""
    room = block_size - min(max_new_tokens, block_size // 2)
    while len(tokens := encode_prompt(messages, tokenizer, chat=True)) > room and len(messages) > 1:
        messages = messages[1:]
    return tokens


def encode_completion(
    prompt: str | Messages, completion: str, tokenizer: Tokenizer, chat: bool
) -> Example:
    """Return a prompt with a completion and the end of text, which are learned."""
    before = encode_prompt(prompt, tokenizer, chat)
    said = tokenizer.encode(f" {completion}" if chat else completion).tolist()
    learned = [False] * len(before) + [True] * (len(said) + 1)
    return Example([*before, *said, tokenizer.eot], learned)


def decode_completion(tokens: list[int], tokenizer: Tokenizer, chat: bool) -> str:
    """Return the text of a completion, without the space after "Assistant:"."""
    text = tokenizer.decode_bytes(tokens).decode(errors="replace")
    return text.removeprefix(" ") if chat else text


def is_exact(text: str, answer: str | float) -> bool:
    """Return whether a completion is the answer, but for white space around either."""
    return text.strip() == str(answer).strip()


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
