"""Interface of all tokenizers, and the two named tokenizers: GPT-2's byte pairs, and plain bytes.

data/tokenizer.py has the tokenizers of files, and makes the tokenizer of a spec.
"""

from abc import ABC, abstractmethod

import numpy as np
import tiktoken

from utils.errors import UserError
from utils.network import ask

ChatTemplate = str | dict[str, str]  # Jinja, or several templates by name: "default", "tool_use"
END_OF_TEXT = "<|endoftext|>"  # token of GPT-2, and of tokenizers that are trained here
# OpenAI's file of GPT-2's pairs; tiktoken reads it, and a second file beside it
GPT2_MERGES = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"
TOKENIZER_FILE = "tokenizer.json"  # Hugging Face's file name, and the key in a spec


class Tokenizer(ABC):
    """Interface of all tokenizers. A "special" token, such as end of text, has an id of its own."""

    name: str
    """Name in manifests: a key of TOKENIZERS, or "tokenizer-" and a checksum."""
    identity: str
    """Equal for two tokenizers only if they give the same tokens and the same end of text."""
    vocab_size: int
    """Number of ids: the highest id + 1."""
    eot: int
    """Id of the end-of-text token. It ends a completion and, without a chat template, an answer."""
    end_ids: frozenset[int]
    """Ids that end a generated text: end of text, the id that begins the next text in the shards,
    the id that ends an answer of a chat model, and each eos_token_id of a Hugging Face model. Empty
    for a vocabulary of characters, whose `eot`, a line break, is text."""
    end_of_text: str = END_OF_TEXT
    """The end-of-text token, whose name in a text is read as text."""
    special_ids: frozenset[int] = frozenset()
    """Ids of tokens with a name that is no text, such as <|im_start|>: a chat does not show them.
    """
    bos_ids: tuple[int, ...] = ()
    """Ids that the tokenizer itself writes before a text, such as LLaMA's BOS; () for GPT-2.
    Benchmarks other than CORE put bos_ids before a context. All other code uses start_ids."""
    is_of_chat_model: bool = False
    """True for the tokenizer of a Hugging Face model with a chat template: the model has learned
    chats, and finetuning/chat.py treats it as a chat model."""
    chat_template: ChatTemplate | None = None
    """Template of the model's chats; None: the format of finetuning/chat.py."""

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Return token ids, uint32 (n,). The name of a special token in the text is encoded as
        text: a document about tokenizers must not end a document. encode_with_added_tokens is for
        prompts."""

    @property
    def start_ids(self) -> tuple[int, ...]:
        """Ids that stand before each text: BOS, or end of text if the tokenizer writes no BOS."""
        if self.bos_ids:
            return self.bos_ids
        return (self.eot,)

    def encode_document(self, text: str) -> np.ndarray:
        """Return start_ids and the ids of a text, uint32 (n,): a document of the shards, or a
        prompt that a model continues."""
        # uint32, because NumPy's default, int64, would make the whole document int64
        return np.concatenate([np.array(self.start_ids, np.uint32), self.encode(text)])

    def encode_continuation(self, text: str) -> np.ndarray:
        """Return the ids, uint32 (n,), of a text that follows another text: without the space, or
        the mark for a space, that some tokenizers put before a text."""
        # GPT-2's and byte tokenizers put no space there; FileTokenizer overrides this method
        return self.encode(text)

    def encode_with_added_tokens(self, text: str, *, follows: bool = False) -> np.ndarray:
        """Return the ids, uint32 (n,), of a text of a prompt or an answer; with `follows` of one
        that follows another text. As in transformers, the names of the model's own added tokens are
        these tokens, except that of end of text, which would end the prompt."""
        # GPT-2's and byte tokenizers have no other token; FileTokenizer overrides this method
        return self.encode_continuation(text) if follows else self.encode(text)

    @abstractmethod
    def decode_bytes(self, ids: list[int]) -> bytes:
        """Return the UTF-8 bytes of token ids: bytes, not a string, because a token may hold a part
        of a character. End of text decodes to nothing, unless end_ids is empty."""

    def lost_text(self, text: str, ids: np.ndarray) -> str:
        """Return the characters of a text that decoding its ids (n,) does not restore."""
        return ""  # only a FileTokenizer may lose text


class ByteTokenizer(Tokenizer):
    """One token for each byte of UTF-8, and id 256 for end of text."""

    name = "bytes"
    identity = "bytes"
    vocab_size = 257
    eot = 256
    end_ids = frozenset([eot])

    def encode(self, text: str) -> np.ndarray:
        # each byte is its own id
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)  # (bytes,)

    def decode_bytes(self, ids: list[int]) -> bytes:
        # bytes() would raise ValueError for end of text, 256
        return bytes(token_id for token_id in ids if token_id != self.eot)


class GPT2Tokenizer(Tokenizer):
    """GPT-2's 50,257 tokens. tiktoken downloads the vocabulary once and keeps a copy."""

    name = "gpt2"
    identity = "gpt2"
    vocab_size = 50257
    eot = 50256
    end_ids = frozenset([eot])

    def __init__(self) -> None:
        try:
            self.encoding = ask(GPT2_MERGES, lambda: tiktoken.get_encoding("gpt2"))
        except OSError as error:  # also the base class of the errors of `requests`
            raise UserError(
                f"the GPT-2 vocabulary could not be downloaded ({type(error).__name__}: "
                f"{error!s:.120}); go online once, set TIKTOKEN_CACHE_DIR to a folder that holds "
                "tiktoken's copy of the vocabulary, or take the tokenizer bytes"
            ) from error

    def encode(self, text: str) -> np.ndarray:
        # without disallowed_special=() tiktoken raises an error for "<|endoftext|>" in a text
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def decode_bytes(self, ids: list[int]) -> bytes:
        # without end of text, which tiktoken would decode to "<|endoftext|>"
        return self.encoding.decode_bytes([token_id for token_id in ids if token_id != self.eot])


# classes by spec; not instances, because GPT2Tokenizer() may download its vocabulary
TOKENIZERS: dict[str, type[GPT2Tokenizer] | type[ByteTokenizer]] = {
    "gpt2": GPT2Tokenizer,
    "bytes": ByteTokenizer,
}
