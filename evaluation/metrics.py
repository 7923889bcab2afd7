"""Validation loss and benchmarks: used by train.py and evaluate.py alike."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from data.loader import Sequences
from data.shards import DataError
from data.tokenizer import Tokenizer
from evaluation.scoring import Score
from evaluation.tasks import (
    STOP_WORDS,
    Item,
    cbt_items,
    hellaswag_clean,
    hellaswag_raw,
    lambada_items,
    read_rows,
)
from model.gpt import GPT
from utils.distributed import Process, autocast


@torch.no_grad()
def validation_loss(
    model: GPT,
    sequences: Sequences,
    process: Process,
    *,
    tokens: int,
    batch_size: int,
    dtype: torch.dtype,
    token_bytes: np.ndarray | None = None,
) -> dict[str, float]:
    """Mean loss in nats per token over the first `tokens` targets of a split, or all there are.

    The batches do not depend on the number of processes: each takes every world_size-th, and their
    losses are added in one order, so the figure is the same for any. With the bytes that each token
    id stands for, `bits_per_byte` too.
    """
    model.eval()
    n = min(len(sequences), max(1, tokens // sequences.block_size))
    batches = np.array_split(np.arange(n), range(batch_size, n, batch_size))
    nats = torch.zeros(len(batches), dtype=torch.float64)
    n_bytes = torch.zeros(len(batches), dtype=torch.float64)
    for turn in range(0, len(batches), process.world_size):
        mine = turn + process.rank
        # all processes run the same number of forwards, which collectives within them rely on
        inputs, targets = sequences.batch(batches[min(mine, len(batches) - 1)])
        idx, labels = (torch.from_numpy(x).to(process.device) for x in (inputs, targets))
        with autocast(process.device, dtype):
            loss = model(idx, labels)
        if mine < len(batches):
            nats[mine] = loss.item() * targets.size
            n_bytes[mine] = 0 if token_bytes is None else float(token_bytes[targets].sum())
    totals = process.sum_float64(torch.stack([nats, n_bytes]))
    total_nats, total_bytes = totals.sum(dim=1).tolist()
    model.train()
    scores = {"loss": total_nats / (n * sequences.block_size)}
    if total_bytes:
        scores["bits_per_byte"] = total_nats / math.log(2) / total_bytes
    return scores


@dataclass(frozen=True)
class Result:
    """One figure: a metric of a task under a named protocol, over n examples."""

    task: str
    protocol: str
    metric: str
    n: int
    value: float
    stderr: float | None = None


Scorer = Callable[..., list[list[Score]]]  # score_items with all but the items filled in


def hellaswag(rows: list[dict], score: Scorer, protocol: str) -> tuple[list[Result], list[dict]]:
    """Zero-shot choice of the ending: by its probability (acc), and by that per token
    (build-nanogpt, llm.c) or per character and per byte (lm-evaluation-harness)."""
    items = {"build-nanogpt": hellaswag_raw, "lm-eval": hellaswag_clean}[protocol](rows)
    scores = score(items)
    name = protocol
    if protocol == "lm-eval" and not all("ctx_a" in row for row in rows):
        name = "lm-eval, ctx alone"  # the harness's query needs more: not to be compared
    nats = [[s.logprob for s in choices] for choices in scores]
    lengths = {"acc": [[1] * len(item.choices) for item in items]}
    if protocol == "build-nanogpt":
        lengths["acc_norm"] = [[s.tokens for s in choices] for choices in scores]
    else:  # without the space that joins an ending to the context
        lengths["acc_norm"] = [[len(c) - 1 for c in item.choices] for item in items]
        lengths["acc_bytes"] = [[len(c.encode()) - 1 for c in item.choices] for item in items]
    picks = {
        metric: [int(np.argmax(np.divide(a, b))) for a, b in zip(nats, by, strict=True)]
        for metric, by in lengths.items()
    }
    return choice_results("hellaswag", name, items, picks, nats)


def cbt(rows: list[dict], score: Scorer, task: str) -> tuple[list[Result], list[dict]]:
    """Choice of the word in the blank: by the mean loss of context and question together, and by
    the probability of the question from the blank on (Radford et al. 2019, section 3.2)."""
    items = cbt_items(rows)
    scores = score(items, with_context=True)
    whole = [
        [(s.context_logprob + s.logprob) / (s.context_tokens + s.tokens) for s in choices]
        for choices in scores
    ]
    rest = [[s.logprob for s in choices] for choices in scores]
    results: list[Result] = []
    examples: list[dict] = []
    for protocol, nats in (("full sequence", whole), ("from the blank", rest)):
        picks = {"acc": [int(np.argmax(x)) for x in nats]}
        found, more = choice_results(task, protocol, items, picks, nats)
        results += found
        examples += more
    return results, examples


def choice_results(
    task: str, protocol: str, items: list[Item], picks: dict[str, list[int]], nats: list
) -> tuple[list[Result], list[dict]]:
    """Accuracy of each metric's picks, and a row for each item."""
    labels = [item.label for item in items]
    results = [
        accuracy(task, protocol, metric, [p == label for p, label in zip(x, labels, strict=True)])
        for metric, x in picks.items()
    ]
    examples = [
        {"task": task, "protocol": protocol, "index": i, "label": label, "logprobs": nats[i]}
        | {f"pick_{metric}": x[i] for metric, x in picks.items()}
        for i, label in enumerate(labels)
    ]
    return results, examples


def lambada(
    rows: list[dict], score: Scorer, tokenizer: Tokenizer
) -> tuple[list[Result], list[dict]]:
    """The last word: whole and greedy, with its perplexity (lm-evaluation-harness); its last token
    alone; and with stop words left out of the choice of its first token, as the GPT-2 paper does in
    some way it does not tell."""
    words = [tokenizer.encode(" " + word).tolist() for word in STOP_WORDS]
    banned = [ids[0] for ids in words if len(ids) == 1]
    scores = [choices[0] for choices in score(lambada_items(rows), banned=banned)]
    nats = np.array([s.logprob for s in scores])
    perplexity = float(np.exp(-nats.mean()))
    stderr = perplexity * float(nats.std(ddof=1)) / len(nats) ** 0.5 if len(nats) > 1 else None
    results = [
        accuracy("lambada", "lm-eval", "acc", [s.greedy for s in scores]),
        Result("lambada", "lm-eval", "perplexity", len(scores), perplexity, stderr),
        accuracy("lambada", "last token", "acc", [s.last for s in scores]),
        accuracy("lambada", "stop words", "acc", [s.greedy_filtered for s in scores]),
    ]
    examples = [{"task": "lambada", "index": i} | asdict(s) for i, s in enumerate(scores)]
    return results, examples


def shared_rows(task: str, path: Path | None, process: Process) -> list[dict]:
    """A benchmark's rows on every process: one of a machine downloads, the others find it there."""
    if path is not None:
        return read_rows(task, path)
    rows: list[dict] = []
    problem: DataError | None = None
    for first in (True, False):
        if (process.local_rank == 0) == first:
            try:
                rows = read_rows(task)
            except DataError as error:
                problem = error
        if not process.all(problem is None):
            raise problem or DataError(f"another process could not read {task}")
    return rows


def spread(rows: list[dict], count: int) -> list[dict]:
    """At most `count` rows that stand evenly over all of them."""
    keep = np.linspace(0, len(rows) - 1, min(count, len(rows)))
    return [rows[i] for i in keep.astype(int)]


def accuracy(task: str, protocol: str, metric: str, hits: list[bool]) -> Result:
    """The share of hits and its standard error."""
    n, p = len(hits), sum(hits) / len(hits)
    return Result(task, protocol, metric, n, p, (p * (1 - p) / (n - 1)) ** 0.5 if n > 1 else None)


def benchmark(
    task: str,
    rows: list[dict],
    score: Scorer,
    tokenizer: Tokenizer,
    hellaswag_protocols: tuple[str, ...] = ("build-nanogpt", "lm-eval"),
) -> tuple[list[Result], list[dict]]:
    """All figures of a task ("hellaswag", "lambada", "cbt_cn", "cbt_ne") on its rows, and one row
    for each example and protocol."""
    if task == "hellaswag":
        parts = [hellaswag(rows, score, protocol) for protocol in hellaswag_protocols]
        return sum((found for found, _ in parts), []), sum((more for _, more in parts), [])
    if task == "lambada":
        return lambada(rows, score, tokenizer)
    return cbt(rows, score, task)


def benchmark_row(
    task: str, rows: list[dict], score: Scorer, tokenizer: Tokenizer
) -> dict[str, float]:
    """A task's figures as a row of metrics during training, by the first of its protocols:
    build-nanogpt's for HellaSwag, lm-evaluation-harness's for LAMBADA."""
    results, _ = benchmark(task, rows, score, tokenizer, ("build-nanogpt",))
    own = [r for r in results if r.protocol == results[0].protocol]
    return {"n": own[0].n} | {r.metric: r.value for r in own}
