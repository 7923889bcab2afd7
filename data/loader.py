"""Data order: which sequences a training step reads, as a pure function of (seed, step).

nanoGPT draws random offsets, so that a run reads some tokens twice and others never. Here the
stream of all tokens is cut into sequences: sequence w is tokens [w*T, w*T + T], T inputs and T
targets, shifted by one; only the last partial sequence is left out. Epoch e visits every sequence
exactly once, in an order drawn from (seed, e). With a global batch of G sequences, step s takes
positions [s*G, (s+1)*G) of that order. Processes and micro-steps slice this range.

So a checkpoint needs no more than the next position: a resumed run, with any number of processes
and any batch, goes on with exactly the sequences that come next.

If --data_dir names several corpora with weights, positions come in periods. In a period of P
positions each corpus has a whole number of places, P times its weight, which are spread evenly; the
next period repeats them. With weights 0.75 and 0.25, P is 4 and the places are a, a, b, a. The
k-th place of a corpus, counted over all periods, is the k-th sequence of the corpus's own order. So
any P positions in a row hold exactly the share of each corpus, and shorter stretches about that
share. A random corpus for each position would give the right shares only in the mean.
"""

import hashlib
import math
import re
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
from torch import Tensor

from data.shards import ShardFolder, TokenStream, open_folders
from utils.errors import UserError

# With ideal hashes, four rounds make a strong pseudorandom permutation (Luby and Rackoff 1988);
# two more make up for a hash that is fast, not ideal. Another number of rounds would change the
# data order of every seed.
FEISTEL_ROUNDS = 6

LONGEST_PERIOD = 1_000_000  # positions; each takes 16 bytes of memory


def permute(positions: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Map positions of an epoch (any shape, each in [0, n)) to sequence ids in [0, n): a shuffle.

    A shuffled array of n ids would take 8 bytes a sequence in each process (80 MB for 10 million
    sequences) and seconds at each start. A Feistel network computes any single element of a
    shuffle. It splits a number into two halves of bits, and in each round XORs one half with a hash
    of a key and the other half. A round can be undone with any hash, so that the network is a
    permutation of all numbers with this many bits.

    The count of these numbers is a power of 4, and n is usually not. A result outside [0, n) goes
    through the network again until it lies inside (cycle walking, Black and Rogaway 2002). The
    result is still a permutation, because each cycle of the network only loses its elements outside
    [0, n). It takes fewer than 4 passes in the mean.
    """
    # half of the smallest even number of bits that holds all numbers below n
    half_bits = ((n - 1).bit_length() + 1) // 2
    half_mask = (1 << half_bits) - 1
    # a uint64 key for each round; this hash is the same on every machine, unlike Python's hash()
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * FEISTEL_ROUNDS).digest()
    round_keys = np.frombuffer(digest, "<u8")  # (6,)

    # Positions in the epoch become sequence ids. uint64: a product wraps around, and a shift to the
    # right fills with zeros.
    sequence_ids = positions.astype(np.uint64)  # permuted in place, until all lie in [0, n)
    unfinished = np.ones(sequence_ids.shape, bool)  # not yet permuted, or permuted to n or above
    while unfinished.any():
        # the upper and the lower `half_bits` bits of the k unfinished ids, uint64 (k,) each
        left = sequence_ids[unfinished] >> half_bits
        right = sequence_ids[unfinished] & half_mask
        for key in round_keys:
            # Multiply by constants of SplitMix64 (Steele et al. 2014), and shift: each bit of
            # `right` changes half of the bits. Take the upper 32 bits, which are mixed best.
            mixed = (right + key) * 0x9E3779B97F4A7C15
            mixed ^= mixed >> 29
            mixed *= 0xBF58476D1CE4E5B9
            mixed >>= 32
            mixed &= half_mask
            # One Feistel round: the old right half becomes the left half, and the left half XOR the
            # hash becomes the right half, so that the next round changes the other one.
            left, right = right, left ^ mixed
        sequence_ids[unfinished] = (left << half_bits) | right
        unfinished = sequence_ids >= n
    return sequence_ids.astype(np.int64)  # Mixture adds int64: uint64 + int64 is float64


def epoch_order(positions: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Return the sequence ids (N,), each in [0, n), at positions (N,) of the data order of n
    sequences: n positions for each epoch, one epoch after the other."""
    sequence_ids = np.empty_like(positions)  # int64; each epoch fills in its part
    epochs = positions // n  # (N,); an epoch has each of the n sequences once
    for epoch in np.unique(epochs):  # a batch may reach into the next epoch
        in_epoch = epochs == epoch  # (N,) bool
        # a shuffle of all n ids, another one for each seed and epoch
        sequence_ids[in_epoch] = permute(positions[in_epoch] % n, n, seed, int(epoch))
    return sequence_ids


def sequence_ids_of_step(step: int, sequences_per_step: int, n: int, seed: int) -> np.ndarray:
    """Return the sequence ids (G,), each in [0, n), of a step with G = `sequences_per_step`; steps
    count from 0."""
    positions = step * sequences_per_step + np.arange(sequences_per_step)  # (G,)
    return epoch_order(positions, n, seed)


class Sequences:
    """A token stream cut into sequences of T = `block_size` inputs and T targets. Raises UserError
    if the stream is too short for one sequence."""

    def __init__(self, stream: TokenStream, block_size: int) -> None:
        self.stream = stream
        self.block_size = block_size
        if len(stream) <= block_size:  # a sequence takes T + 1 tokens
            raise UserError(
                f"{stream.folders[0].path} holds {len(stream):,} {stream.split} tokens, too few "
                f"for one sequence of {block_size}"
            )

    def __len__(self) -> int:
        # - 1: the last target needs a token, too
        return (len(self.stream) - 1) // self.block_size

    def count_within(self, num_tokens: int) -> int:
        """Return the number of sequences for the first `num_tokens` targets (--val_tokens): at
        least 1, at most all."""
        return min(len(self), max(1, num_tokens // self.block_size))

    def read(self, sequence_id: int) -> np.ndarray:
        """Return the tokens of a sequence, int64 (T + 1,), T = block_size."""
        start = sequence_id * self.block_size
        # + 1: the target of the last input, also the first input of the next sequence
        return self.stream.read(start, self.block_size + 1)

    def make_batch(self, sequence_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets, int64 (B, T) each, of the sequences `sequence_ids` (B,)."""
        return shift([self.read(sequence_id) for sequence_id in sequence_ids])


def shift(rows: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets, (B, T) each, of B rows (T + 1,): a target is the next token."""
    tokens = np.stack(rows)  # (B, T + 1)
    # Copy: validation overwrites some targets by -1 in place, which must not become inputs.
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


@dataclass(frozen=True)
class Corpus:
    """Folders of token shards that form one stream, and their weight in the data order."""

    folders: list[Path]
    weight: Fraction
    """Share of all positions, 0 to 1."""


def parse_corpora(data_dir: Sequence[Path | str]) -> list[Corpus]:
    """Return the corpora of --data_dir; their weights add up to 1.

    Each FOLDER:WEIGHT is a corpus; folders without weights together are one corpus. Raises
    UserError if only some of the folders have a weight, if a weight has too many digits, or if a
    folder is named twice, whose text would count twice.
    """
    corpora: list[Corpus] = []
    for name in data_dir:
        # "data/a:0.7" is ("data/a", "0.7"): a number after the last colon is a weight, unless a
        # folder has this whole name
        match = re.fullmatch(r"(.+):(\d+\.?\d*|\.\d+)", str(name))
        if match and not Path(name).exists():
            # 0.7 as exactly 7/10; the weights are divided by their sum below
            corpora.append(Corpus([Path(match[1])], Fraction(match[2])))
    if not corpora:  # no folder has a weight
        corpora = [Corpus([Path(name) for name in data_dir], Fraction(1))]
    # fractions, not floats: each corpus needs a whole number of places in a period
    total_weight = sum(corpus.weight for corpus in corpora)  # 4 for the weights 3 and 1
    if total_weight == 0:
        raise UserError("data_dir: at least one weight must be above 0")
    corpora = [Corpus(corpus.folders, corpus.weight / total_weight) for corpus in corpora]
    # fewer than the names: a folder is named twice, or has no weight, so that the loop left it out
    folders = {folder for corpus in corpora for folder in corpus.folders}
    if len(folders) < len(data_dir) or period_of(corpora) > LONGEST_PERIOD:
        raise UserError(
            "data_dir: name each folder once, all of them with a weight of at most six digits, as "
            "FOLDER:0.7, or none with a weight"
        )
    return corpora


def folders_of(data_dir: Sequence[Path | str]) -> tuple[Path, ...]:
    """Return the folders of --data_dir without their weights: data/a of data/a:0.7."""
    folders: tuple[Path, ...] = ()
    for corpus in parse_corpora(data_dir):
        folders += tuple(corpus.folders)
    return folders


def period_of(corpora: list[Corpus]) -> int:
    """Return the smallest number of positions in which each corpus has a whole number of places."""
    return math.lcm(*(corpus.weight.denominator for corpus in corpora))  # 10 for 7/10 and 3/10


def assign_places(places_per_period: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the corpus of each place in a period of P = sum(places_per_period) places, and the
    turn of each place: the number of earlier places of the same corpus in the period. int64 (P,)
    each.

    Take the period as one unit of time. A corpus with s places cuts it into s equal parts, and has
    a place in the middle of each part, at (turn + 1/2) / s. All places in the order of time make
    the period. With 3 and 1 places the times are 1/6, 3/6, 5/6 and 1/2: corpora 0, 0, 1, 0.

    Up to time t a corpus has t * s places, to within 1/2. So it has n * s / P of the first n
    places, to within (K - 1) / 2 with K corpora: 1/2 with two.
    """
    num_corpora = len(places_per_period)
    corpus_ids = np.repeat(np.arange(num_corpora), places_per_period)  # (P,), corpus by corpus
    turns = np.concatenate([np.arange(num_places) for num_places in places_per_period])  # (P,)
    # (P,), the middle of each place's part of the period: 1/4 and 3/4 for a corpus of two places
    times = (turns + 0.5) / np.array(places_per_period)[corpus_ids]
    # stable: at equal times the first corpus comes first, on every machine
    by_time = np.argsort(times, kind="stable")  # indices (P,)
    return corpus_ids[by_time], turns[by_time]


class Mixture:
    """One split of the corpora of --data_dir, cut into sequences. Sequence ids count through the
    corpora one after the other. A position is an index in the data order, a place is an index
    within a period, and the turn of a place is the number of earlier places of its corpus in the
    period: places a, a, b, a have turns 0, 1, 0, 2. Raises UserError for a damaged folder, or for
    folders that cannot be read together."""

    def __init__(self, data_dir: Sequence[Path | str], split: str, block_size: int) -> None:
        corpora = parse_corpora(data_dir)  # [Corpus([Path("data/a")], Fraction(3, 4)), ...]
        self.corpus_weights = [float(corpus.weight) for corpus in corpora]
        """Share of each corpus in the positions; the shares add up to 1."""
        self.corpus_sequences: list[Sequences] = []
        """Sequences of each corpus."""
        all_folders: list[ShardFolder] = []
        for corpus in corpora:
            # the ShardFolders that have the split, "train" or "val"
            folders = open_folders(corpus.folders, split)
            # of block_size + 1 tokens each: inputs, and targets one token later
            self.corpus_sequences.append(Sequences(TokenStream(folders), block_size))
            all_folders += folders
        # TokenStream refuses corpora that differ in tokenizer or val_fraction.
        self.stream = TokenStream(all_folders)
        """All tokens, for their number, checksum and tokenizer. Batches come from
        `corpus_sequences`."""
        # folders without weights are one corpus, which is named after its first folder
        first_folders = [sequences.stream.folders[0] for sequences in self.corpus_sequences]
        self.names = [folder.name for folder in first_folders]
        """Name of each corpus, for the log (loss_NAME): the name of its first folder, or the path
        of the folder if two corpora have the same name."""
        if len(set(self.names)) < len(self.names):  # e.g. a/shards and b/shards
            self.names = [str(folder.path) for folder in first_folders]
        sequence_counts = [len(sequences) for sequences in self.corpus_sequences]
        self.corpus_starts = np.cumsum([0] + sequence_counts)
        """Id of the first sequence of each corpus, and at the end the number of all sequences:
        [0, 900, 1_000] for corpora of 900 and 100 sequences."""
        self.period = period_of(corpora)
        """Positions after which the places of the corpora repeat."""
        self.places_per_period = [int(corpus.weight * self.period) for corpus in corpora]
        """Places of each corpus in a period: [3, 1] for the weights 0.75 and 0.25. `int` rounds
        nothing, because the products are whole."""
        # corpus and turn of each place, int64 (period,) each: for [3, 1], 0, 0, 1, 0 and 0, 1, 0, 2
        self.corpus_of_place, self.turn_of_place = assign_places(self.places_per_period)

    def sequence_ids_at(self, positions: range | np.ndarray, seed: int) -> np.ndarray:
        """Return the sequence ids (N,) at N positions of the data order."""
        # (N,) each: the whole periods before a position, and its place in its period, 2 and 3 for
        # position 11 of periods of 4
        earlier_periods, places = np.divmod(np.asarray(positions), self.period)
        sequence_ids = np.empty_like(places)  # (N,); each corpus fills in its part
        for i, sequences in enumerate(self.corpus_sequences):
            in_corpus = self.corpus_of_place[places] == i  # (N,) bool; corpus_of_place is (period,)
            # A position in the order of this corpus counts its earlier places: places_per_period[i]
            # in each earlier period, such as 3 of [3, 1], and `turns` in this one.
            turns = self.turn_of_place[places[in_corpus]]  # (k,), if k places are of this corpus
            corpus_positions = earlier_periods[in_corpus] * self.places_per_period[i] + turns
            # Each corpus is shuffled separately, with ids from 0. In the mixture its ids begin at
            # corpus_starts[i].
            ids_in_corpus = epoch_order(corpus_positions, len(sequences), seed)
            sequence_ids[in_corpus] = self.corpus_starts[i] + ids_in_corpus
        return sequence_ids

    def make_batch(self, sequence_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets, int64 (B, T) each, of sequences (B,)."""
        rows: list[np.ndarray] = []  # (T + 1,) each
        for sequence_id in sequence_ids:
            # the last start that is not above the id: 0 for id 899 of starts [0, 900, 1_000]
            corpus_id = np.searchsorted(self.corpus_starts, sequence_id, side="right") - 1
            id_in_corpus = sequence_id - self.corpus_starts[corpus_id]
            rows.append(self.corpus_sequences[corpus_id].read(id_in_corpus))  # from disk
        return shift(rows)

    @property
    def checksum(self) -> int:
        """Checksum of the tokens and, with several corpora, of the order of their places. A resumed
        run warns if it differs."""
        if len(self.names) == 1:
            return self.stream.checksum
        # a CRC-32 that goes on from the checksum of the tokens
        return zlib.crc32(self.corpus_of_place.tobytes(), self.stream.checksum)

    @property
    def title(self) -> str:
        """Names of the corpora, for logs and checkpoints; with several corpora, their shares, too:
        "75 % of a, 25 % of b"."""
        if len(self.names) == 1:
            return self.names[0]
        return ", ".join(
            f"{100 * weight:.4g} % of {name}"
            for weight, name in zip(self.corpus_weights, self.names, strict=True)
        )

    def epochs_by_corpus(self, num_tokens: int) -> dict[str, float]:
        """Return the number of epochs of each corpus in `num_tokens` training tokens, by name."""
        epochs: dict[str, float] = {}
        corpora = zip(self.names, self.corpus_weights, self.corpus_sequences, strict=True)
        for name, weight, sequences in corpora:
            # tokens that are read from the corpus / tokens that it has
            epochs[name] = weight * num_tokens / len(sequences.stream)
        return epochs


@dataclass(frozen=True)
class Slicing:
    """Division of the sequences of a micro-step among processes."""

    micro_batch_size: int
    """Sequences in one forward and backward pass of a process."""
    data_rank: int
    """Process.data_rank. Processes of one tensor-parallel group have the same data rank and read
    the same sequences."""
    data_parallel: int
    """Number of data ranks; without tensor parallelism, the number of processes."""

    @property
    def sequences_per_micro_step(self) -> int:
        """Sequences in one micro-step of all processes."""
        return self.micro_batch_size * self.data_parallel

    def local_positions(self, position: int) -> range:
        """Return the positions that this process reads in the micro-step that begins at `position`:
        with micro-batches of B, [position + data_rank * B, position + (data_rank + 1) * B)."""
        start = position + self.data_rank * self.micro_batch_size
        return range(start, start + self.micro_batch_size)


def train_batches(
    data: Mixture, slicing: Slicing, seed: int, position: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield this process's micro-batches of `data`, one split of all corpora: inputs and targets
    (B, T), from a position in the data order on, without end. Together the processes read
    consecutive positions, so that runs with any number of processes and any micro-batch read the
    same sequences in a step."""
    while True:
        sequence_ids = data.sequence_ids_at(slicing.local_positions(position), seed)  # (B,)
        yield data.make_batch(sequence_ids)
        position += slicing.sequences_per_micro_step  # of all processes


class TrainBatches:
    """The micro-batches of this process, with a count of those that steps have taken: whatever the
    loop does with them, a resumed run continues behind the last one."""

    def __init__(
        self, batches: Iterator[tuple[Tensor, Tensor]], slicing: Slicing, position: int
    ) -> None:
        self.batches = batches  # token ids and targets (B, T) each, on the device
        self.slicing = slicing
        self.position = position
        """Position in the data order after the micro-batches taken so far, of all processes."""

    def __next__(self) -> tuple[Tensor, Tensor]:
        """Return the next micro-batch: token ids and targets (B, T) each."""
        self.position += self.slicing.sequences_per_micro_step  # read by train_step
        return next(self.batches)


def prefetch(items: Iterator) -> Iterator:
    """Yield `items`, which a background thread computes four items ahead, so that training does not
    wait for the disk. No item may be None. An error is raised in place of its item."""
    # one thread: `items` is a generator, which two threads may not advance at once
    worker = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        # Futures in the order of the items, which are the micro-batches of train_batches. Four
        # bridge a slow read; more only take memory. `next` returns None after the last item.
        pending: deque[Future] = deque(worker.submit(next, items, None) for _ in range(4))
        while True:
            item = pending.popleft().result()  # waits for the item, and raises its error
            if item is None:
                return
            pending.append(worker.submit(next, items, None))
            yield item
    finally:
        # also if the consumer stops early: drop calls that have not begun
        worker.shutdown(cancel_futures=True)
