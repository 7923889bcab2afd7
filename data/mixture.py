"""Mixture of corpora by weights: which sequence each position of the data order is.

The one idea: positions come in periods. In a period of P positions each corpus has a whole number
of places, its share, and the places are spread evenly; the next period repeats them. With 0.75 and
0.25, P is 4 and the places are a, a, b, a or the like. The k-th place of a corpus, counted over all
periods, is the k-th sequence of its own data order (data/loader.py). So a batch stays a pure
function of (seed, step), and of any first n positions each corpus has its share of n to within one
sequence. Drawing the corpus of each position by chance would give shares that are right in the mean
only.

Folders without weights are one corpus, in the order of data/loader.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path

import numpy as np

from data.loader import Sequences, shift
from data.shards import ShardFolder, TokenStream, open_folders
from utils.errors import UserError

LONGEST_PERIOD = 1_000_000  # positions; finding their corpora takes some seconds


@dataclass(frozen=True)
class Corpus:
    """Folders of token shards that are read as one stream, and their share of the positions."""

    folders: list[Path]
    weight: Fraction


def parse_corpora(data_dir: Sequence[Path | str]) -> list[Corpus]:
    """Return the corpora of --data_dir; their weights add up to 1.

    FOLDER:WEIGHT is a corpus, folders without weights are one together. Raises UserError if some
    folders have a weight and others do not.
    """
    folders = [Path(name) for name in data_dir]
    corpora: list[Corpus] = []  # those with a weight
    for name in map(str, data_dir):
        folder, _, suffix = name.rpartition(":")  # the last colon: FOLDER may have others
        try:
            weight = Fraction(suffix)  # exact, also for 0.1
        except (ValueError, ZeroDivisionError):  # no number: a path may hold a colon, too
            continue
        if folder:  # "7" alone is a folder
            corpora.append(Corpus([Path(folder)], weight))
    if not corpora:
        return [Corpus(folders, Fraction(1))]
    if len(corpora) < len(folders) or min(corpus.weight for corpus in corpora) <= 0:
        raise UserError("--data_dir: give each folder a weight above 0, as FOLDER:0.7, or none")
    # fractions, not floats: the shares of a period have to be whole numbers
    total = sum(corpus.weight for corpus in corpora)
    return [Corpus(corpus.folders, corpus.weight / total) for corpus in corpora]


def assign_places(shares: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the corpus of each place in a period of P = sum(shares) places, and its rank, the
    number of earlier places of the same corpus in the period; int64 (P,) each.

    Of the first n places corpus i is to have n * shares[i] / P, off by less than one. So its c-th
    place (from 0) may stand from place floor(c * P / shares[i]) on, and has to stand before
    ceil((c + 1) * P / shares[i]), its deadline. Taking the earliest deadline first meets all of
    them (Baruah et al. 1996, proportionate fairness, on one processor). Whole numbers keep it
    exact.
    """
    period = sum(shares)
    counts = [0] * len(shares)  # places of each corpus so far
    corpus_of_place = np.empty(period, np.int64)
    rank_of_place = np.empty(period, np.int64)
    for place in range(period):
        first_deadline = math.inf
        for i, share in enumerate(shares):
            # floor(c * P / share) <= place, in whole numbers
            may_stand = counts[i] * period < (place + 1) * share
            # -(-a // b) is a / b, rounded up
            deadline = -(-(counts[i] + 1) * period // share)
            if may_stand and deadline < first_deadline:  # of equal ones the first corpus
                first_deadline = deadline
                next_corpus = i
        # one corpus may always stand: together they have had fewer places than their shares
        corpus_of_place[place] = next_corpus
        rank_of_place[place] = counts[next_corpus]
        counts[next_corpus] += 1
    return corpus_of_place, rank_of_place


class Mixture:
    """The corpora of --data_dir, of one split, cut into sequences. Sequence ids count through the
    corpora one after the other. Raises UserError for a damaged folder, or for folders that cannot
    be read together."""

    def __init__(self, data_dir: Sequence[Path | str], split: str, block_size: int) -> None:
        corpora = parse_corpora(data_dir)
        self.block_size = block_size
        self.weights = [float(corpus.weight) for corpus in corpora]
        self.parts: list[Sequences] = []
        """Sequences of each corpus."""
        all_folders: list[ShardFolder] = []
        for corpus in corpora:
            folders = open_folders(corpus.folders, split)
            self.parts.append(Sequences(TokenStream(folders), block_size))
            all_folders += folders
        self.stream = TokenStream(all_folders)
        """All tokens, whatever their corpus."""
        first_folders = [part.stream.folders[0] for part in self.parts]
        self.names = [folder.name for folder in first_folders]  # keys of losses in the log
        if len(set(self.names)) < len(self.names):  # a/shards and b/shards
            self.names = [str(folder.path) for folder in first_folders]
        sizes = [len(part) for part in self.parts]
        self.starts = np.cumsum([0, *sizes])
        """Id of the first sequence of each corpus; last, the number of sequences."""
        # the fewest positions of which each weight is a whole number
        self.period = math.lcm(*(corpus.weight.denominator for corpus in corpora))
        """Positions after which the places of the corpora repeat."""
        self.shares = [int(corpus.weight * self.period) for corpus in corpora]
        """Places of each corpus in a period."""
        # `places` holds two int64 for each position of a period, found by a loop in Python
        if self.period > LONGEST_PERIOD:
            raise UserError(
                "--data_dir: give weights of at most six digits, or whole numbers that add up to "
                f"at most {LONGEST_PERIOD:,}"
            )

    @cached_property
    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """Corpus and rank of each place in a period, int64 (period,) each."""
        return assign_places(self.shares)

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the corpus of each position, and its position in that corpus' own order, int64
        (N,) each, for positions (N,) of the data order."""
        corpus_of_place, rank_of_place = self.places
        # position 10 of periods of 4 is place 2 of period 2
        num_periods, place_ids = np.divmod(positions, self.period)  # (N,) each
        corpus_ids = corpus_of_place[place_ids]
        # each earlier period gave a corpus its share of positions, this one its rank so far
        shares = np.array(self.shares)[corpus_ids]
        return corpus_ids, num_periods * shares + rank_of_place[place_ids]

    def order(self, positions: np.ndarray, seed: int) -> np.ndarray:
        """Return the ids (N,) of the sequences at positions (N,) of the data order."""
        corpus_ids, corpus_positions = self.locate(positions)
        ids = np.empty_like(corpus_positions)
        # each corpus shuffles its own sequences; `starts` makes the ids unique over the corpora
        for i, part in enumerate(self.parts):
            chosen = corpus_ids == i
            part_ids = part.order(corpus_positions[chosen], seed)
            ids[chosen] = self.starts[i] + part_ids
        return ids

    def batch(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets, int64 (B, T) each, of the sequences `ids` (B,)."""
        rows: list[np.ndarray] = []  # (T + 1,) each
        for sequence_id in ids:
            # the last corpus whose first id is not above this one
            corpus_id = int(np.searchsorted(self.starts, sequence_id, side="right")) - 1
            part_id = sequence_id - self.starts[corpus_id]
            rows.append(self.parts[corpus_id].read(part_id))
        return shift(rows)

    @property
    def title(self) -> str:
        """Names of the corpora; of several, with their shares."""
        if len(self.names) == 1:
            return self.names[0]
        shares = []
        for weight, name in zip(self.weights, self.names, strict=True):
            shares.append(f"{100 * weight:.4g} % of {Path(name).name}")
        return ", ".join(shares)

    def epochs(self, tokens: int) -> tuple[float, str]:
        """Return how often `tokens` tokens of training see the corpus that they see most often, and
        its name."""
        epochs_of_corpus = []
        for weight, part, name in zip(self.weights, self.parts, self.names, strict=True):
            # weight * tokens is the share of this corpus in the training
            epochs_of_corpus.append((weight * tokens / len(part.stream), name))
        return max(epochs_of_corpus)  # compares the epochs first

    def describe_epochs(self, tokens: int) -> str:
        """Return `epochs` in words, with the name where there are several corpora."""
        epochs, name = self.epochs(tokens)
        if len(self.parts) == 1:
            return f"{epochs:,.2f} epochs"
        return f"{epochs:,.2f} epochs of {name}, the corpus seen most often"
