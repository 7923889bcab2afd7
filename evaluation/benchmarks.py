"""The benchmarks: HellaSwag, LAMBADA, the Children's Book Test, and CORE (evaluation/core.py).

To add one, write a subclass of Task here and put an instance into ALL. train.py scores it, too,
if config.py has the options NAME_every and NAME_data. docs/EVALUATION.md says what each
protocol can be compared with. Published values of OpenAI's GPT-2 are in evaluation/table.py.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, replace

from evaluation.core import FewShotTasks
from evaluation.tasks import (
    Benchmark,
    ExampleScore,
    Item,
    Prediction,
    Result,
    ScoredExample,
    ScoreItems,
    Task,
    TaskScores,
    exponential,
    get_field,
    get_label,
)


def clean_wikihow(text: str) -> str:
    """Remove WikiHow's bracketed marks from a text, exactly as lm-evaluation-harness does."""
    # "[header] How to [title] Do it." becomes " How to. Do it."
    text = text.strip().replace(" [title]", ". ")
    text = re.sub(r"\[.*?\]", "", text)
    return text.replace("  ", " ")


class HellaSwag(Task):
    """Choose the ending of a text (Zellers et al. 2019). The file is hellaswag_val.jsonl of
    github.com/rowanz/hellaswag."""

    name = "hellaswag"
    download = {"path": "Rowan/hellaswag", "split": "validation"}
    protocols = ("build-nanogpt", "lm-eval")
    metric = "acc_norm"

    def items(self, rows: list[dict], protocol: str) -> list[Item]:
        """Return each context with its endings. The protocol build-nanogpt takes the raw text, as
        llm.c does. The others take that of lm-evaluation-harness (version 1.0 of its task):
        activity, colon, context, without WikiHow's marks."""
        items = []
        for row in rows:
            context = get_field(row, "ctx", str)
            endings = get_field(row, "endings", list)  # four texts
            label = get_label(row, "label", len(endings))
            if protocol != "build-nanogpt":
                # ctx_a and ctx_b are the parts of ctx; ctx_b begins the sentence that the endings
                # complete
                if "ctx_a" in row:
                    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
                context = clean_wikihow(context)
                endings = [clean_wikihow(ending) for ending in endings]
            # GPT-2's tokens include the space before a word
            choices = tuple(f" {ending}" for ending in endings)
            items.append(Item(context, choices, label))
        return items

    def choice_metrics(
        self, protocol: str, choice: str, prediction: Prediction
    ) -> dict[str, float]:
        """Return the log-probability of an ending, and its mean per token, or per character and
        per byte as in the harness."""
        # logprob is a sum over all tokens in nats, lower for longer endings
        if protocol == "build-nanogpt":
            return {
                "acc": prediction.logprob,
                "acc_norm": prediction.logprob / prediction.num_tokens,
            }
        ending = choice[1:]  # the harness counts without the space in front
        if not ending:  # nothing but WikiHow's marks: never taken, as in the harness
            return {"acc": prediction.logprob, "acc_norm": -math.inf, "acc_bytes": -math.inf}
        return {
            "acc": prediction.logprob,
            "acc_norm": prediction.logprob / len(ending),
            "acc_bytes": prediction.logprob / len(ending.encode()),
        }

    def score(
        self, rows: list[dict], score_items: ScoreItems, protocols: Sequence[str]
    ) -> TaskScores:
        """Score as Task.score does. Some copies of the file lack `ctx_a` and the activity,
        which the harness's prompt needs: their protocol gets another name, so that nobody compares
        it with the harness."""
        if not all("ctx_a" in row for row in rows):
            protocols = [
                protocol.replace("lm-eval", "lm-eval, ctx alone") for protocol in protocols
            ]
        return super().score(rows, score_items, protocols)


# The GPT-2 paper excludes stop words as last words of LAMBADA passages, but publishes no list. This
# is the English list of Porter et al. that NLTK distributes, without contractions.
STOP_WORDS = """i me my myself we our ours ourselves you your yours yourself yourselves he him his
himself she her hers herself it its itself they them their theirs themselves what which who whom
this that these those am is are was were be been being have has had having do does did doing a an
the and but if or because as until while of at by for with about against between into through
during before after above below to from up down in out on off over under again further then once
here there when where why how all any both each few more most other some such no nor not only own
same so than too very s t can will just don should now""".split()


class Lambada(Task):
    """Predict the last word of a passage (Paperno et al. 2016). The file is OpenAI's
    lambada_test.jsonl. The three protocols read the same forward pass: all tokens of the word
    greedily (lm-eval), its last token alone, or greedily without stop words as first token."""

    name = "lambada"
    download = {"path": "EleutherAI/lambada_openai", "name": "default", "split": "test"}
    protocols = ("lm-eval", "last token", "stop words")
    banned_words = STOP_WORDS

    def items(self, rows: list[dict], protocol: str) -> list[Item]:
        """Return each passage with its last word, split as in lm-evaluation-harness, but without
        white space after the word, which OpenAI's file does not have and some copies do."""
        items = []
        for row in rows:
            context, _, word = row["text"].rstrip().rpartition(" ")
            assert word, "a passage without a word"  # for the message of `read`
            items.append(Item(context, (f" {word}",)))
        return items

    def score_example(
        self, protocol: str, item: Item, predictions: list[Prediction]
    ) -> ScoredExample:
        """Return whether the word is what the model writes, and by lm-eval its nats."""
        [prediction] = predictions  # the word is the only choice
        hits = {  # by protocol
            "lm-eval": prediction.is_greedy,
            "last token": prediction.is_last_greedy,
            "stop words": prediction.is_greedy_filtered,
        }
        score_by_metric = {"acc": ExampleScore(hits[protocol])}  # True counts as 1
        if protocol == "lm-eval":
            # `result` turns the mean of these nats per word into a perplexity
            score_by_metric["perplexity"] = ExampleScore(-prediction.logprob)
        return score_by_metric, asdict(prediction)  # --dump has all fields of the prediction

    def result(self, protocol: str, metric: str, example_scores: list[ExampleScore]) -> Result:
        """Return the mean; of nats of a word the perplexity per word, exp of the mean. Its standard
        error is that of the mean times exp's derivative, as in lm-evaluation-harness."""
        mean = super().result(protocol, metric, example_scores)
        if metric != "perplexity":
            return mean
        # per word, not per token, so that models of different tokenizers can be compared
        perplexity = exponential(mean.value)
        stderr = None
        if mean.stderr is not None:
            stderr = perplexity * mean.stderr
        return replace(mean, value=perplexity, stderr=stderr)


class ChildrensBookTest(Task):
    """Choose the word for a blank in a book (Hill et al. 2016), as in Radford et al. 2019, section
    3.2. The files are those of CBTest, by kind of word: common nouns (CN), named entities (NE)."""

    protocols = ("from the blank",)

    def __init__(self, name: str, configuration: str) -> None:
        self.name = name
        # The kind of word is a configuration of the hub's copy. The validation split, as in the
        # paper: a book of the test split, The Jungle Book, is in GPT-2's training data.
        self.download = {"path": "cam-cst/cbt", "name": configuration, "split": "validation"}

    def parse(self, text: str) -> list[dict]:
        """Return the rows of CBTest's format: 20 numbered lines of context, then the question's.
        That has the question (XXXXX is the blank), a tab, the answer, two tabs, and candidates
        separated by bars."""
        rows = []
        # Line numbers start again with each question, so a line "1 ..." begins one. [1:] drops the
        # empty text before the first question.
        for numbered_lines in re.split(r"^1 ", text, flags=re.MULTILINE)[1:]:
            lines = re.split(r"\s*\n\d+ ", numbered_lines.strip())  # without their numbers
            columns = lines[-1].split("\t")  # question, answer, "", candidates
            row = {
                "sentences": lines[:-1],
                "question": columns[0],
                "answer": columns[1],
                "options": columns[-1].split("|"),
            }
            rows.append(row)
        return rows

    def items(self, rows: list[dict], protocol: str) -> list[Item]:
        """Return the text up to the blank, and each candidate with the question's end after it."""
        items = []
        for row in rows:
            before, after = row["question"].split("XXXXX", 1)
            # CBT separates punctuation by spaces, which stay, as in the paper's setting. The space
            # before the blank moves to the choices.
            context = " ".join(row["sentences"] + [before]).rstrip()
            choices = tuple(f" {option}{after}" for option in row["options"])
            items.append(Item(context, choices, row["options"].index(row["answer"])))
        return items


ALL = (
    HellaSwag(),
    Lambada(),
    ChildrensBookTest("cbt_cn", "CN"),
    ChildrensBookTest("cbt_ne", "NE"),
    FewShotTasks("core"),
)
# by name, in the order of messages and of the colors in pictures
BENCHMARKS: dict[str, Benchmark] = {benchmark.name: benchmark for benchmark in ALL}
