"""Prove that folders of token shards are intact and that an epoch visits each sequence once.

python data/verify.py --data_dir data/edu_fineweb10B
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Python puts data/ there instead

import numpy as np

from data.loader import TokenStream
from data.mixture import Mixture
from data.shards import read_manifest
from utils.cli import start_script
from utils.errors import UserError
from utils.files import sha256

CHUNK = 2**20  # tokens checked at a time


@dataclass
class VerifyConfig:
    """Prove the data order and the checksums of folders of token shards."""

    data_dir: tuple[Path, ...]
    """Folders of token shards, with weights or without, as for train.py."""
    block_size: int = 1024
    """Tokens in a sequence."""
    seed: int = 1337
    """Seed of the data order."""


def main(config: VerifyConfig) -> None:
    for split in ("val", "train"):
        mixture = Mixture(config.data_dir, split, config.block_size)
        for stream in (part.stream for part in mixture.parts):
            check_shards(stream)
            for folder in stream.unfinished:
                print(f"{folder} holds a part of its text: run the sharding to its end")
            print(f"{split}: {len(stream):,} tokens of {stream.tokenizer_identity}")
    for part in mixture.parts:
        n = len(part)
        visits = np.bincount(part.order(np.arange(n), config.seed), minlength=n)
        assert (visits == 1).all(), "an epoch misses or repeats a sequence"
        print(f"{n:,} sequences of {config.block_size} tokens, each exactly once in an epoch")
    check_shares(mixture)


def check_shares(mixture: Mixture) -> None:
    """Prove that each corpus has its share of any first n positions, and its positions in order."""
    counts = np.arange(1, 2 * mixture.period + 1)
    corpus, corpus_positions = mixture.where(counts - 1)
    for i, share in enumerate(mixture.shares):
        chosen = corpus == i
        excess = np.cumsum(chosen) * mixture.period - counts * share  # in 1 / period of a sequence
        assert (np.abs(excess) < mixture.period).all(), "a corpus is a sequence off its share"
        visited = corpus_positions[chosen]
        assert (visited == np.arange(len(visited))).all(), "a corpus misses or repeats a position"
        print(f"{mixture.names[i]}: {share} of every {mixture.period} positions, in its own order")


def check_shards(stream: TokenStream) -> None:
    """Raise UserError for a shard that differs from its checksum or holds what is no token."""
    for folder in stream.folders:
        entries = (read_manifest(folder) or {"shards": []})["shards"]
        for entry in (entry for entry in entries if entry["split"] == stream.split):
            if sha256(path := folder / entry["file"]) != entry["sha256"]:
                raise UserError(f"{path} differs from the manifest's checksum; make it again")
    for start in range(0, len(stream), CHUNK):
        stream.tokens(start, min(CHUNK, len(stream) - start))  # checks the ids


if __name__ == "__main__":
    start_script(main, VerifyConfig)
