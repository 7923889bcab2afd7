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
    """Prove the data order and the checksums of folders of token shards."""

    data_dir: tuple[Path, ...]
    """Folders of token shards."""
    block_size: int = 1024
    """Tokens in a sequence."""
    seed: int = 1337
    """Seed of the data order."""


def main(config: VerifyConfig) -> None:
    entries = {
        folder / entry["file"]: entry
        for folder in config.data_dir
        for entry in (read_manifest(folder) or {"shards": []})["shards"]
    }
    for split in ("val", "train"):
        stream = TokenStream(config.data_dir, split)
        for start in range(0, len(stream), CHUNK):
            stream.tokens(start, min(CHUNK, len(stream) - start))  # checks the ids
        for path in (shard.path for shard in stream.shards if shard.path in entries):
            if sha256(path) != entries[path]["sha256"]:
                raise UserError(f"{path} differs from the manifest's checksum; make it again")
        print(f"{split}: {len(stream):,} {stream.tokenizer} tokens in {len(stream.shards)} shards")
    n = len(Sequences(stream, config.block_size))
    for world_size in WORLD_SIZES:
        visits, batch = np.zeros(n, np.uint8), 8 * world_size
        for step in range(-(-n // batch)):
            ids = step_sequences(step, batch, n, config.seed)
            slices = [Slicing(batch, 4, rank, world_size) for rank in range(world_size)]
            shares = np.concatenate([slicing.rank_ids(ids).ravel() for slicing in slices])
            assert sorted(shares) == sorted(ids), "the ranks do not divide a batch"
            np.add.at(visits, ids[: n - step * batch], 1)  # the rest belongs to the next epoch
        assert (visits == 1).all(), f"{world_size} ranks miss or repeat a sequence of an epoch"
    print(
        f"{n:,} sequences of {config.block_size} tokens, each exactly once per epoch for "
        f"{', '.join(map(str, WORLD_SIZES))} processes; ids and {len(entries)} checksums in order"
    )


if __name__ == "__main__":
    run(main, VerifyConfig)
