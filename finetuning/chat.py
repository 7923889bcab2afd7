"""Dialogs and prompts as token ids.

Sampling and fine-tuning share these functions, so both encode alike. This file is not about which
ids a model learns (finetuning/template.py), or about rows and batches (finetuning/examples.py).

The project's own format puts end of text before each turn, as the shards do before each document,
and after the last turn. If the tokenizer has a BOS, the dialog begins with BOS instead:

    <|endoftext|>User: What is 2 + 3?<|endoftext|>Assistant: 5<|endoftext|>

A Hugging Face model whose tokenizer has a chat template keeps that template instead. Its dialogs
get the same token ids as in transformers, or are refused.
"""

import logging
from functools import cache
from typing import Any

from data.named_tokenizer import TOKENIZERS, Tokenizer
from data.tokenizer import FileTokenizer, load_tokenizer
from evaluation.tasks import get_field
from model.formats.checkpoint import Checkpoint

# One turn, {"role": "user", "content": "2+3?"}, with further fields that a chat template may read.
Message = dict[str, Any]
Messages = list[Message]
Tools = list[dict[str, Any]] | None  # JSON schemas of functions that an assistant may call
# How the project's own format writes each role.
ROLES = {
    "system": "System",
    "user": "User",
    "assistant": "Assistant",
}


def encode_dialog(
    messages: Messages, tokenizer: Tokenizer, open_turn: bool = False, tools: Tools = None
) -> list[int]:
    """Return the token ids of a dialog. With `open_turn` they end where the assistant's next answer
    begins, as a prompt for sampling. Only a chat template writes `tools`."""
    if isinstance(tokenizer, FileTokenizer) and tokenizer.chat_template:
        # "<|im_start|>user\n2+3?<|im_end|>\n..."; UserError if the template fails
        text = tokenizer.render(messages, open_turn, tools)
        # Encoded as a whole, like in transformers: many tokenizers encode the beginning of a text
        # differently. Names of special tokens, such as <|im_end|>, become the tokens.
        return tokenizer.encode_with_special_tokens(text)
    ids = list(tokenizer.start_ids)  # BOS, or end of text if there is no BOS: [50256] of GPT-2
    for message in messages:
        # Encode role and content separately. Sampling continues after the ":", so training must
        # not merge the ":" with the letters that follow it into one token. ROLES has every role:
        # TextEncoder refuses rows with another, and sample.py writes no other.
        ids += tokenizer.encode(f"{ROLES[message['role']]}:").tolist()  # "User:"
        # `follows`: some tokenizers would put a second space before the text
        ids += encode_text(f" {message['content']}", tokenizer, follows=True)
        ids.append(tokenizer.eot)  # closes the turn
    if open_turn:  # the model continues after "Assistant:"
        ids += tokenizer.encode(f"{ROLES['assistant']}:").tolist()
    return ids


def encode_text(text: str, tokenizer: Tokenizer, *, follows: bool = False) -> list[int]:
    """Return the ids of a text of a prompt or an answer. Names of the model's own added tokens
    become these tokens. That of end of text stays text, because the token would end the prompt."""
    # in a vocabulary of characters end_ids are empty: end of text is an ordinary character
    if tokenizer.end_ids and tokenizer.end_of_text in text:
        note_name_as_text(tokenizer.end_of_text)
    # with `follows` other text stands before this one, so the tokenizer adds no space in front
    return tokenizer.encode_with_added_tokens(text, follows=follows).tolist()


@cache  # once, not for each row
def note_name_as_text(token: str) -> None:
    """Print a note that the name of end of text, <|endoftext|>, is read as text. Other programs
    would read the token instead."""
    # distributed.start silences this logger on all processes but the main one
    logging.getLogger("notes").warning(
        "note: %s within a text is read as text, not as the end of the text", token
    )


def encode_prompt(
    prompt: str | Messages, tokenizer: Tokenizer, chat: bool, tools: Tools = None
) -> list[int]:
    """Return the token ids of a prompt, which the model continues. With `chat` they are a dialog up
    to "Assistant:"; else BOS (or end of text) and the text, like the beginning of a document in the
    shards. A vocabulary of characters (nanoGPT) gets the text alone."""
    if not chat:
        assert isinstance(prompt, str)  # TextEncoder.get_text_or_messages refuses messages
        prompt_ids = encode_text(prompt, tokenizer)  # without BOS
        # A vocabulary of characters has no end_ids. An empty prompt gets start_ids nevertheless,
        # because a model needs at least one token.
        if prompt and not tokenizer.end_ids:
            return prompt_ids
        return [*tokenizer.start_ids, *prompt_ids]  # [50256, ...] of GPT-2
    # as_messages makes a text one turn of the user
    return encode_dialog(as_messages(prompt), tokenizer, open_turn=True, tools=tools)


def texts_of(message: Message) -> list[str]:
    """Return the texts of a message, to check that a chat template keeps them. The content is one
    text, or for chat templates a list of entries such as {"type": "text", "text": "Hi"}. Raise
    ValueError for an entry without text, such as an image."""
    if message.get("content") is None and message.get("tool_calls"):
        return []  # an answer that only calls functions
    content = get_field(message, "content", str, list)  # ValueError for another type
    if isinstance(content, list):
        return [get_field(entry, "text", str) for entry in content]
    return [content]


def as_messages(prompt: str | Messages) -> Messages:
    """Return a prompt as a dialog; a text becomes one turn of the user."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return prompt


def fit_history(
    messages: Messages, tokenizer: Tokenizer, block_size: int, max_new_tokens: int
) -> list[int]:
    """Return the token ids of a chat up to the assistant's next answer. `messages` are questions
    and answers in turn. The oldest questions are dropped, each with its answer, until the context
    has room for an answer of `max_new_tokens`, or of half the context if that is less."""
    longest_prompt = block_size - min(max_new_tokens, block_size // 2)  # in tokens
    while True:
        prompt_ids = encode_dialog(messages, tokenizer, open_turn=True)
        # Never drop the newest question: sample.py refuses it if it exceeds the context.
        if len(prompt_ids) <= longest_prompt or len(messages) == 1:
            return prompt_ids
        messages = messages[2:]


def is_chat(checkpoint: Checkpoint, tokenizer_spec: str) -> bool:
    """Return True if a model has learned to chat. A checkpoint of finetune.py records it as the
    option --plain; any other model has learned it if its tokenizer has a chat template.
    `checkpoint` is {} for a model of another project."""
    options = checkpoint.get("config", {})  # by the names of their flags: {"plain": False, ...}
    if "plain" in options:  # only finetune.py has this option
        return not options["plain"]
    # is_of_chat_model: it has a chat template. Those in TOKENIZERS ("gpt2", "bytes") have none, and
    # loading "gpt2" could need a download.
    return tokenizer_spec not in TOKENIZERS and load_tokenizer(tokenizer_spec).is_of_chat_model
