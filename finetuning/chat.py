"""Dialogs and prompts as token ids.

Sampling and fine-tuning encode by these functions alike. Not about which of the ids a model learns:
see finetuning/template.py, nor about rows and batches: see finetuning/examples.py.

The project's own format puts end of text before each turn, as the shards have it before each
document, and after the last one. Before the first turn stands the tokenizer's BOS if it has one:

    <|endoftext|>User: What is 2 + 3?<|endoftext|>Assistant: 5<|endoftext|>

A Hugging Face model whose tokenizer has a chat template keeps that template instead. Its dialogs
have the token ids that transformers gives them, or are refused.
"""

from typing import Any

from data.named_tokenizer import TOKENIZERS, Tokenizer
from data.tokenizer import FileTokenizer, load_tokenizer
from evaluation.tasks import get_field
from model.formats.checkpoint import Checkpoint

# "role", "content", and further fields that a chat template may read
Message = dict[str, Any]
Messages = list[Message]
Tools = list[dict[str, Any]] | None  # JSON schemas of functions that an assistant may call
# Name of each role in a text.
ROLES = {
    "system": "System",
    "user": "User",
    "assistant": "Assistant",
}


def encode_with_special_tokens(
    messages: Messages, tokenizer: Tokenizer, open_turn: bool = False, tools: Tools = None
) -> list[int]:
    """Return the token ids of a dialog; `open_turn` begins an answer after it. Only a chat template
    writes `tools`."""
    if isinstance(tokenizer, FileTokenizer) and tokenizer.chat_template:
        # as one text, like transformers: many tokenizers encode the beginning of a text differently
        return tokenizer.encode_with_special_tokens(tokenizer.render(messages, open_turn, tools))
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


def encode_prompt(
    prompt: str | Messages, tokenizer: Tokenizer, chat: bool, tools: Tools = None
) -> list[int]:
    """Return the token ids that a completion follows: of a dialog up to "Assistant:", or with
    `chat` false of the prompt's text as the beginning of a document; of characters alone, as in
    nanoGPT, with nothing before it."""
    if not chat:
        assert isinstance(prompt, str)  # TextEncoder.get_text refuses messages for plain text
        if prompt and not tokenizer.end_ids:  # a vocabulary of characters
            return tokenizer.encode(prompt).tolist()
        return tokenizer.encode_document(prompt).tolist()
    return encode_with_special_tokens(as_messages(prompt), tokenizer, open_turn=True, tools=tools)


def texts_of(message: Message) -> list[str]:
    """Return the texts of a message: its content, or the entries of it, for chat templates alone,
    as [{"type": "text", "text": "Hi"}]. Raise ValueError for entries without text, as images."""
    if message.get("content") is None and message.get("tool_calls"):
        return []
    content = get_field(message, "content", str, list)
    if isinstance(content, list):
        return [get_field(entry, "text", str) for entry in content]
    return [content]


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
        prompt_ids = encode_with_special_tokens(messages, tokenizer, open_turn=True)
        # the newest question stays, however long it is: sample.py refuses one beyond the context
        if len(prompt_ids) <= longest_prompt or len(messages) == 1:
            return prompt_ids
        messages = messages[2:]


def is_chat(checkpoint: Checkpoint, tokenizer_spec: str) -> bool:
    """Return True if a model has learned to chat: as its checkpoint of finetune.py says, or, for
    another model, because it came with a chat template. `checkpoint` is {} for one that is none of
    this project's."""
    options = checkpoint.get("config", {})
    if "plain" in options:  # an option of finetune.py alone
        return not options["plain"]
    # a tokenizer with a name has no template; loading GPT-2's could need a download
    return tokenizer_spec not in TOKENIZERS and load_tokenizer(tokenizer_spec).is_of_chats
