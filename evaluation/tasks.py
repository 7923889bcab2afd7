"""The benchmarks, one Task each: rows from the hub or a file, items, scores, published figures.

A benchmark is added by a subclass of Task and its name in TASKS. Needs no PyTorch.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from model.config import SIZES
from utils.errors import UserError


@dataclass(frozen=True)
class Item:
    """A context and its possible continuations, of which choices[label] is right."""

    context: str
    choices: tuple[str, ...]
    """Continuations, each beginning with white space."""
    label: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.label < len(self.choices), "the label is none of the choices"


class Score(NamedTuple):
    """A model's prediction of one continuation of a context."""

    logprob: float  # of the whole continuation, in nats
    tokens: int  # of the continuation
    greedy: bool  # greedy decoding gives the continuation
    greedy_filtered: bool  # greedy decoding gives it if no banned word can be the first token
    last: bool  # the last token is the likeliest after those before it
    context_logprob: float  # of the context after its first token, in nats; 0 unless requested
    context_tokens: int  # tokens in context_logprob


@dataclass(frozen=True)
class Result:
    """Value of one metric of a task under a named protocol, over n examples."""

    task: str
    protocol: str
    metric: str
    n: int
    value: float
    stderr: float | None = None


ScoreItems = Callable[..., list[list[Score]]]  # evaluation.scoring.Scorer.score
TaskScores = tuple[list[Result], list[dict]]  # results, and a row for each example and protocol
Published = dict[tuple[str, str, str], tuple[float, str]]


def published(source: str, protocol: str, metric: str, *values: float | None) -> Published:
    """Return figures of OpenAI's gpt2, gpt2-medium, gpt2-large and gpt2-xl: value and source by
    protocol, metric and size."""
    sizes = zip(SIZES, values, strict=False)
    return {(protocol, metric, size): (value, source) for size, value in sizes if value is not None}


# OpenAI did not release its evaluation code, and the paper's LAMBADA and CBT figures have not been
# reproduced: they are listed under the protocol that is closest to the paper's description.
PAPER = "Radford et al. 2019, table 3"
NANOGPT = "build-nanogpt's hellaswag.py"
NOTEBOOK = "build-nanogpt's play.ipynb"
HARNESS = "lm-evaluation-harness, in build-nanogpt's hellaswag.py and the harness's issue 2159"
VALIDATION = published(NOTEBOOK, "FineWeb-Edu", "loss", 3.2924)  # on the first shard


def accuracy(task: str, protocol: str, metric: str, hits: Sequence[bool]) -> Result:
    """Return the share of hits and its standard error."""
    n, p = len(hits), float(np.mean(hits))
    return Result(task, protocol, metric, n, p, (p * (1 - p) / (n - 1)) ** 0.5 if n > 1 else None)


def join(parts: list[TaskScores]) -> TaskScores:
    """Return the results and the examples of several protocols as one."""
    return sum((results for results, _ in parts), []), sum((examples for _, examples in parts), [])


class Task:
    """A benchmark. Subclasses set the attributes and define two methods.

    items(rows, protocol) returns an Item for each row. score(rows, score, protocols) returns the
    results under some protocols, and a row of --dump for each example of each.
    """

    name: str
    hub: dict[str, str]
    """Arguments of datasets.load_dataset."""
    protocols: tuple[str, ...]
    """Ways to score; train.py logs the first."""
    metric: str = "acc"
    """Metric of the first protocol that plot.py draws."""
    published: Published

    def parse(self, text: str) -> list[dict]:
        """Return the rows of a file's text: JSON lines."""
        return [json.loads(line) for line in text.split("\n") if line.strip()]

    def download(self) -> list[dict]:
        """Return the rows of the hub."""
        from datasets import load_dataset

        return list(load_dataset(**self.hub))

    def read(self, path: Path | None = None) -> list[dict]:
        """Return the rows of a file in the original format, or else of the hub."""
        try:
            rows = self.parse(path.read_text(encoding="utf-8")) if path else self.download()
            assert rows, "no items"
            for protocol in self.protocols:
                self.items(rows, protocol)
            return rows
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise UserError(
                f"{self.name} could not be read from {path or self.hub['path']} ({reason}); a file "
                "in the original format is given by --data"
            ) from error

    def choose(self, protocol: str, items: list[Item], values: dict[str, list]) -> TaskScores:
        """Choose the continuation of the highest value of each metric; "acc" has the
        log-probabilities."""
        task, labels = self.name, [item.label for item in items]
        picks = {metric: [int(np.argmax(x)) for x in table] for metric, table in values.items()}
        results = [accuracy(task, protocol, name, np.equal(x, labels)) for name, x in picks.items()]
        examples = [
            {"task": task, "protocol": protocol, "index": i, "label": label, "logprobs": logprobs}
            | {f"pick_{metric}": x[i] for metric, x in picks.items()}
            for i, (label, logprobs) in enumerate(zip(labels, values["acc"], strict=True))
        ]
        return results, examples


class HellaSwag(Task):
    """Choose the ending of a text (Zellers et al. 2019; file: github.com/rowanz/hellaswag)."""

    name = "hellaswag"
    hub = {"path": "Rowan/hellaswag", "split": "validation"}
    protocols = ("build-nanogpt", "lm-eval")
    metric = "acc_norm"
    published = (
        published(NANOGPT, "build-nanogpt", "acc", 0.2859, None, None, 0.3842)
        | published(NANOGPT, "build-nanogpt", "acc_norm", 0.2955, None, None, 0.4893)
        | published(NOTEBOOK, "build-nanogpt", "acc_norm", None, 0.3752, 0.4320)
        | published(HARNESS, "lm-eval", "acc", 0.2892, None, None, 0.4004)
        | published(HARNESS, "lm-eval", "acc_norm", 0.3114, None, None, 0.5089)
    )

    def items(self, rows: list[dict], protocol: str) -> list[Item]:
        """Return each context with its endings: raw text, as in build-nanogpt and llm.c, or that of
        lm-evaluation-harness (version 1.0 of its task): activity, colon, context, without WikiHow's
        bracketed marks. Rows that lack `ctx_a`, as in some copies, give their `ctx` alone."""

        def clean(text: str) -> str:
            text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
            return text.replace("  ", " ")

        items = []
        for row in rows:
            context, endings = row["ctx"], row["endings"]
            if protocol == "lm-eval":
                if "ctx_a" in row:
                    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
                context, endings = clean(context), map(clean, endings)
            items.append(Item(context, tuple(f" {end}" for end in endings), int(row["label"])))
        return items

    def score(self, rows: list[dict], score: ScoreItems, protocols: Sequence[str]) -> TaskScores:
        """Choose an ending by its log-probability (acc), and by its log-probability per token
        (build-nanogpt, llm.c) or per character and per byte (lm-evaluation-harness)."""
        parts = []
        for protocol in protocols:
            items = self.items(rows, protocol)
            scores = score(items)
            nats = [[s.logprob for s in choices] for choices in scores]
            lengths = {"acc_norm": [[s.tokens for s in choices] for choices in scores]}
            if protocol == "lm-eval":  # lengths without the space that joins an ending
                lengths = {
                    "acc_norm": [[len(c) - 1 for c in item.choices] for item in items],
                    "acc_bytes": [[len(c.encode()) - 1 for c in item.choices] for item in items],
                }
                if not all("ctx_a" in row for row in rows):
                    protocol = "lm-eval, ctx alone"  # not comparable with the harness
            means = {name: list(map(np.divide, nats, by)) for name, by in lengths.items()}
            parts.append(self.choose(protocol, items, {"acc": nats} | means))
        return join(parts)


class Lambada(Task):
    """Predict the last word of a passage (Paperno et al. 2016; file: OpenAI's lambada_test.jsonl).

    lm-eval: all its tokens greedily, and perplexity; last token: that one alone; stop words:
    greedily with stop words excluded from the choice of the first token. The GPT-2 paper has a
    stop-word filter too, but does not publish how it works.
    """

    name = "lambada"
    hub = {"path": "EleutherAI/lambada_openai", "name": "default", "split": "test"}
    protocols = ("lm-eval", "last token", "stop words")
    published = (
        published(HARNESS, "lm-eval", "acc", 0.3256)
        | published(HARNESS, "lm-eval", "perplexity", 40.06)
        | published("transformers issue 13761", "last token", "acc", 0.4667)
        | published(PAPER, "stop words", "acc", 0.4599, 0.5548, 0.6012, 0.6324)
    )

    def items(self, rows: list[dict], protocol: str) -> list[Item]:
        """Return each passage and its last word, as lm-evaluation-harness splits it, but without
        the white space after the word, which OpenAI's file does not have."""
        parts = [row["text"].rstrip().rpartition(" ") for row in rows]
        return [Item(context, (" " + word,)) for context, _, word in parts]

    def score(self, rows: list[dict], score: ScoreItems, protocols: Sequence[str]) -> TaskScores:
        scores = [s for (s,) in score(self.items(rows, protocols[0]), banned=STOP_WORDS)]
        nats, n = np.array([s.logprob for s in scores]), len(scores)
        perplexity = float(np.exp(-nats.mean()))
        stderr = perplexity * float(nats.std(ddof=1)) / n**0.5 if n > 1 else None
        results = [
            accuracy(self.name, "lm-eval", "acc", [s.greedy for s in scores]),
            Result(self.name, "lm-eval", "perplexity", n, perplexity, stderr),
            accuracy(self.name, "last token", "acc", [s.last for s in scores]),
            accuracy(self.name, "stop words", "acc", [s.greedy_filtered for s in scores]),
        ]
        examples = [{"task": self.name, "index": i} | s._asdict() for i, s in enumerate(scores)]
        return [r for r in results if r.protocol in protocols], examples


class CBT(Task):
    """Choose the word for a blank in a children's book (Hill et al. 2016; file: CBTest's): common
    nouns or named entities."""

    protocols = ("full sequence", "from the blank")

    def __init__(self, name: str, configuration: str, *values: float) -> None:
        self.name = name  # the split is that of PAPER, section 3.2
        self.hub = {"path": "cam-cst/cbt", "name": configuration, "split": "validation"}
        self.published = published(PAPER, "from the blank", "acc", *values)

    def parse(self, text: str) -> list[dict]:
        """Return the rows of CBTest's format. Lines 1 to 20 of an item are its context. Line 21
        holds a question with XXXXX for the blank, a tab, the answer, two tabs, and ten candidates
        separated by bars."""
        rows, sentences = [], []
        for line in filter(None, map(str.strip, text.split("\n"))):
            number, _, rest = line.partition(" ")
            assert number == str(len(sentences) + 1), f"line {line[:40]!r} is out of order"
            if "\t" not in rest:
                sentences.append(rest)
                continue
            question, answer, *_, options = rest.split("\t")
            row = {"sentences": sentences, "question": question, "answer": answer}
            rows.append(row | {"options": options.split("|")})
            sentences = []
        return rows

    def items(self, rows: list[dict], protocol: str) -> list[Item]:
        """Return the text up to the blank, and each candidate with the rest of the question."""
        items = []
        for row in rows:
            before, after = row["question"].split("XXXXX", 1)
            context = " ".join([*row["sentences"], before]).rstrip()
            choices = tuple(f" {option}{after}" for option in row["options"])
            items.append(Item(context, choices, row["options"].index(row["answer"])))
        return items

    def score(self, rows: list[dict], score: ScoreItems, protocols: Sequence[str]) -> TaskScores:
        """Choose by the mean loss of context and question together, and by the log-probability of
        the question from the blank on (Radford et al. 2019, section 3.2)."""
        items = self.items(rows, protocols[0])
        scores = score(items, with_context=True)
        whole = [
            [(s.context_logprob + s.logprob) / (s.context_tokens + s.tokens) for s in choices]
            for choices in scores
        ]
        rest = [[s.logprob for s in choices] for choices in scores]
        values = {"full sequence": whole, "from the blank": rest}
        return join([self.choose(name, items, {"acc": values[name]}) for name in protocols])


# The GPT-2 paper excludes stop words as last words of LAMBADA passages, but publishes no list. This
# is the English list of Porter et al. that NLTK distributes, without contractions.
STOP_WORDS = """i me my myself we our ours ourselves you your yours yourself yourselves he him his
himself she her hers herself it its itself they them their theirs themselves what which who whom
this that these those am is are was were be been being have has had having do does did doing a an
the and but if or because as until while of at by for with about against between into through
during before after above below to from up down in out on off over under again further then once
here there when where why how all any both each few more most other some such no nor not only own
same so than too very s t can will just don should now""".split()

TASKS: dict[str, Task] = {
    "hellaswag": HellaSwag(),
    "lambada": Lambada(),
    "cbt_cn": CBT("cbt_cn", "CN", 0.8765, 0.9235, 0.9345, 0.9330),
    "cbt_ne": CBT("cbt_ne", "NE", 0.834, 0.871, 0.880, 0.8905),
}
