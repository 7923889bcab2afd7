"""Scorer: the validation loss, on all processes together."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from data.loader import Sequences
from data.tokenizer import Tokenizer, bytes_per_token
from model.gpt import GPT
from utils.devices import autocast
from utils.distributed import Process


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
        with a tokenizer, bits_per_byte = nats / ln 2 / bytes, by which tokenizers can be compared.

        The figures are the same for any number of processes: each batch has a slot of its own in
        the sum. The last batch is filled with sequences that do not count, to have equal shapes.
        """
        self.model.eval()
        token_bytes = bytes_per_token(self.tokenizer) if self.tokenizer else None  # (vocab_size,)
        n, size = sequences.count_within(tokens), self.batch_size
        batches = np.array_split(np.arange(n), range(size, n, size))
        sums = torch.zeros(2, len(batches), dtype=torch.float64)  # nats and bytes of each batch
        for mine, batch, counts in self.process.share(batches):
            inputs, targets = sequences.batch(np.resize(batch, len(batches[0])))  # (B, T)
            targets[len(batch) :] = -1
            idx, labels = (torch.from_numpy(x).to(self.process.device) for x in (inputs, targets))
            with autocast(self.process.device, self.dtype, fixed_shapes=True):
                loss = self.model(idx, labels)
            if counts:
                counted = targets[: len(batch)]
                sums[0, mine] = loss.item() * counted.size
                sums[1, mine] = 0 if token_bytes is None else float(token_bytes[counted].sum())
        nats, n_bytes = self.process.sum_float64(sums).sum(dim=1).tolist()
        self.model.train()
        scores = {"loss": nats / (n * sequences.block_size)}
        return scores | ({"bits_per_byte": nats / math.log(2) / n_bytes} if n_bytes else {})
