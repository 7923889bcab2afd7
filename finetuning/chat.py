"""Dialogs, prompts and completions as token ids with a loss mask.

End of text precedes each turn of a dialog, as it precedes each document of the shards, and closes
the last one; the model learns what the assistant says and the end of text after it:

    <|endoftext|>User: What is 2 + 3?<|endoftext|>Assistant: 5<|endoftext|>
                                                             ~~~~~~~~~~~~~~  (with the space)
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.tokenizer import Tokenizer

Messages = list[dict[str, str]]
ROLES = {"system": "System", "user": "User", "assistant": "Assistant"}
# the chat_template in tokenizer_config.json, for apply_chat_template of transformers
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ eos_token + message['role'] | capitalize + ': ' "
    "+ message['content'] }}{% endfor %}{{ eos_token }}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


@dataclass(frozen=True, eq=False)
class Example:
    """Token ids (T,) of a text, uint16, and a mask (T,), true where they count in the loss."""

    tokens: np.ndarray
    loss_mask: np.ndarray

    @classmethod
    def join(cls, *parts: tuple[np.ndarray | list[int], bool]) -> "Example":
        """Join token ids, each with a flag: True if they count in the loss."""
        tokens = np.concatenate([tokens for tokens, _ in parts]).astype(np.uint16)
        return cls(tokens, np.repeat([counts for _, counts in parts], [len(x) for x, _ in parts]))


def encode_messages(messages: Messages, tokenizer: Tokenizer) -> Example:
    """Encode a dialog; the assistant's turns count in the loss."""
    parts, counts = [], False
    for message in messages:
        parts.append(([tokenizer.eot], counts))  # closes the turn before
        counts = message["role"] == "assistant"
        parts.append((tokenizer.encode(f"{ROLES[message['role']]}:"), False))
        parts.append((tokenizer.encode(f" {message['content']}"), counts))
    return Example.join(*parts, ([tokenizer.eot], counts))


def encode_prompt(prompt: str | Messages, tokenizer: Tokenizer, chat: bool) -> list[int]:
    """Return the token ids that a completion follows: up to "Assistant:" in a chat, in which a text
    is a turn of the user, else the text of the prompt after end of text."""
    if not chat:
        return [tokenizer.eot, *tokenizer.encode(prompt).tolist()]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    dialog = encode_messages(messages, tokenizer).tokens
    return [*dialog.tolist(), *tokenizer.encode(f"{ROLES['assistant']}:").tolist()]


def fit_history(
    messages: Messages, tokenizer: Tokenizer, block_size: int, max_new_tokens: int
) -> list[int]:
    """Return the token ids that the assistant's next turn follows, without the oldest questions and
    their answers where `max_new_tokens`, or half of the context, would not fit after them."""
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
    """Encode a prompt and a completion with its end of text; the prompt does not count."""
    said = tokenizer.encode(f" {completion}" if chat else completion)
    before = encode_prompt(prompt, tokenizer, chat)
    return Example.join((before, False), (said, True), ([tokenizer.eot], True))


def decode_completion(tokens: list[int], tokenizer: Tokenizer, chat: bool) -> str:
    """Return the text of a completion, without the space after "Assistant:"."""
    text = tokenizer.decode_bytes(tokens).decode(errors="replace")
    return text.removeprefix(" ") if chat else text


def is_chat(saved: dict, name: str) -> bool:
    """Return True if a model was fine-tuned on chats: by its checkpoint `saved`, or, for the
    Hugging Face folder `name` without one, by the chat template that convert.py writes."""
    if saved:
        return saved["config"].get("plain") is False
    path = Path(name) / "tokenizer_config.json"
    return path.is_file() and json.loads(path.read_text()).get("chat_template") == CHAT_TEMPLATE
