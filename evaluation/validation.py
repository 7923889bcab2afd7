"""Scorer: the validation loss, on all processes together."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from data.loader import Sequences
from data.tokenizer import Tokenizer
from model.gpt import GPT
from utils.devices import autocast
from utils.distributed import Process


def too_few_tokens(name: str, sequences: Sequences, tokens: int) -> str:
    """Return the sentence for a corpus whose validation split is smaller than `tokens`."""
    held_out = len(sequences) * sequences.block_size
    return (
        f"note: validation reads all {held_out:,} tokens of {name}, fewer than --val_tokens "
        f"{tokens:,}: the fewer, the rougher the loss"
    )


def weighted_mean(scores: list[dict[str, float]], weights: list[float]) -> dict[str, float]:
    """Return the figures of a mixture from those of validation_loss for its corpora. The weights
    are shares of tokens, so that bits per byte is the mean of bits over the mean of bytes."""
    loss = sum(weight * x["loss"] for weight, x in zip(weights, scores, strict=True))
    if not all("bits_per_byte" in x for x in scores):
        return {"loss": loss}
    num_bytes = 0.0  # per token of the mixture
    for weight, x in zip(weights, scores, strict=True):
        num_bytes += weight * x["loss"] / math.log(2) / x["bits_per_byte"]
    return {"loss": loss, "bits_per_byte": loss / math.log(2) / num_bytes}


@dataclass
class Scorer:
    """A model, and how to run it over batches that the processes share: all of them call each
    method with the same arguments and get the same figures."""

    model: GPT
    tokenizer: Tokenizer | None  # None where only the loss is needed
    process: Process
    dtype: torch.dtype  # autocast dtype of matmuls
    batch_size: int
    progress: Callable[[int], None] = lambda rows: None  # called with the number of rows just done

    @torch.no_grad()
    def validation_loss(self, sequences: Sequences, tokens: int) -> dict[str, float]:
        """Return the mean loss in nats per token over the first `tokens` targets of a split and,
        where the shards tell the size of their text, bits_per_byte = loss / ln 2 / (bytes of source
        text for a token of the whole split), by which tokenizers can be compared.

        The figures are the same for any number of processes: each batch has a slot of its own in
        the sum. The last batch is filled with sequences that do not count, to have equal shapes.
        """
        self.model.eval()
        n, size = sequences.count_within(tokens), self.batch_size
        batches = np.array_split(np.arange(n), range(size, n, size))
        sums = torch.zeros(len(batches), dtype=torch.float64)  # nats of each batch
        for mine, batch, counts in self.process.share(batches):
            inputs, targets = sequences.batch(np.resize(batch, len(batches[0])))  # (B, T)
            targets[len(batch) :] = -1
            idx, labels = (torch.from_numpy(x).to(self.process.device) for x in (inputs, targets))
            with autocast(self.process.device, self.dtype):
                loss = self.model(idx, labels)
            if counts:
                sums[mine] = loss.item() * targets[: len(batch)].size
        nats = self.process.sum_float64(sums).sum().item()
        self.model.train()
        scores = {"loss": nats / (n * sequences.block_size)}
        bytes_per_token = sequences.stream.bytes_per_token
        if bytes_per_token:
            scores["bits_per_byte"] = scores["loss"] / math.log(2) / bytes_per_token
        return scores
