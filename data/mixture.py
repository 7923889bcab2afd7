"""Mixture of corpora by weights: which sequence each position of the data order is.

Every block of 1,000 positions holds each corpus in its exact share, in places that a keyed
permutation draws; each corpus runs through its own order, epoch by epoch. So a batch stays a pure
function of (seed, step). Folders without weights are one corpus, in the order of data/loader.py.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.loader import Sequences, TokenStream, permute
from data.shards import corpus_name
from utils.errors import UserError

BLOCK = 1000  # positions


def parse_corpora(data_dir: Sequence[Path | str]) -> list[tuple[list[Path], float]]:
    """Return the folders and the weight of each corpus of --data_dir: FOLDER:WEIGHT is one corpus,
    folders without weights are one together. Raises UserError where some have a weight."""
    found = []
    for name in map(str, data_dir):
        folder, _, weight = name.rpartition(":")
        try:
            found.append((Path(folder).expanduser(), float(weight) if folder else None))
        except ValueError:
            found.append((Path(name), None))
    weights = [weight for _, weight in found if weight is not None]
    if not weights:
        return [([Path(name) for name in data_dir], 1.0)]
    if len(weights) < len(found) or min(weights) <= 0:
        raise UserError("--data_dir: give each folder a weight above 0, as FOLDER:0.7, or none")
    return [([folder], weight / sum(weights)) for folder, weight in found]


class Mixture:
    """The corpora of --data_dir, of one split, cut into sequences. Sequence ids count through them
    one after the other. Raises UserError for a damaged folder, or for several tokenizers."""

    def __init__(self, data_dir: Sequence[Path | str], split: str, block_size: int) -> None:
        corpora = parse_corpora(data_dir)
        self.block_size, self.weights = block_size, [weight for _, weight in corpora]
        self.stream = TokenStream([x for folders, _ in corpora for x in folders], split)  # all
        self.parts = [Sequences(TokenStream(x, split), block_size) for x, _ in corpora]
        self.names = [corpus_name(folders[0]) for folders, _ in corpora]
        if len(set(self.names)) < len(self.names):
            self.names = [str(folders[0]) for folders, _ in corpora]
        self.starts = np.cumsum([0, *map(len, self.parts)])  # of the ids of each corpus
        ends = np.round(np.cumsum(self.weights) * BLOCK).astype(int)
        self.places = np.array([0, *ends])  # in a block, of each corpus
        if (np.diff(self.places) < 1).any():
            raise UserError(f"--data_dir: a weight is below {1 / BLOCK} of all")

    def epochs(self, tokens: int) -> float:
        """Return how often `tokens` tokens of training see the corpus that they see most often."""
        pairs = zip(self.weights, self.parts, strict=True)
        return max(weight * tokens / len(part.stream) for weight, part in pairs)

    def where(self, positions: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the corpus, and the position in its own order, of ascending positions (N,)."""
        block, offset = np.divmod(positions, BLOCK)
        place = [permute(offset[block == b], BLOCK, seed, -1 - int(b)) for b in np.unique(block)]
        place = np.concatenate(place)
        corpus = np.searchsorted(self.places, place, side="right") - 1
        return corpus, block * np.diff(self.places)[corpus] + place - self.places[corpus]

    def order(self, positions: np.ndarray, seed: int) -> np.ndarray:
        """Return the ids (N,) of the sequences at ascending positions (N,) of the data order."""
        if len(self.parts) == 1:
            return self.parts[0].order(positions, seed)
        corpus, own = self.where(positions, seed)
        ids = np.empty_like(own)
        for i, part in enumerate(self.parts):
            ids[corpus == i] = self.starts[i] + part.order(own[corpus == i], seed)
        return ids

    def batch(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets, int64 (B, T) each, of the sequences `ids` (B,)."""
        inputs, targets = np.empty((2, len(ids), self.block_size), np.int64)
        corpus = np.searchsorted(self.starts, ids, side="right") - 1
        for i in np.unique(corpus):
            mine = corpus == i
            inputs[mine], targets[mine] = self.parts[i].batch(ids[mine] - self.starts[i])
        return inputs, targets
