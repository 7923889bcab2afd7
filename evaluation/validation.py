"""Scorer: a model that is scored, and its validation loss, in training and by evaluate.py.

All processes take part: each scores its share of the batches, and all of them get the sum over
every batch. So the number of processes changes no metric. Log-probabilities of texts, for
benchmarks, are the subject of scoring.py; only these need a tokenizer.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from data.loader import Mixture, Sequences
from evaluation.tasks import batched
from model.gpt import GPT
from utils.distributed import Process


def weighted_mean(
    corpus_metrics: list[dict[str, float]], corpus_weights: list[float]
) -> dict[str, float]:
    """Return the metrics of a mixture from those that validation_loss gives for its corpora.

    The weights are shares of tokens, which add up to 1: Mixture.corpus_weights. So bits per byte
    are the mean of bits per token over the mean of bytes per token, not a mean of the corpora's
    bits per byte.
    """
    loss = 0.0  # nats per token
    bytes_per_token = 0.0
    for weight, metrics in zip(corpus_weights, corpus_metrics, strict=True):
        loss += weight * metrics["loss"]
        # nats / ln 2 are bits; bits per token / bits per byte = bytes per token
        if metrics.get("bits_per_byte"):
            bytes_per_token += weight * metrics["loss"] / math.log(2) / metrics["bits_per_byte"]
    means = {"loss": loss, "n": sum(metrics["n"] for metrics in corpus_metrics)}
    # left out if the shards of one corpus do not tell the size of their text, or its loss is 0
    if all(metrics.get("bits_per_byte") for metrics in corpus_metrics):
        means["bits_per_byte"] = loss / math.log(2) / bytes_per_token
    return means


@dataclass
class Scorer:
    """A model, and how to run it. All processes call each method, and the functions of scoring.py,
    with the same arguments and get the same metrics. A signal ends them between two batches:
    Process.map raises Stopped."""

    model: GPT
    """The model itself, not the module that DDP wraps around it."""
    process: Process
    """This process, which scores its share of the batches in its dtype."""
    batch_size: int
    """Rows of one forward pass on one process."""
    on_batch: Callable[[int], object] = lambda num_rows: None
    """Called before each batch of a benchmark with its number of rows on all processes: evaluate.py
    moves its progress bar."""

    def metrics_by_corpus(self, val: Mixture, tokens: int) -> dict[str, dict[str, float]]:
        """Return what validation_loss gives for each corpus of a split, by its name, and of several
        corpora last the "weighted mean", where Evaluator.validate expects it."""
        corpus_metrics = [self.validation_loss(corpus, tokens) for corpus in val.corpus_sequences]
        by_corpus = dict(zip(val.names, corpus_metrics, strict=True))
        if len(corpus_metrics) > 1:
            by_corpus["weighted mean"] = weighted_mean(corpus_metrics, val.corpus_weights)
        return by_corpus

    @torch.no_grad()
    def validation_loss(self, sequences: Sequences, tokens: int) -> dict[str, float]:
        """Return the mean loss in nats per token over the first `tokens` targets of a split, and
        the number n of these.

        Where the shards tell the size of their text, there is also bits_per_byte = loss / ln 2 /
        (bytes of source text for a token of the whole split), by which runs with different
        tokenizers can be compared.
        """
        self.model.eval()  # without dropout
        # the first sequences of the split, the same at every evaluation
        num_sequences = sequences.count_within(tokens)
        # lists of sequence ids; the last list may be shorter
        batches = batched(list(range(num_sequences)), self.batch_size)

        def sum_nats(batch: list[int]) -> float:
            """Return the loss of all targets of a batch of sequences, summed, in nats."""
            # Sequences that do not count fill up the last batch, as another shape would be compiled
            # anew. Targets of -1 are left out of the mean.
            filled = np.resize(batch, len(batches[0]))  # repeats its ids
            inputs, targets = sequences.make_batch(filled)  # int64 (B, T) each
            targets[len(batch) :] = -1
            idx = torch.from_numpy(inputs).to(self.process.device)
            target_ids = torch.from_numpy(targets).to(self.process.device)
            with self.process.autocast():
                loss = self.model(idx, target_ids)  # mean over the targets that are not -1
            return loss.item() * targets[: len(batch)].size  # times the number of these targets

        # each process scores its share of the batches; all get the sums of all batches
        total_nats = sum(self.process.map(sum_nats, batches))
        self.model.train()
        num_targets = num_sequences * sequences.block_size  # a target for each input
        metrics = {"loss": total_nats / num_targets, "n": num_targets}
        # mean over the split; None if a manifest is missing or does not tell the size of the text
        bytes_per_token = sequences.stream.bytes_per_token
        if bytes_per_token:
            metrics["bits_per_byte"] = metrics["loss"] / math.log(2) / bytes_per_token
        return metrics
