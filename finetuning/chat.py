"""Dialogs, prompts and completions as token ids with a loss mask.

End of text precedes each turn of a dialog, as it precedes each document of the shards, and closes
the last one; the model learns what the assistant says and the end of text after it:

    <|endoftext|>User: What is 2 + 3?<|endoftext|>Assistant: 5<|endoftext|>
                                                             ~~~~~~~~~~~~~~  (with the space)

A model of others that comes with a chat template keeps its own format.
"""

import json
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from data.tokenizer import Tokenizer, load_tokenizer

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


def render(messages: Messages, tokenizer: Tokenizer, open_turn: bool = False) -> str:
    """Return a dialog by the tokenizer's chat template; `open_turn` begins an answer after it."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # of torch

    jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = jinja.from_string(tokenizer.chat_template)
    ends = dict.fromkeys(("bos_token", "eos_token"), tokenizer.end_of_text)
    return template.render(messages=messages, add_generation_prompt=open_turn, **ends)


def encode_rendered(messages: Messages, tokenizer: Tokenizer, last_alone: bool = False) -> Example:
    """Encode a dialog by the chat template, as one text; what follows the beginning of an answer
    counts, with `last_alone` of the last message."""
    texts, said = [], ""
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and (not last_alone or i == len(messages) - 1):
            before = render(messages[:i], tokenizer, open_turn=True)
            after = render(messages[: i + 1], tokenizer)
            if not (before.startswith(said) and after.startswith(before)):
                raise ValueError("the chat template changes earlier turns with later ones")
            texts += [(before[len(said) :], False), (after[len(before) :], True)]
            said = after
    texts.append((render(messages, tokenizer)[len(said) :], False))
    pieces, counts = zip(*texts, strict=True)
    ids = [tokenizer.encode(text, special=True) for text in accumulate(pieces)]
    return Example(ids[-1], np.repeat(counts, np.diff([0, *map(len, ids)])))


def encode_messages(messages: Messages, tokenizer: Tokenizer) -> Example:
    """Encode a dialog; the assistant's turns count in the loss."""
    if tokenizer.chat_template:
        return encode_rendered(messages, tokenizer)
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
    messages = as_messages(prompt)
    if tokenizer.chat_template:
        return tokenizer.encode(render(messages, tokenizer, True), special=True).tolist()
    dialog = encode_messages(messages, tokenizer).tokens
    return [*dialog.tolist(), *tokenizer.encode(f"{ROLES['assistant']}:").tolist()]


def as_messages(prompt: str | Messages) -> Messages:
    """Return a dialog, in which a text is a turn of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


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
    if chat and tokenizer.chat_template:
        answer = {"role": "assistant", "content": completion}
        return encode_rendered([*as_messages(prompt), answer], tokenizer, last_alone=True)
    said = tokenizer.encode(f" {completion}" if chat else completion)
    before = encode_prompt(prompt, tokenizer, chat)
    return Example.join((before, False), (said, True), ([tokenizer.eot], True))


def decode_completion(tokens: list[int], tokenizer: Tokenizer, chat: bool) -> str:
    """Return the text of a completion, without the space after "Assistant:"."""
    text = tokenizer.decode_bytes(tokens).decode(errors="replace")
    return text.removeprefix(" ") if chat and not tokenizer.chat_template else text


def is_chat(saved: dict, name: str, tokenizer: str) -> bool:
    """Return True if a model has learned to chat: by its checkpoint `saved`, else by the chat
    template of its tokenizer or in the Hugging Face folder `name`."""
    if saved and "plain" in saved["config"]:
        return not saved["config"]["plain"]
    about, jinja = Path(name) / "tokenizer_config.json", Path(name) / "chat_template.jinja"
    found = about.is_file() and "chat_template" in json.loads(about.read_text())
    return found or jinja.is_file() or load_tokenizer(tokenizer).chat_template is not None
