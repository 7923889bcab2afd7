"""Tokenizers and chats of Hugging Face folders, as transformers reads, renders and writes them.

The only file that imports transformers, and only within functions: the import takes seconds, and
runs with tokenizers of this project do without it. data/tokenizer.py makes a spec of what is read
here, once; nobody looks into the folder again.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.named_tokenizer import END_OF_TEXT, TOKENIZER_FILE, ChatTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# the only inputs of a GPT-2 or LLaMA: transformers 4 would give them token_type_ids, too
MODEL_INPUTS = ["input_ids", "attention_mask"]


@dataclass
class ModelTokens:
    """Statements of a Hugging Face model about its tokens, beside its tokenizer.json."""

    template_tokens: dict[str, str] = field(default_factory=dict)
    """Special tokens by the names that templates have for them: bos_token, eos_token, ..."""
    chat_template: ChatTemplate | None = None
    end_ids: list[int] = field(default_factory=list)
    """Ids at which transformers' `generate` ends a text."""


def read_folder(folder: Path, num_rows: int) -> tuple[str, ModelTokens]:
    """Return what transformers says of a folder: the content of a tokenizer.json, with every added
    token, whatever file it stands in; and the rest. Left out are tokens that classes add to any
    vocabulary, and for which an embedding of `num_rows` rows has none. Raise ValueError for a
    tokenizer that has no tokenizer.json, and for other folders whatever transformers raises."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

    # never the code of a folder
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"a {type(tokenizer).__name__} has no {TOKENIZER_FILE}")
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    added_tokens = [entry for entry in content["added_tokens"] if entry["id"] < num_rows]
    content["added_tokens"] = added_tokens
    token_names = [entry["content"] for entry in added_tokens]
    # Leaves out tokens that were cut off above, and additional_special_tokens, which is a list.
    special_tokens = tokenizer.special_tokens_map.items()
    template_tokens = {name: token for name, token in special_tokens if token in token_names}

    end_ids: list[int] = []
    config_classes: dict[str, Any] = {
        "config.json": AutoConfig,
        "generation_config.json": GenerationConfig,
    }
    for file_name, config_class in config_classes.items():
        if not (folder / file_name).is_file():
            continue
        end_id = config_class.from_pretrained(folder).eos_token_id
        if isinstance(end_id, list):
            end_ids += end_id
        # A number may be the default of a class, as GPT-2's 50256, which is a word in other
        # vocabularies.
        elif end_id in tokenizer.added_tokens_decoder:
            end_ids.append(end_id)
    return json.dumps(content), ModelTokens(template_tokens, tokenizer.chat_template, end_ids)


def says_no_more(folder: Path, eot: int) -> bool:
    """Return whether transformers would say nothing of a folder beside its tokenizer.json, which
    has one special token, END_OF_TEXT with the id `eot`."""
    for pattern in ("added_tokens.json", "special_tokens_map.json", "**/*.jinja"):
        if any(folder.glob(pattern)):
            return False
    # values that add nothing to a tokenizer.json whose one special token is END_OF_TEXT
    without_effect = (None, END_OF_TEXT, eot, "PreTrainedTokenizerFast")
    for path in folder.glob("*config.json"):
        for name, value in json.loads(path.read_text(encoding="utf-8")).items():
            if re.search("token|template|prefix", name) and value not in without_effect:
                return False
    return True


def to_transformers(
    tokenizer_json: str,
    special_tokens: dict[str, str],
    chat_template: ChatTemplate | None,
    block_size: int | None = None,
) -> "PreTrainedTokenizerFast":
    """Return transformers' tokenizer of a tokenizer.json, which renders dialogs and writes folders.
    It warns of texts longer than `block_size` tokens."""
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    arguments: dict[str, Any] = dict(special_tokens)  # bos_token="<s>", ...
    pre_tokenizer = json.loads(tokenizer_json)["pre_tokenizer"] or {}
    if pre_tokenizer.get("add_prefix_space"):
        arguments["add_prefix_space"] = True  # transformers 4 would switch it off otherwise
    return PreTrainedTokenizerFast(
        tokenizer_object=Backend.from_str(tokenizer_json),
        chat_template=chat_template,
        model_max_length=block_size,
        model_input_names=MODEL_INPUTS,
        **arguments,
    )
