"""Validation loss and the figures of benchmarks, for train.py and evaluate.py."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from data.loader import Sequences
from data.tokenizer import Tokenizer
from evaluation.scoring import Score
from evaluation.tasks import STOP_WORDS, Item, cbt_items, hellaswag_items, lambada_items
from model.gpt import GPT
from utils.devices import autocast
from utils.distributed import Process
from utils.errors import UserError


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
    """Return the mean loss in nats per token over the first `tokens` targets of a split, or all.

    The figure is the same for any number of processes: each batch's nats have a slot of their own,
    which are summed over processes, then added up in one order. 5 batches on 2 processes:

        turn       0   1   2                 slots of rank 0   n0   0  n2   0  n4
        rank 0     0   2   4                 slots of rank 1    0  n1   0  n3   0
        rank 1     1   3  (4)                summed            n0  n1  n2  n3  n4

    Rank 1 repeats batch 4 uncounted: collectives inside the forward pass need every process. The
    last batch is filled with sequences that do not count, so that all have one shape.

    With `token_bytes` (vocab_size,), the UTF-8 bytes of each token id, it adds bits_per_byte =
    nats / ln 2 / bytes, which does not depend on the tokenizer: tokens of 4 bytes at a loss of
    2.77 nats = 4 bits give 1 bit per byte.
    """
    model.eval()
    n = sequences.count_within(tokens)
    batches = np.array_split(np.arange(n), range(batch_size, n, batch_size))
    sums = torch.zeros(2, len(batches), dtype=torch.float64)  # nats and bytes of each batch
    for mine, batch, counts in process.share(batches):
        inputs, targets = sequences.batch(np.resize(batch, len(batches[0])))  # (B, T)
        targets[len(batch) :] = -1
        idx, labels = (torch.from_numpy(x).to(process.device) for x in (inputs, targets))
        with autocast(process.device, dtype):
            loss = model(idx, labels)
        if counts:
            counted = targets[: len(batch)]
            sums[0, mine] = loss.item() * counted.size
            sums[1, mine] = 0 if token_bytes is None else float(token_bytes[counted].sum())
    nats, n_bytes = process.sum_float64(sums).sum(dim=1).tolist()
    model.train()
    scores = {"loss": nats / (n * sequences.block_size)}
    return scores | ({"bits_per_byte": nats / math.log(2) / n_bytes} if n_bytes else {})


@dataclass(frozen=True)
class Result:
    """Value of one metric of a task under a named protocol, over n examples."""

    task: str
    protocol: str
    metric: str
    n: int
    value: float
    stderr: float | None = None


def check_lengths(task: str, rows: list[dict], tokenizer: Tokenizer, block_size: int) -> None:
    """Raise UserError if a continuation of a benchmark is longer than the model's context."""
    items = {"hellaswag": partial(hellaswag_items, clean=False), "lambada": lambada_items}
    for item in items.get(task, cbt_items)(rows):
        for choice in item.choices:
            if len(choice.encode()) > block_size:  # a token has a byte or more
                if (tokens := len(tokenizer.encode(choice))) > block_size:
                    raise UserError(
                        f"{task} cannot be scored: a continuation has {tokens} tokens, the model a "
                        f"context of {block_size}; leave out {task}"
                    )


Scorer = Callable[..., list[list[Score]]]  # score_items with every argument but the items bound
TaskScores = tuple[list[Result], list[dict]]  # results, and a row for each example and protocol


def score_hellaswag(rows: list[dict], score: Scorer, protocol: str) -> TaskScores:
    """Choose an ending by its log-probability (acc), and by its log-probability per token
    (build-nanogpt, llm.c) or per character and per byte (lm-evaluation-harness)."""
    harness = protocol == "lm-eval"
    items = hellaswag_items(rows, clean=harness)
    scores = score(items)
    nats = [[s.logprob for s in choices] for choices in scores]
    if harness:  # lengths without the space that joins an ending to the context
        lengths = {
            "acc_norm": [[len(c) - 1 for c in item.choices] for item in items],
            "acc_bytes": [[len(c.encode()) - 1 for c in item.choices] for item in items],
        }
    else:
        lengths = {"acc_norm": [[s.tokens for s in choices] for choices in scores]}
    means = {name: list(map(np.divide, nats, by)) for name, by in lengths.items()}
    if harness and not all("ctx_a" in row for row in rows):
        protocol = "lm-eval, ctx alone"  # not comparable: the harness's query has more fields
    return choose("hellaswag", protocol, items, {"acc": nats} | means)


def score_cbt(rows: list[dict], score: Scorer, task: str) -> list[TaskScores]:
    """Choose the word for the blank by the mean loss of context and question together, and by the
    log-probability of the question from the blank on (Radford et al. 2019, section 3.2)."""
    items = cbt_items(rows)
    scores = score(items, with_context=True)
    whole = [
        [(s.context_logprob + s.logprob) / (s.context_tokens + s.tokens) for s in choices]
        for choices in scores
    ]
    rest = [[s.logprob for s in choices] for choices in scores]
    protocols = {"full sequence": whole, "from the blank": rest}
    return [choose(task, name, items, {"acc": values}) for name, values in protocols.items()]


def score_lambada(rows: list[dict], score: Scorer, tokenizer: Tokenizer) -> TaskScores:
    """Score the last word: all its tokens greedily, with perplexity (lm-evaluation-harness); its
    last token alone; and greedily with stop words excluded from the choice of the first token. The
    GPT-2 paper has a stop-word filter too, but does not publish how it works."""
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
    return results, [{"task": "lambada", "index": i} | s._asdict() for i, s in enumerate(scores)]


def choose(task: str, protocol: str, items: list[Item], values: dict[str, list]) -> TaskScores:
    """Choose the continuation of the highest value of each metric; "acc" is log-probabilities."""
    labels = [item.label for item in items]
    picks = {metric: [int(np.argmax(x)) for x in table] for metric, table in values.items()}
    results = [accuracy(task, protocol, name, np.equal(x, labels)) for name, x in picks.items()]
    examples = [
        {"task": task, "protocol": protocol, "index": i, "label": label, "logprobs": logprobs}
        | {f"pick_{metric}": x[i] for metric, x in picks.items()}
        for i, (label, logprobs) in enumerate(zip(labels, values["acc"], strict=True))
    ]
    return results, examples


def accuracy(task: str, protocol: str, metric: str, hits: Sequence[bool]) -> Result:
    """Return the share of hits and its standard error."""
    n, p = len(hits), float(np.mean(hits))
    return Result(task, protocol, metric, n, p, (p * (1 - p) / (n - 1)) ** 0.5 if n > 1 else None)


def score_benchmark(
    task: str,
    rows: list[dict],
    score: Scorer,
    tokenizer: Tokenizer,
    hellaswag_protocols: tuple[str, ...] = ("build-nanogpt", "lm-eval"),
) -> TaskScores:
    """Return all figures of a task ("hellaswag", "lambada", "cbt_cn", "cbt_ne") on its rows."""
    if task == "hellaswag":
        parts = [score_hellaswag(rows, score, protocol) for protocol in hellaswag_protocols]
    elif task == "lambada":
        parts = [score_lambada(rows, score, tokenizer)]
    else:
        parts = score_cbt(rows, score, task)
    results, examples = zip(*parts, strict=True)
    return sum(results, []), sum(examples, [])


def benchmark_row(
    task: str, rows: list[dict], score: Scorer, tokenizer: Tokenizer
) -> dict[str, float]:
    """Return a task's figures as a row of metrics.jsonl, under the first of its protocols:
    build-nanogpt's for HellaSwag, lm-evaluation-harness's for LAMBADA."""
    results, _ = score_benchmark(task, rows, score, tokenizer, ("build-nanogpt",))
    own = [r for r in results if r.protocol == results[0].protocol]
    return {"n": own[0].n} | {r.metric: r.value for r in own}
