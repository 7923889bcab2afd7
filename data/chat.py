"""Dialogs, prompts and completions as token ids, of which some are to be learned.

A dialog is plain text. End of text precedes each turn, as it does each document of the shards, and
closes the last one; the model learns what the assistant says and the end of text after it:

    <|endoftext|>User: What is 2 + 3?<|endoftext|>Assistant: 5<|endoftext|>
                                                             ~~~~~~~~~~~~~~  (with the space)
"""

from dataclasses import dataclass

from data.chat_rows import ROLES
from data.tokenizer import Tokenizer

# of tokenizer_config.json, for apply_chat_template of transformers
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ eos_token + message['role'] | capitalize + ': ' "
    "+ message['content'] }}{% endfor %}{{ eos_token }}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Example:
    """Token ids of a text, and which of them a model learns to predict."""

    tokens: list[int]
    learned: list[bool]


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
