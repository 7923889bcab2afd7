"""Prove that folders of token shards are intact and that an epoch visits each sequence once.

python data/verify.py --data_dir data/edu_fineweb10B
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Python puts data/ there instead

import numpy as np

from data.loader import Sequences, TokenStream, permute
from data.shards import read_manifest
from utils.cli import run
from utils.errors import UserError
from utils.files import sha256

CHUNK = 2**20  # tokens checked at a time


@dataclass
class VerifyConfig:
    """Prove the data order and the checksums of folders of token shards."""

    data_dir: tuple[Path, ...]
    """Folders of token shards."""
    block_size: int = 1024
    """Tokens in a sequence."""
    seed: int = 1337
    """Seed of the data order."""


def main(config: VerifyConfig) -> None:
    for folder in config.data_dir:
        for entry in (read_manifest(folder) or {"shards": []})["shards"]:
            if sha256(path := folder / entry["file"]) != entry["sha256"]:
                raise UserError(f"{path} differs from the manifest's checksum; make it again")
    for split in ("val", "train"):
        stream = TokenStream(config.data_dir, split)
        for start in range(0, len(stream), CHUNK):
            stream.tokens(start, min(CHUNK, len(stream) - start))  # checks the ids
        kind, count = stream.tokenizer_name, len(stream.shards)
        print(f"{split}: {len(stream):,} {kind} tokens in {count} shards")
    n = len(Sequences(stream, config.block_size))
    visits = np.bincount(permute(np.arange(n), n, config.seed, 0), minlength=n)
    assert (visits == 1).all(), "an epoch misses or repeats a sequence"
    print(f"{n:,} sequences of {config.block_size} tokens, each exactly once in an epoch")


if __name__ == "__main__":
    run(main, VerifyConfig)
