"""Dialogs and prompts as token ids.

Sampling and fine-tuning encode by these functions alike. Not about which of the ids a model learns:
see finetuning/template.py, nor about rows and batches: see finetuning/examples.py.

The project's own format puts end of text before each turn, as the shards have it before each
document, and after the last one. Before the first turn stands the tokenizer's BOS if it has one:

    <|endoftext|>User: What is 2 + 3?<|endoftext|>Assistant: 5<|endoftext|>

A Hugging Face model whose tokenizer has a chat template keeps that template instead. Its dialogs
have the token ids that transformers gives them, or are refused.
"""

from pathlib import Path
from typing import Any

from data.named_tokenizer import TOKENIZERS, Tokenizer
from data.tokenizer import FileTokenizer, load_tokenizer, read_json
from training.checkpoint import Checkpoint

# "role", "content", and further fields that a chat template may read
Message = dict[str, Any]
Messages = list[Message]
# Name of each role in a text.
ROLES = {
    "system": "System",
    "user": "User",
    "assistant": "Assistant",
}


def encode_dialog(messages: Messages, tokenizer: Tokenizer, open_turn: bool = False) -> list[int]:
    """Return the token ids of a dialog; `open_turn` begins an answer after it."""
    if isinstance(tokenizer, FileTokenizer) and tokenizer.chat_template:
        # as one text, like transformers: many tokenizers encode the beginning of a text differently
        return tokenizer.encode_dialog(tokenizer.render(messages, open_turn))
    ids = list(tokenizer.start_ids)  # BOS or end of text, before the first turn
    for message in messages:
        # Role and content are encoded apart: a merge of ":" with a letter would give ids in
        # training that sampling, which continues after the ":", never sees.
        ids += tokenizer.encode(f"{ROLES[message['role']]}:").tolist()
        # as a continuation: a tokenizer that puts a space before a text must not add a second one
        ids += tokenizer.encode_continuation(f" {message['content']}").tolist()
        ids.append(tokenizer.eot)  # closes the turn
    if open_turn:  # the model continues after "Assistant:"
        ids += tokenizer.encode(f"{ROLES['assistant']}:").tolist()
    return ids


def encode_prompt(prompt: str | Messages, tokenizer: Tokenizer, chat: bool) -> list[int]:
    """Return the token ids that a completion follows: of a dialog up to "Assistant:", or with
    `chat` false of the prompt's text as the beginning of a document."""
    if not chat:
        assert isinstance(prompt, str)  # plain text has no turns
        return tokenizer.encode_document(prompt).tolist()
    return encode_dialog(as_messages(prompt), tokenizer, open_turn=True)


def as_messages(prompt: str | Messages) -> Messages:
    """Return a prompt as a dialog; a text is one turn of the user."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return prompt


def fit_history(
    messages: Messages, tokenizer: Tokenizer, block_size: int, max_new_tokens: int
) -> list[int]:
    """Return the token ids that the assistant's next turn follows, for questions and answers in
    turn. The oldest questions are left out, each with its answer, until `max_new_tokens`, or half
    of the context, fit after them."""
    longest_prompt = block_size - min(max_new_tokens, block_size // 2)  # in tokens
    while True:
        prompt_ids = encode_dialog(messages, tokenizer, open_turn=True)
        # the newest question stays, however long it is: sample.py refuses one beyond the context
        if len(prompt_ids) <= longest_prompt or len(messages) == 1:
            return prompt_ids
        messages = messages[2:]


def is_chat(checkpoint: Checkpoint, name: str | Path, tokenizer_spec: str) -> bool:
    """Return True if a model has learned to chat.

    A checkpoint of finetune.py tells it. Else a chat template does: that of the tokenizer, or one
    in the Hugging Face folder `name`. `checkpoint` is {} for such a folder.
    """
    options = checkpoint.get("config", {})
    if "plain" in options:  # an option of finetune.py alone
        return not options["plain"]
    # a tokenizer with a name has no template; loading GPT-2's could need a download
    if tokenizer_spec not in TOKENIZERS and load_tokenizer(tokenizer_spec).chat_template:
        return True
    # The spec of GPT-2's tokenizer is its name alone. Where convert.py has exported a chat model
    # with it, the template stands in this file.
    tokenizer_config = read_json(Path(name, "tokenizer_config.json"))  # {} if there is none
    return "chat_template" in tokenizer_config
