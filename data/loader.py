"""Data order: which sequences a training step reads, as a pure function of (seed, step).

nanoGPT draws random offsets, so that some tokens are seen twice and others never. Here the stream
of all tokens is cut into sequences: sequence w is tokens [w*T, w*T + T], T inputs and T targets,
shifted by one; only the last partial one is left out. Epoch e visits every sequence exactly once,
in an order drawn from (seed, e). Step s takes positions [s*G, (s+1)*G) of that order, G sequences
in a global batch, and ranks and micro-steps slice this range.

So there is no state to save: a resumed run, with any number of processes and any micro-batch,
goes on with the very sequences that come next.
"""

import hashlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from data.shards import TokenStream
from utils.errors import UserError

# With ideal hashes, four rounds make a strong pseudorandom permutation (Luby and Rackoff 1988);
# two more make up for a hash that is only fast. Another number would change the data order of
# every seed.
FEISTEL_ROUNDS = 6


def permute(positions: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Map positions (any shape, each in [0, n)) of an epoch to sequence ids, each used once.

    A shuffled array of n ids would do, but takes 8 bytes a sequence on each rank, and seconds at
    each start: 10 million sequences are 80 MB. A Feistel network computes any element of a shuffle
    by itself. It splits a number into two halves of bits and in each round XORs one half with a
    hash of the other and a key. Whatever the hash, a round can be undone, so that the network is a
    permutation of all numbers of that many bits.

    These are a power of 4, and n is not. A result outside [0, n) goes through the network again
    until it lies inside (cycle walking, Black and Rogaway 2002). That stays a permutation, as each
    cycle of the network only loses its elements outside, and takes below 4 passes in the mean.
    """
    # the fewest bits, an even number of them, that write all numbers below n
    num_half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    half_bits = np.uint64(num_half_bits)
    half_mask = np.uint64((1 << num_half_bits) - 1)
    # a uint64 key for each round; the hash is the same on every machine, as Python's hash() is not
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * FEISTEL_ROUNDS).digest()
    round_keys = np.frombuffer(digest, "<u8")

    # uint64: a product wraps around, and a shift to the right fills with zeros
    ids = positions.astype(np.uint64)
    outside = np.ones(ids.shape, bool)  # not yet permuted, or permuted to n or above
    while outside.any():
        left = ids[outside] >> half_bits
        right = ids[outside] & half_mask
        for key in round_keys:
            # multiply and shift as in SplitMix64 (Steele et al. 2014), so that each bit of `right`
            # changes half of the bits; the high ones, which are mixed best, are taken
            mixed = (right + key) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
            mixed *= np.uint64(0xBF58476D1CE4E5B9)
            mixed >>= np.uint64(32)
            mixed &= half_mask
            left, right = right, left ^ mixed
        ids[outside] = (left << half_bits) | right
        outside = ids >= n
    return ids.astype(np.int64)


def epoch_order(positions: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Return the ids (N,), out of n, at positions (N,) of the data order, epoch after epoch."""
    ids = np.empty_like(positions)
    epochs = positions // n
    for epoch in np.unique(epochs):  # a batch may reach into the next epoch
        in_epoch = epochs == epoch
        ids[in_epoch] = permute(positions[in_epoch] % n, n, seed, int(epoch))
    return ids


def step_sequences(step: int, batch: int, n: int, seed: int) -> np.ndarray:
    """Return the ids (G,), out of n, of the sequences in a step with G = `batch`."""
    return epoch_order(step * batch + np.arange(batch), n, seed)


class Sequences:
    """A token stream cut into sequences of T = `block_size` inputs and as many targets. Raises
    UserError if the stream is too short for one."""

    def __init__(self, stream: TokenStream, block_size: int) -> None:
        self.stream = stream
        self.block_size = block_size
        if len(stream) <= block_size:
            raise UserError(
                f"{stream.folders[0].path} holds {len(stream):,} {stream.split} tokens, too few "
                f"for one sequence of --block_size {block_size}"
            )

    def __len__(self) -> int:
        # the last target needs a token, too
        return (len(self.stream) - 1) // self.block_size

    def order(self, positions: np.ndarray, seed: int) -> np.ndarray:
        """Return the ids (N,) of the sequences at positions (N,) of the data order."""
        return epoch_order(positions, len(self), seed)

    def count_within(self, tokens: int) -> int:
        """Return how many sequences the first `tokens` targets are: at least 1, at most all."""
        num_sequences = max(1, tokens // self.block_size)
        return min(len(self), num_sequences)

    def read(self, sequence_id: int) -> np.ndarray:
        """Return the tokens of a sequence, int64 (T + 1,)."""
        start = int(sequence_id) * self.block_size
        return self.stream.tokens(start, self.block_size + 1)  # and the target of the last one

    def batch(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets, int64 (B, T) each, of the sequences `ids` (B,)."""
        return shift([self.read(sequence_id) for sequence_id in ids])


def shift(rows: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets, (B, T) each, of B rows (T + 1,): a target is the next token."""
    tokens = np.stack(rows)  # (B, T + 1)
    # copies, as such slices are not contiguous in memory
    inputs = np.ascontiguousarray(tokens[:, :-1])
    targets = np.ascontiguousarray(tokens[:, 1:])
    return inputs, targets


@dataclass(frozen=True)
class Slicing:
    """Division of a global batch of `batch` sequences into ranks and micro-steps."""

    batch: int
    micro_batch: int
    """Sequences in one forward and backward pass of a rank."""
    rank: int = 0
    world_size: int = 1

    @property
    def micro_steps(self) -> int:
        return self.batch // (self.micro_batch * self.world_size)

    def rank_ids(self, ids: np.ndarray) -> np.ndarray:
        """Return this rank's ids (micro_steps, micro_batch) of those of a global batch (batch,)."""
        # Micro-step first, rank second: micro-step i of all ranks is sequences [i*B*W, (i+1)*B*W)
        # of the step, whatever the number of ranks W and the micro-batch B.
        shares = ids.reshape(self.micro_steps, self.world_size, self.micro_batch)
        return shares[:, self.rank]


def train_batches(
    sequences: Sequences, slicing: Slicing, seed: int, steps: range
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield this rank's micro-batches, inputs and targets (B, T), micro_steps of them for each
    step. `sequences` may be a Mixture (data/mixture.py), too."""
    for step in steps:
        positions = step * slicing.batch + np.arange(slicing.batch)
        # every rank computes the order of the whole step, and reads only its own sequences
        for ids in slicing.rank_ids(sequences.order(positions, seed)):
            yield sequences.batch(ids)


def prefetch(items: Iterator) -> Iterator:
    """Yield items, none of them None, that a background thread computes some steps ahead, so that
    training does not wait for the disk. An error is raised where its item would come."""
    # one thread: `items` is a generator, which two threads may not advance at once
    worker = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        ready = deque()  # of futures, in the order of the items
        for _ in range(4):  # enough for a slow read between fast ones; more only takes memory
            ready.append(worker.submit(next, items, None))
        while True:
            item = ready.popleft().result()
            if item is None:  # the end
                return
            ready.append(worker.submit(next, items, None))
            yield item
    finally:  # also when the consumer stops early: the waiting calls are dropped
        worker.shutdown(cancel_futures=True)
