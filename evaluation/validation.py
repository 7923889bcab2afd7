"""Scorer: a model to score, and its validation loss, for training and evaluate.py.

All processes take part: each scores its share of the batches, and all processes get the sum over
every batch. So the number of processes changes no metric. scoring.py computes log-probabilities of
texts for benchmarks, which need a tokenizer; the validation loss needs none.
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
    """Return the metrics of a mixture from the metrics of its corpora (see validation_loss).

    The weights are shares of tokens that add up to 1 (Mixture.corpus_weights). So the bits per byte
    of the mixture are its mean bits per token divided by its mean bytes per token, not the mean of
    the corpora's bits per byte.
    """
    loss = 0.0  # nats per token
    bytes_per_token = 0.0
    for weight, metrics in zip(corpus_weights, corpus_metrics, strict=True):
        loss += weight * metrics["loss"]
        # nats / ln 2 = bits; bits per token / bits per byte = bytes per token
        if metrics.get("bits_per_byte"):
            bytes_per_token += weight * metrics["loss"] / math.log(2) / metrics["bits_per_byte"]
    means = {"loss": loss, "n": sum(metrics["n"] for metrics in corpus_metrics)}  # n: targets
    # left out if a corpus has no bits_per_byte, as its manifest lacks the text size, or a loss of 0
    if all(metrics.get("bits_per_byte") for metrics in corpus_metrics):
        means["bits_per_byte"] = loss / math.log(2) / bytes_per_token
    return means


@dataclass
class Scorer:
    """A model to score, with the process and batch size to run it.

    All processes call each method, and the functions of scoring.py, with the same arguments and get
    the same metrics. After a signal Process.map_across_processes raises Stopped between two
    batches.
    """

    model: GPT
    """The model itself, not the module that DDP wraps around it."""
    process: Process
    """This process, which scores its share of the batches in its dtype."""
    batch_size: int
    """Rows of one forward pass on one process."""
    on_batch: Callable[[int], object] = lambda num_rows: None
    """Called before each batch of a benchmark with the number of rows that all processes score
    together: evaluate.py moves its progress bar."""

    def metrics_by_corpus(self, val: Mixture, num_tokens: int) -> dict[str, dict[str, float]]:
        """Return the metrics of validation_loss for each corpus of the split `val`, by corpus name.
        Several corpora have a last entry "weighted mean". Evaluator.validate takes the last entry.
        """
        # [{"loss": 3.29, "n": 10_485_760, "bits_per_byte": 0.98}, ...]
        corpus_metrics = [
            self.validation_loss(sequences, num_tokens) for sequences in val.corpus_sequences
        ]
        # val.names and val.corpus_weights ([0.7, 0.3]) have the order of corpus_sequences
        metrics_by_name = dict(zip(val.names, corpus_metrics, strict=True))
        if len(corpus_metrics) > 1:
            metrics_by_name["weighted mean"] = weighted_mean(corpus_metrics, val.corpus_weights)
        return metrics_by_name

    @torch.no_grad()
    def validation_loss(self, sequences: Sequences, num_tokens: int) -> dict[str, float]:
        """Return "loss", the mean in nats per token over the first `num_tokens` targets of a split,
        and "n", the number of targets.

        "bits_per_byte" makes runs with different tokenizers comparable. It is loss / ln 2 / (bytes
        of source text per token, over the whole split), and is missing unless the manifests of the
        shards have the size of their text.
        """
        self.model.eval()  # no dropout
        # every evaluation takes the same sequences, the first ones of the split
        num_sequences = sequences.count_within(num_tokens)  # at least 1, at most all
        # ids of sequences: [[0, ..., 15], [16, ..., 31], ...]; the last list may be shorter
        batches = batched(list(range(num_sequences)), self.batch_size)

        def sum_nats(sequence_ids: list[int]) -> float:
            """Return the sum of the loss over all targets of a batch of sequences, in nats."""
            # A shorter last batch would be compiled anew for its shape: repeat its ids up to the
            # full batch size. The loss ignores the targets of the repeated sequences, -1.
            filled_ids = np.resize(sequence_ids, len(batches[0]))  # (B,)
            inputs, targets = sequences.make_batch(filled_ids)  # int64 (B, T) each
            targets[len(sequence_ids) :] = -1
            idx = torch.from_numpy(inputs).to(self.process.device)
            target_ids = torch.from_numpy(targets).to(self.process.device)
            # one forward pass: cached casts of the weights would only take memory
            with self.process.autocast(keep_weights=False):
                loss = self.model(idx, target_ids)  # mean over the targets that are not -1
            # the mean times the number of these targets
            return loss.item() * targets[: len(sequence_ids)].size

        # each process scores its share of the batches; all processes get the sums of all batches
        total_nats = sum(self.process.map_across_processes(sum_nats, batches))
        self.model.train()  # dropout again: a training step may follow
        num_targets = num_sequences * sequences.block_size  # one target for each input
        metrics = {"loss": total_nats / num_targets, "n": num_targets}
        # mean over the split; None if a manifest is missing or lacks the size of the text
        bytes_per_token = sequences.stream.bytes_per_token
        if bytes_per_token:
            metrics["bits_per_byte"] = metrics["loss"] / math.log(2) / bytes_per_token
        return metrics
