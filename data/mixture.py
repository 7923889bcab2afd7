"""Mixture of corpora by weights: which sequence each position of the data order is.

Weights are whole shares of a period of positions, which repeats. Of any first n positions, each
corpus has its share of n to within one sequence, and runs through its own order, epoch by epoch. So
a batch stays a pure function of (seed, step). Folders without weights are one corpus, in the order
of data/loader.py.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property
from pathlib import Path

import numpy as np

from data.loader import Sequences, TokenStream
from data.shards import corpus_name
from utils.errors import UserError

LONGEST_PERIOD = 1_000_000  # positions; finding their corpora takes some seconds


def read_weight(text: str) -> Fraction | None:
    """Return a decimal number exactly; None for other text, as a path may hold a colon, too."""
    try:
        float(text)  # a Fraction would take 3/4
        return Fraction(text)
    except ValueError:
        return None


def parse_corpora(data_dir: Sequence[Path | str]) -> list[tuple[list[Path], Fraction]]:
    """Return the folders and the weight of each corpus of --data_dir; the weights add up to 1.
    FOLDER:WEIGHT is one corpus, folders without weights are one together. Raises UserError where
    some have a weight."""
    names = [str(name) for name in data_dir]
    splits = [name.rpartition(":") for name in names]
    weights = [read_weight(weight) if folder else None for folder, _, weight in splits]
    if all(weight is None for weight in weights):
        return [([Path(name) for name in names], Fraction(1))]
    if any(weight is None or weight <= 0 for weight in weights):
        raise UserError("--data_dir: give each folder a weight above 0, as FOLDER:0.7, or none")
    folders = [Path(folder).expanduser() for folder, _, _ in splits]
    total = sum(weights)
    return [([folder], weight / total) for folder, weight in zip(folders, weights, strict=True)]


def assign_places(shares: Sequence[int]) -> np.ndarray:
    """Return the corpus of each place in a period of sum(shares) places, int64 (sum(shares),).

    Of the first n places corpus i has less than one more or less than n * shares[i] / sum(shares).
    So its c-th place (from 0) may stand from place floor(c / weight) on, and has to stand before
    ceil((c + 1) / weight). The earliest of these deadlines first meets all of them (Baruah et al.
    1996, proportionate fairness; one processor). Whole numbers keep it exact.
    """
    period = sum(shares)
    counts = [0] * len(shares)
    places = np.empty(period, np.int64)
    for place in range(period):
        first, first_deadline = None, math.inf
        for i, share in enumerate(shares):
            may_stand = counts[i] * period < (place + 1) * share
            deadline = -(-(counts[i] + 1) * period // share)
            if may_stand and deadline < first_deadline:
                first, first_deadline = i, deadline
        places[place] = first
        counts[first] += 1
    return places


class Mixture:
    """The corpora of --data_dir, of one split, cut into sequences. Sequence ids count through them
    one after the other. Raises UserError for a damaged folder, or for several tokenizers."""

    def __init__(self, data_dir: Sequence[Path | str], split: str, block_size: int) -> None:
        corpora = parse_corpora(data_dir)
        self.block_size, self.weights = block_size, [float(weight) for _, weight in corpora]
        self.stream = TokenStream([x for folders, _ in corpora for x in folders], split)  # all
        self.parts = [Sequences(TokenStream(x, split), block_size) for x, _ in corpora]
        self.names = [corpus_name(folders[0]) for folders, _ in corpora]
        if len(set(self.names)) < len(self.names):
            self.names = [str(folders[0]) for folders, _ in corpora]
        self.starts = np.cumsum([0, *map(len, self.parts)])  # of the ids of each corpus
        self.period = math.lcm(*(weight.denominator for _, weight in corpora))
        self.shares = [int(weight * self.period) for _, weight in corpora]
        """Positions of each corpus in a period."""
        if self.period > LONGEST_PERIOD:
            raise UserError(
                "--data_dir: give weights of at most six digits, or whole numbers that add up to "
                f"at most {LONGEST_PERIOD:,}"
            )

    @cached_property
    def places(self) -> np.ndarray:
        """Corpus of each position in a period, int64 (period,)."""
        return assign_places(self.shares)

    @cached_property
    def ranks(self) -> np.ndarray:
        """Number of earlier positions of the same corpus in the period, int64 (period,)."""
        ranks = np.empty_like(self.places)
        for i, share in enumerate(self.shares):
            ranks[self.places == i] = np.arange(share)
        return ranks

    @property
    def title(self) -> str:
        """Names of the corpora, of several with their shares."""
        if len(self.names) == 1:
            return self.names[0]
        names = [Path(name).name for name in self.names]
        shares = [f"{100 * weight:.4g} %" for weight in self.weights]
        return ", ".join(f"{x} of {y}" for x, y in zip(shares, names, strict=True))

    def epochs(self, tokens: int) -> tuple[float, str]:
        """Return how often `tokens` tokens of training see the corpus that they see most often, and
        its name."""
        corpora = zip(self.weights, self.parts, self.names, strict=True)
        return max((weight * tokens / len(part.stream), name) for weight, part, name in corpora)

    def describe_epochs(self, tokens: int) -> str:
        """Return the epochs of `tokens` tokens of training in words, which name the corpus that is
        meant where there are several."""
        epochs, name = self.epochs(tokens)
        corpus = f" of {name}, the corpus seen most often" if len(self.parts) > 1 else ""
        return f"{epochs:,.2f} epochs{corpus}"

    def where(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the corpus, and the position in its own order, of positions (N,)."""
        periods, places = np.divmod(positions, self.period)
        corpus = self.places[places]
        return corpus, periods * np.array(self.shares)[corpus] + self.ranks[places]

    def order(self, positions: np.ndarray, seed: int) -> np.ndarray:
        """Return the ids (N,) of the sequences at positions (N,) of the data order."""
        if len(self.parts) == 1:
            return self.parts[0].order(positions, seed)
        corpus, corpus_positions = self.where(positions)
        ids = np.empty_like(corpus_positions)
        for i, part in enumerate(self.parts):
            ids[corpus == i] = self.starts[i] + part.order(corpus_positions[corpus == i], seed)
        return ids

    def batch(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets, int64 (B, T) each, of the sequences `ids` (B,)."""
        inputs, targets = np.empty((2, len(ids), self.block_size), np.int64)
        corpus = np.searchsorted(self.starts, ids, side="right") - 1
        for i in np.unique(corpus):
            mine = corpus == i
            inputs[mine], targets[mine] = self.parts[i].batch(ids[mine] - self.starts[i])
        return inputs, targets
