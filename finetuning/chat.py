"""Dialogs, prompts and completions as token ids, of which some count in the loss.

A dialog is plain text. End of text precedes each turn, as it does each document of the shards, and
closes the last one; the model learns what the assistant says and the end of text after it:

    <|endoftext|>User: What is 2 + 3?<|endoftext|>Assistant: 5<|endoftext|>
                                                             ~~~~~~~~~~~~~~  (with the space)
"""

from dataclasses import dataclass

import numpy as np

from data.tokenizer import Tokenizer
from finetuning.rows import ROLES

# of tokenizer_config.json, for apply_chat_template of transformers
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ eos_token + message['role'] | capitalize + ': ' "
    "+ message['content'] }}{% endfor %}{{ eos_token }}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
Messages = list[dict[str, str]]


@dataclass(frozen=True, eq=False)
class Example:
    """Token ids (T,) of a text, uint16, and which of them (T,) count in the loss."""

    tokens: np.ndarray
    loss_mask: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def join(cls, parts: list[tuple[np.ndarray, bool]]) -> "Example":
        """Return the texts of `parts` as one; each says whether its tokens count in the loss."""
        tokens = np.concatenate([tokens for tokens, _ in parts]).astype(np.uint16)
        return cls(tokens, np.repeat([counts for _, counts in parts], [len(x) for x, _ in parts]))


def encode_messages(messages: Messages, tokenizer: Tokenizer) -> Example:
    """Return a dialog, of which the assistant's turns count in the loss."""
    parts, end, counts = [], np.array([tokenizer.eot]), False
    for message in messages:
        parts.append((end, counts))  # closes the turn before
        counts = message["role"] == "assistant"
        parts.append((tokenizer.encode(f"{ROLES[message['role']]}:"), False))
        parts.append((tokenizer.encode(f" {message['content']}"), counts))
    return Example.join([*parts, (end, counts)])


def as_messages(prompt: str | Messages) -> Messages:
    """Return a prompt as messages: a text is a turn of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def encode_prompt(prompt: str | Messages, tokenizer: Tokenizer, chat: bool) -> list[int]:
    """Return the token ids that a completion follows: up to "Assistant:" in a chat, else the text
    of the prompt after end of text."""
    if not chat:
        return [tokenizer.eot, *tokenizer.encode(prompt).tolist()]
    dialog = encode_messages(as_messages(prompt), tokenizer).tokens
    return [*dialog.tolist(), *tokenizer.encode(f"{ROLES['assistant']}:").tolist()]


def fit_history(
    messages: Messages, tokenizer: Tokenizer, block_size: int, max_new_tokens: int
) -> list[int]:
    """Return the token ids that the assistant's next turn follows. Where the context has no room
    for all and `max_new_tokens` more, or half of it, the oldest questions are left out with their
    answers; messages of the system stay."""
    room = block_size - min(max_new_tokens, block_size // 2)
    while len(tokens := encode_prompt(messages, tokenizer, chat=True)) > room:
        turns = [i for i, message in enumerate(messages) if message["role"] == "user"]
        if len(turns) < 2:
            break
        messages = messages[: turns[0]] + messages[turns[1] :]
    return tokens


def encode_completion(
    prompt: str | Messages, completion: str, tokenizer: Tokenizer, chat: bool
) -> Example:
    """Return a prompt with a completion and the end of text, which count in the loss."""
    said = tokenizer.encode(f" {completion}" if chat else completion)
    before = np.array(encode_prompt(prompt, tokenizer, chat))
    return Example.join([(before, False), (said, True), (np.array([tokenizer.eot]), True)])


def decode_completion(tokens: list[int], tokenizer: Tokenizer, chat: bool) -> str:
    """Return the text of a completion, without the space after "Assistant:"."""
    text = tokenizer.decode_bytes(tokens).decode(errors="replace")
    return text.removeprefix(" ") if chat else text


def is_exact(text: str, answer: str | float) -> bool:
    """Return whether a completion is the answer, but for white space around either."""
    return text.strip() == str(answer).strip()
