"""The benchmarks: HellaSwag, LAMBADA, the Children's Book Test, and CORE (evaluation/core.py).

To add a benchmark, write a subclass of Task here and put an instance into ALL. If train.py shall
score it, too, add the options NAME_every and NAME_data to config.py, and one entry each to the
dicts `steps_between` and `data_paths` of training/evaluator.py. docs/EVALUATION.md says what each
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
    """HellaSwag: choose the ending of a text (Zellers et al. 2019). The file is
    hellaswag_val.jsonl of github.com/rowanz/hellaswag."""

    name = "hellaswag"
    download = {"path": "Rowan/hellaswag", "split": "validation"}
    protocols = ("build-nanogpt", "lm-eval")
    metric = "acc_norm"

    def items(self, rows: list[dict], protocol: str) -> list[Item]:
        """Return each context with its endings. The protocol build-nanogpt takes the raw text, as
        llm.c does. The other protocols take the text of lm-evaluation-harness (version 1.0 of its
        task): activity, colon and context, without WikiHow's marks."""
        items: list[Item] = []
        # {"activity_label": "Roof repair", "ctx_a": "A man sits.", "ctx_b": "he",
        # "ctx": "A man sits. he", "endings": [four texts], "label": 3, ...}
        for row in rows:
            # ValueError without a field; `read` makes a UserError of it, which names the source
            context = get_field(row, "ctx", str)
            endings = get_field(row, "endings", list)
            label = get_label(row, "label", len(endings))  # index of the right ending
            if protocol != "build-nanogpt":
                # "Roof repair: A man sits. He": the endings complete the sentence of ctx_b. Some
                # copies of the file have ctx alone: `score` then renames the protocol.
                if "ctx_a" in row:
                    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
                context = clean_wikihow(context)
                endings = [clean_wikihow(ending) for ending in endings]
            # GPT-2's tokens include the space before a word
            choices = tuple(f" {ending}" for ending in endings)
            items.append(Item(context, choices, label))
        return items

    def choice_values(self, protocol: str, choice: str, prediction: Prediction) -> dict[str, float]:
        """Return the log-probability of an ending as "acc", and its mean per token as "acc_norm".
        lm-eval takes the mean per character instead, and as "acc_bytes" the mean per byte."""
        # logprob is a sum over all tokens in nats, so it is lower for longer endings
        length_by_metric = {"acc_norm": prediction.num_tokens}
        if protocol != "build-nanogpt":
            ending = choice[1:]  # the harness does not count the space in front
            length_by_metric = {"acc_norm": len(ending), "acc_bytes": len(ending.encode())}
        value_by_metric = {"acc": prediction.logprob}
        for metric, length in length_by_metric.items():
            # 0 if the ending had only WikiHow's marks: never chosen, as in the harness
            value_by_metric[metric] = prediction.logprob / length if length else -math.inf
        return value_by_metric

    def score(
        self, rows: list[dict], score_items: ScoreItems, protocols: Sequence[str]
    ) -> TaskScores:
        """Score the rows by each protocol, as Task.score does. Some copies of the file lack `ctx_a`
        and the activity, which the harness's prompt needs. Their protocol gets another name, so
        that nobody compares the result with the harness."""
        if not all("ctx_a" in row for row in rows):
            protocols = [
                protocol.replace("lm-eval", "lm-eval, ctx alone") for protocol in protocols
            ]
        return super().score(rows, score_items, protocols)


# The GPT-2 paper excludes stop words as last words of LAMBADA passages, but publishes no list. This
# list is the English one of Porter et al. in NLTK, without contractions.
STOP_WORDS = """i me my myself we our ours ourselves you your yours yourself yourselves he him his
himself she her hers herself it its itself they them their theirs themselves what which who whom
this that these those am is are was were be been being have has had having do does did doing a an
the and but if or because as until while of at by for with about against between into through
during before after above below to from up down in out on off over under again further then once
here there when where why how all any both each few more most other some such no nor not only own
same so than too very s t can will just don should now""".split()


class Lambada(Task):
    """LAMBADA: predict the last word of a passage (Paperno et al. 2016). The file is OpenAI's
    lambada_test.jsonl.

    Three protocols read the same forward pass. The word is right if greedy decoding writes all of
    its tokens (lm-eval), if its last token is the likeliest one (last token), or if greedy decoding
    without stop words as first token writes it (stop words).
    """

    name = "lambada"
    download = {"path": "EleutherAI/lambada_openai", "name": "default", "split": "test"}
    protocols = ("lm-eval", "last token", "stop words")
    banned_words = STOP_WORDS

    def items(self, rows: list[dict], protocol: str) -> list[Item]:
        """Split each passage before its last word, as lm-evaluation-harness does. White space after
        the word is dropped: some copies of OpenAI's file have it."""
        items: list[Item] = []
        for row in rows:  # {"text": "... to the door, and there stood Tom"}
            context, _, word = row["text"].rstrip().rpartition(" ")
            assert word, "a passage without a word"  # `read` puts this text into its UserError
            items.append(Item(context, (f" {word}",)))  # one choice; tokens include the space
        return items

    def score_example(
        self, protocol: str, item: Item, predictions: list[Prediction]
    ) -> ScoredExample:
        """Return whether the model writes the word, and for lm-eval the nats of the word."""
        [prediction] = predictions  # the word is the only choice
        is_right_by_protocol = {
            "lm-eval": prediction.is_greedy,  # greedy decoding writes all tokens of the word
            "last token": prediction.is_last_greedy,  # its last token is the likeliest one
            "stop words": prediction.is_greedy_filtered,  # greedy if no stop word may come first
        }
        # True counts as 1
        score_by_metric = {"acc": ExampleScore(is_right_by_protocol[protocol])}
        if protocol == "lm-eval":
            # the nats of all tokens of this word; `result` turns their mean into a perplexity
            score_by_metric["perplexity"] = ExampleScore(-prediction.logprob)
        return score_by_metric, asdict(prediction)  # --dump writes all fields of the prediction

    def result(self, protocol: str, metric: str, example_scores: list[ExampleScore]) -> Result:
        """Return the accuracy, or the perplexity per word: exp of the mean nats of a word. The
        standard error of a perplexity is the error of the mean times the derivative of exp;
        lm-evaluation-harness bootstraps it."""
        mean_result = super().result(protocol, metric, example_scores)  # with its stderr
        if metric != "perplexity":
            return mean_result
        # per word, not per token, so that models with different tokenizers can be compared
        mean_nats = mean_result.value
        perplexity = exponential(mean_nats)  # infinity where a float overflows
        stderr = None  # for a single example
        if mean_result.stderr is not None:
            stderr = perplexity * mean_result.stderr  # the derivative of exp(x) is exp(x)
        return replace(mean_result, value=perplexity, stderr=stderr)


class ChildrensBookTest(Task):
    """Children's Book Test: choose the word for a blank in a book (Hill et al. 2016), as in Radford
    et al. 2019, section 3.2. CBTest has a file for common nouns (CN) and one for named entities
    (NE)."""

    protocols = ("from the blank",)

    def __init__(self, name: str, configuration: str) -> None:
        self.name = name
        # The hub's copy has a configuration for each kind of word. As in the paper, the split is
        # validation: GPT-2's training data has a book of the test split, The Jungle Book.
        self.download = {"path": "cam-cst/cbt", "name": configuration, "split": "validation"}

    def parse(self, text: str) -> list[dict]:
        """Return the rows of a file in CBTest's format. A row has 20 numbered lines of context and
        a line with the question (XXXXX is the blank), a tab, the answer, two tabs, and candidates
        separated by bars."""
        rows: list[dict] = []
        # Line numbers start again with each row, so each row begins with a line "1 ...". [1:] drops
        # the empty text before the first row.
        for numbered_lines in re.split(r"^1 ", text, flags=re.MULTILINE)[1:]:
            lines = re.split(r"\s*\n\d+ ", numbered_lines.strip())  # 21 texts, without numbers
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
        """Return the text up to the blank as context. Each choice is a candidate and the rest of
        the question."""
        items: list[Item] = []
        # {"sentences": [20 lines], "question": "She saw the XXXXX .", "answer": "fox",
        # "options": ["dog", "fox", ...]}
        for row in rows:
            before, after = row["question"].split("XXXXX", 1)  # "She saw the ", " ."
            # CBT's spaces around punctuation stay; the paper's de-tokenizer removes them. The
            # space before the blank moves to the choices.
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
# name -> benchmark; messages list them in this order, and pictures take their colors in it
BENCHMARKS: dict[str, Benchmark] = {benchmark.name: benchmark for benchmark in ALL}
