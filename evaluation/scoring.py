"""Log-probabilities of continuations, on which HellaSwag, LAMBADA and CBT are built.

A context and its continuations share one row of a batch, so that the context is computed once; the
attention mask hides the continuations from each other. The head runs at scored positions only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.tokenizer import Tokenizer
from evaluation.targets import score_targets
from evaluation.tasks import Item
from model.gpt import GPT
from utils.devices import autocast
from utils.distributed import Process
from utils.errors import UserError


class Score(NamedTuple):
    """A model's prediction of one continuation of a context."""

    logprob: float  # of the whole continuation, in nats
    tokens: int  # of the continuation
    greedy: bool  # greedy decoding gives the continuation
    greedy_filtered: bool  # greedy decoding gives it if no banned token can be the first
    last: bool  # the last token is the likeliest after those before it
    context_logprob: float  # of the context after its first token, in nats; 0 unless requested
    context_tokens: int  # tokens in context_logprob


@dataclass(frozen=True)
class Row:
    """Token ids of a context and of the continuations that share it in one row of a batch."""

    item: int
    first: int  # index of choices[0] among the choices of the item
    context: list[int]
    choices: list[list[int]]

    @property
    def length(self) -> int:
        """Tokens, rounded up to a multiple of 8 so that few different shapes occur."""
        tokens = len(self.context) + sum(len(choice) - 1 for choice in self.choices)
        return -(-tokens // 8) * 8


def make_rows(items: list[Item], tokenizer: Tokenizer, block_size: int) -> list[Row]:
    """Return the tokenised items as rows. If a context and a continuation together exceed the block
    size, the context loses its start (as in lm-eval), and each continuation gets its own row."""
    rows = []
    for number, item in enumerate(items):
        text = item.context.rstrip()
        space = item.context[len(text) :]
        context = tokenizer.encode(text).tolist() or [tokenizer.eot]
        choices = [tokenizer.encode(space + choice).tolist() for choice in item.choices]
        longest = max(map(len, choices))
        if longest > block_size:
            raise UserError(
                f"a continuation is {longest} tokens long; this model's block size is {block_size}"
            )
        if len(context) + longest - 1 <= block_size:
            rows.append(Row(number, 0, context, choices))
        else:
            for n, choice in enumerate(choices):
                room = block_size + 1 - len(choice)
                rows.append(Row(number, n, context[-room:], [choice]))
    return rows


def collate(rows: list[Row]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return token ids (B, T), positions (B, T) and mask (B, 1, T, T) of rows.

    A context "a b" with the continuations "c d" and "e f" becomes one row; the last token of a
    continuation is never an input:

        ids        a  b  c  e        "c" and "e" both follow "b", and "e" does not attend to "c"
        positions  0  1  2  2
        part       0  0  1  2

    The mask is None, for plain causal attention, if every row has one continuation.
    """
    idx, positions = np.zeros((2, len(rows), max(row.length for row in rows)), np.int64)
    part = np.full(idx.shape, -1)  # 0: context; 1, 2, ...: continuations; -1: padding
    for b, row in enumerate(rows):
        end = len(row.context)
        idx[b, :end], positions[b, :end], part[b, :end] = row.context, range(end), 0
        for n, choice in enumerate(row.choices, 1):
            start, end = end, end + len(choice) - 1
            idx[b, start:end], part[b, start:end] = choice[:-1], n
            positions[b, start:end] = len(row.context) + np.arange(end - start)
    mask = None
    if any(len(row.choices) > 1 for row in rows):
        part = torch.from_numpy(part)
        mask = (part[:, None, :] == part[:, :, None]) | (part == 0)[:, None, :]
        mask = mask.tril().unsqueeze(1)
    return torch.from_numpy(idx), torch.from_numpy(positions), mask


def score_rows(
    model: GPT, rows: list[Row], *, dtype: torch.dtype, banned: list[int], with_context: bool
) -> list[Score]:
    """Return the scores of all continuations in a batch of rows, in order."""
    device = model.transformer.wte.weight.device
    idx, positions, mask = (x if x is None else x.to(device) for x in collate(rows))
    # for each token to predict: its row b, the column t whose output predicts it, and its id
    b_index, t_index, targets, span_lengths = [], [], [], []
    for b, row in enumerate(rows):
        end = len(row.context)
        spans = [(range(end - 1), row.context[1:])] if with_context else []
        for choice in row.choices:
            start, end = end, end + len(choice) - 1
            spans.append(([len(row.context) - 1, *range(start, end)], choice))
        for columns, tokens in spans:
            b_index += [b] * len(columns)
            t_index += columns
            targets += tokens
            span_lengths.append(len(columns))
    b_index, t_index, targets = torch.tensor([b_index, t_index, targets], device=device)  # (N,)
    with autocast(device, dtype):
        x = model.hidden(idx, positions=positions, mask=mask)[b_index, t_index]  # (N, C)
    found = score_targets(x, model.head_weight[: model.config.vocab_size], targets, banned)
    spans = zip(*(values.cpu().split(span_lengths) for values in found), strict=True)
    scores = []
    for row in rows:
        context_logprob = next(spans)[0].double().sum().item() if with_context else 0.0
        context_tokens = len(row.context) - 1 if with_context else 0
        for choice in row.choices:
            nats, hits, filtered = next(spans)
            logprob, filtered = nats.double().sum().item(), filtered[0] and hits[1:].all()
            flags = (bool(hits.all()), bool(filtered), bool(hits[-1]))
            scores.append(Score(logprob, len(choice), *flags, context_logprob, context_tokens))
    return scores


@torch.no_grad()
def score_items(
    model: GPT,
    tokenizer: Tokenizer,
    process: Process,
    items: list[Item],
    *,
    batch_size: int,
    dtype: torch.dtype,
    banned: list[int] | None = None,
    with_context: bool = False,
    progress: Callable[[int], None] = lambda rows: None,
) -> list[list[Score]]:
    """Return a Score for each continuation of each item, on every process; they share the work.

    `banned` are the token ids of Score.greedy_filtered; `with_context` scores the context too;
    `progress` is called with the number of rows done since its last call.
    """
    model.eval()
    rows = sorted(make_rows(items, tokenizer, model.config.block_size), key=lambda r: -r.length)
    batches = [  # of rows of equal length
        group[start : start + batch_size]
        for group in (list(group) for _, group in groupby(rows, attrgetter("length")))
        for start in range(0, len(group), batch_size)
    ]
    starts = np.cumsum([0, *(len(item.choices) for item in items)])
    table = torch.zeros(starts[-1], len(Score._fields), dtype=torch.float64)
    options = {"dtype": dtype, "banned": banned or [], "with_context": with_context}
    for mine, batch, counts in process.share(batches):
        scores = score_rows(model, batch, **options)
        if counts:
            index = [starts[r.item] + r.first + n for r in batch for n in range(len(r.choices))]
            table[index] = torch.tensor(scores, dtype=torch.float64)
        turn = mine - process.rank
        progress(sum(len(b) for b in batches[turn : turn + process.world_size]))
    model.train()
    kinds = Score.__annotations__.values()
    rows = process.sum_float64(table).tolist()
    found = [Score(*(kind(x) for kind, x in zip(kinds, row, strict=True))) for row in rows]
    return [found[a:b] for a, b in zip(starts, starts[1:], strict=False)]
