"""Prove that a folder of token shards is intact and that its data order is right.

    python data/verify.py --data_dir data/edu_fineweb10B

Checks every token id against the vocabulary, every shard against the manifest's checksum, and that
an epoch visits each sequence exactly once for several numbers of processes.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Python puts data/ there instead

import numpy as np

from data.loader import Sequences, Slicing, TokenStream, step_sequences
from data.shards import read_manifest
from utils.cli import run
from utils.errors import UserError
from utils.files import sha256

CHUNK = 2**20  # tokens checked at a time
WORLD_SIZES = (1, 2, 3, 4, 8)


@dataclass
class VerifyConfig:
    """Prove the data order and the checksums of a folder of token shards."""

    data_dir: Path
    """Folder of token shards."""
    block_size: int = 1024
    """Tokens in a sequence."""
    seed: int = 1337
    """Seed of the data order."""


def verify_shards(stream: TokenStream, checksums: dict[str, str]) -> None:
    """Raise UserError for a token id outside the vocabulary or a shard with another checksum."""
    for start in range(0, len(stream), CHUNK):
        stream.tokens(start, min(CHUNK, len(stream) - start))
    for shard in stream.shards:
        if checksums.get(shard.path.name, digest := sha256(shard.path)) != digest:
            raise UserError(f"{shard.path} differs from the manifest's checksum; make it again")


def verify_order(n: int, seed: int) -> None:
    """Raise AssertionError unless the ranks visit each of n sequences once in the first epoch."""
    for world_size in WORLD_SIZES:
        visits = np.zeros(n, np.uint8)
        batch = 8 * world_size
        for step in range(-(-n // batch)):
            ids = step_sequences(step, batch, n, seed)
            slices = [Slicing(batch, 4, rank, world_size) for rank in range(world_size)]
            shares = np.concatenate([slicing.rank_ids(ids).ravel() for slicing in slices])
            assert sorted(shares) == sorted(ids), "the ranks do not divide a batch"
            np.add.at(visits, ids[: n - step * batch], 1)  # the rest belongs to the next epoch
        assert (visits == 1).all(), f"{world_size} ranks miss or repeat a sequence of an epoch"


def main(config: VerifyConfig) -> None:
    if config.block_size < 1:
        raise UserError(f"--block_size {config.block_size} must be at least 1")
    listed = (read_manifest(config.data_dir) or {"shards": []})["shards"]
    checksums = {shard["file"]: shard["sha256"] for shard in listed}
    streams = {split: TokenStream(config.data_dir, split) for split in ("train", "val")}
    for split, stream in streams.items():
        print(f"{split}: {len(stream):,} {stream.tokenizer} tokens in {len(stream.shards)} shards")
        verify_shards(stream, checksums)
    n = len(Sequences(streams["train"], config.block_size))
    verify_order(n, config.seed)
    print(
        f"{n:,} sequences of {config.block_size} tokens, each exactly once per epoch for "
        f"{', '.join(map(str, WORLD_SIZES))} processes; "
        f"{len(streams['train']) - 1 - n * config.block_size} tokens at the end left out; "
        f"ids and {len(checksums)} checksums in order"
    )


if __name__ == "__main__":
    run(main, VerifyConfig)
