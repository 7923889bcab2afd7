"""Prove that folders of token shards are intact and that an epoch visits each sequence once.

python data/verify.py --data_dir data/edu_fineweb10B
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Python puts data/ there instead

import utils.environment  # noqa: F401 (first: it says what to type without PyTorch)

import numpy as np

from data.loader import Mixture
from data.sharder import sha256
from data.shards import TokenStream
from utils.cli import start_script
from utils.errors import UserError
from utils.ranges import Count, Natural

CHUNK = 2**20  # tokens checked at a time


@dataclass
class VerifyConfig:
    """Prove the data order and the checksums of folders of token shards."""

    data_dir: tuple[Path, ...]
    """Folders of token shards, with weights or without, as for train.py."""
    block_size: Count = 1024
    """Tokens in a sequence."""
    seed: Natural = 1337
    """Seed of the data order."""


def main(config: VerifyConfig) -> None:
    for split in ("val", "train"):
        mixture = Mixture(config.data_dir, split, config.block_size)
        for part in mixture.parts:
            check_shards(part.stream)  # reads every token
            print(f"{split}: {len(part.stream):,} tokens of {part.stream.tokenizer_identity}")
    for part in mixture.parts:  # those of the train split
        n = len(part)
        # the order of a whole epoch at once; visits (n,) counts each sequence id
        visits = np.bincount(part.order(np.arange(n), config.seed), minlength=n)
        assert (visits == 1).all(), "an epoch misses or repeats a sequence"
        print(f"{n:,} sequences of {config.block_size} tokens, each exactly once in an epoch")


def check_shards(stream: TokenStream) -> None:
    """Raise UserError for a shard that differs from its checksum or holds what is no token."""
    for folder in stream.folders:
        if folder.manifest is None:  # of another project, without checksums
            continue
        for entry in folder.manifest.shards:
            path = folder.path / entry.file
            if entry.split == stream.split and sha256(path) != entry.sha256:
                raise UserError(f"{path} differs from the manifest's checksum; make it again")
    # in chunks: a split may be larger than memory
    for start in range(0, len(stream), CHUNK):
        stream.tokens(start, min(CHUNK, len(stream) - start))  # checks the ids


if __name__ == "__main__":
    start_script(main, VerifyConfig)
