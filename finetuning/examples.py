"""Rows of .jsonl files, in the formats of docs/FINETUNING.md, as examples and as batches of them.

A row is a JSON object, an example what a method learns from it: a sequence of tokens, or two.
Not about how a dialog becomes token ids: see finetuning/chat.py.
"""

import json
import math
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
    encode_prompt,
    encode_with_special_tokens,
    texts_of,
)
from finetuning.template import find_answer, is_learned
from utils.distributed import Process
from utils.errors import UserError

# The loss of model/loss.py leaves out targets of this value.
NO_TARGET = -1
# Fields by which rows of other projects change how a dialog is written, which is not supported
# here. Fields such as "id" or "source" are ignored.
UNSUPPORTED = ("tools", "functions", "documents", "chat_template_kwargs", "images", "system")


@dataclass(frozen=True, eq=False)
class Example:
    """A sequence of T tokens, some of which count in the loss."""

    tokens: np.ndarray
    """Token ids (T,), uint32."""
    loss_mask: np.ndarray
    """bool (T,): true for a token that counts in the loss, which is predicted from those before."""

    @classmethod
    def of_completion(cls, prompt_ids: list[int], completion_ids: list[int]) -> "Example":
        """Join a prompt, which does not count in the loss, and a completion, which does."""
        tokens = np.array(prompt_ids + completion_ids, np.uint32)  # half of the memory of int64
        return cls(tokens, np.arange(len(tokens)) >= len(prompt_ids))


def encode_messages(messages: Messages, tokenizer: Tokenizer, tools: Tools = None) -> Example:
    """Encode a dialog of which the assistant's turns count in the loss; raise ValueError where the
    chat template does not let one of them be learned."""
    ids = encode_with_special_tokens(messages, tokenizer, tools=tools)  # T of them
    loss_mask = np.zeros(len(ids), bool)
    for i, message in enumerate(messages):
        if is_learned(message):
            # the slice of its token ids, including the one that ends it
            loss_mask[find_answer(messages, i, ids, tokenizer, tools)] = True
    return Example(np.array(ids, np.uint32), loss_mask)


def encode_completion(
    prompt: str | Messages,
    completion: str,
    tokenizer: Tokenizer,
    chat: bool,
    tools: Tools = None,
) -> Example:
    """Encode a prompt, which does not count in the loss, and a completion with the token that ends
    it, which do. Nothing of what a chat template writes after that token is part of it."""
    if not chat:
        prompt_ids = encode_prompt(prompt, tokenizer, chat)
        # The completion is encoded apart from the prompt, as sampling writes it: no token spans
        # both. After an empty prompt it begins the text.
        encode = tokenizer.encode_continuation if prompt else tokenizer.encode
        completion_ids = [*encode(completion).tolist(), tokenizer.eot]
        return Example.of_completion(prompt_ids, completion_ids)
    # Answers of earlier turns are part of the prompt here, and do not count in the loss.
    dialog = [*as_messages(prompt), {"role": "assistant", "content": completion}]
    ids = encode_with_special_tokens(dialog, tokenizer, tools=tools)
    answer = find_answer(dialog, len(dialog) - 1, ids, tokenizer, tools)
    return Example.of_completion(ids[: answer.start], ids[answer])


def read_lines(path: Path) -> list[tuple[int, str]]:
    """Return the lines of a file of UTF-8 text that are not empty, each with its number from 1."""
    try:
        # utf-8-sig drops the byte order mark of Windows; splitlines would also split at U+2028
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    return [(line_number, line) for line_number, line in enumerate(lines, 1) if line.strip()]


def read_examples(path: Path, to_example: Callable[[dict], Any]) -> list:
    """Return what `to_example` makes of each row of a .jsonl file, in their order; raise UserError
    with file and line for a row that it raises for."""
    examples = []
    for line_number, line in read_lines(path):
        row = None
        try:
            row = json.loads(line)
            examples.append(to_example(row))
        except Exception as error:  # a row can be wrong in any way
            reason = str(error)
            if not isinstance(row, dict):
                reason = f"no JSON object, as each row is; train.py takes plain text ({error})"
            raise UserError(f"{path}, line {line_number}: {reason}") from error
    if not examples:
        raise UserError(f"{path} holds no rows; give one JSON object per line")
    return examples


def check_message(message: Message) -> None:
    """Raise ValueError for a message with a role or a field that the project's own format cannot
    write."""
    fields = [name for name, value in message.items() if value]  # without "tool_calls": null
    if message["role"] not in ROLES or not set(fields) <= {"role", "content", "weight"}:
        raise ValueError(f"a chat has no such role or field: {message!r:.200}")


@dataclass
class Question:
    """A row with a "prompt" to complete, of grpo or of evaluate.py."""

    row: dict
    prompt_ids: list[int]
    """Token ids that a completion follows: of a chat up to "Assistant:"."""


@dataclass
class TextEncoder:
    """Encodes rows of chats, or of plain text, for a model with a context of `block_size` tokens.
    Each method raises ValueError for a row that it cannot encode."""

    tokenizer: Tokenizer
    chat: bool
    """False for plain text: without turns."""
    block_size: int
    num_cut: int = 0
    """Examples so far that were longer than the context; finetune.py warns of them."""

    def dialog(self, row: dict) -> Example:
        """Encode the "messages" of a row, its "prompt" and "completion", or its "instruction",
        "input" and "output"."""
        # plain text has no turns for messages, so that its rows need a prompt
        if self.chat and "messages" in row:
            messages = as_messages(self.get_text(row, "messages"))
            return self.cut(encode_messages(messages, self.tokenizer, row.get("tools")))
        # Alpaca's names; its "input", often empty, is what the instruction is about
        if "instruction" in row and "prompt" not in row:
            prompt = get_field(row, "instruction", str)
            if row.get("input"):
                prompt += "\n\n" + get_field(row, "input", str)
            return self.completion({**row, "prompt": prompt}, "output")
        return self.completion(row, "completion")

    def completion(self, row: dict, name: str) -> Example:
        """Encode the "prompt" of a row and the completion in its field `name`, which is completion,
        output, chosen or rejected."""
        prompt = self.get_text(row, "prompt")  # a text, or messages of earlier turns
        completion = get_field(row, name, str)
        tools = row.get("tools")
        return self.cut(encode_completion(prompt, completion, self.tokenizer, self.chat, tools))

    def cut(self, example: Example) -> Example:
        """Return the beginning of an example that fits into the context, and count it if it is
        not the whole; raise ValueError if nothing in it counts in the loss."""
        block_size = self.block_size
        # such a row would teach nothing, and a mean over no targets would be NaN
        if not example.loss_mask[:block_size].any():
            raise ValueError(f"the row has no answer in its first {block_size} tokens, the context")
        if len(example.tokens) > block_size:
            self.num_cut += 1
        return Example(example.tokens[:block_size], example.loss_mask[:block_size])

    def question(self, row: dict, max_new_tokens: int, *, has_answer: bool) -> Question:
        """Encode the "prompt" of a row, after which `max_new_tokens` must fit into the context.
        With `has_answer` the row must have an "answer" to compare with."""
        if has_answer:
            get_field(row, "answer", str, int, float)
        prompt = self.get_text(row, "prompt")
        prompt_ids = encode_prompt(prompt, self.tokenizer, self.chat, row.get("tools"))
        # sampling drops the older half of a full context
        if len(prompt_ids) + max_new_tokens > self.block_size:
            raise ValueError(
                f"a prompt of {len(prompt_ids)} tokens and an answer of {max_new_tokens} "
                f"exceed the context of {self.block_size}"
            )
        return Question(row, prompt_ids)

    def get_text(self, row: dict, name: str) -> str | Messages:
        """Return a field that holds a text or, in a chat, messages. Raise ValueError for a row or a
        message with other fields that would change what it means."""
        has_template = self.chat and self.tokenizer.chat_template  # which can write tools
        for field in UNSUPPORTED:
            if row.get(field) and not (field == "tools" and has_template):
                raise ValueError(f'"{field}" is not supported, and would change what the row means')
        if not self.chat:  # plain text has no turns for messages
            return get_field(row, name, str)
        value = get_field(row, name, str, list)
        if isinstance(value, list):
            for message in value:
                get_field(message, "role", str)
                texts_of(message)
                if message.get("weight") not in (None, 0, 1):
                    raise ValueError(f'"weight" is 0 or 1: {message!r:.200}')
                # a chat template reads further fields of a message, the project's own format none
                if not self.tokenizer.chat_template:
                    get_field(message, "content", str)
                    check_message(message)
        return value


@dataclass
class Batch:
    """B sequences of up to T tokens, padded on the right; None in fields that a method does not
    need. All tensors are on the device of the process."""

    idx: Tensor
    """Token ids (B, T), int64."""
    targets: Tensor
    """Next token (B, T) of each token; NO_TARGET where it does not count in the loss."""
    last_columns: Tensor
    """Column (B,) of the last token of each sequence, at which a reward is read."""
    advantages: Tensor | None = None
    """grpo: advantage (B,) of each completion, float32."""
    ref_logprobs: Tensor | None = None
    """Log-probabilities in nats under the reference model: of targets (B, T) for grpo, of
    completions, summed over their tokens, (B,) for dpo."""


def collate_padded(
    examples: list[Example], block_size: int, process: Process, compiled: bool = False
) -> Batch:
    """Return a batch of examples, each of at most `block_size` tokens. For a `compiled` model T is
    a power of 2, or block_size, so that few shapes are compiled.

    The example "a b c", of which the first token does not count in the loss, becomes

        idx  a  b  c  0  0        targets  b  c -1 -1 -1        last_columns  2
    """
    lengths = np.array([len(example.tokens) for example in examples])  # (B,)
    T = 8 * math.ceil(lengths.max() / 8)  # sizes that suit tensor cores
    if compiled:  # the next power of 2, as each T costs a compilation
        T = 1 << (T - 1).bit_length()
    T = min(T, block_size)  # the model has no further positions
    # Padding is token 0. It needs no mask: attention is causal, so no token of an example sees what
    # stands on its right, and the loss leaves out what padding itself predicts.
    idx = np.zeros((len(examples), T), np.int64)
    targets = np.full((len(examples), T), NO_TARGET)
    for b, example in enumerate(examples):
        # The last token predicts nothing, but a reward model reads its value there.
        idx[b, : lengths[b]] = example.tokens
        # columns whose next token counts in the loss: that token is their target
        columns = np.flatnonzero(example.loss_mask[1:])  # (targets of this example,)
        targets[b, columns] = example.tokens[columns + 1]
    arrays = (idx, targets, lengths - 1)  # in the order of the fields of Batch
    return Batch(*[process.copy_to_device(torch.from_numpy(array)) for array in arrays])
