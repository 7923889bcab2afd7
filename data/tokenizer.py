"""Tokenizers by their spec: text to token ids and back.

A tokenizer travels in manifests and checkpoints as a text, its spec: a key of TOKENIZERS, or JSON
that holds a whole tokenizer.json, so that no other file is needed. data/named_tokenizer.py has the
interface and the tokenizers with a name, data/file_tokenizer.py reads a tokenizer.json, and
data/export_tokenizer.py writes one for other programs.
"""

from data.file_tokenizer import load_file_tokenizer
from data.named_tokenizer import TOKENIZERS, Tokenizer


def load_tokenizer(spec: str) -> Tokenizer:
    """Return the tokenizer of a spec; raise UserError if that of GPT-2 cannot be downloaded."""
    if spec in TOKENIZERS:
        return TOKENIZERS[spec]()  # reads the vocabulary
    return load_file_tokenizer(spec)


def tokenizer_identity(spec: str) -> str:
    """Return Tokenizer.identity of a spec, without a download."""
    return spec if spec in TOKENIZERS else load_tokenizer(spec).identity


def count_tokens(spec: str) -> int:
    """Return Tokenizer.vocab_size of a spec, without a download."""
    # vocab_size is an attribute of the class already
    tokenizer = TOKENIZERS[spec] if spec in TOKENIZERS else load_tokenizer(spec)
    return tokenizer.vocab_size
