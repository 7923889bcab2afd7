"""Task, the base class of the benchmarks, its inputs and results, and the function that finds all.

A benchmark is added by one file in evaluation/benchmarks: a subclass of Task, and a list TASKS of
its instances. train.py scores it if config/options.py has NAME_every and NAME_data. Imports no
PyTorch.
"""

import json
import pkgutil
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import numpy as np

from evaluation import benchmarks
from utils.errors import UserError


class Item(NamedTuple):
    """A context and its possible continuations, of which choices[label] is right."""

    context: str
    choices: tuple[str, ...]  # each begins with white space
    label: int = 0


class Score(NamedTuple):
    """A model's prediction of one continuation of a context."""

    logprob: float  # of the whole continuation, in nats
    tokens: int  # of the continuation
    greedy: bool  # greedy decoding gives the continuation
    greedy_filtered: bool  # greedy decoding gives it if no banned word can be the first token
    last: bool  # the last token is the likeliest after those before it
    context_logprob: float  # of the context after its first token, in nats; 0 unless requested
    context_tokens: int  # tokens in context_logprob


class Result(NamedTuple):
    """Value of one metric of a task under a named protocol, over n examples."""

    task: str
    protocol: str
    metric: str
    n: int
    value: float
    stderr: float | None = None
    ties: int = 0  # examples with several best choices


TaskScores = tuple[list[Result], list[dict]]  # results, and rows of examples for --dump
ValueOf = Callable[[str, Score], float]  # the continuation with the highest value is chosen


def mean_result(task: str, protocol: str, metric: str, values: Sequence[float]) -> Result:
    """Return the mean of values, or the share of hits, and its standard error."""
    n = len(values)
    stderr = float(np.std(values, ddof=1)) / n**0.5 if n > 1 else None
    return Result(task, protocol, metric, n, float(np.mean(values)), stderr)


class Task:
    """A benchmark. Subclasses set the attributes and define items(rows, protocol), which returns an
    Item for each row, and either values or a score of their own."""

    name: str
    order = 99  # position in lists and pictures
    hub: dict[str, str]  # arguments of datasets.load_dataset
    protocols: tuple[str, ...]  # ways to score; train.py logs the first
    metric = "acc"  # metric of the first protocol that plot.py draws
    values: dict[str, dict[str, ValueOf]]  # by protocol and metric; acc: logprob
    resized = False  # True if values need the score of the context
    published: dict = {}  # evaluation.published.Published

    def parse(self, text: str) -> list[dict]:
        """Return the rows of a file's text: JSON lines."""
        return [json.loads(line) for line in text.split("\n") if line.strip()]

    def read(self, path: Path | None = None) -> list[dict]:
        """Return the rows of a file in the original format, or else of the hub."""
        try:
            if path:
                rows = self.parse(path.read_text(encoding="utf-8"))
            else:
                rows = list(import_module("datasets").load_dataset(**self.hub))
            assert rows, "no items"
            for protocol in self.protocols:
                for item in self.items(rows, protocol):
                    assert item.choices[item.label]
            return rows
        except Exception as error:
            problem = f"{path or self.hub['path']} ({type(error).__name__}: {error})"
            hint = "--data takes a file in the original format"
            raise UserError(f"{self.name} could not be read from {problem}; {hint}") from error

    def score(self, rows: list[dict], score: Callable, protocols: Sequence[str]) -> TaskScores:
        """Choose a continuation for each item by each protocol; `score` is Scorer.score."""
        results, examples, items, scores = [], [], [], []
        for protocol in protocols:
            previous, items = items, self.items(rows, protocol)
            if items != previous:
                scores = score(items, resized=self.resized)
            about = {"task": self.name, "protocol": protocol}
            found = [about | {"index": i, "label": item.label} for i, item in enumerate(items)]
            metrics = {"acc": lambda choice, s: s.logprob} | self.values.get(protocol, {})
            for metric, value_of in metrics.items():
                credits = []  # of an example: the chance that one of its best choices is right
                ties = 0
                for example, item, choices in zip(found, items, scores, strict=True):
                    values = list(map(value_of, item.choices, choices))
                    example.setdefault("logprobs", values)
                    best = np.flatnonzero(np.array(values) == max(values))
                    ties += len(best) > 1
                    example[f"pick_{metric}"] = int(best[0])
                    if protocol.startswith("lm-eval"):
                        best = best[:1]  # the harness takes the first
                    credits.append(float(item.label in best) / len(best))
                result = mean_result(self.name, protocol, metric, credits)
                results.append(result._replace(ties=ties))
            examples += found
        return results, examples


@cache
def find_tasks() -> dict[str, Task]:
    """Return the tasks of all modules of evaluation/benchmarks by name, sorted by Task.order."""
    modules = pkgutil.iter_modules(benchmarks.__path__, "evaluation.benchmarks.")
    tasks = [task for module in modules for task in import_module(module.name).TASKS]
    return {task.name: task for task in sorted(tasks, key=lambda task: task.order)}
