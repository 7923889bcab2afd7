import math
import random
from dataclasses import replace

import pytest
from conftest import user_error, write_rows

from data.tokenizer import load_tokenizer
from evaluation.benchmarks import BENCHMARKS
from evaluation.core import FewShotTask
from evaluation.table import PUBLISHED
from evaluation.tasks import Prediction

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
    prediction = Prediction(-4.0, 2, *[True] * 3)
    per_unit = {"acc": -4.0, "acc_norm": -2.0, "acc_bytes": -1.0}
    assert HELLASWAG.choice_values("lm-eval", " 中a", prediction) == per_unit
    per_token = {"acc": -4.0, "acc_norm": -4.0 / 3}
    assert (
        HELLASWAG.choice_values("build-nanogpt", "", replace(prediction, num_tokens=3)) == per_token
    )
    never_taken = {"acc_norm": -math.inf, "acc_bytes": -math.inf}
    assert HELLASWAG.choice_values("lm-eval", " ", prediction) == per_unit | never_taken
    short = {k: row[k] for k in ("ctx", "endings", "label")}
    assert HELLASWAG.items([short], "lm-eval")[0].context == " How to. Do it. he"


def test_lambada_asks_for_the_last_word():
    for end in ("", " ", " \n"):
        (item,) = LAMBADA.items([{"text": "He said\n\nyes to it" + end}], "lm-eval")
        assert (item.context, item.choices) == ("He said\n\nyes to", (" it",))


def test_lambada_has_three_accuracies_a_perplexity_and_their_errors():
    predictions = [
        [Prediction(-1.0, 1, True, False, True)],
        [Prediction(-3.0, 1, False, False, True)],
    ]
    rows = [{"text": "a b"}] * 2
    results, _ = LAMBADA.score(rows, lambda *_: predictions, LAMBADA.protocols)
    perplexity = pytest.approx(math.exp(2))  # a mean of 2 nats, with an error of 1
    assert [(result.value, result.stderr) for result in results] == [
        *((0.5, 0.5), (perplexity, perplexity), (1.0, 0.0), (0.0, 0.0))
    ]


def test_cbt_asks_for_the_word_in_the_blank(tmp_path):
    (tmp_path / "cbt.txt").write_text(BOOK * 2)
    item, _ = CBT.items(CBT.read(tmp_path / "cbt.txt", None, BYTES, 64), "from the blank")
    assert item.context == "Tom had a dog . The dog ran to Ann . `` Where is the"
    assert item.choices[1] == " dog ? '' said Ann ." and item.label == 1


def test_benchmarks_come_from_the_hub_or_ask_for_a_file(monkeypatch):
    def load_dataset(path, name=None, split=None, **_):
        if name == "CN":
            raise ConnectionError
        return [{"text": f"{path} {split}"}]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert LAMBADA.read(None, None, BYTES, 64) == [{"text": "EleutherAI/lambada_openai test"}]
    with user_error(r"\(ConnectionError.*; give a file in the original"):
        CBT.read(None, None, BYTES, 64)


def test_published_values_are_those_of_a_benchmark_and_protocol():
    assert PUBLISHED["hellaswag", "lm-eval", "acc_norm"].by_model_type["gpt2-xl"] == 0.5089
    for task, protocol, _ in PUBLISHED.keys() - {("val", "FineWeb-Edu", "loss")}:
        assert protocol in BENCHMARKS[task].protocols


# for each kind of row: the task, a sound row, its required fields, and the label with its choices
ENDINGS = ["a", "b", "c"]
CORE_ROWS = {
    "multiple_choice": {"query": "q", "choices": ENDINGS, "gold": 0},
    "schema": {"context_options": ENDINGS, "continuation": "x", "gold": 0},
    "language_modeling": {"context": "q", "continuation": "x"},
}
TASKS = [
    (HELLASWAG, {"ctx": "q", "endings": ENDINGS, "label": 0}),
    (LAMBADA, {"text": "a b"}),
    *((FewShotTask("mine", kind, 1, " "), row) for kind, row in CORE_ROWS.items()),
]


@pytest.mark.parametrize("task, sound", TASKS, ids=lambda x: getattr(x, "type", None))
def test_an_item_that_lacks_a_field_or_a_right_choice_is_refused_and_no_other(
    tmp_path, task, sound
):
    rng = random.Random(0)
    for _ in range(60):
        field = rng.choice(list(sound))
        value = rng.choice([None, 1.0, {}, "text", ["x"], *range(-5, 6)])
        row = sound | {field: value}
        is_sound = type(value) is type(sound[field])
        if field in ("gold", "label"):
            is_sound = is_sound and 0 <= value < len(ENDINGS)
        if rng.random() < 0.2:
            del row[field]
            is_sound = False
        path = write_rows(tmp_path / "rows.jsonl", [sound, row, sound])
        if is_sound:
            assert len(task.read(path, None, BYTES, 64)) == 3
        else:
            with user_error("cannot use .*rows.jsonl"):
                task.read(path, None, BYTES, 64)
