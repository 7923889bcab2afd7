"""Write tokenizers in Hugging Face's format, and build the byte-level BPE that they are made of.

No script: only convert.py and data/train_tokenizer.py need this; training and sampling do not.
"""

import json
from pathlib import Path

import tokenizers
from tiktoken.load import read_file_cached
from tokenizers import decoders, models, pre_tokenizers

from data.named_tokenizer import TOKENIZER_FILE, Tokenizer
from data.tokenizer import FileTokenizer, byte_characters

END_OF_TEXT = "<|endoftext|>"  # GPT-2's name
GPT2_MERGES = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"
# Pieces of text that no token crosses, as Qwen 3.5 cuts them: letters keep their marks, which GPT-2
# splits off in Hindi, and each digit is a token.
UNICODE_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(model: models.BPE, split: str = "gpt2") -> tokenizers.Tokenizer:
    """Return byte-level BPE whose tokens lie within the pieces that `split` ("gpt2" or "unicode")
    cuts a text into."""
    engine = tokenizers.Tokenizer(model)
    # use_regex cuts by GPT-2's expression
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split == "gpt2")
    engine.pre_tokenizer = to_bytes
    if split == "unicode":
        cut = pre_tokenizers.Split(tokenizers.Regex(UNICODE_PIECES), "isolated")
        engine.pre_tokenizer = pre_tokenizers.Sequence([cut, to_bytes])
    engine.decoder = decoders.ByteLevel()  # for other programs; ours has bytes_of_id
    return engine


def to_engine(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """Return GPT-2's tokenizer, or that of bytes, in Hugging Face's format."""
    characters = byte_characters()
    vocab = {}
    for token_id in range(tokenizer.eot):
        token = tokenizer.decode_bytes([token_id])
        vocab["".join(characters[byte] for byte in token)] = token_id
    merges = []
    if tokenizer.name == "gpt2":
        # tiktoken keeps tokens without the pairs that they are merged from, but the file that it
        # made them of lies in its cache: a line of version, then a pair in each
        lines = read_file_cached(GPT2_MERGES).decode().splitlines()
        merges = [(left, right) for left, right in map(str.split, lines[1:])]
    engine = byte_level(models.BPE(vocab, merges))
    engine.add_special_tokens([END_OF_TEXT])  # gets the next id, which is tokenizer.eot
    return engine


def save_tokenizer(
    tokenizer: Tokenizer, folder: Path, block_size: int, chat_template: str | None = None
) -> None:
    """Write tokenizer.json and tokenizer_config.json, which transformers' AutoTokenizer reads."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": block_size}
    if isinstance(tokenizer, FileTokenizer):
        content = tokenizer.tokenizer_json
        config.update(tokenizer.template_tokens)
    else:
        content = to_engine(tokenizer).to_str()
        config.update(dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT))
    if chat_template:  # of a model that was fine-tuned on dialogs
        config["chat_template"] = chat_template
    (folder / TOKENIZER_FILE).write_text(content, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
