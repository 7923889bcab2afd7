"""Batches as a pure function of (seed, step), so that the loader has no state to save.

The tokens of one or several folders are one stream. Sequence w is tokens [w*T, w*T + T]: T inputs
and T targets, shifted by one, across the borders of shards and folders; only the last partial one
is left out. Epoch e visits every sequence exactly once, in an order drawn from (seed, e). Step s
takes positions [s*G, (s+1)*G) of it, a global batch of G; ranks and micro-steps slice that range.
"""

import hashlib
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from data.shards import (
    bytes_per_token,
    check_together,
    find_shards,
    folder_tokenizer,
    read_manifest,
)
from data.tokenizer import count_tokens, tokenizer_identity
from utils.errors import UserError

ROUNDS = 6


def permute(index: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Map positions of an epoch (any shape, in [0, n)) to sequence ids without memory of size n. A
    Feistel network keyed by (seed, epoch) permutes the smallest power of 4 that is at least n;
    results outside [0, n) pass through it again (cycle walking: Black and Rogaway 2002)."""
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
    """The tokens of a split in one or several folders as one virtual array, mapped from disk.
    Raises UserError if the folders hold no shards of the split, or cannot be read together."""

    def __init__(self, folders: Path | Sequence[Path], split: str) -> None:
        folders = [folders] if isinstance(folders, str | Path) else folders
        self.split, self.folders = split, [Path(folder) for folder in folders]
        check_together(self.folders)
        self.shards = [shard for folder in self.folders for shard in find_shards(folder, split)]
        self.starts = np.cumsum([0, *(shard.tokens for shard in self.shards)])
        specs = [folder_tokenizer(folder) for folder in self.folders]
        identities = sorted({tokenizer_identity(spec) for spec in specs})
        if len(identities) > 1:
            raise UserError(
                f"the folders of --data_dir have several tokenizers: {', '.join(identities)}"
            )
        self.tokenizer, self.tokenizer_identity = specs[0], identities[0]
        self.vocab_size = count_tokens(self.tokenizer)
        self._open = lru_cache(maxsize=128)(lambda i: self.shards[i].open())  # few open files

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def bytes_per_token(self) -> float | None:
        """Mean bytes of source text for a token; None where a folder does not tell."""
        return bytes_per_token([read_manifest(folder) for folder in self.folders], self.split)

    @property
    def digest(self) -> int:
        """Checksum of the lengths and the first tokens of the shards, in their order. It does not
        depend on where the folders lie."""
        crc = 0
        for shard in self.shards:
            crc = zlib.crc32(f"{shard.tokens}".encode(), crc)
            crc = zlib.crc32(shard.open()[:1000].tobytes(), crc)
        return crc

    @property
    def unfinished(self) -> list[Path]:
        """Folders that hold a part of their text: neither its end nor --max_shards ended the
        sharding, as it was interrupted or still runs."""
        folders = []
        for folder in self.folders:
            manifest = read_manifest(folder) or {}
            if not (manifest.get("complete", True) or manifest["stopped"]):
                folders.append(folder)
        return folders

    def tokens(self, start: int, length: int) -> np.ndarray:
        """Return tokens [start, start + length), int64 (length,); raise UserError for a bad id."""
        assert 0 <= start and start + length <= len(self)
        parts, i = [], int(np.searchsorted(self.starts, start, side="right")) - 1
        while length:
            offset = start - int(self.starts[i])
            part = self._open(i)[offset : offset + length]
            if (highest := part.max(initial=0)) >= self.vocab_size:
                known = f"{self.vocab_size:,} of {self.tokenizer_identity}"
                path = self.shards[i].path
                raise UserError(f"{path} holds token id {highest}, not one of the {known}")
            parts.append(part)
            start, length, i = start + len(part), length - len(part), i + 1
        return np.concatenate(parts).astype(np.int64)


class Sequences:
    """A token stream divided into sequences of T inputs and T targets."""

    def __init__(self, stream: TokenStream, block_size: int) -> None:
        self.stream, self.block_size = stream, block_size
        if len(stream) <= block_size:
            found = f"{stream.folders[0]} holds {len(stream):,} {stream.split} tokens"
            raise UserError(f"{found}, too few for one sequence of --block_size {block_size}")

    def __len__(self) -> int:
        return (len(self.stream) - 1) // self.block_size

    def order(self, positions: np.ndarray, seed: int) -> np.ndarray:
        """Return the ids (N,) of the sequences at positions (N,) of the data order."""
        return epoch_order(positions, len(self), seed)

    def count_within(self, tokens: int) -> int:
        """Return how many sequences the first `tokens` targets are: at least 1, at most all."""
        return min(len(self), max(1, tokens // self.block_size))

    def batch(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets, int64 (B, T) each, of the sequences `ids` (B,)."""
        T = self.block_size
        rows = np.stack([self.stream.tokens(int(w) * T, T + 1) for w in ids])
        return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])


def epoch_order(positions: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Return the ids (N,) of the sequences, out of n, at positions (N,) of the data order."""
    ids, epochs = np.empty_like(positions), positions // n
    for e in np.unique(epochs):
        ids[epochs == e] = permute(positions[epochs == e] % n, n, seed, int(e))
    return ids


def step_sequences(step: int, batch: int, n: int, seed: int) -> np.ndarray:
    """Return the ids (G,) of the sequences in a step with G = `batch`, out of n sequences."""
    return epoch_order(step * batch + np.arange(batch), n, seed)


@dataclass(frozen=True)
class Slicing:
    """Division of a global batch of `batch` sequences into ranks and micro-steps."""

    batch: int
    micro_batch: int
    rank: int = 0
    world_size: int = 1

    @property
    def micro_steps(self) -> int:
        return self.batch // (self.micro_batch * self.world_size)

    def rank_ids(self, ids: np.ndarray) -> np.ndarray:
        """Return this rank's ids (micro_steps, micro_batch) of those of a global batch (batch,)."""
        return ids.reshape(self.micro_steps, self.world_size, self.micro_batch)[:, self.rank]


def train_batches(
    sequences: Sequences, slicing: Slicing, seed: int, steps: range
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield this rank's micro-batches (inputs, targets), micro_steps of them for each step."""
    for step in steps:
        positions = step * slicing.batch + np.arange(slicing.batch)
        for ids in slicing.rank_ids(sequences.order(positions, seed)):
            yield sequences.batch(ids)


def prefetch(items: Iterator, depth: int = 4) -> Iterator:
    """Yield items, none of them None, that a background thread computes up to `depth` ahead."""
    worker = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        ready = deque(worker.submit(next, items, None) for _ in range(depth))
        while (item := ready.popleft().result()) is not None:
            ready.append(worker.submit(next, items, None))
            yield item
    finally:
        worker.shutdown(cancel_futures=True)
