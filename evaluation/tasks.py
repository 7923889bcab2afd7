"""HellaSwag, LAMBADA and the Children's Book Test as plain lists of items to score.

Rows come from the Hugging Face hub, or from a file in the original format: HellaSwag's .jsonl
(github.com/rowanz/hellaswag), OpenAI's lambada_test.jsonl, CBTest's numbered lines.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from utils.distributed import Process
from utils.errors import UserError

HUB = {  # task: (dataset, configuration, split)
    "hellaswag": ("Rowan/hellaswag", None, "validation"),
    "lambada": ("EleutherAI/lambada_openai", "default", "test"),
    "cbt_cn": ("cam-cst/cbt", "CN", "validation"),  # the split of the GPT-2 paper, section 3.2
    "cbt_ne": ("cam-cst/cbt", "NE", "validation"),
}
# The GPT-2 paper excludes stop words as last words of LAMBADA passages, but publishes no list. This
# is the English list of Porter et al. that NLTK distributes, without contractions.
STOP_WORDS = """i me my myself we our ours ourselves you your yours yourself yourselves he him his
himself she her hers herself it its itself they them their theirs themselves what which who whom
this that these those am is are was were be been being have has had having do does did doing a an
the and but if or because as until while of at by for with about against between into through
during before after above below to from up down in out on off over under again further then once
here there when where why how all any both each few more most other some such no nor not only own
same so than too very s t can will just don should now""".split()


@dataclass(frozen=True)
class Item:
    """A context and its possible continuations, of which choices[label] is right."""

    context: str
    choices: tuple[str, ...]
    """Continuations, each beginning with white space."""
    label: int = 0


def read_rows(task: str, path: Path | None = None) -> list[dict]:
    """Return the rows of a benchmark from a file in its original format, or else from the hub;
    raise UserError if they cannot be read, there are none, or a row is not valid."""
    rows = _hub_rows(task) if path is None else _file_rows(task, path)
    source = path or HUB[task][0]
    if not rows:
        raise UserError(f"{source} holds no {task} items")
    for number, row in enumerate(rows, 1):
        try:
            valid = _is_valid(task, row)
        except UnicodeEncodeError as error:
            raise UserError(
                f"{source}, item {number}, holds the lone surrogate {error.object[error.start]!a}, "
                "which is no character; correct or remove that item"
            ) from error
        except (KeyError, TypeError, ValueError, AttributeError, IndexError):
            valid = False
        if not valid:
            raise UserError(f"{source}, item {number}, is not a valid item of {task}")
    return rows


def read_rows_on_all(task: str, path: Path | None, process: Process) -> list[dict]:
    """Return a benchmark's rows on every process; one process of each machine downloads first. A
    download that ends ten minutes after the main process's ends the run."""
    rows, problem = [], None
    for first in (True, False):
        if (process.local_rank == 0) == first:
            try:
                rows = read_rows(task, path)
            except UserError as error:
                problem = error
        process.wait_for_main()
        if not process.all_agree(problem is None):
            raise problem or UserError(f"another process could not read {task}")
    return rows


def _is_valid(task: str, row: dict) -> bool:
    """Return True if a row has the fields of its task; a row of other types may raise instead."""
    if task == "hellaswag":
        names = ("ctx", "activity_label", "ctx_a", "ctx_b") if "ctx_a" in row else ("ctx",)
        texts = [*row["endings"], *(row[name] for name in names)]
        valid = 0 <= int(row["label"]) < len(row["endings"])
    elif task == "lambada":
        texts = [row["text"]]
        valid = bool(row["text"].strip())
    else:
        texts = [row["question"], *row["sentences"], *row["options"]]
        valid = "XXXXX" in row["question"] and row["answer"] in row["options"]
    "".join(texts).encode()  # raises TypeError, or UnicodeEncodeError for a lone surrogate
    return valid


def _hub_rows(task: str) -> list[dict]:
    import datasets

    name, configuration, split = HUB[task]
    try:
        return list(datasets.load_dataset(name, configuration, split=split))
    except Exception as error:  # datasets and its file systems raise many kinds
        in_training = "" if task.startswith("cbt") else f" (train.py: --{task}_data)"
        raise UserError(
            f"{name} could not be downloaded from the hub ({type(error).__name__}); go online, or "
            f"give a file in the original format by --data{in_training}"
        ) from error


def _file_rows(task: str, path: Path) -> list[dict]:
    try:
        text = path.read_text(encoding="utf-8")
        if task.startswith("cbt"):
            return parse_cbt(text)
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is not in the original format of {task}: {error}") from error


def parse_cbt(text: str) -> list[dict]:
    """Parse CBTest's own format into rows; raise ValueError for a line that is out of order.

    Lines 1 to 20 of an item are its context. Line 21 holds a question with XXXXX for the missing
    word, a tab, the answer, two tabs, and ten candidates separated by bars.
    """
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
        row = {"sentences": sentences, "question": question, "answer": answer}
        rows.append(row | {"options": options.split("|")})
        sentences = []
    return rows


def hellaswag_items(rows: list[dict], *, clean: bool) -> list[Item]:
    """Return each context of HellaSwag with its endings, as raw or as clean text.

    Raw text is what build-nanogpt and llm.c score. Clean text is that of lm-evaluation-harness's
    task hellaswag (version 1.0): activity, colon, context, without WikiHow's bracketed marks. Rows
    that lack `ctx_a`, as in some copies of the data, give their `ctx` alone.
    """

    def cleaned(text: str) -> str:
        text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
        return text.replace("  ", " ")

    items = []
    for row in rows:
        context, endings = row["ctx"], row["endings"]
        if clean:
            if "ctx_a" in row:
                context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
            context, endings = cleaned(context), map(cleaned, endings)
        items.append(Item(context, tuple(f" {end}" for end in endings), int(row["label"])))
    return items


def lambada_items(rows: list[dict]) -> list[Item]:
    """Return each passage with its last word to predict, as lm-evaluation-harness splits it, but
    without the white space after the word, which OpenAI's file does not have."""
    parts = [row["text"].rstrip().rpartition(" ") for row in rows]
    return [Item(context, (" " + word,)) for context, _, word in parts]


def cbt_items(rows: list[dict]) -> list[Item]:
    """Return the text up to the blank, and each candidate with the rest of the question."""
    items = []
    for row in rows:
        before, _, after = row["question"].partition("XXXXX")
        context = " ".join([*row["sentences"], before]).rstrip()
        choices = tuple(f" {option}{after}" for option in row["options"])
        items.append(Item(context, choices, row["options"].index(row["answer"])))
    return items
