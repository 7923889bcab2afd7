"""Build byte-level BPE tokenizers, and write tokenizers in Hugging Face's format.

This is no script. Only convert.py and data/train_tokenizer.py need it; training and sampling do
not.
"""

import json
from pathlib import Path

import tokenizers
from tiktoken.load import read_file_cached
from tokenizers import decoders, models, pre_tokenizers

from data.huggingface_tokenizer import to_transformers
from data.named_tokenizer import (
    END_OF_TEXT,
    GPT2_MERGES,
    TOKENIZER_FILE,
    ChatTemplate,
    Tokenizer,
)
from data.tokenizer import FileTokenizer, byte_characters
from utils.network import ask

# Qwen 3.5's expression for the pieces of text that no token crosses. Letters keep their marks,
# which GPT-2's expression splits off in Hindi, and each digit is a token.
UNICODE_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make_byte_level_backend(model: models.BPE, split: str = "gpt2") -> tokenizers.Tokenizer:
    """Return a byte-level BPE tokenizer with the tokens and merges of `model`; models.BPE() has
    none, until the caller trains the tokenizer. `split` is "gpt2" or "unicode", the expression that
    cuts a text into pieces; no token crosses the border of two pieces."""
    backend = tokenizers.Tokenizer(model)
    # `to_bytes` writes the bytes of a text as characters, "Ġthe" for " the". With use_regex it
    # first cuts the text by GPT-2's expression. add_prefix_space would put a space before a text.
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split == "gpt2")
    backend.pre_tokenizer = to_bytes
    if split == "unicode":
        # "isolated": each match is a piece of its own, so that no character is dropped
        cut = pre_tokenizers.Split(tokenizers.Regex(UNICODE_PIECES), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([cut, to_bytes])
    backend.decoder = decoders.ByteLevel()  # for other programs only
    return backend


def to_backend(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """Return a named tokenizer, GPT-2's or bytes, as an object of the library `tokenizers`."""
    characters = byte_characters()  # characters[32] is "Ġ", which stands for a space
    vocab: dict[str, int] = {}  # {"!": 0, ..., "Ġthe": 262, ...}: tokens in byte_characters
    for token_id in range(tokenizer.eot):  # end of text is the last id
        token_bytes = tokenizer.decode_bytes([token_id])  # b" the" of id 262
        vocab["".join(characters[byte] for byte in token_bytes)] = token_id
    # [("Ġ", "t"), ("Ġ", "a"), ...]: pairs of tokens in order of priority
    merges: list[tuple[str, str]] = []
    if tokenizer.name == "gpt2":
        # tiktoken's encoding lacks the pairs, but its cache has OpenAI's file of merges: a line
        # with the version, then one pair a line, "Ġ t". `ask` limits the time of a download.
        lines = ask(GPT2_MERGES, lambda: read_file_cached(GPT2_MERGES)).decode().splitlines()
        merges = [(left, right) for left, right in map(str.split, lines[1:])]
    # A tokenizers.Tokenizer, which first splits by GPT-2's expression and writes bytes as
    # characters. Without merges, as for the tokenizer bytes, each byte is a token.
    backend = make_byte_level_backend(models.BPE(vocab, merges))
    backend.add_special_tokens([END_OF_TEXT])  # gets the next id, which is tokenizer.eot
    return backend


def save_tokenizer(
    tokenizer: Tokenizer, folder: Path, block_size: int, chat_template: ChatTemplate | None = None
) -> None:
    """Write tokenizer.json and tokenizer_config.json to `folder`, for AutoTokenizer of
    transformers. `block_size` is the model's context in tokens."""
    if isinstance(tokenizer, FileTokenizer):
        tokenizer_json = tokenizer.tokenizer_json  # content of a tokenizer.json, a str
        # tokens by their names in transformers; template_tokens may have another eos_token
        special_tokens = {"eos_token": tokenizer.end_of_text} | tokenizer.template_tokens
        if not tokenizer.chat_template:  # a chat template needs the bos_token of its model
            # start_ids stand before a text: BOS, or end of text for a tokenizer without BOS
            bos_token = tokenizer.backend.id_to_token(tokenizer.start_ids[0])
            special_tokens["bos_token"] = str(bos_token)  # never None: it is an id of this file
        if not tokenizer.end_ids:
            # End of text is a line break. transformers would drop a special token from a text.
            special_tokens = {}
    else:
        tokenizer_json = to_backend(tokenizer).to_str()  # made here, as it has no file
        # a named tokenizer, gpt2 or bytes, has one token for all of these roles
        special_tokens = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    # a PreTrainedTokenizerFast of transformers, which warns of texts above `block_size` tokens
    tokenizer_hf = to_transformers(tokenizer_json, special_tokens, chat_template, block_size)
    # save_jinja_files=False writes the chat template into tokenizer_config.json, because older
    # versions of transformers do not read a separate file.
    tokenizer_hf.save_pretrained(folder, save_jinja_files=False)
    make_readable_by_transformers_4(folder)


def make_readable_by_transformers_4(folder: Path) -> None:
    """Replace what transformers 5 writes to a folder and transformers 4 does not read, or reads
    with another default. Both versions read the replacements."""
    config_path = folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # 5 has another name, TokenizersBackend
    config["clean_up_tokenization_spaces"] = False  # 4 drops spaces before punctuation by default
    write_json(config_path, config)

    content = json.loads((folder / TOKENIZER_FILE).read_text(encoding="utf-8"))
    merges = content["model"].get("merges", [])  # [["Ġ", "t"], ...]; Unigram has none
    # transformers before 4.45 reads only "Ġ t", which serves unless a token has a space.
    if not any(" " in token for merge in merges for token in merge):
        content["model"]["merges"] = [" ".join(merge) for merge in merges]
        write_json(folder / TOKENIZER_FILE, content)


def write_json(path: Path, content: dict) -> None:
    """Write JSON as transformers does."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
