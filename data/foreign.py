"""Token files in the layouts of other projects: llm.c's .bin.

    NAME.bin           256 little-endian int32 (magic, version, token count, zeros), then the tokens
                       (llm.c, dev/data/data_common.py)

data/shards.py, which imports this file on demand, opens the folders that such files stand in.
"""

import struct
from pathlib import Path

import numpy as np

from data.shards import Shard

BIN_HEADER = struct.Struct("<3i1012x")  # magic, version, token count, and zeros up to 1,024 bytes
# magic and version by the dtype of the tokens: llm.c writes GPT-2's as uint16, Llama 3's as uint32
BIN_VERSIONS = {"<u2": (20240520, 1), "<u4": (20240801, 7)}


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
