"""Log-probabilities of continuations, for benchmarks.

All processes take part: each scores its share of the batches, and all processes get the predictions
of every batch before anything is summed up. So the number of processes changes no metric.

A context and its continuations share one row of a batch (sequence packing), so that the context
runs through the model once. The attention mask hides the continuations from each other. If that
does not suit the model (model/proof.py), each continuation has a row of its own. This file
only computes predictions: tasks.py picks the choices, and training/evaluator.py and evaluate.py
decide what is scored.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.named_tokenizer import Tokenizer
from evaluation.tasks import (
    Benchmark,
    Continuation,
    Item,
    Prediction,
    ScoreBenchmark,
    Task,
    batched,
)
from evaluation.validation import Scorer
from model.chunked_loss import chunk_bytes, rows_within
from model.gpt import GPT
from model.proof import agrees, is_proven
from utils.distributed import Process
from utils.errors import UserError


@dataclass(frozen=True)
class PackedItem:
    """One row of a batch: token ids of a context and of the continuations that share it."""

    first_index: int
    """Index of choices[0] among the continuations of all items; choices[1] has the next index."""
    context_ids: list[int]
    """Token ids, at least one: the last one predicts the first token of each choice."""
    choices: list[list[int]]
    """Token ids of each continuation. No list is empty."""

    @property
    def padded_length(self) -> int:
        """Number of inputs of the row, rounded up to a multiple of 8 so that few different shapes
        occur. The last token of a continuation predicts nothing, so it is no input."""
        num_inputs = len(self.context_ids) + sum(len(choice) - 1 for choice in self.choices)
        return -(-num_inputs // 8) * 8


def pack_items(
    continuations_of_items: list[list[Continuation]], share_rows: bool
) -> list[PackedItem]:
    """Pack the continuations of all items into rows, in order. If `share_rows`, neighbors within an
    item share a row if their contexts are equal. A Continuation has `context_ids` and its own
    `ids`, neither of them empty."""
    packed_items: list[PackedItem] = []
    index = 0  # number of the continuation, counted over all items
    for continuations in continuations_of_items:
        for i, continuation in enumerate(continuations):
            # i > 0 means that packed_items[-1] belongs to this item
            has_same_context = i > 0 and continuation.context_ids == packed_items[-1].context_ids
            if share_rows and has_same_context:
                packed_items[-1].choices.append(continuation.ids)
            else:
                packed_items.append(PackedItem(index, continuation.context_ids, [continuation.ids]))
            index += 1
    return packed_items


@dataclass(frozen=True)
class PackedBatch:
    """Rows of packed items as tensors, with N targets: the tokens whose probability is needed. The
    targets are sorted by row, then by choice."""

    idx: Tensor  # (B, T) token ids, padded with 0 on the right
    positions: Tensor  # (B, T), as if each continuation stood alone after the context
    mask: Tensor | None  # bool (B, 1, T, T), True where a query attends; None: causal
    target_rows: Tensor  # (N,), row of the hidden state that predicts a target
    target_columns: Tensor  # (N,), column of that hidden state
    target_ids: Tensor  # (N,)


def make_batch(packed_items: list[PackedItem], device: torch.device) -> PackedBatch:
    """Return the batch of packed items of equal length.

    A context "a b" with the continuations "c d" and "e f" becomes one row:

        idx        a  b  c  e        "c" and "e" both follow "b", and "e" does not attend to "c"
        positions  0  1  2  2        each continuation goes on after the context
        segment    0  0  1  2        0: context; 1, 2, ...: continuations

    Padding fills a row up to its length, a multiple of 8: idx 0, positions 0, segment -1.

    There are four targets: "c" and "e" are predicted at "b", "d" at "c", and "f" at "e".
    """
    B = len(packed_items)
    T = packed_items[0].padded_length  # of all rows, see batches_of_equal_length
    idx = np.zeros((B, T), np.int64)
    positions = np.zeros((B, T), np.int64)
    segment_ids = np.full((B, T), -1)  # -1: padding
    targets: list[tuple[int, int, int]] = []  # (row, column, id), as in PackedBatch
    for b, packed_item in enumerate(packed_items):
        context_length = len(packed_item.context_ids)  # in tokens
        idx[b, :context_length] = packed_item.context_ids
        positions[b, :context_length] = range(context_length)
        segment_ids[b, :context_length] = 0
        start = context_length  # column of the first input of the choice
        for segment, choice in enumerate(packed_item.choices, 1):
            inputs = choice[:-1]  # the last token predicts nothing
            end = start + len(inputs)
            idx[b, start:end] = inputs
            positions[b, start:end] = range(context_length, context_length + len(inputs))
            segment_ids[b, start:end] = segment
            # the last token of the context predicts the first token of the choice
            columns = [context_length - 1, *range(start, end)]
            for column, token in zip(columns, choice, strict=True):
                targets.append((b, column, token))
            start = end
    # (N,) each: row and column of the hidden state that predicts a target, and the target's id
    target_rows, target_columns, target_ids = torch.tensor(targets, device=device).T

    mask = None  # causal attention: faster, and enough if each row has one continuation
    if any(len(packed_item.choices) > 1 for packed_item in packed_items):
        mask = segment_mask(torch.from_numpy(segment_ids)).to(device)
    return PackedBatch(
        idx=torch.from_numpy(idx).to(device),
        positions=torch.from_numpy(positions).to(device),
        mask=mask,
        target_rows=target_rows,
        target_columns=target_columns,
        target_ids=target_ids,
    )


def segment_mask(segment_ids: Tensor) -> Tensor:
    """Return the mask (B, 1, T, T) of the segments (B, T) of make_batch: a token attends to its own
    segment and to the context, but not to later tokens."""
    same_segment = segment_ids[:, None, :] == segment_ids[:, :, None]  # (B, queries, keys)
    in_context = segment_ids[:, None, :] == 0  # (B, 1, keys)
    return (same_segment | in_context).tril().unsqueeze(1)  # tril makes it causal


def targets_hidden(model: GPT, batch: PackedBatch, share_rows: bool) -> Tensor:
    """Return the hidden states (N, C) that predict the targets of a batch. Unless `share_rows`,
    each row has one continuation, and the model reads it as in training."""
    if share_rows:
        hidden = model.hidden(batch.idx, positions=batch.positions, mask=batch.mask)  # (B, T, C)
    else:
        # With a block_size of 100, rows are padded to up to 104 columns, and the model refuses more
        # than 100. Only padding is cut off.
        hidden = model.hidden(batch.idx[:, : model.config.block_size])  # (B, T, C)
    return hidden[batch.target_rows, batch.target_columns]


@torch.no_grad()
def packing_agrees(model: GPT) -> bool:
    """Compare the logits of continuations that share a row with their context, up to the full
    context, with those of each continuation in a row of its own. `model` is a narrow copy."""
    block_size = model.config.block_size
    length = min(4, block_size)  # of a choice, in tokens: all but its last one are inputs
    random_ids = torch.randint(model.config.vocab_size, (block_size + 2 * length,)).tolist()
    context = random_ids[: block_size - length + 1]  # + length - 1 inputs of a choice = block_size
    choices = [random_ids[block_size : block_size + length], random_ids[block_size + length :]]
    # first_index is 0, because make_batch does not read it
    packed = make_batch([PackedItem(0, context, choices)], torch.device("cpu"))
    alone = make_batch([PackedItem(0, context, [choice]) for choice in choices], packed.idx.device)
    return agrees(  # True if the logits (N, V) differ only by rounding
        model.logits(targets_hidden(model, packed, share_rows=True)),
        model.logits(targets_hidden(model, alone, share_rows=False)),
    )


def is_packing_proven(model: GPT) -> bool:
    """Return whether continuations of one context may share a row. The first call for a class and
    config runs packing_agrees, and prints a note if it returns False; later calls only return."""
    return is_proven("scoring several continuations in one row", packing_agrees, model)


def score_targets(
    model: GPT, x: Tensor, target_ids: Tensor, banned_ids: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Score the target ids (N,) that hidden states x (N, C) predict.

    Return three tensors (N,): the log-probability of each target in nats, whether the target is the
    argmax of all ids, and whether it is the argmax of the ids that are not banned. The argmax is
    the first of equal logits.
    """
    # One slice at a time, because each hidden state has V float32 logits. The logits of a slice
    # take half of chunk_bytes (2**30 on a GPU, 2**26 on a CPU): logsumexp makes a second tensor of
    # their size. From 32 rows on, rows_within rounds down to a multiple of 32: for GPT-2 it returns
    # 2,656 rows on a GPU, 160 on a CPU.
    rows_per_slice = rows_within(chunk_bytes(x.device) // 2, 4 * model.config.vocab_size)
    logprobs, is_argmax, is_allowed_argmax = [], [], []  # a tensor (n,) for each slice
    # In float32: many of V bfloat16 logits are equal, and ties would decide which id is greedy.
    with torch.autocast(x.device.type, enabled=False):
        slices = zip(x.float().split(rows_per_slice), target_ids.split(rows_per_slice), strict=True)
        for chunk, chunk_target_ids in slices:  # (n, C), (n,)
            logits = model.logits(chunk).float()  # (n, V), without padding
            target_logits = logits.gather(1, chunk_target_ids[:, None]).squeeze(1)
            logprobs.append(target_logits - logits.logsumexp(-1))  # log-softmax of the targets
            is_argmax.append(logits.argmax(-1) == chunk_target_ids)
            logits[:, banned_ids] = -torch.inf  # LAMBADA's stop words; [] of other tasks
            is_allowed_argmax.append(logits.argmax(-1) == chunk_target_ids)
    return torch.cat(logprobs), torch.cat(is_argmax), torch.cat(is_allowed_argmax)


def score_batch(
    scorer: Scorer, banned_ids: list[int], packed_items: list[PackedItem]
) -> dict[int, Prediction]:
    """Score one batch. Return the Prediction of each choice, by the index of the choice among the
    choices of all items (PackedItem.first_index)."""
    # moves the progress bar of evaluate.py: each process now scores a batch of about this size
    scorer.on_batch(len(packed_items) * scorer.process.data_parallel)
    batch = make_batch(packed_items, scorer.process.device)
    share_rows = is_packing_proven(scorer.model)
    # One forward pass: cached casts of the weights would only take memory.
    with scorer.process.autocast(keep_weights=False):
        # Only hidden states that predict a target go through the head below. Logits of whole rows
        # would take V / C times the memory of the hidden states, 65 times in GPT-2 124M.
        hidden = targets_hidden(scorer.model, batch, share_rows)  # (N, C)
    outputs = score_targets(scorer.model, hidden, batch.target_ids, banned_ids)
    # (N,) each, copied to the CPU at once: reading single elements would copy each one alone
    logprobs, is_argmax, is_allowed_argmax = [tensor.cpu() for tensor in outputs]
    logprobs = logprobs.double()  # keeps the digits of a sum over hundreds of tokens

    # The N targets are in the order of PackedBatch. [start, end) are the targets of one choice, and
    # is_argmax says of each whether it is the likeliest id.
    prediction_by_index: dict[int, Prediction] = {}
    start = 0
    for packed_item in packed_items:
        for index, choice in enumerate(packed_item.choices, packed_item.first_index):
            end = start + len(choice)
            # a banned word may not come first, but may follow
            is_rest_greedy = is_argmax[start + 1 : end].all()
            prediction_by_index[index] = Prediction(
                logprob=logprobs[start:end].sum().item(),
                num_tokens=len(choice),
                is_greedy=bool(is_argmax[start:end].all()),
                is_greedy_filtered=bool(is_allowed_argmax[start] and is_rest_greedy),
                is_last_greedy=bool(is_argmax[end - 1]),
            )
            start = end
    return prediction_by_index


def single_token_ids(words: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    """Return the ids of the words that are one token after a space. A longer word cannot be banned
    by its first token, which other words have, too."""
    # the ids of each word; encode_continuation adds no second space in front
    ids_of_words = [tokenizer.encode_continuation(f" {word}").tolist() for word in words]
    return [ids[0] for ids in ids_of_words if len(ids) == 1]


def batches_of_equal_length(
    packed_items: list[PackedItem], batch_size: int
) -> list[list[PackedItem]]:
    """Return batches of rows of equal padded_length, the longest first: if memory runs out, it does
    so at once and not after an hour."""
    longest_first = sorted(packed_items, key=lambda row: row.padded_length, reverse=True)
    batches: list[list[PackedItem]] = []
    for _, equal_rows in groupby(longest_first, key=lambda row: row.padded_length):
        batches.extend(batched(list(equal_rows), batch_size))  # the last one may be smaller
    return batches


@torch.no_grad()
def score_items(
    scorer: Scorer, tokenizer: Tokenizer, items: list[Item], task: Task
) -> list[list[Prediction]]:
    """Return a Prediction for each choice of each item. `task` encodes the items. Raise UserError
    if a log-probability is not finite. Every process must call this function."""
    scorer.model.eval()  # no dropout
    banned_ids = single_token_ids(task.banned_words, tokenizer)  # of LAMBADA; [] of other tasks
    block_size = scorer.model.config.block_size
    # for each item a list of Continuations, one for each choice
    continuations_of_items = [task.continuations(item, tokenizer, block_size) for item in items]
    # Each process compares alone. All must make equally many batches, as a process with fewer would
    # leave the others waiting in map_across_processes below.
    share_rows = scorer.process.all_agree(is_packing_proven(scorer.model))
    packed_items = pack_items(continuations_of_items, share_rows)
    batches = batches_of_equal_length(packed_items, scorer.batch_size)

    prediction_by_index: dict[int, Prediction] = {}  # by the index of a choice among all choices
    # Each process scores some batches and gets the predictions of all. After a signal this call
    # raises Stopped.
    for batch_predictions in scorer.process.map_across_processes(
        partial(score_batch, scorer, banned_ids), batches
    ):
        prediction_by_index |= batch_predictions
    scorer.model.train()  # dropout again: a training step may follow
    # The weights are of a run that diverged. Comparisons with NaN are false: no choice would win.
    if not all(math.isfinite(prediction.logprob) for prediction in prediction_by_index.values()):
        raise UserError("the model gives NaN or infinity instead of log-probabilities")

    # the batches are sorted by length: restore the order of the items
    predictions_of_items: list[list[Prediction]] = []
    start = 0  # index of the first continuation of the item
    for item in items:
        end = start + len(item.choices)
        predictions_of_items.append([prediction_by_index[index] for index in range(start, end)])
        start = end
    return predictions_of_items


def refuse_other_data(process: Process, name: str, content: object) -> None:
    """Raise UserError on every process if the processes have read another `content` for the task
    `name`: plain values, or objects of dataclasses. Each would score other examples than the table
    says."""
    message = f"the machines have different data of {name}: give all of them one file"
    # raises UserError(message) on every process unless all give the same number
    process.check_equal(zlib.crc32(repr(content).encode()), message)


def open_benchmark(
    benchmark: Benchmark,
    path: Path | None,
    limit: int | None,
    scorer: Scorer,
    tokenizer: Tokenizer,
    protocols: Sequence[str],
) -> ScoreBenchmark:
    """Read a benchmark's rows, at most `limit` for each task, from a path, or download them. Return
    the function that scores them. Raise UserError if they cannot be read or scored: now, not in the
    middle of a run."""
    block_size = scorer.model.config.block_size
    read_rows = partial(benchmark.read, path, limit, tokenizer, block_size)
    # [{"text": "... stood Tom"}, ...] of LAMBADA; for CORE a pair (task, its rows) for each task
    rows = scorer.process.read_on_all(read_rows)  # the main process first, to fill the cache
    refuse_other_data(scorer.process, benchmark.name, rows)  # UserError on every process
    # called without arguments: returns Results, and rows for --dump
    return partial(benchmark.score, rows, partial(score_items, scorer, tokenizer), protocols)
