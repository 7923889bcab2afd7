"""ItemScorer: log-probabilities of continuations, on all processes together.

A context and its continuations share one row of a batch, so that the context is computed once; the
attention mask hides the continuations from each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data.tokenizer import Tokenizer
from evaluation.tasks import Item, Score
from evaluation.validation import Scorer
from model.loss import rows_within
from utils.devices import autocast
from utils.errors import UserError

SLICE_BYTES = {"cpu": 2**24, "cuda": 2**29}  # float32 logits of a slice of the tokens


class PackedItem(NamedTuple):
    """Token ids of a context and of the continuations that share it in one row of a batch."""

    first: int  # index of choices[0] among the continuations of all items
    context: list[int]
    choices: list[list[int]]
    length: int  # tokens, rounded up to a multiple of 8 so that few different shapes occur


def pack(items: list[Item], tokenizer: Tokenizer, block_size: int) -> list[PackedItem]:
    """Return the tokenised items as rows. If a context and a continuation together exceed the block
    size, the context loses its start (as in lm-eval), and each continuation gets its own row."""
    rows, first = [], 0
    for item in items:
        own = tokenizer.encode(item.context.rstrip()).tolist()
        context, texts = own or [tokenizer.eot], [item.context + x for x in item.choices]
        choices = [tokenizer.encode(text).tolist()[len(own) :] for text in texts]
        longest = max(map(len, choices))
        if longest > block_size:
            raise UserError(f"a continuation has {longest} tokens, the context {block_size}")
        fits = len(context) + longest - 1 <= block_size
        for group in [choices] if fits else [[choice] for choice in choices]:
            kept = context[-(block_size + 1 - max(map(len, group))) :]
            length = len(kept) + sum(len(choice) - 1 for choice in group)
            rows.append(PackedItem(first, kept, group, -(-length // 8) * 8))
            first += len(group)
    return rows


def to_tensors(rows: list[PackedItem], resized: bool) -> tuple:
    """Return token ids (B, T), positions (B, T), mask (B, 1, T, T), and spans of tokens to predict,
    each a list of row, column whose output predicts the token, and token: for each row the span of
    its context, empty unless `resized`, and those of its continuations. The mask is None, for
    plain causal attention, if every row has one continuation.

    A context "a b" with the continuations "c d" and "e f" becomes one row; the last token of a
    continuation is never an input:

        ids        a  b  c  e        "c" and "e" both follow "b", and "e" does not attend to "c"
        positions  0  1  2  2
        part       0  0  1  2
    """
    arrays = np.zeros((3, len(rows), max(row.length for row in rows)), np.int64)
    idx, positions, part = arrays
    part -= 1  # 0: context; 1, 2, ...: continuations; -1: padding
    spans = []
    for b, row in enumerate(rows):
        end = len(row.context)
        idx[b, :end], positions[b, :end], part[b, :end] = row.context, range(end), 0
        targets = row.context[1:] if resized else []
        spans.append([(b, t, token) for t, token in enumerate(targets)])
        for n, choice in enumerate(row.choices, 1):
            start, end = end, end + len(choice) - 1
            idx[b, start:end], part[b, start:end] = choice[:-1], n
            positions[b, start:end] = len(row.context) + np.arange(end - start)
            columns = len(row.context) - 1, *range(start, end)
            spans.append([(b, t, token) for t, token in zip(columns, choice, strict=True)])
    idx, positions, part = torch.from_numpy(arrays)
    mask = (part[:, None, :] == part[:, :, None]) | (part == 0)[:, None, :]
    is_causal = all(len(row.choices) == 1 for row in rows)
    return idx, positions, None if is_causal else mask.tril().unsqueeze(1), spans


def score_targets(x: Tensor, weight: Tensor, targets: Tensor, banned: list[int]) -> tuple:
    """Return three tensors (N,) for targets (N,) after hidden states x (N, C), for a head of weight
    (V, C): the log-probability in nats, and whether the target is the argmax (the first of equal
    logits) of all ids, and of those not `banned`. Float32, as many bfloat16 logits are equal."""
    rows = rows_within(SLICE_BYTES.get(x.device.type, SLICE_BYTES["cuda"]), 4 * len(weight))
    found, weight = [], weight.float()
    with torch.autocast(x.device.type, enabled=False):
        for some, wanted in zip(x.float().split(rows), targets.split(rows), strict=True):
            logits = F.linear(some, weight)  # (rows, V)
            logprobs = logits.gather(1, wanted[:, None]).squeeze(1) - logits.logsumexp(-1)
            hits = logits.argmax(-1) == wanted
            logits[:, banned] = -torch.inf
            found.append((logprobs, hits, logits.argmax(-1) == wanted))
    return tuple(map(torch.cat, zip(*found, strict=True)))


@dataclass
class ItemScorer(Scorer):
    """Scorer of continuations, for benchmarks."""

    @torch.no_grad()
    def score(
        self, items: list[Item], banned: Sequence[str] = (), resized: bool = False
    ) -> list[list[Score]]:
        """Return a Score for each continuation of each item; `banned` are the words of
        Score.greedy_filtered, `resized` scores the context too."""
        self.model.eval()
        rows = pack(items, self.tokenizer, self.model.config.block_size)
        rows.sort(key=lambda row: -row.length)
        batches = []  # of rows of equal length
        for _, group in groupby(rows, lambda row: row.length):
            while batch := list(islice(group, self.batch_size)):
                batches.append(batch)
        words = [self.tokenizer.encode(" " + word).tolist() for word in banned]
        ids = [word[0] for word in words if len(word) == 1]
        n = sum(len(item.choices) for item in items)
        table = torch.zeros(n, len(Score._fields), dtype=torch.float64)
        for _, batch, counts in self.process.share(batches):
            scores = self.score_batch(batch, ids, resized)
            if counts:
                table[[row.first + i for row in batch for i in range(len(row.choices))]] = scores
            self.progress(len(batch) * self.process.world_size)
        self.model.train()
        table = self.process.sum_float64(table)
        if table.isnan().any():
            raise UserError("the model gives NaN (not a number) instead of a probability")
        columns = table.T.tolist()
        kinds = Score.__annotations__.values()
        found = map(Score, *(map(kind, x) for kind, x in zip(kinds, columns, strict=True)))
        return [list(islice(found, len(item.choices))) for item in items]

    def score_batch(self, rows: list[PackedItem], banned: list[int], resized: bool) -> Tensor:
        """Return the fields of Score (choices, 7) for the continuations of a batch, in order."""
        model, device = self.model, self.process.device
        *inputs, spans = to_tensors(rows, resized)
        idx, positions, mask = (x if x is None else x.to(device) for x in inputs)
        b_index, t_index, targets = torch.tensor([*chain(*spans)], device=device).T  # (N,)
        with autocast(device, self.dtype):
            x = model.hidden(idx, positions=positions, mask=mask)  # (B, T, C)
        weight = model.head_weight[: model.config.vocab_size]
        found = score_targets(x[b_index, t_index], weight, targets, banned)
        lengths = [len(span) for span in spans]
        of_spans = zip(*(values.cpu().split(lengths) for values in found), strict=True)
        scores = []
        for row in rows:
            nats, *_ = next(of_spans)
            context = nats.double().sum(), len(nats)
            for _ in row.choices:
                nats, hits, filtered = next(of_spans)
                greedy = hits.all(), filtered[0] and hits[1:].all(), hits[-1]
                scores.append([nats.double().sum(), len(nats), *greedy, *context])
        return torch.tensor(scores, dtype=torch.float64)
