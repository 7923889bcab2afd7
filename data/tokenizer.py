"""Tokenizers: GPT-2's byte pair encoding through tiktoken, plain bytes, or any tokenizer.json.

A tokenizer travels in checkpoints as text, its spec: a key of TOKENIZERS, or JSON that holds a
tokenizer.json; see data/file_tokenizer.py.
"""

import json
import zlib
from importlib import import_module

import numpy as np

from utils.errors import UserError

TOKENIZER = "tokenizer.json"  # of Hugging Face's tokenizers


class ByteTokenizer:
    """One token per UTF-8 byte, and id 256 for end of text."""

    name = "bytes"
    identity = name  # equal if and only if two tokenizers give the same tokens
    vocab_size = 257
    eot = 256  # id of the end-of-text token, which precedes every document
    end_ids = frozenset([eot])  # of the tokens that end a generated text
    chat_template: str | None = None  # of the model that the tokenizer came with

    def encode(self, text: str) -> np.ndarray:
        """Return token ids, uint16 (n,), without recognising special tokens."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def encode_continuation(self, text: str) -> np.ndarray:
        """Return the ids of a text that another one precedes: without the mark or space that some
        tokenizers put before a text."""
        return self.encode(text)

    def decode_bytes(self, ids: list[int]) -> bytes:
        """Return the UTF-8 bytes of token ids, which may cut a character; end of text is empty."""
        return bytes(i for i in ids if i != self.eot)

    def lost_text(self, text: str, ids: np.ndarray) -> str:
        """Return the characters of a text that its ids, uint16 (n,), do not give back."""
        return ""


class GPT2Tokenizer(ByteTokenizer):
    """GPT-2's 50,257 tokens; tiktoken downloads them once."""

    name = "gpt2"
    identity = name
    vocab_size = 50257
    eot = 50256
    end_ids = frozenset([eot])

    def __init__(self) -> None:
        import tiktoken

        try:
            self.encoding = tiktoken.get_encoding("gpt2")
        except OSError as error:  # errors of requests, too
            raise UserError(
                f"the GPT-2 vocabulary could not be downloaded ({type(error).__name__}); go online "
                "once, or set TIKTOKEN_CACHE_DIR to a folder that holds tiktoken's copy of it"
            ) from error

    def encode(self, text: str) -> np.ndarray:
        return self.encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)

    def decode_bytes(self, ids: list[int]) -> bytes:
        return self.encoding.decode_bytes([i for i in ids if i != self.eot])


Tokenizer = ByteTokenizer
TOKENIZERS = {"gpt2": GPT2Tokenizer, "bytes": ByteTokenizer}


def tokenizer_name(spec: str) -> str:
    """Return the name of a tokenizer in manifests, which tell its end of text beside it."""
    if spec in TOKENIZERS:
        return spec
    values = json.loads(spec)
    if "name" in values:
        return values["name"]
    content = json.dumps(values[TOKENIZER], sort_keys=True)
    return f"tokenizer-{zlib.crc32(content.encode()):08x}"


def tokenizer_identity(spec: str) -> str:
    """Return Tokenizer.identity without loading the tokenizer. It tells the end of text, too: one
    tokenizer.json with two of them separates documents by two different tokens."""
    name = tokenizer_name(spec)
    if name in TOKENIZERS:
        return name
    return f"{name} with {json.loads(spec)['eot']}"


def load_tokenizer(spec: str) -> Tokenizer:
    """Return the tokenizer of a spec."""
    if spec in TOKENIZERS:
        return TOKENIZERS[spec]()
    return import_module("data.file_tokenizer").FileTokenizer(spec)  # on demand


def count_tokens(spec: str) -> int:
    """Return the vocabulary size of a tokenizer, without downloading that of GPT-2."""
    if spec in TOKENIZERS:
        return TOKENIZERS[spec].vocab_size
    return load_tokenizer(spec).vocab_size
