"""Scoring continuations of contexts: what HellaSwag, LAMBADA and CBT come down to.

The continuations of a context stand behind it in one row, kept apart by the attention mask, so that
the context is run once; the head runs only where a score needs it. Rows are batched by length.
"""

from collections.abc import Callable
from dataclasses import astuple, dataclass, fields

import numpy as np
import torch
from torch import Tensor

from data.tokenizer import Tokenizer
from evaluation.tasks import Item
from model.config import ModelError
from model.gpt import GPT
from model.loss import look_up
from utils.distributed import Process, autocast


@dataclass(frozen=True)
class Score:
    """What a model makes of one continuation of a context."""

    logprob: float
    """Of the whole continuation, in nats."""
    tokens: int
    greedy: bool
    """Whether taking the likeliest token each time gives the continuation."""
    greedy_filtered: bool
    """The same where the first token is none of the banned ones."""
    last: bool
    """Whether its last token is the likeliest after those before it."""
    context_logprob: float
    """Of the context after its first token, in nats; 0 unless asked for."""
    context_tokens: int
    """How many those are."""


@dataclass(frozen=True)
class Row:
    """Token ids of a context and of the continuations that share it in one row of a batch."""

    item: int
    first: int  # number of the first of these continuations among the item's
    context: list[int]
    choices: list[list[int]]

    @property
    def length(self) -> int:
        """A multiple of 8, padding included, so that the shapes of batches are few."""
        tokens = len(self.context) + sum(len(choice) - 1 for choice in self.choices)
        return -(-tokens // 8) * 8


def rows_of(items: list[Item], tokenizer: Tokenizer, block_size: int) -> list[Row]:
    """The items as rows; where a context and a continuation do not fit the block size together, the
    start of the context goes, as in lm-evaluation-harness, and the continuation has its own row."""
    rows = []
    for number, item in enumerate(items):
        text = item.context.rstrip()
        space = item.context[len(text) :]
        context = tokenizer.encode(text).tolist() or [tokenizer.eot]
        choices = [tokenizer.encode(space + choice).tolist() for choice in item.choices]
        longest = max(map(len, choices))
        if longest > block_size:
            raise ModelError(
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
    """Token ids and positions (B, T) of rows, and the mask (B, 1, T, T) that keeps continuations of
    a context apart; none where each row holds one."""
    T = max(row.length for row in rows)
    idx, positions = np.zeros((2, len(rows), T), np.int64)
    part = np.full((len(rows), T), -1)  # 0 the context, 1, 2, ... its continuations, -1 padding
    for b, row in enumerate(rows):
        place = len(row.context)
        idx[b, :place], positions[b, :place], part[b, :place] = row.context, range(place), 0
        for n, choice in enumerate(row.choices, 1):
            end = place + len(choice) - 1
            idx[b, place:end] = choice[:-1]
            positions[b, place:end] = range(len(row.context), len(row.context) + len(choice) - 1)
            part[b, place:end] = n
            place = end
    mask = None
    if any(len(row.choices) > 1 for row in rows):
        part = torch.from_numpy(part)
        own = (part[:, None, :] == part[:, :, None]) | (part == 0)[:, None, :]
        mask = own.tril().unsqueeze(1)
    return torch.from_numpy(idx), torch.from_numpy(positions), mask


def score_rows(
    model: GPT, rows: list[Row], *, dtype: torch.dtype, banned: list[int], with_context: bool
) -> list[Score]:
    """Scores of all continuations in a batch of rows, in order; losses are summed in float32."""
    device = model.transformer.wte.weight.device
    idx, positions, mask = collate(rows)
    batch, place, target, owner = [], [], [], []  # of each token to predict
    for b, row in enumerate(rows):
        before = len(row.context)
        spans = [(list(range(before - 1)), row.context[1:])] if with_context else []
        for choice in row.choices:
            after = range(before, before + len(choice) - 1)
            spans.append(([len(row.context) - 1, *after], choice))
            before += len(choice) - 1
        for places, targets in spans:
            batch += [b] * len(places)
            place += places
            target += targets
            owner.append(len(places))
    with autocast(device, dtype):
        mask = None if mask is None else mask.to(device)
        x = model.hidden(idx.to(device), positions=positions.to(device), mask=mask)
        x = x[torch.tensor(batch, device=device), torch.tensor(place, device=device)]  # (N, C)
    vocabulary = model.head_weight[: model.config.vocab_size]
    targets = torch.tensor(target, device=device)
    found = look_up(x, vocabulary, targets, banned)
    scores, spans = [], zip(*(x.cpu().split(owner) for x in found), strict=True)
    for row in rows:
        context_logprob = next(spans)[0].double().sum().item() if with_context else 0.0
        for choice in row.choices:
            nats, hits, filtered = next(spans)
            scores.append(
                Score(
                    nats.double().sum().item(),
                    len(choice),
                    bool(hits.all()),
                    bool(filtered[0] and hits[1:].all()),
                    bool(hits[-1]),
                    context_logprob,
                    len(row.context) - 1 if with_context else 0,
                )
            )
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
    progress: Callable[[int], None] = lambda items: None,
) -> list[list[Score]]:
    """A Score for each continuation of each item, the same on every process, which share the work.

    Token ids in `banned` cannot be the first of a greedy continuation where the score says so;
    `with_context` scores the context too; `progress` hears of each batch that is done.
    """
    model.eval()
    rows = sorted(rows_of(items, tokenizer, model.config.block_size), key=lambda r: -r.length)
    batches: list[list[Row]] = []
    for row in rows:
        if batches and len(batches[-1]) < batch_size and row.length == batches[-1][0].length:
            batches[-1].append(row)
        else:
            batches.append([row])
    starts = np.cumsum([0, *(len(item.choices) for item in items)])
    table = torch.zeros(starts[-1], len(fields(Score)), dtype=torch.float64)
    for turn in range(0, len(batches), process.world_size):
        mine = turn + process.rank
        # all processes run the same number of forwards, which collectives within them rely on
        batch = batches[min(mine, len(batches) - 1)]
        scores = score_rows(
            model, batch, dtype=dtype, banned=banned or [], with_context=with_context
        )
        if mine < len(batches):
            places = [starts[r.item] + r.first + n for r in batch for n in range(len(r.choices))]
            table[places] = torch.tensor([astuple(score) for score in scores]).double()
        progress(sum(len(b) for b in batches[turn : turn + process.world_size]))
    model.train()
    table = process.sum_float64(table)
    kinds = [field.type for field in fields(Score)]
    found = [Score(*(k(v) for k, v in zip(kinds, r, strict=True))) for r in table.tolist()]
    return [found[a:b] for a, b in zip(starts, starts[1:], strict=False)]
