import math

import pytest
from conftest import user_error

from data.tokenizer import load_tokenizer
from evaluation.benchmarks import BENCHMARKS
from evaluation.table import PUBLISHED
from evaluation.tasks import Score

HELLASWAG, LAMBADA, CBT = (BENCHMARKS[name] for name in ("hellaswag", "lambada", "cbt_cn"))
BYTES = load_tokenizer("bytes")
BOOK = """1 Tom had a dog .
2 The dog ran to Ann .
3 `` Where is the XXXXX ? '' said Ann .\tdog\t\tcat|dog|Ann
"""


def test_hellaswag_text_is_raw_or_cleaned_as_the_harness_does():
    row = {
        "ctx": "[header] How to [title] Do it. he", "ctx_a": "[header] How to [title] Do it.",
        "ctx_b": "he", "activity_label": "Doing", "endings": ["runs [substeps] off", "b", "c", "d"],
        "label": "0",
    }  # fmt: skip
    assert HELLASWAG.items([row], "build-nanogpt")[0].choices[0] == " runs [substeps] off"
    (clean,) = HELLASWAG.items([row], "lm-eval")
    assert clean.context == "Doing: How to. Do it. He" and clean.choices[0] == " runs off"
    assert clean.label == 0
    score = Score(-4.0, 2, *[True] * 3)
    per_unit = {"acc": -4.0, "acc_norm": -2.0, "acc_bytes": -1.0}
    assert HELLASWAG.values("lm-eval", " 中a", score) == per_unit
    short = {k: row[k] for k in ("ctx", "endings", "label")}
    assert HELLASWAG.items([short], "lm-eval")[0].context == " How to. Do it. he"


def test_lambada_asks_for_the_last_word():
    for end in ("", " ", " \n"):
        (item,) = LAMBADA.items([{"text": "He said\n\nyes to it" + end}], "lm-eval")
        assert (item.context, item.choices) == ("He said\n\nyes to", (" it",))


def test_lambada_has_three_accuracies_a_perplexity_and_their_errors():
    scores = [[Score(-1.0, 1, True, False, True)], [Score(-3.0, 1, False, False, True)]]
    rows = [{"text": "a b"}] * 2
    results, _ = LAMBADA.score(rows, lambda *_: scores, LAMBADA.protocols)
    perplexity = pytest.approx(math.exp(2))  # a mean of 2 nats, with an error of 1
    assert [(result.value, result.stderr) for result in results] == [
        *((0.5, 0.5), (perplexity, perplexity), (1.0, 0.0), (0.0, 0.0))
    ]


def test_cbt_asks_for_the_word_in_the_blank(tmp_path):
    (tmp_path / "cbt.txt").write_text(BOOK * 2)
    item, _ = CBT.items(CBT.read(tmp_path / "cbt.txt", None, BYTES, 64), "from the blank")
    assert item.context == "Tom had a dog . The dog ran to Ann . `` Where is the"
    assert item.choices[1] == " dog ? '' said Ann ." and item.label == 1


def test_benchmarks_come_from_the_hub_or_name_the_option_of_a_file(monkeypatch):
    def load_dataset(path, name=None, split=None, **_):
        if name == "CN":
            raise ConnectionError
        return [{"text": f"{path} {split}"}]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert LAMBADA.read(None, None, BYTES, 64) == [{"text": "EleutherAI/lambada_openai test"}]
    with user_error(r"\(ConnectionError.*; --data, in train.py --NAME"):
        CBT.read(None, None, BYTES, 64)


def test_published_figures_are_those_of_a_benchmark_and_protocol():
    assert PUBLISHED["hellaswag", "lm-eval", "acc_norm"].values["gpt2-xl"] == 0.5089
    for task, protocol, _ in PUBLISHED.keys() - {("val", "FineWeb-Edu", "loss")}:
        assert protocol in BENCHMARKS[task].protocols
