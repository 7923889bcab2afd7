"""Read rows of .jsonl files (docs/FINETUNING.md), encode them as examples, and batch the examples.

A row is a JSON object. An example is what a method learns from a row: one sequence of tokens, a
pair or a question. This file is not about how a dialog becomes token ids: see finetuning/chat.py.
"""

import json
import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.named_tokenizer import Tokenizer
from evaluation.tasks import get_field
from finetuning.chat import (
    ROLES,
    Message,
    Messages,
    Tools,
    as_messages,
    encode_dialog,
    encode_prompt,
    encode_text,
    texts_of,
)
from finetuning.template import find_answer, is_learned
from utils.distributed import Process
from utils.errors import UserError, reading

# model/loss.py ignores targets of this value.
NO_TARGET = -1
# Fields that change how other projects write a dialog. Rows with them are refused, except "tools"
# with a chat template. Other fields, such as "id" or "source", are ignored.
UNSUPPORTED = ("tools", "functions", "documents", "chat_template_kwargs", "images", "system")


@dataclass(frozen=True, eq=False)
class Example:
    """A sequence of T tokens, some of which count in the loss."""

    tokens: np.ndarray
    """Token ids (T,), uint32."""
    loss_mask: np.ndarray
    """bool (T,): True if the token counts in the loss, as a target for the tokens before it."""

    @classmethod
    def of_completion(cls, prompt_ids: list[int], completion_ids: list[int]) -> "Example":
        """Join a prompt and a completion, of which only the completion counts in the loss: the ids
        7 8 and 9 become the tokens 7 8 9 with the mask False False True."""
        tokens = np.array(prompt_ids + completion_ids, np.uint32)  # half the memory of int64
        return cls(tokens, np.arange(len(tokens)) >= len(prompt_ids))


def encode_messages(messages: Messages, tokenizer: Tokenizer, tools: Tools = None) -> Example:
    """Encode a dialog. Only the assistant's turns count in the loss, except turns of "weight" 0.
    Raise ValueError if the chat template writes a turn in a way that cannot be learned."""
    ids = encode_dialog(messages, tokenizer, tools=tools)  # T token ids
    loss_mask = np.zeros(len(ids), bool)
    for i, message in enumerate(messages):
        if is_learned(message):
            # find_answer returns the slice of the turn's token ids, with the token that ends it
            loss_mask[find_answer(messages, i, ids, tokenizer, tools)] = True
    return Example(np.array(ids, np.uint32), loss_mask)


def encode_completion(
    prompt: str | Messages,
    completion: str,
    tokenizer: Tokenizer,
    chat: bool,
    tools: Tools = None,
) -> Example:
    """Encode a prompt and a completion. Only the completion and the token that ends it count in the
    loss. Text that a chat template writes after that token is dropped."""
    if not chat:
        prompt_ids = encode_prompt(prompt, tokenizer, chat)  # [50256, ...] of GPT-2
        # Encode the completion separately, so that no token spans prompt and completion, as in
        # sampling. After an empty prompt the completion begins the text.
        completion_ids = encode_text(completion, tokenizer, follows=bool(prompt))
        completion_ids.append(tokenizer.eot)  # ends the completion, and is learned, too
        return Example.of_completion(prompt_ids, completion_ids)
    # Answers of earlier turns belong to the prompt here: they do not count in the loss.
    dialog = [*as_messages(prompt), {"role": "assistant", "content": completion}]
    # list of ids, by the chat template or in the project's own format
    ids = encode_dialog(dialog, tokenizer, tools=tools)
    # slice of `ids` that holds the completion, with the token that ends it
    answer_slice = find_answer(dialog, len(dialog) - 1, ids, tokenizer, tools)
    return Example.of_completion(ids[: answer_slice.start], ids[answer_slice])


def read_lines(path: Path) -> list[tuple[int, str]]:
    """Return the non-empty lines of a UTF-8 file, each with its number for errors, from 1:
    [(1, '{"prompt": ...}'), ...]."""
    with reading(path, "a text in UTF-8"):  # UserError if it is none
        # utf-8-sig drops a byte order mark (Windows). splitlines would also split at U+2028.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    return [(line_number, line) for line_number, line in enumerate(lines, 1) if line.strip()]


def read_examples(path: Path, to_example: Callable[[dict], Any]) -> list:
    """Return to_example(row) for each row of a .jsonl file, in order. If `to_example` raises, raise
    UserError with the file, the line and the reason of the first such row, and the other lines."""
    examples: list[Any] = []
    reason_by_line: dict[int, str] = {}  # {3: 'there is no "prompt" of type str, ...'}
    for line_number, line in read_lines(path):
        row = None
        try:
            row = json.loads(line)
            examples.append(to_example(row))  # Example, Pair or Question
        except Exception as error:  # a row of a user can be wrong in any way
            reason = str(error)
            if not isinstance(row, dict):
                reason = f"each row must be a JSON object; train.py takes plain text ({error})"
            reason_by_line[line_number] = reason
    if reason_by_line:
        first_line, *other_lines = reason_by_line  # their numbers in the file
        message = f"{path}, line {first_line}: {reason_by_line[first_line]}"
        if other_lines:
            # "4, 7, 9", at most 60 characters
            numbers = textwrap.shorten(", ".join(map(str, other_lines)), 60, placeholder=" ...")
            message += f"; and {len(other_lines):,} more rows cannot be used: lines {numbers}"
        raise UserError(message)
    if not examples:
        raise UserError(f"{path} holds no rows; give one JSON object per line")
    return examples


@dataclass
class Question:
    """A prompt to complete, for grpo or evaluate.py."""

    row: dict
    """Row of the file: {"prompt": "2+3?", "answer": "5"}; only grpo can do without an answer."""
    prompt_ids: list[int]
    """Token ids of the prompt, which the model continues: of a chat up to "Assistant:"."""


@dataclass
class TextEncoder:
    """Encodes rows of chats or of plain text. Each method raises ValueError for a row that it
    cannot encode."""

    tokenizer: Tokenizer
    chat: bool
    """True: encode prompts as chats, by the chat template of the tokenizer or with User: and
    Assistant: turns; False: as plain text."""
    block_size: int
    """Context of the model in tokens."""
    num_cut: int = 0
    """Number of examples so far that were cut to the context; finetune.py warns about them."""

    def dialog(self, row: dict) -> Example:
        """Encode a row of one of three forms.

        {"messages": [{"role": "user", "content": "2+3?"}, {"role": "assistant", ...}]}
        {"prompt": "2+3?", "completion": "5"}
        {"instruction": "Add the numbers.", "input": "2 3", "output": "5"}
        """
        # plain text has no turns, so its rows need a prompt in place of messages
        if self.chat and "messages" in row:
            # [{"role": "user", "content": "2+3?"}, ...]; a text alone is a turn of the user
            messages = as_messages(self.get_text_or_messages(row, "messages"))
            # cut to the context; the assistant's turns count in the loss
            return self.cut_and_count(encode_messages(messages, self.tokenizer, row.get("tools")))
        # Alpaca's names; "input", the text that the instruction is about, is often empty
        if "instruction" in row and "prompt" not in row:
            prompt = get_field(row, "instruction", str)  # ValueError if it is no str
            if row.get("input"):
                prompt += "\n\n" + get_field(row, "input", str)
            return self.completion({**row, "prompt": prompt}, "output")  # "output": the answer
        return self.completion(row, "completion")

    def completion(self, row: dict, name: str) -> Example:
        """Encode the "prompt" of a row and the completion in the field `name`: completion, output,
        chosen or rejected."""
        prompt = self.get_text_or_messages(row, "prompt")  # a text, or messages of earlier turns
        completion = get_field(row, name, str)  # ValueError without it
        tools = row.get("tools")  # JSON schemas of functions, or None
        example = encode_completion(prompt, completion, self.tokenizer, self.chat, tools)
        return self.cut_and_count(example)

    def cut_and_count(self, example: Example) -> Example:
        """Return an example cut to the context, and count it in num_cut if it was longer. Raise
        ValueError if no token that remains counts in the loss."""
        block_size = self.block_size
        # An example without targets would teach nothing, and its mean loss would be NaN.
        if not example.loss_mask[:block_size].any():
            raise ValueError(f"the row has no answer in its first {block_size} tokens, the context")
        if len(example.tokens) > block_size:
            self.num_cut += 1
        return Example(example.tokens[:block_size], example.loss_mask[:block_size])

    def question(self, row: dict, max_new_tokens: int, *, has_answer: bool) -> Question:
        """Encode the "prompt" of a row. Raise ValueError unless prompt and `max_new_tokens` fit
        into the context and, with `has_answer`, the row has an "answer" to compare with."""
        if has_answer:
            get_field(row, "answer", str, int, float)  # ValueError without it
        prompt = self.get_text_or_messages(row, "prompt")  # a text, or messages of a chat
        prompt_ids = encode_prompt(prompt, self.tokenizer, self.chat, row.get("tools"))
        # if they do not fit, sampling would drop the older half of the context
        if len(prompt_ids) + max_new_tokens > self.block_size:
            raise ValueError(
                f"a prompt of {len(prompt_ids)} tokens and an answer of {max_new_tokens} "
                f"exceed the context of {self.block_size}"
            )
        return Question(row, prompt_ids)

    def get_text_or_messages(self, row: dict, name: str) -> str | Messages:
        """Return the field `name` of a row: a text or, in a chat, messages. Raise ValueError
        without it, for messages in plain text, for a message that check_message refuses, and for
        another field of the row that is not supported and would change its meaning."""
        # chat_template is Jinja, one text or several by name, or None. Only Jinja can write tools.
        has_template = self.chat and bool(self.tokenizer.chat_template)
        for field in UNSUPPORTED:  # "tools", "documents", "images", ...
            if row.get(field) and not (field == "tools" and has_template):
                raise ValueError(f'"{field}" is not supported, and would change what the row means')
        if not self.chat:  # plain text has no turns for messages
            return get_field(row, name, str)  # ValueError for messages
        text_or_messages = get_field(row, name, str, list)  # ValueError for another type
        if isinstance(text_or_messages, list):
            for message in text_or_messages:
                self.check_message(message)
        return text_or_messages

    def check_message(self, message: Message) -> None:
        """Raise ValueError for a message without a role or without content (or, for a chat
        template, tool calls), for an entry of the content without text, for a weight besides 0 and
        1 and, unless a chat template writes the message, for a role or field that the project's own
        format lacks."""
        role = get_field(message, "role", str)  # ValueError without it
        texts_of(message)  # ValueError for entries without text
        is_supported = message.get("weight") in (None, 0, 1)  # 0: not learned
        # Only a chat template reads roles other than system, user and assistant, and further fields
        # of a message.
        if not self.tokenizer.chat_template:
            get_field(message, "content", str)
            # {"role", "content"}, without fields that are null, empty or 0
            used_fields = {field for field in message if message[field]}
            is_supported &= role in ROLES and used_fields <= {"role", "content", "weight"}
        if not is_supported:
            raise ValueError(
                f"a chat has no such role or field, or a weight besides 0 and 1: {message!r:.200}"
            )


@dataclass
class Batch:
    """B sequences of up to T tokens, padded on the right, as tensors on the device of the process.
    A field is None if the method does not need it."""

    idx: Tensor
    """Token ids (B, T), int64."""
    targets: Tensor
    """Next token (B, T), int64, at each position; NO_TARGET if it does not count in the loss."""
    last_columns: Tensor
    """Column (B,) of the last token of each sequence, where a reward model reads the reward."""
    advantages: Tensor | None = None
    """grpo: advantage (B,) of each completion, float32."""
    ref_logprobs: Tensor | None = None
    """Log-probabilities under the reference model, in nats. grpo: of each target (B, T); dpo: of
    each completion (B,), summed over its tokens."""


def collate_padded(
    examples: list[Example], block_size: int, process: Process, compiled: bool = False
) -> Batch:
    """Return a batch of examples, each of at most `block_size` tokens. For a `compiled` model T is
    a power of 2 or block_size, so that few shapes are compiled.

    The example "a b c", whose first token does not count in the loss, becomes, with T = 8 (or a
    smaller block_size),

        idx      a  b  c  0  0  0  0  0
        targets  b  c -1 -1 -1 -1 -1 -1        last_columns  2
    """
    lengths = np.array([len(example.tokens) for example in examples])  # (B,), in tokens
    T = 8 * math.ceil(lengths.max() / 8)  # multiples of 8 suit tensor cores
    if compiled:  # the next power of 2: each T costs a compilation
        T = 1 << (T - 1).bit_length()
    T = min(T, block_size)  # the model has no further positions
    # Padding is token 0. It needs no mask: attention is causal, so no token sees the padding on its
    # right, and padding has no targets.
    idx = np.zeros((len(examples), T), np.int64)  # (B, T)
    targets = np.full((len(examples), T), NO_TARGET)
    for b, example in enumerate(examples):
        # with the last token, which predicts nothing: a reward model reads the reward there
        idx[b, : lengths[b]] = example.tokens
        # the target of a column is the next token, if that token counts in the loss
        columns = np.flatnonzero(example.loss_mask[1:])  # (targets of this example,)
        targets[b, columns] = example.tokens[columns + 1]
    return Batch(
        idx=process.copy_to_device(torch.from_numpy(idx)),
        targets=process.copy_to_device(torch.from_numpy(targets)),
        last_columns=process.copy_to_device(torch.from_numpy(lengths - 1)),
    )
