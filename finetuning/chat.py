"""Dialogs and prompts as token ids, and which of these ids are learned.

Sampling and fine-tuning encode by these functions alike. Not about the texts that a model learns
from, their rows and batches: see finetuning/examples.py.

The project's own format puts end of text before each turn, as the shards have it before each
document, and after the last one. Before the first turn stands the tokenizer's BOS if it has one.
The model learns what the assistant says and the end of text after it, which are underlined here:

    <|endoftext|>User: What is 2 + 3?<|endoftext|>Assistant: 5<|endoftext|>
                                                             ~~~~~~~~~~~~~~  (with the space)

A Hugging Face model whose tokenizer has a chat template keeps that template instead. Its dialogs
have the token ids that transformers gives them, or are refused.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.tokenizer import TOKENIZERS, Tokenizer, load_tokenizer

Message = dict[str, Any]  # with "role" and "content", and what a chat template may read besides
Messages = list[Message]
ROLES = {  # by role: its name in a text
    "system": "System",
    "user": "User",
    "assistant": "Assistant",
}


@dataclass(frozen=True, eq=False)
class Segment:
    """Consecutive token ids (n,) of a text, all of which count in the loss or none."""

    tokens: np.ndarray | list[int]
    is_learned: bool


def encode_turns(
    messages: Messages,
    tokenizer: Tokenizer,
    open_turn: bool = False,
) -> list[Segment]:
    """Encode a dialog in the project's own format; `open_turn` begins an answer after it. The
    assistant's turns are learned."""
    segments = [Segment(list(tokenizer.start_ids), is_learned=False)]  # before the first turn
    for message in messages:
        role = ROLES[message["role"]]
        # Role and content are encoded apart: a merge of ":" with a letter would give ids in
        # training that sampling, which continues after the ":", never sees.
        segments.append(Segment(tokenizer.encode(f"{role}:"), is_learned=False))
        # a continuation: tokenizers that put a space before a text must not add a second one
        content_ids = tokenizer.encode_continuation(f" {message['content']}")
        segments.append(Segment([*content_ids, tokenizer.eot], is_learned(message)))
    if open_turn:  # what sampling continues
        segments.append(Segment(tokenizer.encode(f"{ROLES['assistant']}:"), is_learned=False))
    return segments


def is_learned(message: Message) -> bool:
    """Return True for a turn of the assistant, unless its "weight" is 0."""
    return message["role"] == "assistant" and message.get("weight") in (None, 1)


def encode_prompt(
    prompt: str | Messages,
    tokenizer: Tokenizer,
    chat: bool,
) -> list[int]:
    """Return the token ids that a completion follows: of a dialog up to "Assistant:", or with
    `chat` false of the prompt's text as the beginning of a document."""
    if not chat:
        return tokenizer.encode_document(prompt).tolist()
    messages = as_messages(prompt)
    if tokenizer.chat_template:
        return tokenizer.encode_dialog(tokenizer.render(messages, open_turn=True))
    segments = encode_turns(messages, tokenizer, open_turn=True)
    return np.concatenate([segment.tokens for segment in segments]).tolist()


def as_messages(prompt: str | Messages) -> Messages:
    """Return a prompt as a dialog; a text is one turn of the user."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return prompt


def fit_history(
    messages: Messages,
    tokenizer: Tokenizer,
    block_size: int,
    max_new_tokens: int,
) -> list[int]:
    """Return the token ids that the assistant's next turn follows, for questions and answers in
    turn. The oldest questions are left out, each with its answer, until `max_new_tokens`, or half
    of the context, fit after them."""
    longest_prompt = block_size - min(max_new_tokens, block_size // 2)
    prompt_ids = encode_prompt(messages, tokenizer, chat=True)
    # the newest question stays, however long it is
    while len(prompt_ids) > longest_prompt and len(messages) > 1:
        messages = messages[2:]
        prompt_ids = encode_prompt(messages, tokenizer, chat=True)
    return prompt_ids


def is_chat(checkpoint: dict, name: str | Path, tokenizer_spec: str) -> bool:
    """Return True if a model has learned to chat.

    A checkpoint of finetune.py tells it. Else a chat template does: that of the tokenizer, or one
    in the Hugging Face folder `name`. `checkpoint` is {} for such a folder.
    """
    options = checkpoint.get("config", {})
    if "plain" in options:  # an option of finetune.py alone
        return not options["plain"]
    if tokenizer_spec not in TOKENIZERS and load_tokenizer(tokenizer_spec).chat_template:
        return True
    # The spec of GPT-2's tokenizer is its name alone. Where convert.py has exported a chat model
    # with it, the template stands in this file.
    tokenizer_config = Path(name, "tokenizer_config.json")
    if not tokenizer_config.is_file():
        return False
    return "chat_template" in json.loads(tokenizer_config.read_text(encoding="utf-8"))
