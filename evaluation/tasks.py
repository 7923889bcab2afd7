"""Task: the base class of the benchmarks, with the items that go in and the results that come out.

A benchmark turns each row of its data file into an Item, which is a context with its possible
continuations, and encodes both as token ids. evaluation/scoring.py computes a Prediction for each
continuation. The Task then picks the best continuation by its rules. This file runs no model and
imports no PyTorch, so that plot.py starts fast. The benchmarks themselves are in
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
from utils.network import DOWNLOAD_SECONDS, HUB, ask


@dataclass(frozen=True)
class Item:
    """A context and its possible continuations. The right one is choices[label]."""

    context: str
    choices: tuple[str, ...]
    """Texts that are appended to the context unchanged: nothing is added before a choice."""
    label: int = 0
    """Index of the right choice; 0 if the item has a single choice."""


@dataclass(frozen=True)
class Continuation:
    """Token ids of a continuation and of the context before it. Neither list is empty: the model
    predicts each token of `ids` from the token before it."""

    context_ids: list[int]
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
    """True if greedy decoding writes the continuation when no word of Task.banned_words may come
    first. Only LAMBADA reads this field and the next one."""
    is_last_greedy: bool
    """True if the last token is the likeliest token after all tokens before it."""


@dataclass(frozen=True)
class ExampleScore:
    """Score of one item by one metric."""

    value: float
    """1 if the model's choice is right, else 0. If n choices tie and one of them is right, the
    value is 1 / n; in lm-eval and CORE the first of them counts alone. LAMBADA's perplexity has the
    nats of the word here."""
    is_tie: bool = False
    """True if several choices are equally good; Result.ties counts these items."""


# The scores of an example by metric, {"acc": ExampleScore(1.0)}, and the fields of its row for
# --dump, {"label": 2, "logprobs": [-41.2, ...], ...}. The caller adds task, protocol and index.
ScoredExample = tuple[dict[str, ExampleScore], dict]


@dataclass(frozen=True)
class Result:
    """Value of one metric of a task under a named protocol, over n examples. evaluate.py writes its
    fields as JSON."""

    task: str
    """Name of the benchmark, of a task of CORE or of a file of questions; "val" for a loss."""
    protocol: str
    """Rules of the scoring, such as "lm-eval", or "5-shot" of a task of CORE; for "val" the corpus.
    """
    metric: str
    """Name of `value`: "acc", "acc_norm", "perplexity", "loss", ..."""
    n: int
    """Number of examples; for "val" the number of target tokens."""
    value: float
    """From 0 to 1 for an accuracy; for "loss" in nats, and for "bits_per_byte" in bits."""
    stderr: float | None = None
    """Standard error of the value; None for a single example and for "val"."""
    ties: int = 0
    """Number of examples with several best choices."""
    centered: float | None = None
    """Accuracy on the scale of CORE, where 0 is guessing and 1 is perfect; None in other tasks, and
    in the mean of CORE, which has it as `value`."""


# Results, and one row per example for --dump:
# {"task": "lambada", "protocol": "lm-eval", "index": 0, "logprob": -3.1, ...}
TaskScores = tuple[list[Result], list[dict]]
ScoreBenchmark = Callable[[], TaskScores]  # scores a benchmark whose data has been read
# maps items and their task to a Prediction for each choice of each item. It is
# scoring.score_items, whose scorer and tokenizer are filled in.
ScoreItems = Callable[[list[Item], "Task"], list[list[Prediction]]]


def mean_result(
    task: str, protocol: str, metric: str, values: Sequence[float], ties: int = 0
) -> Result:
    """Return the mean of one value per example, with its standard error. Values of 0 and 1 give an
    accuracy."""
    n = len(values)
    stderr = None  # a single value has no standard error
    if n > 1:
        # lm-evaluation-harness, too, uses the sample standard deviation
        stderr = float(np.std(values, ddof=1)) / n**0.5
    return Result(task, protocol, metric, n, float(np.mean(values)), stderr, ties)


def exponential(nats: float) -> float:
    """Return the perplexity e^nats. Return infinity where a float overflows: there math.exp would
    raise an error, and a score that has taken hours would be lost."""
    return math.inf if nats > 709 else math.exp(nats)  # the largest float is e^709.78


def get_field(row: dict, name: str, *types: type) -> Any:
    """Return a field of a row of a .jsonl file. Raise ValueError if the field is missing, has none
    of the types, or is text that is not valid UTF-8."""
    value = row.get(name)  # None if the field is missing
    # bool is a subclass of int, so True would pass as an int
    if not isinstance(value, types) or isinstance(value, bool):
        type_names = " or ".join(json_type.__name__ for json_type in types)
        raise ValueError(f'there is no "{name}" of type {type_names}, but fields {", ".join(row)}')
    if isinstance(value, str):
        check_text(value, f'"{name}"')
    return value


def get_label(row: dict, name: str, num_choices: int) -> int:
    """Return the index of the right choice, the field `name` of a row. Raise ValueError if the
    field is missing or no choice has this index."""
    label = str(get_field(row, name, int, str))  # the hub's copy of HellaSwag has it as text
    # isdecimal refuses a sign: Python would count a negative index from the end
    if not label.isdecimal() or int(label) >= num_choices:
        raise ValueError(f'"{name}" is {label!r} of {num_choices} choices: {row!r:.200}')
    return int(label)


def spread_evenly(rows: list, limit: int | None) -> list:
    """Return `limit` rows (of any type), spread evenly over the whole list. Return all rows if the
    limit is None or larger. Files are often sorted, so their first rows are no fair sample:
    HellaSwag begins with ActivityNet."""
    if limit is None or len(rows) <= limit:
        return rows
    return [rows[i] for i in np.linspace(0, len(rows) - 1, limit).astype(int)]


def batched(items: list, batch_size: int) -> list[list]:
    """Return the items in lists of `batch_size`. The last list may be shorter."""
    return [items[start : start + batch_size] for start in range(0, len(items), batch_size)]


def split_ids(ids: list[int], start: int, max_tokens: int) -> Continuation:
    """Split the ids of a whole text at index `start` into context and continuation.

    If the text has more than `max_tokens` ids, the context loses its first ids. Raise ValueError if
    the continuation is empty, or so long that no context fits; Benchmark.read adds the name of the
    file.
    """
    num_scored = len(ids) - start
    if not 0 < num_scored < max_tokens:
        raise ValueError(
            f"a continuation has {num_scored} tokens; it needs at least 1, and at most "
            f"{max_tokens - 1} fit in the model's context"
        )
    # The slice begins at a negative index: it keeps the last max_tokens - num_scored tokens of the
    # context. A shorter context stays whole.
    return Continuation(ids[:start][num_scored - max_tokens :], ids[start:])


class Benchmark(ABC):
    """A benchmark of evaluate.py and train.py: a Task, or the tasks of a folder, as CORE's 22."""

    name: str
    """Name for --tasks, in logs and in file names."""
    protocols: tuple[str, ...]
    """Ways to prepare and score the same examples. train.py logs the first one only."""
    metric: str
    """Metric of the first protocol, which plot.py draws."""
    download: dict[str, str]
    """Source of the data if the user gives no path: arguments of datasets.load_dataset. CORE has a
    URL as "path"."""
    layout = "a file in the original format"
    """What the path of `read` must be, for error messages."""

    def read(
        self, path: Path | None, limit: int | None, tokenizer: Tokenizer, block_size: int
    ) -> list:
        """Read the rows that `score` takes, at most `limit` for each task, from a path. Download
        them if the path is None. Raise UserError if the data cannot be read, or if a model of this
        context length cannot score it."""
        try:
            return self.load(path, limit, tokenizer, block_size)
        except UserError:  # a task of CORE already names itself and its file
            raise
        except Exception as error:  # a failed download, another file format, a long text
            origin = path or self.download["path"]  # such as "Rowan/hellaswag"
            # layout: "a file in the original format", or for CORE "a folder in the layout of ..."
            raise UserError(
                f"{self.name} cannot use {origin} ({type(error).__name__}: {error}); give "
                f"{self.layout}"
            ) from error

    @abstractmethod
    def load(
        self, path: Path | None, limit: int | None, tokenizer: Tokenizer, block_size: int
    ) -> list:
        """Read the rows for `read`, which turns any error of this method into a UserError. A Task
        returns one dict per example, CORE a pair (task, rows) per task."""

    @abstractmethod
    def score(self, rows: list, score_items: ScoreItems, protocols: Sequence[str]) -> TaskScores:
        """Score the rows that `read` returned. The last Result is of the whole benchmark."""


class Task(Benchmark):
    """A benchmark of one file.

    A subclass sets the attributes of Benchmark and defines `items`. It overrides `choice_values` if
    it does not choose by log-probability alone, `score_example` if its items have no choices, and
    `parse` if its file is not JSON lines.
    """

    metric = "acc"
    banned_words: Sequence[str] = ()
    """Words that may not come first in Prediction.is_greedy_filtered."""

    @abstractmethod
    def items(self, rows: list[dict], protocol: str) -> list[Item]:
        """Return an Item for each row."""

    def continuations(
        self, item: Item, tokenizer: Tokenizer, block_size: int
    ) -> list[Continuation]:
        """Encode the choices of an item, each with its context, as lm-evaluation-harness does."""
        # As in the harness, white space at the end of a context belongs to the continuation.
        # Context and choice are encoded together, because a merge can join their characters. The
        # continuation begins after as many ids as the context has alone. `encode` adds no BOS.
        context_ids: list[int] = tokenizer.encode(item.context.rstrip()).tolist()
        # ids of the context and each choice as one text
        whole_ids = [tokenizer.encode(item.context + choice).tolist() for choice in item.choices]
        # Index in each list of whole_ids, at which the continuation begins. One token may contain
        # the end of the context and a whole choice; then the continuation begins with that token.
        # The harness fails on such an item.
        seam = min(len(context_ids), min(len(ids) for ids in whole_ids) - 1)
        # As in the harness, only BOS stands before a context. GPT-2 has none (bos_ids is ()): its
        # published scores are without end of text. An empty context becomes end of text then, as it
        # needs one token.
        ids_before = [*tokenizer.bos_ids, *context_ids[:seam]] or [tokenizer.eot]
        # All ids from `seam` on are the continuation. Its last token is no input of the model, so
        # block_size + 1 tokens fit. split_ids drops the first tokens of a longer text.
        return [
            split_ids(ids_before + ids[seam:], len(ids_before), block_size + 1) for ids in whole_ids
        ]

    def choice_values(self, protocol: str, choice: str, prediction: Prediction) -> dict[str, float]:
        """Return the value of one choice for each metric. The metric is the accuracy of the model
        that picks the choice with the highest value. For "acc" this is the log-probability."""
        return {"acc": prediction.logprob}

    def parse(self, text: str) -> list[dict]:
        """Return the rows of a data file from its text: JSON lines."""
        # not splitlines: it also splits at U+2028, and JSON allows this character in a text
        return [json.loads(line) for line in text.split("\n") if line.strip()]

    def select(self, rows: list[dict], limit: int | None) -> list[dict]:
        """Return the rows to score: `limit` of them, or all if it is None."""
        return spread_evenly(rows, limit)

    def load(
        self, path: Path | None, limit: int | None, tokenizer: Tokenizer, block_size: int
    ) -> list[dict]:
        """Return the rows of a file in the original format. If the path is None, download them from
        the Hugging Face hub."""
        if path is not None:
            rows = self.parse(path.read_text(encoding="utf-8-sig"))  # drops a byte order mark
        else:
            rows = ask(HUB, self.download_rows, DOWNLOAD_SECONDS)  # calls it, for at most 180 s
        assert rows, "no items"  # `read` puts this text into its UserError
        rows = self.select(rows, limit)  # spread evenly; a task of CORE shuffles them
        # Encode all items once and drop the result: a row that lacks a field or is too long fails
        # now, not in the middle of the scoring.
        for protocol in self.protocols:
            for item in self.items(rows, protocol):
                self.continuations(item, tokenizer, block_size)
        return rows

    def download_rows(self) -> list[dict]:
        """Return all rows of the benchmark, from the hub or the cache of an earlier download."""
        from datasets import load_dataset  # here, as the import takes seconds

        return list(load_dataset(**self.download))  # path="Rowan/hellaswag", split="validation"

    def score(
        self, rows: list[dict], score_items: ScoreItems, protocols: Sequence[str]
    ) -> TaskScores:
        """Score the rows by each protocol. Return a Result for each protocol and metric, and for
        --dump a row for each protocol and example."""
        results: list[Result] = []
        dump_rows: list[dict] = []
        scored_items: list[Item] = []  # items of the last call of the model
        predictions: list[list[Prediction]] = []  # for each of scored_items, one for each choice
        for protocol in protocols:
            items = self.items(rows, protocol)
            # Protocols with the same texts differ only in the scoring. They share one pass of the
            # model.
            if items != scored_items:
                predictions = score_items(items, self)  # runs the model, on all processes
                scored_items = items
            # {"acc": [ExampleScore(1.0), ...], ...}: a score for each of `rows`
            example_scores_by_metric: dict[str, list[ExampleScore]] = defaultdict(list)
            for index, (item, item_predictions) in enumerate(zip(items, predictions, strict=True)):
                score_by_metric, details = self.score_example(protocol, item, item_predictions)
                for metric, example_score in score_by_metric.items():
                    example_scores_by_metric[metric].append(example_score)
                dump_row = {"task": self.name, "protocol": protocol, "index": index}
                dump_rows.append(dump_row | details)  # details: such as {"label": 2, ...}
            for metric, example_scores in example_scores_by_metric.items():
                results.append(self.result(protocol, metric, example_scores))  # such as their mean
        return results, dump_rows

    def score_example(
        self, protocol: str, item: Item, predictions: list[Prediction]
    ) -> ScoredExample:
        """Return the score of an example by metric, and the fields of its row for --dump.

        `predictions` has one for each choice of the item. For each metric, this method picks the
        choice with the highest value and compares it with the label.
        """
        # values by which a metric picks a choice: [{"acc": -41.2, "acc_norm": -3.4}, ...]
        values_of_choices = [
            self.choice_values(protocol, choice, prediction)
            for choice, prediction in zip(item.choices, predictions, strict=True)
        ]
        logprobs = [prediction.logprob for prediction in predictions]
        details = {"label": item.label, "logprobs": logprobs}  # for --dump
        score_by_metric: dict[str, ExampleScore] = {}
        for metric in values_of_choices[0]:  # all choices have the same metrics
            values = [value_by_metric[metric] for value_by_metric in values_of_choices]
            # indices of the choices with the highest value; a tie has several
            picks = [i for i, value in enumerate(values) if value == max(values)]
            is_tie = len(picks) > 1
            # --dump shows the first of equal choices. The accuracy counts a share of each instead:
            # otherwise a model of zeros would be right wherever the label is 0.
            details[f"pick_{metric}"] = picks[0]
            if protocol.startswith("lm-eval"):  # or HellaSwag's "lm-eval, ctx alone"
                picks = picks[:1]  # the harness takes the first of equal choices
            # 1 or 0 for a single pick; 1 / len(picks) for a tie with the right choice in it
            score_by_metric[metric] = ExampleScore((item.label in picks) / len(picks), is_tie)
        return score_by_metric, details

    def result(self, protocol: str, metric: str, example_scores: list[ExampleScore]) -> Result:
        """Return the mean over the examples as the result of a metric."""
        values = [score.value for score in example_scores]
        num_ties = sum(score.is_tie for score in example_scores)
        return mean_result(self.name, protocol, metric, values, num_ties)
