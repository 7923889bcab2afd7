"""Tokenizers: text to token ids and back, with GPT-2's byte pairs, plain bytes or a tokenizer.json.

A tokenizer travels in manifests and checkpoints as a text, its spec: a key of TOKENIZERS, or JSON
that holds a whole tokenizer.json, so that no other file is needed. `load_tokenizer` makes a
Tokenizer of a spec. This file reads and writes no tokenizer.json: data/file_tokenizer.py makes a
spec of one, data/export_tokenizer.py writes one for other programs.
"""

import json
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from functools import cached_property, lru_cache

import numpy as np
import tokenizers

from utils.errors import UserError

TOKENIZER = "tokenizer.json"  # file name of Hugging Face's format, and its key in a spec
SPACE = "\u2581"  # stands for a space in the tokens of SentencePiece (LLaMA)


class Tokenizer(ABC):
    """Interface of all tokenizers. "Special" tokens, as end of text, are ids of their own."""

    name: str
    """Name in manifests."""
    identity: str
    """Equal if and only if two tokenizers give the same tokens and the same end of text."""
    vocab_size: int
    """Number of ids: the highest one + 1."""
    eot: int
    """Id of the end-of-text token, which precedes every document of the shards."""
    end_ids: frozenset[int]
    """Ids that end a generated text: end of text, and what ends an answer of a chat model."""
    chat_template: str | None = None
    """Jinja template of the dialogs of the model that the tokenizer came with."""

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Return token ids, uint16 (n,). A special token that is spelled out in the text is text:
        documents about tokenizers must not be able to end a document."""

    def encode_continuation(self, text: str) -> np.ndarray:
        """Return the ids (n,) of a text that follows another one: without the space, or the mark
        for one, that some tokenizers put before a text."""
        return self.encode(text)

    @abstractmethod
    def decode_bytes(self, ids: list[int]) -> bytes:
        """Return the UTF-8 bytes of token ids. Bytes, not a string, because one token may hold a
        part of a character. End of text decodes to nothing."""

    def lost_text(self, text: str, ids: np.ndarray) -> str:
        """Return the characters of a text that its ids (n,) do not give back."""
        return ""


class ByteTokenizer(Tokenizer):
    """One token for each byte of UTF-8, and id 256 for end of text."""

    name = "bytes"
    identity = "bytes"
    vocab_size = 257
    eot = 256
    end_ids = frozenset([eot])

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def decode_bytes(self, ids: list[int]) -> bytes:
        return bytes(token for token in ids if token != self.eot)


class GPT2Tokenizer(Tokenizer):
    """GPT-2's 50,257 tokens. tiktoken downloads them once and keeps a copy."""

    name = "gpt2"
    identity = "gpt2"
    vocab_size = 50257
    eot = 50256
    end_ids = frozenset([eot])

    def __init__(self) -> None:
        import tiktoken  # here, so that byte tokens work without it

        try:
            self.encoding = tiktoken.get_encoding("gpt2")
        except OSError as error:  # the base class of the errors of requests, too
            raise UserError(
                f"the GPT-2 vocabulary could not be downloaded ({type(error).__name__}); go online "
                "once, or set TIKTOKEN_CACHE_DIR to a folder that holds tiktoken's copy of it"
            ) from error

    def encode(self, text: str) -> np.ndarray:
        # without disallowed_special=() tiktoken raises an error for "<|endoftext|>" in a text
        return self.encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)

    def decode_bytes(self, ids: list[int]) -> bytes:
        return self.encoding.decode_bytes([token for token in ids if token != self.eot])


class FileTokenizer(Tokenizer):
    """Tokenizer of a tokenizer.json, run by the library `tokenizers`.

    Its spec is JSON: "tokenizer.json" is the content of the file and "eot" the end-of-text token;
    "end_ids", "chat_template" and "template_tokens" are those of the Hugging Face model that it
    came with; "name" is a key of TOKENIZERS that has the same tokens, if there is one.
    """

    def __init__(self, spec: str) -> None:
        values = json.loads(spec)
        content = values[TOKENIZER]
        self.tokenizer_json = json.dumps(content, ensure_ascii=False)
        self.end_of_text = values["eot"]

        # Two files with the same content are the same tokenizer, wherever they lie. With another
        # end of text they are not: their documents are separated by different tokens.
        checksum = zlib.crc32(json.dumps(content, sort_keys=True).encode())
        self.name = values.get("name", f"tokenizer-{checksum:08x}")
        self.identity = self.name
        if self.name not in TOKENIZERS:
            self.identity = f"{self.name} with {self.end_of_text}"

        self.engine = make_engine(self.tokenizer_json)
        vocab = self.engine.get_vocab()
        self.vocab_size = max(vocab.values()) + 1
        self.eot = vocab[self.end_of_text]
        self.end_ids = frozenset([self.eot, *values.get("end_ids", [])])
        self.added_ids = set(self.engine.get_added_tokens_decoder())
        """Ids beside the vocabulary of plain text: special tokens."""

        self.chat_template = values["chat_template"]
        self.template_tokens = {"bos_token": self.end_of_text, "eos_token": self.end_of_text}
        self.template_tokens.update(values.get("template_tokens", {}))
        """Strings that the chat template may insert, by the name of their variable."""

        # Bytes of each id. The decoder of the file is not asked: it gives strings, in which a
        # character that spans two tokens is lost, and some files have none.
        is_byte_level = '"type": "ByteLevel"' in self.tokenizer_json
        byte_of_character = {character: i for i, character in enumerate(byte_characters())}
        self.bytes_of_id: dict[int, bytes] = {}
        for token, token_id in vocab.items():
            if is_byte_level and token_id not in self.added_ids:
                token_bytes = bytes(byte_of_character[character] for character in token)
            elif token.startswith("<0x") and len(token) == 6:  # byte fallback, as <0x0A>
                token_bytes = bytes([int(token[3:5], 16)])
            else:
                token_bytes = token.replace(SPACE, " ").encode()
            self.bytes_of_id[token_id] = token_bytes
        self.bytes_of_id[self.eot] = b""

    @cached_property
    def continuing_engine(self) -> tokenizers.Tokenizer:
        """The engine without what puts a space, or a mark for one, before a text."""
        content = json.loads(self.tokenizer_json, object_hook=without_prefix)
        return make_engine(json.dumps(content))

    def encode(self, text: str, special: bool = False) -> np.ndarray:
        """Return token ids, uint16 (n,). With `special`, the names of special tokens in the text
        become these tokens, as a chat template needs."""
        return encode_with(self.engine, text, special)

    def encode_continuation(self, text: str, special: bool = False) -> np.ndarray:
        return encode_with(self.continuing_engine, text, special)

    def decode_bytes(self, ids: list[int]) -> bytes:
        # a model may have ids that its tokenizer lacks, as rows of padding
        return b"".join(self.bytes_of_id.get(token, b"") for token in ids)

    def render(self, messages: list[dict[str, str]], open_turn: bool = False) -> str:
        """Return a dialog as text by the chat template; with `open_turn`, up to the place where
        the assistant's next answer begins."""
        from jinja2.sandbox import ImmutableSandboxedEnvironment  # slow; only chats need it

        # transformers renders with these options; the sandbox is there because a template is code
        # of strangers
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        template = environment.from_string(self.chat_template)
        variables = {"messages": messages, "add_generation_prompt": open_turn}
        return template.render(variables, **self.template_tokens)

    def lost_text(self, text: str, ids: np.ndarray) -> str:
        decoded = self.decode_bytes(ids.tolist()).decode(errors="replace")
        if decoded in (text, f" {text}"):  # many tokenizers put a space before the first word
            return ""
        # What a normalizer does, as lower-casing or composing characters, is meant and counts as no
        # loss. What lacks after it was dropped by a pre-tokenizer, as white space, or has no token.
        if self.engine.normalizer is not None:
            text = self.engine.normalizer.normalize_str(text)
        lost_counts = Counter(text.replace(SPACE, " ")) - Counter(decoded)
        return "".join(lost_counts.elements())


TOKENIZERS = {"gpt2": GPT2Tokenizer, "bytes": ByteTokenizer}


def make_engine(tokenizer_json: str) -> tokenizers.Tokenizer:
    """Return the tokenizer of a tokenizer.json, without the truncation and padding that it may ask
    for, and with special tokens in a text read as text."""
    engine = tokenizers.Tokenizer.from_str(tokenizer_json)
    engine.no_truncation()
    engine.no_padding()
    engine.encode_special_tokens = True  # the library's name for "as text"
    return engine


def encode_with(engine: tokenizers.Tokenizer, text: str, special: bool) -> np.ndarray:
    """Return token ids, uint16 (n,); with `special`, those of special tokens in the text."""
    as_text = not special
    if engine.encode_special_tokens != as_text:
        # An assignment fails while another thread encodes. Threads encode documents only, for
        # which the value never changes.
        engine.encode_special_tokens = as_text
    # encode_batch_fast frees Python's interpreter lock, encode does not
    (encoding,) = engine.encode_batch_fast([text], add_special_tokens=False)
    return np.array(encoding.ids, np.uint16)


def without_prefix(component: dict) -> dict:
    """Return a component of a tokenizer.json (normalizer, pre-tokenizer, ...) without its option to
    put something before each text."""
    if component.get("type") == "Prepend":
        component["prepend"] = ""
    if component.get("type") in ("ByteLevel", "Metaspace"):
        component["add_prefix_space"] = False
    if component.get("type") == "Metaspace":
        component["prepend_scheme"] = "never"
    return component


def byte_characters() -> list[str]:
    """Return the characters that byte-level BPE writes for the bytes 0 to 255.

    A printable character of Latin-1 stands for its own byte, and the n-th character from U+0100 on
    for the n-th of the other bytes (bytes_to_unicode of GPT-2's encoder.py).
    """
    characters = []
    num_others = 0
    for byte in range(256):
        if chr(byte).isprintable() and chr(byte) != " ":
            characters.append(chr(byte))
        else:
            characters.append(chr(0x100 + num_others))
            num_others += 1
    return characters


@lru_cache(maxsize=8)  # building the tables of a large tokenizer.json takes a second
def load_tokenizer(spec: str) -> Tokenizer:
    """Return the tokenizer of a spec; raise UserError if that of GPT-2 cannot be downloaded."""
    if spec in TOKENIZERS:
        return TOKENIZERS[spec]()
    return FileTokenizer(spec)


def tokenizer_identity(spec: str) -> str:
    """Return Tokenizer.identity of a spec, without a download."""
    return spec if spec in TOKENIZERS else load_tokenizer(spec).identity


def count_tokens(spec: str) -> int:
    """Return Tokenizer.vocab_size of a spec, without a download."""
    tokenizer = TOKENIZERS[spec] if spec in TOKENIZERS else load_tokenizer(spec)
    return tokenizer.vocab_size
