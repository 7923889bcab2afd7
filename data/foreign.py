"""Token files in the layouts of other projects: llm.c's .bin and datatrove's .ds.

    NAME.bin           256 little-endian int32 (magic, version, token count, zeros), then the tokens
                       (llm.c, dev/data/data_common.py)
    NAME.ds            the tokens alone, little-endian (datatrove, pipeline/tokens/tokenizer.py)
    NAME.ds.metadata   lines of text: the tokenizer, "|" and the bytes of a token; number of tokens
    NAME.ds.index      ends of the documents, which training does not need

data/shards.py, which imports this file on demand, opens the folders that such files stand in.
"""

import struct
from pathlib import Path

import numpy as np

from data.shards import Shard
from data.tokenizer import TOKENIZER_FILE
from utils.errors import UserError

BIN_HEADER = struct.Struct("<3i1012x")  # magic, version, token count, and zeros up to 1,024 bytes
# magic and version by the dtype of the tokens: llm.c writes GPT-2's as uint16, Llama 3's as uint32
BIN_VERSIONS = {"<u2": (20240520, 1), "<u4": (20240801, 7)}
GPT2_NAMES = ("gpt2", "openai-community/gpt2")  # on the Hugging Face hub, where datatrove looks


def bin_header(dtype: str, num_tokens: int) -> bytes:
    """Return the header of a .bin shard."""
    return BIN_HEADER.pack(*BIN_VERSIONS[dtype], num_tokens)


def inspect_bin(path: Path) -> Shard:
    """Return the shard that a .bin file says it is; raise ValueError if llm.c does not know it."""
    with open(path, "rb") as file:
        magic, version, num_tokens = BIN_HEADER.unpack(file.read(BIN_HEADER.size))
    for dtype, known in BIN_VERSIONS.items():
        if known == (magic, version):
            return Shard(path, BIN_HEADER.size, num_tokens, np.dtype(dtype))
    # a file of tokens alone
    raise ValueError("no header of llm.c; np.save(path, np.fromfile(...)) adds one")


def inspect_datatrove(path: Path) -> Shard:
    """Return the shard that the metadata of a .ds file say it is. Raise UserError if they name
    another tokenizer than GPT-2's, and no tokenizer.json stands in the folder."""
    metadata = path.with_name(path.name + ".metadata").read_text(encoding="utf-8")
    first_line, num_tokens = metadata.splitlines()[:2]
    tokenizer, _, token_size = first_line.rpartition("|")
    # The file of a local path, as datatrove takes it, is not looked for there: this may be another
    # machine. Without the name, a vocabulary of about the size of GPT-2's would be taken for it.
    if tokenizer not in GPT2_NAMES and not path.with_name(TOKENIZER_FILE).exists():
        raise UserError(f"{path} holds tokens of {tokenizer}: put its {TOKENIZER_FILE} beside it")
    return Shard(path, 0, int(num_tokens), np.dtype(f"<u{token_size}"))
