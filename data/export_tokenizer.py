"""Write tokenizers in Hugging Face's format, and build the byte-level BPE that they are made of.

No script: only convert.py and data/train_tokenizer.py need this; training and sampling do not.
"""

from pathlib import Path

import tokenizers
from tiktoken.load import read_file_cached
from tokenizers import decoders, models, pre_tokenizers

from data.huggingface_tokenizer import to_transformers
from data.named_tokenizer import END_OF_TEXT, ChatTemplate, Tokenizer
from data.tokenizer import FileTokenizer, byte_characters

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
    backend = tokenizers.Tokenizer(model)
    # `to_bytes` writes a text as characters that stand for its bytes (byte_characters). With
    # use_regex it first cuts the text by GPT-2's expression.
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split == "gpt2")
    backend.pre_tokenizer = to_bytes
    if split == "unicode":
        # isolated: each match is a piece of its own, so that no character is dropped
        cut = pre_tokenizers.Split(tokenizers.Regex(UNICODE_PIECES), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([cut, to_bytes])
    backend.decoder = decoders.ByteLevel()  # for other programs only
    return backend


def to_backend(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """Return GPT-2's tokenizer, or that of bytes, as one of the library `tokenizers`."""
    characters = byte_characters()
    vocab: dict[str, int] = {}  # ids by token, spelled in these characters
    for token_id in range(tokenizer.eot):  # end of text is the last id
        token_bytes = tokenizer.decode_bytes([token_id])
        vocab["".join(characters[byte] for byte in token_bytes)] = token_id
    # pairs of tokens in order of priority; byte tokens have none
    merges: list[tuple[str, str]] = []
    if tokenizer.name == "gpt2":
        # tiktoken does not keep the pairs that its tokens are merged from, but its cache has
        # OpenAI's file of them: a line with the version, then one pair a line.
        lines = read_file_cached(GPT2_MERGES).decode().splitlines()
        merges = [(left, right) for left, right in map(str.split, lines[1:])]
    backend = byte_level(models.BPE(vocab, merges))
    backend.add_special_tokens([END_OF_TEXT])  # gets the next id, which is tokenizer.eot
    return backend


def save_tokenizer(
    tokenizer: Tokenizer, folder: Path, block_size: int, chat_template: ChatTemplate | None = None
) -> None:
    """Write tokenizer.json and tokenizer_config.json, which transformers' AutoTokenizer reads."""
    if isinstance(tokenizer, FileTokenizer):
        tokenizer_json = tokenizer.tokenizer_json
        special_tokens = {"eos_token": tokenizer.end_of_text, **tokenizer.template_tokens}
        if not tokenizer.chat_template:  # else the template needs the model's own
            special_tokens["bos_token"] = tokenizer.backend.id_to_token(tokenizer.start_ids[0])
        if not tokenizer.end_ids:
            # End of text is a line break here. transformers drops special tokens from a text.
            special_tokens = {}
    else:
        tokenizer_json = to_backend(tokenizer).to_str()
        # GPT-2 has one token for all of these
        special_tokens = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    # The template goes into the JSON, as older transformers do not read a file of its own.
    to_transformers(tokenizer_json, special_tokens, chat_template, block_size).save_pretrained(
        folder, save_jinja_files=False
    )
    # transformers 5 writes a name of the class that transformers 4 does not know
    path = folder / "tokenizer_config.json"
    config_json = path.read_text(encoding="utf-8")
    config_json = config_json.replace("TokenizersBackend", "PreTrainedTokenizerFast")
    path.write_text(config_json, encoding="utf-8")
