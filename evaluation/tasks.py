"""Task: the base class of the benchmarks, with the items that go in and the results that come out.

A benchmark turns each row of its data file into an Item: a context with several possible
continuations, and encodes these as token ids. evaluation/scoring.py computes a Prediction for each
continuation; the Task picks the best one by its rules. This file runs no model and imports no
PyTorch, so that plot.py can name the benchmarks without it. The benchmarks themselves are in
evaluation/benchmarks.py and core.py.
"""

import json
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.named_tokenizer import Tokenizer
from utils.errors import UserError, check_text


@dataclass(frozen=True)
class Item:
    """A context and its possible continuations, of which choices[label] is right."""

    context: str
    choices: tuple[str, ...]
    """Each follows the context as it is: where white space separates them, it begins with that."""
    label: int = 0
    """Index of the right choice; 0 where there is only one, which nothing is chosen from."""


@dataclass(frozen=True)
class Continuation:
    """Token ids of a continuation, and of the context that it follows; none of both is empty, as
    each token that is scored is predicted from one before it."""

    context: list[int]
    ids: list[int]


@dataclass(frozen=True)
class Prediction:
    """A model's prediction of one continuation of a context."""

    logprob: float
    """Log-probability of the whole continuation, in nats."""
    num_tokens: int
    """Tokens of the continuation."""
    is_greedy: bool
    """True if greedy decoding from the context writes the continuation."""
    is_greedy_filtered: bool
    """True if greedy decoding writes it when none of Task.banned_words may come first. Only LAMBADA
    reads this one and the next."""
    is_last_greedy: bool
    """True if the last token is the likeliest one after all tokens before it."""


@dataclass(frozen=True)
class ExampleScore:
    """How good the predictions for an item are by one metric."""

    value: float
    """For a choice 1 if it is right, else 0; of several best ones the share that is right, or by
    the protocols of others (lm-eval, CORE) whether the first of them is. For LAMBADA's
    perplexity the nats of the word."""
    is_tie: bool = False
    """True if there are several best ones; Result.ties counts them."""


# of an example: its score by metric, and what its row for --dump tells beside task, protocol
# and index
ScoredExample = tuple[dict[str, ExampleScore], dict]


@dataclass(frozen=True)
class Result:
    """Value of one metric of a task under a named protocol, over n examples. evaluate.py writes its
    fields as JSON."""

    task: str
    """Name of the benchmark, of a task of CORE or of a file of questions; "val" for a loss."""
    protocol: str
    metric: str
    n: int
    """Examples; of "val" target tokens."""
    value: float
    stderr: float | None = None
    """Standard error of the value; None for a single example and for "val"."""
    ties: int = 0
    """Examples with several best choices."""
    centered: float | None = None
    """Accuracy between that of guessing, 0, and 1: the scale of CORE."""


# results, and one row per example for --dump
TaskScores = tuple[list[Result], list[dict]]
ScoreBenchmark = Callable[[], TaskScores]  # scores a task whose data has been read
# takes items and their task, gives a Prediction for each choice of each item: scoring.score_items
# with its first two arguments
ScoreItems = Callable[[list[Item], "Task"], list[list[Prediction]]]


def mean_result(
    task: str, protocol: str, metric: str, values: Sequence[float], ties: int = 0
) -> Result:
    """Return the mean of one value per example (for hits: their share) and its standard error."""
    n = len(values)
    stderr = None  # a single value has none
    if n > 1:
        # standard error of the mean from the sample standard deviation, as lm-evaluation-harness
        # has it
        stderr = float(np.std(values, ddof=1)) / n**0.5
    return Result(task, protocol, metric, n, float(np.mean(values)), stderr, ties)


def exponential(nats: float) -> float:
    """Return e^nats, a perplexity; infinity for more than a float can hold, where math.exp raises,
    and a score that has taken hours would be lost."""
    return math.inf if nats > 709 else math.exp(nats)  # the largest float is e^709.78


def get_field(row: dict, name: str, *types: type) -> Any:
    """Return a field of a row of a .jsonl file; raise ValueError unless it is there and of one of
    the types, and text is UTF-8."""
    value = row.get(name)
    # None where the field is missing; True is an int to Python
    if not isinstance(value, types) or isinstance(value, bool):
        type_names = " or ".join(json_type.__name__ for json_type in types)
        raise ValueError(f'there is no "{name}" of type {type_names}, but fields {", ".join(row)}')
    if isinstance(value, str):
        check_text(value, f'"{name}"')
    return value


def get_label(row: dict, name: str, num_choices: int) -> int:
    """Return the field of a row that is the index of the right choice; raise ValueError unless it
    is there, and there is such a choice."""
    label = str(get_field(row, name, int, str))  # a text in the hub's copy of HellaSwag
    # no sign: Python would count negative ones from the end
    if not label.isdecimal() or int(label) >= num_choices:
        raise ValueError(f'"{name}" is {label!r} of {num_choices} choices: {row!r:.200}')
    return int(label)


def evenly_spread(rows: list, limit: int | None) -> list:
    """Return `limit` rows, dicts or questions, or all if there are not more or the limit is None.
    They are spread over the whole list, as files are often sorted: HellaSwag begins with
    ActivityNet."""
    if limit is None or len(rows) <= limit:
        return rows
    return [rows[i] for i in np.linspace(0, len(rows) - 1, limit).astype(int)]


def batched(items: list, batch_size: int) -> list[list]:
    """Return items in lists of `batch_size`, of which the last one may be shorter."""
    return [items[start : start + batch_size] for start in range(0, len(items), batch_size)]


def split_ids(ids: list[int], start: int, max_tokens: int) -> Continuation:
    """Return the continuation that begins at index `start` of the ids of a whole text. The context
    loses its start where both together have more than `max_tokens`. Raise ValueError if no token of
    it is left, or the continuation has none; Benchmark.read names the file then."""
    num_scored = len(ids) - start
    if not 0 < num_scored < max_tokens:
        raise ValueError(
            f"a continuation has {num_scored} tokens; it needs at least 1, and at most "
            f"{max_tokens - 1} fit in the model's context"
        )
    # The slice begins at a negative index: it keeps the last max_tokens - num_scored tokens of the
    # context, or all of a shorter one.
    return Continuation(ids[:start][num_scored - max_tokens :], ids[start:])


class Benchmark(ABC):
    """A benchmark of evaluate.py and train.py: one Task, or the several ones of CORE."""

    name: str
    """Name for --tasks, in logs and in file names."""
    protocols: tuple[str, ...]
    """Ways to prepare and score the same examples; train.py logs the first one."""
    metric: str
    """Metric of the first protocol that plot.py draws."""
    download: dict[str, str]
    """Where the data comes from without a path: arguments of datasets.load_dataset, or for CORE a
    URL as "path"."""
    layout = "a file in the original format"
    """What `read` takes as a path."""

    def read(
        self, path: Path | None, limit: int | None, tokenizer: Tokenizer, block_size: int
    ) -> list:
        """Return what `score` takes, with at most `limit` examples of each task: from a path, or
        downloaded. Raise UserError if it cannot be read, or not be scored by a model of this
        context length."""
        try:
            return self.load(path, limit, tokenizer, block_size)
        except UserError:  # a task of CORE has named itself and its file
            raise
        except Exception as error:  # a failed download, a file of another format, a long text
            origin = path or self.download["path"]
            raise UserError(
                f"{self.name} cannot use {origin} ({type(error).__name__}: {error}); give "
                f"{self.layout}"
            ) from error

    @abstractmethod
    def load(
        self, path: Path | None, limit: int | None, tokenizer: Tokenizer, block_size: int
    ) -> list:
        """Read as `read` does, and raise any error. The rows of a Task are dicts of its file; those
        of CORE are pairs of a task and its rows."""

    @abstractmethod
    def score(self, rows: list, score_items: ScoreItems, protocols: Sequence[str]) -> TaskScores:
        """Score what `read` returned. The last Result is that of the whole benchmark."""


class Task(Benchmark):
    """A benchmark of one file. A subclass sets the attributes and defines `items`; it overrides
    `choice_metrics` if a continuation is not chosen by its log-probability, `score_example` if
    there is nothing to choose, `parse` if its file is not JSON lines."""

    metric = "acc"
    banned_words: Sequence[str] = ()
    """Words that may not come first in Prediction.is_greedy_filtered."""

    @abstractmethod
    def items(self, rows: list[dict], protocol: str) -> list[Item]:
        """Return an Item for each row."""

    def continuations(
        self, item: Item, tokenizer: Tokenizer, block_size: int
    ) -> list[Continuation]:
        """Return the continuations of an item as lm-evaluation-harness encodes them."""
        # White space at the end of a context belongs to the continuation, as in the harness.
        # Context and continuation are encoded together, as a merge can reach across the seam: ids
        # beyond those of the context belong to the continuation.
        context: list[int] = tokenizer.encode(item.context.rstrip()).tolist()
        wholes = [tokenizer.encode(item.context + choice).tolist() for choice in item.choices]
        # If one token spans the seam and nothing follows, the continuation begins with that token,
        # and the other continuations of the item begin at the same place. The harness fails on such
        # an item.
        seam = min(len(context), min(len(whole) for whole in wholes) - 1)
        # As in the harness, only BOS stands before a context: GPT-2's published scores have no end
        # of text there. An empty context gets one, to predict the first token from.
        context = [*tokenizer.bos_ids, *context[:seam]] or [tokenizer.eot]
        continuations = []
        for whole in wholes:
            ids = context + whole[seam:]
            # inputs are all tokens but the last: block_size + 1 tokens fit
            continuations.append(split_ids(ids, len(context), block_size + 1))
        return continuations

    def choice_metrics(
        self, protocol: str, choice: str, prediction: Prediction
    ) -> dict[str, float]:
        """Return the value of a continuation by metric: the choice with the highest value is the
        model's. "acc" is the log-probability."""
        return {"acc": prediction.logprob}

    def parse(self, text: str) -> list[dict]:
        """Return the rows of a data file from its text: JSON lines."""
        # not splitlines, which would also split at U+2028, which JSON allows in a text
        return [json.loads(line) for line in text.split("\n") if line.strip()]

    def select(self, rows: list[dict], limit: int | None) -> list[dict]:
        """Return the rows that are scored."""
        return evenly_spread(rows, limit)

    def load(
        self, path: Path | None, limit: int | None, tokenizer: Tokenizer, block_size: int
    ) -> list[dict]:
        """Return the rows of a file in the original format; without a path, download them from the
        Hugging Face hub."""
        if path is not None:
            rows = self.parse(path.read_text(encoding="utf-8-sig"))
        else:
            from datasets import load_dataset  # takes seconds, and files do without

            rows = list(load_dataset(**self.download))
        assert rows, "no items"  # for the message of `read`
        rows = self.select(rows, limit)
        # A row that lacks a field, or is too long, fails here, not in the middle of the scoring.
        for protocol in self.protocols:
            for item in self.items(rows, protocol):
                self.continuations(item, tokenizer, block_size)
        return rows

    def score(
        self, rows: list[dict], score_items: ScoreItems, protocols: Sequence[str]
    ) -> TaskScores:
        """Return a Result for each protocol and metric, and a row for --dump for each protocol and
        example."""
        results: list[Result] = []
        dump_rows: list[dict] = []
        scored_items: list[Item] = []
        predictions: list[list[Prediction]] = []  # for each of these items, one for each choice
        for protocol in protocols:
            items = self.items(rows, protocol)
            # Protocols with the same texts differ only in how they score. They share one pass of
            # the model.
            if items != scored_items:
                predictions = score_items(items, self)
                scored_items = items  # `predictions` are of these items
            # one score per example, in the order of `rows`
            example_scores_by_metric: dict[str, list[ExampleScore]] = defaultdict(list)
            for index, (item, item_predictions) in enumerate(zip(items, predictions, strict=True)):
                score_by_metric, details = self.score_example(protocol, item, item_predictions)
                for metric, example_score in score_by_metric.items():
                    example_scores_by_metric[metric].append(example_score)
                dump_row = {"task": self.name, "protocol": protocol, "index": index}
                dump_rows.append(dump_row | details)  # `details` as score_example chose them
            for metric, example_scores in example_scores_by_metric.items():
                results.append(self.result(protocol, metric, example_scores))
        return results, dump_rows

    def score_example(
        self, protocol: str, item: Item, predictions: list[Prediction]
    ) -> ScoredExample:
        """Return the score of an example by metric, and what its row for --dump tells of it, from a
        prediction for each of the item's choices. Here a continuation is chosen by each metric, and
        compared with the label."""
        # one dict by metric for each choice; the higher a value, the likelier the choice
        choice_metrics: list[dict[str, float]] = []
        for choice, prediction in zip(item.choices, predictions, strict=True):
            choice_metrics.append(self.choice_metrics(protocol, choice, prediction))
        logprobs = [metrics["acc"] for metrics in choice_metrics]
        details = {"label": item.label, "logprobs": logprobs}
        score_by_metric: dict[str, ExampleScore] = {}
        for metric in choice_metrics[0]:  # all choices have the same metrics
            values = [metrics[metric] for metrics in choice_metrics]  # one for each choice
            # indices of the choices with the largest value, several for a tie
            best = [i for i, value in enumerate(values) if value == max(values)]
            is_tie = len(best) > 1
            # --dump has the first of equal choices. The accuracy counts each of them by its share:
            # otherwise a model of zeros would be right wherever the label is 0.
            details[f"pick_{metric}"] = best[0]
            if protocol.startswith("lm-eval"):  # or HellaSwag's "lm-eval, ctx alone"
                best = best[:1]  # the harness takes the first one
            # 1 or 0 for a single best choice; for a tie 1 / len(best) if the right choice is in it
            score_by_metric[metric] = ExampleScore((item.label in best) / len(best), is_tie)
        return score_by_metric, details

    def result(self, protocol: str, metric: str, example_scores: list[ExampleScore]) -> Result:
        """Return the mean of one score per example."""
        values = [score.value for score in example_scores]
        num_ties = sum(score.is_tie for score in example_scores)
        return mean_result(self.name, protocol, metric, values, num_ties)
