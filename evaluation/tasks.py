"""HellaSwag, LAMBADA and the Children's Book Test as plain lists of items to score.

Rows come from the hub, or from a local file in the original format: HellaSwag's and LAMBADA's
.jsonl (github.com/rowanz/hellaswag; OpenAI's lambada_test.jsonl), CBTest's numbered lines.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from data.shards import DataError

HUB = {  # dataset, configuration, split
    "hellaswag": ("Rowan/hellaswag", None, "validation"),
    "lambada": ("EleutherAI/lambada_openai", "default", "test"),
    "cbt_cn": ("cam-cst/cbt", "CN", "validation"),  # the split of the GPT-2 paper, section 3.2
    "cbt_ne": ("cam-cst/cbt", "NE", "validation"),
}
# Words that the GPT-2 paper's filter does not take for the last word of a LAMBADA passage; it names
# no list. This is the English one of Porter et al. that NLTK distributes, without contractions.
STOP_WORDS = """i me my myself we our ours ourselves you your yours yourself yourselves he him his
himself she her hers herself it its itself they them their theirs themselves what which who whom
this that these those am is are was were be been being have has had having do does did doing a an
the and but if or because as until while of at by for with about against between into through
during before after above below to from up down in out on off over under again further then once
here there when where why how all any both each few more most other some such no nor not only own
same so than too very s t can will just don should now""".split()


@dataclass(frozen=True)
class Item:
    """A context, continuations of it that begin with white space, and which of them is right."""

    context: str
    choices: tuple[str, ...]
    label: int = 0


def read_rows(task: str, path: Path | None = None) -> list[dict]:
    """The rows of a benchmark, from a file in its original format, or from the hub.

    Raises DataError where they cannot be had, or a row lacks something.
    """
    rows = _hub_rows(task) if path is None else _file_rows(task, path)
    if not rows:
        raise DataError(f"{path or HUB[task][0]} holds no {task} items")
    for number, row in enumerate(rows, 1):
        try:
            whole = CHECKS.get(task, _is_cbt)(row)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError):
            whole = False
        if not whole:
            raise DataError(f"{path or HUB[task][0]}, item {number}, is not one of {task}")
    return rows


def _are_texts(*values: object) -> bool:
    return all(isinstance(value, str) for value in values)


def _is_hellaswag(row: dict) -> bool:
    parts = ("activity_label", "ctx_a", "ctx_b")
    named = "ctx_a" not in row or _are_texts(*(row[part] for part in parts))
    labelled = 0 <= int(row["label"]) < len(row["endings"])
    return named and labelled and _are_texts(row["ctx"], *row["endings"])


def _is_lambada(row: dict) -> bool:
    return _are_texts(row["text"]) and bool(row["text"].strip())


def _is_cbt(row: dict) -> bool:
    return (
        _are_texts(row["question"], *row["sentences"], *row["options"])
        and "XXXXX" in row["question"]
        and row["answer"] in row["options"]
    )


CHECKS = {"hellaswag": _is_hellaswag, "lambada": _is_lambada}


def _hub_rows(task: str) -> list[dict]:
    import datasets

    name, configuration, split = HUB[task]
    try:
        return list(datasets.load_dataset(name, configuration, split=split))
    except Exception as error:  # whatever datasets and its file systems raise
        raise DataError(
            f"{name} could not be had from the hub ({type(error).__name__}); go online, or give a "
            "file in the original format"
        ) from error


def _file_rows(task: str, path: Path) -> list[dict]:
    try:
        text = path.read_text(encoding="utf-8")
        if task.startswith("cbt"):
            return parse_cbt(text)
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path} is not in the original format of {task}: {error}") from error


def parse_cbt(text: str) -> list[dict]:
    """CBTest's own format: lines 1 to 20 a context, line 21 a question with XXXXX for the missing
    word, a tab, the answer, two tabs, ten candidates between bars."""
    rows: list[dict] = []
    sentences: list[str] = []
    for line in filter(None, map(str.strip, text.split("\n"))):
        number, _, rest = line.partition(" ")
        if number != str(len(sentences) + 1):
            raise ValueError(f"line {line[:40]!r} does not have number {len(sentences) + 1}")
        if "\t" not in rest:
            sentences.append(rest)
            continue
        question, answer, *_, options = rest.split("\t")
        rows.append(
            {
                "sentences": sentences,
                "question": question,
                "answer": answer,
                "options": options.split("|"),
            }
        )
        sentences = []
    return rows


def hellaswag_raw(rows: list[dict]) -> list[Item]:
    """The text as it is, as build-nanogpt and llm.c score it."""
    return [
        Item(row["ctx"], tuple(f" {ending}" for ending in row["endings"]), int(row["label"]))
        for row in rows
    ]


def hellaswag_clean(rows: list[dict]) -> list[Item]:
    """The text as lm-evaluation-harness's task hellaswag (version 1.0) makes it: the activity, a
    colon, the context, and WikiHow's bracketed marks removed. A row without these fields, as in
    some copies of the data, gives its `ctx` alone."""

    def clean(text: str) -> str:
        text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
        return text.replace("  ", " ")

    def context(row: dict) -> str:
        if "ctx_a" not in row:
            return row["ctx"]
        return f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"

    return [
        Item(clean(context(row)), tuple(f" {clean(e)}" for e in row["endings"]), int(row["label"]))
        for row in rows
    ]


def lambada_items(rows: list[dict]) -> list[Item]:
    """The last word of each passage, as in lm-evaluation-harness's lambada_openai."""
    split = [row["text"].rpartition(" ") for row in rows]
    return [Item(context, (" " + word,)) for context, _, word in split]


def cbt_items(rows: list[dict]) -> list[Item]:
    """Sentences and question up to the blank; each candidate, with the rest of the question."""
    items = []
    for row in rows:
        before, _, after = row["question"].partition("XXXXX")
        context = " ".join([*row["sentences"], before]).rstrip()
        choices = tuple(f" {option}{after}" for option in row["options"])
        items.append(Item(context, choices, row["options"].index(row["answer"])))
    return items
