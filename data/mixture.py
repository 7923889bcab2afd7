"""Mixture of corpora by weights: which sequence each position of the data order is.

Weights are whole shares of a period of positions, which repeats. Of any first n positions, each
corpus has its share of n to within one sequence, and runs through its own order, epoch by epoch. So
a batch stays a pure function of (seed, step). Folders without weights are one corpus, in the order
of data/loader.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path

import numpy as np

from data.loader import Sequences, TokenStream
from data.shards import corpus_name
from utils.errors import UserError

LONGEST_PERIOD = 1_000_000  # positions; finding their corpora takes some seconds


def read_weight(text: str) -> Fraction | None:
    """Return a weight exactly; None for other text, as a path may hold a colon, too."""
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None


@dataclass(frozen=True)
class Corpus:
    """Folders of token shards that are read as one stream, and their share of the positions."""

    folders: list[Path]
    weight: Fraction


def parse_corpora(data_dir: Sequence[Path | str]) -> list[Corpus]:
    """Return the corpora of --data_dir; their weights add up to 1. FOLDER:WEIGHT is one corpus,
    folders without weights are one together. Raises UserError where some have a weight."""
    names = [str(name) for name in data_dir]
    corpora = []
    for name in names:
        folder, _, suffix = name.rpartition(":")
        weight = read_weight(suffix)
        if folder and weight is not None:
            corpora.append(Corpus([Path(folder).expanduser()], weight))
    if not corpora:
        return [Corpus([Path(name) for name in names], Fraction(1))]
    if len(corpora) < len(names) or min(corpus.weight for corpus in corpora) <= 0:
        raise UserError("--data_dir: give each folder a weight above 0, as FOLDER:0.7, or none")
    total = sum(corpus.weight for corpus in corpora)
    return [Corpus(corpus.folders, corpus.weight / total) for corpus in corpora]


def assign_places(shares: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the corpus of each place in a period of sum(shares) places, and the number of earlier
    places of the same corpus, int64 (sum(shares),) each.

    Of the first n places corpus i has less than one more or less than n * shares[i] / sum(shares).
    So its c-th place (from 0) may stand from place floor(c / weight) on, and has to stand before
    ceil((c + 1) / weight). The earliest of these deadlines first meets all of them (Baruah et al.
    1996, proportionate fairness; one processor). Whole numbers keep it exact.
    """
    period = sum(shares)
    counts = [0] * len(shares)
    corpora, ranks = np.empty((2, period), np.int64)
    for place in range(period):
        first, first_deadline = None, math.inf
        for i, share in enumerate(shares):
            may_stand = counts[i] * period < (place + 1) * share
            deadline = -(-(counts[i] + 1) * period // share)
            if may_stand and deadline < first_deadline:
                first, first_deadline = i, deadline
        corpora[place], ranks[place] = first, counts[first]
        counts[first] += 1
    return corpora, ranks


class Mixture:
    """The corpora of --data_dir, of one split, cut into sequences. Sequence ids count through them
    one after the other. Raises UserError for a damaged folder, or for several tokenizers."""

    def __init__(self, data_dir: Sequence[Path | str], split: str, block_size: int) -> None:
        corpora = parse_corpora(data_dir)
        self.block_size = block_size
        self.weights = [float(corpus.weight) for corpus in corpora]
        self.parts = []
        for corpus in corpora:
            self.parts.append(Sequences(TokenStream(corpus.folders, split), block_size))
        all_folders = [folder for corpus in corpora for folder in corpus.folders]
        self.stream = TokenStream(all_folders, split)
        self.names = [corpus_name(corpus.folders[0]) for corpus in corpora]
        if len(set(self.names)) < len(self.names):
            self.names = [str(corpus.folders[0]) for corpus in corpora]
        self.starts = np.cumsum([0, *map(len, self.parts)])  # of the ids of each corpus
        self.period = math.lcm(*(corpus.weight.denominator for corpus in corpora))
        self.shares = [int(corpus.weight * self.period) for corpus in corpora]
        """Positions of each corpus in a period."""
        if self.period > LONGEST_PERIOD:
            raise UserError(
                "--data_dir: give weights of at most six digits, or whole numbers that add up to "
                f"at most {LONGEST_PERIOD:,}"
            )

    @cached_property
    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """Corpus and rank of each position in a period, as assign_places returns them."""
        return assign_places(self.shares)

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
        corpora, ranks = self.places
        periods, places = np.divmod(positions, self.period)
        corpus = corpora[places]
        return corpus, periods * np.array(self.shares)[corpus] + ranks[places]

    def order(self, positions: np.ndarray, seed: int) -> np.ndarray:
        """Return the ids (N,) of the sequences at positions (N,) of the data order."""
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
            chosen = corpus == i
            inputs[chosen], targets[chosen] = self.parts[i].batch(ids[chosen] - self.starts[i])
        return inputs, targets
