"""Batches as a pure function of (seed, step): nothing to save, nothing to lose.

The train tokens of a folder are one virtual stream. Sequence w is its tokens [w*T, w*T + T] (T
inputs and T targets, one apart), across shard borders; only the last partial sequence is left out.
Epoch e visits every sequence exactly once, in an order drawn from (seed, e). Step s takes positions
[s*G, (s+1)*G) of that order, G sequences to a global batch; ranks and micro-steps slice that range.

    python -m data.loader --data_dir D --verify

proves it for a folder: every sequence once per epoch for several numbers of processes, every id
within the vocabulary, every checksum of the manifest.
"""

import hashlib
import queue
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import numpy as np

from data.shards import DataError, find_shards, read_manifest
from data.tokenizer import GPT2Tokenizer

Item = TypeVar("Item")
ROUNDS = 6


def permute(index: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Where an epoch's positions (any shape, in [0, n)) fall in a shuffle of range(n).

    A Feistel network keyed by (seed, epoch) permutes the smallest square power of two that holds
    n; values that land outside are sent through again until they are inside (cycle walking: Black
    and Rogaway 2002). No array of n is ever made.
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * ROUNDS).digest()
    keys = np.frombuffer(digest, "<u8")
    x = index.astype(np.uint64)
    outside = np.ones(x.shape, bool)
    while outside.any():
        left, right = x[outside] >> half, x[outside] & mask
        for key in keys:
            mixed = (right + key) * np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
        x[outside] = (left << half) | right
        outside = x >= n
    return x.astype(np.int64)


class TokenStream:
    """All tokens of a split in a folder as one array that is never in memory as a whole."""

    def __init__(self, folder: Path | str, split: str) -> None:
        folder = Path(folder)
        self.shards = find_shards(folder, split)
        self.ends = np.cumsum([shard.tokens for shard in self.shards])
        manifest = read_manifest(folder) or {}
        self.tokenizer: str = manifest.get("tokenizer", GPT2Tokenizer.name)
        self.vocab_size: int = manifest.get("vocab_size", GPT2Tokenizer.vocab_size)
        self._open = lru_cache(maxsize=128)(lambda i: self.shards[i].open())  # bounds open files

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length) as int64; DataError for an id outside the vocabulary."""
        assert 0 <= start and start + length <= len(self)
        parts = []
        i = int(np.searchsorted(self.ends, start, side="right"))
        while length:
            shard = self.shards[i]
            offset = start - (int(self.ends[i]) - shard.tokens)
            part = self._open(i)[offset : offset + length]
            if len(part) and part.max() >= self.vocab_size:
                raise DataError(
                    f"{shard.path} holds token id {part.max()}, outside the vocabulary of "
                    f"{self.vocab_size:,} ({self.tokenizer}); make the shard again"
                )
            parts.append(part)
            start, length, i = start + len(part), length - len(part), i + 1
        return np.concatenate(parts).astype(np.int64)


class Sequences:
    """A token stream cut into sequences of T inputs and T targets."""

    def __init__(self, stream: TokenStream, block_size: int) -> None:
        self.stream, self.block_size = stream, block_size
        if len(stream) <= block_size:
            raise DataError(
                f"{stream.shards[0].path.parent} holds {len(stream):,} tokens of this split, too "
                f"few for one sequence of {block_size:,}; add text or lower --block_size"
            )

    def __len__(self) -> int:
        return (len(self.stream) - 1) // self.block_size

    def batch(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets, int64 (B, T) each, of the sequences `ids` (B,)."""
        T = self.block_size
        rows = np.stack([self.stream.read(int(w) * T, T + 1) for w in ids])
        return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])


def step_sequences(step: int, batch: int, n: int, seed: int) -> np.ndarray:
    """Ids (G,) of the sequences in the global batch of `batch` = G sequences at `step`, of n."""
    position = step * batch + np.arange(batch)
    epochs = position // n
    return np.concatenate(
        [permute(position[epochs == e] % n, n, seed, int(e)) for e in np.unique(epochs)]
    )


@dataclass(frozen=True)
class Slicing:
    """How ranks and micro-steps share a global batch of `batch` sequences."""

    batch: int
    micro_batch: int
    rank: int = 0
    world_size: int = 1

    @property
    def micro_steps(self) -> int:
        return self.batch // (self.micro_batch * self.world_size)

    def own(self, ids: np.ndarray) -> np.ndarray:
        """This rank's share (micro_steps, micro_batch) of a global batch of ids (batch,)."""
        return ids.reshape(self.micro_steps, self.world_size, self.micro_batch)[:, self.rank]


def train_batches(
    sequences: Sequences, slicing: Slicing, seed: int, steps: range
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """This rank's micro-batches (inputs, targets), micro_steps of them for each step in turn."""
    for step in steps:
        for ids in slicing.own(step_sequences(step, slicing.batch, len(sequences), seed)):
            yield sequences.batch(ids)


def read_ahead(items: Iterable[Item], depth: int = 4) -> Iterator[Item]:
    """The same items, made up to `depth` ahead by a background thread; its errors come here."""
    ready: queue.Queue = queue.Queue(depth)
    stop = threading.Event()

    def put(item: object) -> bool:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.2)
                return True
            except queue.Full:
                pass
        return False

    def work() -> None:
        try:
            for item in items:
                if not put((item, None)):
                    return
            put((None, StopIteration()))
        except Exception as error:
            put((None, error))

    threading.Thread(target=work, daemon=True, name="read_ahead").start()
    try:
        while True:
            item, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item
    finally:
        stop.set()


def verify(folder: Path, block_size: int, seed: int) -> str:
    """Proves the promises at the top of this file for a folder; AssertionError or DataError if not.

    Returns a sentence with the figures.
    """
    listed = {s["file"]: s["sha256"] for s in (read_manifest(folder) or {"shards": []})["shards"]}
    for split in ("train", "val"):
        stream = TokenStream(folder, split)
        for start in range(0, len(stream), 2**20):
            stream.read(start, min(2**20, len(stream) - start))
        for shard in stream.shards:
            with open(shard.path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if listed.get(shard.path.name, digest) != digest:
                raise DataError(f"{shard.path} is not what the manifest lists; make it again")
    sequences = Sequences(TokenStream(folder, "train"), block_size)
    n, worlds = len(sequences), (1, 2, 3, 4, 8)
    for world in worlds:
        seen = np.zeros(n, np.uint8)
        batch = 8 * world
        for step in range(-(-n // batch)):
            ids = step_sequences(step, batch, n, seed)
            parts = [Slicing(batch, 4, rank, world).own(ids).ravel() for rank in range(world)]
            assert sorted(np.concatenate(parts)) == sorted(ids), "ranks do not share a batch out"
            np.add.at(seen, ids[: n - step * batch], 1)  # the rest belongs to the next epoch
        assert (seen == 1).all(), f"an epoch of {world} ranks misses or repeats a sequence"
    left = len(sequences.stream) - 1 - n * block_size
    return (
        f"{n:,} sequences of {block_size} tokens, each exactly once per epoch for "
        f"{', '.join(map(str, worlds))} processes; {left} tokens at the end left out; "
        f"ids and {len(listed)} checksums in order"
    )


@dataclass
class LoaderConfig:
    """Describe a folder of shards; with --verify, prove the data order on it."""

    data_dir: Path
    """Folder of shards."""
    verify: bool = False
    """Check every id and checksum, and that an epoch uses every sequence once."""
    block_size: int = 1024
    """Tokens in a sequence."""
    seed: int = 1337
    """Seed of the order."""


def main(config: LoaderConfig) -> None:
    for split in ("train", "val"):
        stream = TokenStream(config.data_dir, split)
        print(f"{split}: {len(stream):,} {stream.tokenizer} tokens in {len(stream.shards)} shards")
    if config.verify:
        print(verify(config.data_dir, config.block_size, config.seed))


if __name__ == "__main__":
    from utils.cli import run  # a script may use the command line that the scripts share

    run(main, LoaderConfig)
