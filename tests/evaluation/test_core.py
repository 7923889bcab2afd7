"""CORE's tasks: prompts, the tokens that count, and items right or wrong as in nanochat."""

import json
import zipfile
from functools import partial
from pathlib import Path

import harness_model
import pytest
from conftest import SHARED, read_rows, script, torchrun, train_args, user_error, write_rows

from data.tokenizer import load_tokenizer
from evaluation import core
from evaluation.benchmarks import BENCHMARKS
from evaluation.core import FewShotTask, FewShotTasks
from utils.errors import UserError
from utils.logger import read_metrics

BYTES = load_tokenizer("bytes")
ROWS = {
    "multiple_choice": {"query": "Q?", "choices": ["ab", "ac"], "gold": 1},
    "schema": {"context_options": ["Tom", "Ann Lee"], "continuation": "ran", "gold": 0},
    "language_modeling": {"context": "2+2= ", "continuation": "4"},
}
YAML = """icl_tasks:
- label: sums
  dataset_uri: mine/sums.jsonl
  icl_task_type: multiple_choice
- {label: words, dataset_uri: words.jsonl, icl_task_type: language_modeling, num_fewshot: [1]}
"""


def task(kind, num_shots=0, delimiter=" "):
    return FewShotTask("task", kind, num_shots, delimiter)


def texts(kind, **options):
    """The context and the counted text of each choice of the first of three equal rows."""
    this = task(kind, **options)
    item = this.items([ROWS[kind]] * 3, "nanochat")[0]
    continuations = this.continuations(item, BYTES, 64)
    assert all(continuation.context_ids[0] == BYTES.eot for continuation in continuations)
    return [(bytes(c.context_ids[1:]).decode(), bytes(c.ids).decode()) for c in continuations]


def test_the_tokens_that_differ_count_and_a_schemas_common_end():
    assert texts("multiple_choice") == [("Q? a", "b"), ("Q? a", "c")]
    assert texts("schema") == [("Tom", " ran"), ("Ann Lee", " ran")]
    assert texts("language_modeling") == [("2+2=", " 4")]


def test_of_a_schema_only_the_common_end_counts_also_where_one_ends_the_other():
    this = task("schema")
    row = {"context_options": ["", " and"], "continuation": "x", "gold": 0}
    [item] = this.items([row], "nanochat")
    assert [bytes(c.ids) for c in this.continuations(item, BYTES, 64)] == [b" x", b" x"]


def test_examples_with_their_answers_stand_before_a_question():
    shown = "Q?: ac\n\n" * 2 + "Q?: a"
    assert texts("multiple_choice", num_shots=2, delimiter=": ")[0] == (shown, "b")
    assert texts("schema", num_shots=1)[1] == ("Tom ran\n\nAnn Lee", " ran")
    assert texts("language_modeling", num_shots=1) == [("2+2= 4\n\n2+2=", " 4")]


def test_a_choice_that_begins_another_keeps_a_token_and_a_long_prompt_loses_its_start():
    this = task("multiple_choice")
    [item] = this.items([{"query": "Q", "choices": ["5", "5 m"], "gold": 0}], "nanochat")
    assert [bytes(c.ids) for c in this.continuations(item, BYTES, 64)] == [b"5", b"5 m"]
    short, long = this.continuations(item, BYTES, 4)  # ids in all, as in nanochat
    assert (bytes(short.context_ids[1:]), bytes(long.context_ids)) == (b"Q ", b" ")
    with pytest.raises(ValueError, match="a continuation has 3 tokens"):
        this.continuations(item, BYTES, 3)


@pytest.fixture
def bundle(tmp_path):
    """A user's own tasks: three lines for each, and no table of baselines."""
    folder = tmp_path / "mine"
    (folder / "eval_data" / "mine").mkdir(parents=True)
    (folder / "core.yaml").write_text(YAML)
    sums = [{"query": f"{n}+1=", "choices": [str(n), str(n + 1)], "gold": 1} for n in range(5)]
    words = [{"context": f"word {n}", "continuation": "x"} for n in range(4)]
    for path, rows in (("mine/sums.jsonl", sums), ("words.jsonl", words)):
        write_rows(folder / "eval_data" / path, rows)
    return folder


def test_own_tasks_are_scored_and_centered_by_guessing(bundle, trained, tmp_path):
    run = ("evaluate.py", "--checkpoint", trained, "--device", "cpu", "--tasks", bundle)
    text = script(*run, "--out", tmp_path / "1.json").stdout
    sums, words, mean = json.loads((tmp_path / "1.json").read_text())["results"]
    assert (sums["task"], sums["n"], words["protocol"]) == ("sums", 5, "1-shot")
    assert sums["centered"] == pytest.approx(2 * sums["value"] - 1)
    assert words["centered"] == words["value"] and (mean["task"], mean["n"]) == ("mine", 9)
    assert mean["value"] == pytest.approx((sums["centered"] + words["centered"]) / 2)
    assert "centered" in text and "GPT-3" not in text


def test_training_logs_the_mean_of_its_tasks(bundle, shards, tmp_path):
    flags = ("--core_every", 2, "--core_data", bundle)
    script(*train_args(shards, tmp_path / "run", 3, *flags))
    rows = read_metrics(tmp_path / "run")["core"]
    assert [row["step"] for row in rows] == [0, 2, 3]
    assert all(row["n"] == 9 and -1 <= row["centered"] <= 1 for row in rows)


def test_a_folder_that_cannot_be_scored_is_named(bundle):
    read = partial(FewShotTasks("mine").read, bundle, None, BYTES)
    words = bundle / "eval_data" / "words.jsonl"
    words.write_text('{"context": "alone"}\n')
    with user_error("words cannot use .*mine/eval_data/words.jsonl .AssertionError: 1 items"):
        read(64)
    words.write_text('{"context": "alone", "continuation": "a long word"}\n' * 2)
    with user_error("words cannot use .*a continuation has 12 tokens.*at most 11 fit"):
        read(12)
    (bundle / "core.yaml").unlink()
    with user_error("No such file.*; give a folder in the layout"):
        read(64)


def test_the_bundle_is_downloaded_once_and_whole(bundle, tmp_path, monkeypatch):
    archive = tmp_path / "bundle.zip"
    with zipfile.ZipFile(archive, "w") as zipped:
        for path in bundle.rglob("*"):
            zipped.write(path, Path("eval_bundle", path.relative_to(bundle)))
    monkeypatch.setattr(core, "BUNDLE_URL", archive.as_uri())
    monkeypatch.chdir(tmp_path)
    read = partial(BENCHMARKS["core"].read, None, tokenizer=BYTES, block_size=64)
    whole = archive.read_bytes()
    archive.write_bytes(whole[:-1])  # as after a connection that broke off
    with user_error("core cannot use .*not a zip file"):
        read(limit=None)
    archive.write_bytes(whole)
    tasks = read(limit=3)
    assert [(task.name, len(rows)) for task, rows in tasks] == [("sums", 3), ("words", 3)]
    archive.unlink()  # the folder is there now
    assert len(read(limit=None)[0][1]) == 5
    assert [path.name for path in Path("data").iterdir()] == ["eval_bundle"]


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data/core")
@pytest.mark.slow
@pytest.mark.parametrize("batch_size, processes", [(1, 1), (7, 2), (32, 1)])
def test_each_item_is_right_or_wrong_as_in_nanochat(tmp_path, batch_size, processes):
    """core_hits.json is what tests/record_core.py prints for tests/harness_model.py."""
    try:
        harness_model.write(tmp_path / "model")
    except UserError as error:
        pytest.skip(str(error))
    args = ["--model", tmp_path / "model", "--tasks", "core", "--data", SHARED / "data" / "core"]
    args += ["--device", "cpu", "--dtype", "float32", "--batch_size", batch_size]
    torchrun(processes, "evaluate.py", *args, "--dump", tmp_path / "dump.jsonl")
    hits = {}
    for row in read_rows(tmp_path / "dump.jsonl"):
        hits[row["task"]] = hits.get(row["task"], "") + str(int(row["correct"]))
    assert hits == json.loads(Path(__file__).with_name("core_hits.json").read_text())
