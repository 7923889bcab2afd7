"""Tokenizers: GPT-2's byte pair encoding through tiktoken, and plain bytes without a download."""

import json
from pathlib import Path

import numpy as np

from utils.errors import UserError

GPT2_IDS = {"!": 0, "\u0120the": 262, "Hello": 15_496}  # \u0120 stands for a space


class ByteTokenizer:
    """One token per UTF-8 byte, and id 256 for end of text."""

    name = "bytes"
    vocab_size = 257
    eot = 256  # id of the end-of-text token, which precedes every document

    def encode(self, text: str) -> np.ndarray:
        """Return token ids, uint16 (n,), without recognising special tokens."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def decode_bytes(self, ids: list[int]) -> bytes:
        """Return the UTF-8 bytes of token ids, which may cut a character; end of text is empty."""
        return bytes(i for i in ids if i != self.eot)


def check_vocabulary(folder: Path) -> None:
    """Raise UserError if a Hugging Face model has the size of GPT-2's vocabulary, but another."""
    for path in filter(Path.is_file, (folder / "vocab.json", folder / "tokenizer.json")):
        ids = json.loads(path.read_text(encoding="utf-8"))
        ids = ids["model"]["vocab"] if path.name == "tokenizer.json" else ids
        if len(ids) > 50_000 and not GPT2_IDS.items() <= ids.items():
            raise UserError(f"{path} is another tokenizer than GPT-2's, the one known here")


class GPT2Tokenizer:
    """GPT-2's 50,257 tokens, with the methods of ByteTokenizer; tiktoken downloads them once."""

    name = "gpt2"
    vocab_size = 50257
    eot = 50256

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


Tokenizer = GPT2Tokenizer | ByteTokenizer
TOKENIZERS = {"gpt2": GPT2Tokenizer, "bytes": ByteTokenizer}


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of this name, a key of TOKENIZERS."""
    return TOKENIZERS[name]()


def bytes_per_token(tokenizer: Tokenizer) -> np.ndarray:
    """Return the number of UTF-8 bytes of each token id, int64 (vocab_size,)."""
    return np.array([len(tokenizer.decode_bytes([i])) for i in range(tokenizer.vocab_size)])
