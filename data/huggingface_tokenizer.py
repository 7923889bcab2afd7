"""Tokenizers and chats of Hugging Face folders: transformers reads, renders and writes them.

For tokenizers, only this file imports transformers, and only within functions: the import takes
seconds, and runs with tokenizers of this project do not need it. data/tokenizer.py turns the
content of a folder into a spec once; later code reads only the spec.
"""

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.named_tokenizer import END_OF_TEXT, ChatTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# all inputs of a GPT-2 or LLaMA: transformers 4 would add token_type_ids
MODEL_INPUTS = ["input_ids", "attention_mask"]


@dataclass
class ModelTokens:
    """Statements of a Hugging Face model about its tokens, beside its tokenizer.json."""

    template_tokens: dict[str, str] = field(default_factory=dict)
    """Special tokens by their names in templates: bos_token, eos_token, ..."""
    chat_template: ChatTemplate | None = None
    end_ids: list[int] = field(default_factory=list)
    """Ids at which transformers' `generate` ends a text."""


def read_folder(folder: Path, declared_vocab_size: int) -> tuple[str, ModelTokens]:
    """Return the tokenizer of a folder, as transformers reads it: the content of a tokenizer.json,
    with the added tokens of all files, and the other statements about tokens. Leaves out tokens
    from id `declared_vocab_size` of the model on, which classes of transformers add to any
    vocabulary. Raise any error of transformers for unusable folders."""
    from transformers import AutoTokenizer

    # trust_remote_code=False: never run the code of a folder
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    # AttributeError for a tokenizer that cannot be written as a tokenizer.json, such as ByT5's
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    # [{"id": 50256, "content": "<|endoftext|>", ...}]
    added_tokens = tokens_with_row(content["added_tokens"], folder, declared_vocab_size)
    content["added_tokens"] = added_tokens
    tokenizer_json = json.dumps(content)

    added_texts = [entry["content"] for entry in added_tokens]
    # {"bos_token": "<s>", ...}, without tokens that were left out above, and without
    # additional_special_tokens, a list
    template_tokens = {
        name: token for name, token in tokenizer.special_tokens_map.items() if token in added_texts
    }
    end_ids = read_end_ids(folder, tokenizer.added_tokens_decoder)
    # chat_template is a ChatTemplate or None
    return tokenizer_json, ModelTokens(template_tokens, tokenizer.chat_template, end_ids)


def tokens_with_row(
    added_tokens: list[dict[str, Any]], folder: Path, declared_vocab_size: int
) -> list[dict[str, Any]]:
    """Return the added tokens of a folder that have a row in the embedding of its model. Print a
    note about the others: without an id, they are read as text."""
    with_row: list[dict[str, Any]] = []
    without_row: list[str] = []  # ["<pad>"]
    for entry in added_tokens:
        if entry["id"] < declared_vocab_size:
            with_row.append(entry)
        else:
            without_row.append(entry["content"])
    if without_row:
        logging.getLogger("notes").warning(
            "note: the model of %s has no row of its embedding for %s: read as text",
            folder,
            ", ".join(without_row),
        )
    return with_row


def read_end_ids(folder: Path, added_tokens_by_id: Mapping[int, object]) -> list[int]:
    """Return the ids at which transformers' `generate` ends a text of this model: those of the
    configs in its folder. A single one counts only if it is that of an added token.
    `added_tokens_by_id` is {50256: AddedToken("<|endoftext|>"), ...}."""
    from transformers import AutoConfig, GenerationConfig

    end_ids: list[int] = []
    config_classes: dict[str, Any] = {
        "config.json": AutoConfig,
        "generation_config.json": GenerationConfig,
    }
    for file_name, config_class in config_classes.items():
        if not (folder / file_name).is_file():
            continue
        # 50256, or [128001, 128009] of Llama 3, or None
        eos_token_id = config_class.from_pretrained(folder).eos_token_id
        if isinstance(eos_token_id, list):
            end_ids += eos_token_id
        # A number may be the default of its class. GPT-2's default, 50256, is a word in other
        # vocabularies.
        elif eos_token_id in added_tokens_by_id:
            end_ids.append(eos_token_id)
    return end_ids


def tokenizer_json_says_all(folder: Path, eot: int) -> bool:
    """Return True if the other files of a folder add nothing to its tokenizer.json, so that
    read_folder, and the slow import of transformers, are not needed. The tokenizer.json has one
    special token, END_OF_TEXT with the id `eot`."""
    for pattern in ("added_tokens.json", "special_tokens_map.json", "**/*.jinja"):
        if any(folder.glob(pattern)):
            return False
    # values that add nothing if END_OF_TEXT is the only special token
    without_effect = (None, END_OF_TEXT, eot, "PreTrainedTokenizerFast")
    for path in folder.glob("*config.json"):  # of the model, its generation and its tokenizer
        config_fields = json.loads(path.read_text(encoding="utf-8"))
        config_fields.pop("clean_up_tokenization_spaces", None)  # how other programs decode
        for name, value in config_fields.items():
            if re.search("token|template|prefix", name) and value not in without_effect:
                return False
    return True


def to_transformers(
    tokenizer_json: str,
    special_tokens: dict[str, str],
    chat_template: ChatTemplate | None,
    block_size: int | None = None,
) -> "PreTrainedTokenizerFast":
    """Return a tokenizer of transformers from the content of a tokenizer.json, to render dialogs
    and to write folders. `special_tokens` are keyed by name: bos_token, eos_token, ... It warns of
    texts longer than `block_size` tokens; None: it does not warn."""
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    arguments: dict[str, Any] = dict(special_tokens)  # {"bos_token": "<s>", ...}
    # {"type": "ByteLevel", "add_prefix_space": True, ...}; {} if the file has none
    pre_tokenizer = json.loads(tokenizer_json)["pre_tokenizer"] or {}
    if pre_tokenizer.get("add_prefix_space"):
        arguments["add_prefix_space"] = True  # else transformers 4 switches it off
    return PreTrainedTokenizerFast(
        tokenizer_object=Backend.from_str(tokenizer_json),
        chat_template=chat_template,  # Jinja, or several by name, or None
        model_max_length=block_size,
        model_input_names=MODEL_INPUTS,
        **arguments,
    )
