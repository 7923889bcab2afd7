"""Scorer: the validation loss of a model, in training and by evaluate.py.

All processes take part: each scores its share of the batches, and all of them get the sum over
every batch. So the number of processes changes no figure. Log-probabilities of texts, for
benchmarks, are the subject of scoring.py.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from data.loader import Sequences
from evaluation.tasks import batched
from model.gpt import GPT
from utils.devices import autocast
from utils.distributed import Process


def weighted_mean(scores: list[dict[str, float]], weights: list[float]) -> dict[str, float]:
    """Return the figures of a mixture from those of validation_loss for its corpora.

    The weights are shares of tokens, which add up to 1. So bits per byte are the mean of bits per
    token over the mean of bytes per token, not a mean of the corpora's bits per byte.
    """
    loss = sum(weight * x["loss"] for weight, x in zip(weights, scores, strict=True))
    means = {"loss": loss, "n": sum(x["n"] for x in scores)}
    if not all("bits_per_byte" in x for x in scores):
        return means
    bytes_per_token = 0.0
    for weight, x in zip(weights, scores, strict=True):
        # bits per token / bits per byte = bytes per token of the corpus
        bytes_per_token += weight * x["loss"] / math.log(2) / x["bits_per_byte"]
    return means | {"bits_per_byte": loss / math.log(2) / bytes_per_token}


@dataclass
class Scorer:
    """A model, and how to run it. All processes call each method with the same arguments and get
    the same figures. A signal ends a method between two batches: Process.map raises Stopped."""

    model: GPT
    process: Process
    dtype: torch.dtype
    """Autocast dtype of matmuls."""
    batch_size: int
    """Rows of one forward pass on one process."""

    @torch.no_grad()
    def validation_loss(self, sequences: Sequences, tokens: int) -> dict[str, float]:
        """Return the mean loss in nats per token over the first `tokens` targets of a split, and
        the number n of these.

        Where the shards tell the size of their text, there is also bits_per_byte = loss / ln 2 /
        (bytes of source text for a token of the whole split), by which runs with different
        tokenizers can be compared.
        """
        self.model.eval()  # without dropout
        # the first ones, the same at every evaluation
        num_sequences = sequences.count_within(tokens)
        batches = batched(list(range(num_sequences)), self.batch_size)

        def sum_nats(batch: list[int]) -> float:
            """Return the sum of the loss over the targets of sequences."""
            # The last batch is filled up with sequences that do not count, as another shape would
            # be compiled anew. Targets of -1 are left out of the mean.
            filled = np.resize(batch, len(batches[0]))
            inputs, targets = sequences.batch(filled)  # (B, T)
            targets[len(batch) :] = -1
            ids = torch.from_numpy(inputs).to(self.process.device)
            target_ids = torch.from_numpy(targets).to(self.process.device)
            with autocast(self.process.device, self.dtype):
                loss = self.model(ids, target_ids)
            # the loss is a mean over the targets that count
            return loss.item() * targets[: len(batch)].size

        total_nats = sum(self.process.map(sum_nats, batches))
        self.model.train()  # with dropout again
        num_targets = num_sequences * sequences.block_size
        scores = {"loss": total_nats / num_targets, "n": num_targets}
        bytes_per_token = sequences.stream.bytes_per_token
        if bytes_per_token:
            scores["bits_per_byte"] = scores["loss"] / math.log(2) / bytes_per_token
        return scores
