"""Dialogs, prompts and completions as token ids with a loss mask.

End of text precedes each turn of a dialog, as it precedes each document of the shards, and closes
the last one; the model learns what the assistant says and the end of text after it:

    <|endoftext|>User: What is 2 + 3?<|endoftext|>Assistant: 5<|endoftext|>
                                                             ~~~~~~~~~~~~~~  (with the space)

A model of others that comes with a chat template keeps its own format.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.tokenizer import TOKENIZERS, Tokenizer, load_tokenizer

Messages = list[dict[str, str]]
ROLES = {"system": "System", "user": "User", "assistant": "Assistant"}


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


def encode_rendered(
    messages: Messages, tokenizer: Tokenizer, open_turn: bool = False
) -> list[tuple[np.ndarray, bool]]:
    """Encode a dialog by the chat template; return its parts, each with True if it is an answer.

    Parts begin where an answer begins or ends and are encoded apart, so that no token spans two of
    them: what is sampled follows the same ids as in training. Where the template writes an earlier
    turn in another way once later ones follow, that turn is no part of its own.
    """
    whole = tokenizer.render(messages, open_turn)
    parts = []
    encode, start = tokenizer.encode, 0
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        opened = tokenizer.render(messages[:i], open_turn=True)
        answered = tokenizer.render(messages[: i + 1])
        if whole.startswith(answered) and answered.startswith(opened):
            parts.append((encode(whole[start : len(opened)], special=True), False))
            answer, rest = split_answer(answered[len(opened) :], message["content"], tokenizer)
            parts += [(answer, True), (rest, False)]
            encode, start = tokenizer.encode_continuation, len(answered)
    parts.append((encode(whole[start:], special=True), False))
    return parts


def split_answer(text: str, content: str, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Encode what a chat template writes for an answer of this content: up to the token that ends
    it, and the rest, as a line break. End of text ends an answer where the template has no token
    for that."""
    ids = tokenizer.encode_continuation(text, special=True)
    for place, token in enumerate(ids.tolist(), 1):
        if token in tokenizer.end_ids:
            return ids[:place], ids[place:]
    content = content.strip()
    end = text.find(content) + len(content)
    answer = tokenizer.encode_continuation(text[:end], special=True)
    rest = tokenizer.encode_continuation(text[end:], special=True)
    return np.append(answer, np.uint16(tokenizer.eot)), rest


def encode_messages(messages: Messages, tokenizer: Tokenizer) -> Example:
    """Encode a dialog; the assistant's turns count in the loss."""
    if tokenizer.chat_template:
        parts = encode_rendered(messages, tokenizer)
        num_answers = sum(message["role"] == "assistant" for message in messages)
        if sum(is_answer for _, is_answer in parts) < num_answers:
            raise ValueError("the chat template changes earlier turns with later ones")
        return Example.join(*parts)
    parts, counts = [], False
    for message in messages:
        parts.append(([tokenizer.eot], counts))  # closes the turn before
        counts = message["role"] == "assistant"
        parts.append((tokenizer.encode(f"{ROLES[message['role']]}:"), False))
        parts.append((tokenizer.encode_continuation(f" {message['content']}"), counts))
    return Example.join(*parts, ([tokenizer.eot], counts))


def encode_prompt(prompt: str | Messages, tokenizer: Tokenizer, chat: bool) -> list[int]:
    """Return the token ids that a completion follows: up to "Assistant:" in a chat, in which a text
    is a turn of the user, else the text of the prompt after end of text."""
    if not chat:
        return [tokenizer.eot, *tokenizer.encode(prompt).tolist()]
    messages = as_messages(prompt)
    if tokenizer.chat_template:
        parts = encode_rendered(messages, tokenizer, open_turn=True)
        return np.concatenate([ids for ids, _ in parts]).tolist()
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
    """Encode a prompt and a completion up to the token that ends it; the prompt does not count."""
    before = encode_prompt(prompt, tokenizer, chat)
    if chat and tokenizer.chat_template:
        messages = as_messages(prompt)
        opened = tokenizer.render(messages, open_turn=True)
        answered = tokenizer.render([*messages, {"role": "assistant", "content": completion}])
        if not answered.startswith(opened):
            raise ValueError("the chat template changes earlier turns with later ones")
        answer, _ = split_answer(answered[len(opened) :], completion, tokenizer)
        return Example.join((before, False), (answer, True))
    answer = tokenizer.encode_continuation(f" {completion}" if chat else completion)
    return Example.join((before, False), (answer, True), ([tokenizer.eot], True))


def decode_completion(tokens: list[int], tokenizer: Tokenizer, chat: bool) -> str:
    """Return the text of a completion, without the space after "Assistant:"."""
    text = tokenizer.decode_bytes(tokens).decode(errors="replace")
    return text.removeprefix(" ") if chat and not tokenizer.chat_template else text


def is_chat(saved: dict, name: str, tokenizer: str) -> bool:
    """Return True if a model has learned to chat: by its checkpoint `saved`, else by the chat
    template of its tokenizer or in the Hugging Face folder `name`."""
    if saved and "plain" in saved["config"]:
        return not saved["config"]["plain"]
    if tokenizer not in TOKENIZERS and load_tokenizer(tokenizer).chat_template:
        return True
    about, jinja = Path(name) / "tokenizer_config.json", Path(name) / "chat_template.jinja"
    if about.is_file() and json.loads(about.read_text(encoding="utf-8")).get("chat_template"):
        return True
    return jinja.is_file()
