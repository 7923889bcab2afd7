"""Tokenizers: GPT-2's byte pairs through tiktoken, and plain bytes, which need no download."""

from typing import Protocol

import numpy as np

from data.shards import DataError


class Tokenizer(Protocol):
    """What the rest of the project needs of a tokenizer; ids fit uint16."""

    name: str
    vocab_size: int
    eot: int  # the end-of-text id that precedes every document

    def encode(self, text: str) -> np.ndarray:
        """Token ids, uint16 (n,), of text taken literally: no special tokens are recognised."""

    def decode_bytes(self, ids: list[int]) -> bytes:
        """UTF-8 bytes of token ids; a cut-off character stays cut off. End of text is empty."""

    def ranks(self) -> dict[bytes, int]:
        """The id of each token but end of text; merges of lower ids come first."""


class ByteTokenizer:
    """One token per UTF-8 byte, and 256 for end of text."""

    name = "bytes"
    vocab_size = 257
    eot = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def decode_bytes(self, ids: list[int]) -> bytes:
        return bytes(i for i in ids if i != self.eot)

    def ranks(self) -> dict[bytes, int]:
        return {bytes([i]): i for i in range(256)}


class GPT2Tokenizer:
    """GPT-2's 50,257 tokens. tiktoken downloads the vocabulary once, or finds it in
    the folder TIKTOKEN_CACHE_DIR names. Raises DataError where it can do neither."""

    name = "gpt2"
    vocab_size = 50257
    eot = 50256

    def __init__(self) -> None:
        import tiktoken

        try:
            self.encoding = tiktoken.get_encoding("gpt2")
        except OSError as error:  # tiktoken raises what requests raises, which is an OSError
            raise DataError(
                f"the GPT-2 vocabulary could not be downloaded ({type(error).__name__}); go online "
                "once, or set TIKTOKEN_CACHE_DIR to a folder that holds tiktoken's copy of it"
            ) from error

    def encode(self, text: str) -> np.ndarray:
        return self.encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)

    def decode_bytes(self, ids: list[int]) -> bytes:
        return self.encoding.decode_bytes([i for i in ids if i != self.eot])

    def ranks(self) -> dict[bytes, int]:
        ids = range(self.eot)
        return {self.encoding.decode_single_token_bytes(i): i for i in ids}


TOKENIZERS = {"gpt2": GPT2Tokenizer, "bytes": ByteTokenizer}


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of that name; DataError if there is none."""
    if name not in TOKENIZERS:
        raise DataError(f"no tokenizer is called {name!r}; there are {', '.join(TOKENIZERS)}")
    return TOKENIZERS[name]()


def bytes_per_token(tokenizer: Tokenizer) -> np.ndarray:
    """UTF-8 bytes that each id stands for, int64 (vocab_size,): what bits per byte divides by."""
    return np.array([len(tokenizer.decode_bytes([i])) for i in range(tokenizer.vocab_size)])
