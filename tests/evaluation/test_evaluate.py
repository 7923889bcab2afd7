"""evaluate.py as a whole command."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import harness_model
import pytest
import torch
from conftest import (
    ROOT,
    SHARED,
    environment,
    losses,
    read_rows,
    run_ranks,
    script,
    slow,
    torchrun,
    user_error,
    write_rows,
)
from record_harness import with_all_fields

import evaluate
from data.export_tokenizer import save_tokenizer
from data.tokenizer import load_tokenizer
from evaluation.table import openai_model_type
from evaluation.validation import Scorer
from model.config import GPTConfig
from model.formats.huggingface import load_pretrained, save_pretrained
from model.gpt import GPT
from utils.distributed import ALONE, Process
from utils.errors import UserError

CBT = """1 Tom had a dog .
2 The dog ran to Ann .
3 `` Where is the XXXXX ? '' said Ann .\tdog\t\tcat|dog|Ann
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder of a small model in Hugging Face's format, and of files of benchmarks."""
    folder = tmp_path_factory.mktemp("exported")
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=128, vocab_size=257, n_layer=2, n_head=2, n_embd=32))
    for p in model.parameters():
        p.data.normal_(0, 0.3)  # far from uniform
    save_pretrained(model, folder)
    save_tokenizer(load_tokenizer("bytes"), folder, 128)
    row = {"endings": ["a", "bb", "c c", "d"], "label": 0}
    write_rows(folder / "h.jsonl", [{"ctx": f"A dog number {i}", **row} for i in range(23)])
    write_rows(folder / "l.jsonl", [{"text": f"the cat {i} e"} for i in range(23)])
    (folder / "c.txt").write_text(CBT * 9)
    return folder


@pytest.fixture(scope="module")
def scored(exported, shards):
    """A command line of evaluate.py, its output on one process, and the folder of its files."""
    tasks = ["--tasks", "val", "hellaswag", "lambada", "cbt_cn", "--data_dir", shards]
    data = ["--data", exported / "h.jsonl", exported / "l.jsonl", exported / "c.txt"]
    args = ["evaluate.py", "--model", exported, *tasks, *data, "--val_tokens", 8192]
    args += ["--dtype", "float32"]
    out = ["--out", exported / "1.json", "--dump", exported / "1.jsonl"]
    return args, script(*args, *out).stdout, exported


def results(path):
    """Value by task, protocol and metric."""
    rows = json.loads(path.read_text(), parse_constant=pytest.fail)["results"]
    return {(r["task"], r["protocol"], r["metric"]): r["value"] for r in rows}


def lambada_logprobs(dump):
    return [row["logprob"] for row in read_rows(dump) if row["protocol"] == "last token"]


def test_a_table_and_a_dump_are_written_anew_each_time(scored, tmp_path):
    args, text, folder = scored
    # the rows lack what the harness's query needs: its values are not put beside theirs
    assert "lm-eval, ctx alone" in text and "0.2955 [1]" in text and "0.3114" not in text
    assert len((folder / "1.jsonl").read_text().splitlines()) == 5 * 23 + 9
    table, dump = tmp_path / "a.json", tmp_path / "a.jsonl"
    table.write_text("an older evaluation")
    dump.write_text("an older evaluation")
    out = ["--out", table, "--dump", dump]
    script(*args, *out, "--limit", 2)
    protocols = [protocol for task, protocol, _ in results(table) if task == "hellaswag"]
    assert protocols == [*["build-nanogpt"] * 2, *["lm-eval, ctx alone"] * 3]
    assert len(dump.read_text().splitlines()) == 6 * 2
    whole = lambada_logprobs(folder / "1.jsonl")  # the examples are spread over the file
    assert lambada_logprobs(dump) == pytest.approx([whole[0], whole[22]])


def test_batches_and_processes_change_no_metric(scored, tmp_path):
    args, _, folder = scored
    torchrun(2, *args, "--out", tmp_path / "2.json", "--batch_size", 7)
    one, two = results(folder / "1.json"), results(tmp_path / "2.json")
    assert len(one) == 3 + 5 + 4 + 1 and one == pytest.approx(two, rel=1e-5)
    accuracies = [key for key in one if key[2].startswith("acc")]
    assert [one[key] for key in accuracies] == [two[key] for key in accuracies]


def test_each_task_has_a_file_beside_the_checkpoint(trained, exported, tmp_path):
    """Of a checkpoint, "val" is the loss on the shards that it was trained on."""
    best = tmp_path / "run" / "checkpoints" / "model_best.pt"
    best.parent.mkdir(parents=True)
    shutil.copy(trained / "checkpoints" / "model_best.pt", best)
    sums = tmp_path / "sums.jsonl"
    sums.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    evaluate_run = ("evaluate.py", "--checkpoint", tmp_path / "run", "--tasks")
    script(*evaluate_run, "val", "--val_tokens", 4096, "--dtype", "float32", "--device", "cpu")
    val = json.loads((best.parent / "model_best_val.json").read_text())
    assert val["dtype"] == "float32" and val["results"][0]["n"] == 4096
    assert {row["metric"] for row in val["results"]} == {"loss", "perplexity", "bits_per_byte"}
    logged = min(losses(trained, "val").values())
    assert val["results"][0]["value"] == pytest.approx(logged, rel=1e-6)
    options = ["--data", exported / "c.txt", "--limit", 3, "--max_new_tokens", 8]
    script(*evaluate_run, "cbt_cn", sums, *options)
    names = {path.name for path in best.parent.glob("*.json")}
    assert names == {"model_best_val.json", "model_best_cbt_cn.json", "model_best_sums.json"}


def test_a_task_that_cannot_be_scored_is_named_and_the_others_are_kept(exported, tmp_path):
    long = write_rows(tmp_path / "long.jsonl", [{"text": "a " + "b" * 200}])
    args = ["--model", exported, "--tasks", "lambada", "hellaswag", "--limit", 2]
    args += ["--data", long, exported / "h.jsonl"]
    text = script(ROOT / "evaluate.py", *args, cwd=tmp_path, code=1).stdout
    written = tmp_path / "logs" / f"{exported.name}_hellaswag.json"
    assert {task for task, *_ in results(written)} == {"hellaswag"}
    failed = "^lambada could not be scored: .*long.jsonl .ValueError: a continuation has 201 tokens"
    # named at once, and in short at the end
    assert re.search(
        f"{failed}(.|\n)*wrote logs/{written.name}\nnot scored: lambada$", text.strip()
    )


@pytest.mark.parametrize(
    "collective, of_all, message",
    [
        ("merge", {1: "no such file"}, "no such file"),
        ("min", -7, "the machines have different data of"),  # the least is -7, the most 7
    ],
)
def test_data_that_another_process_cannot_open_or_that_differ_fail_on_all(
    monkeypatch, exported, shards, tmp_path, collective, of_all, message
):
    monkeypatch.setattr(Process, collective, lambda self, own: of_all)
    config = evaluate.EvalOptions(data_dir=(shards,))
    scorer = Scorer(load_pretrained(exported), ALONE, 1)
    questions = write_rows(tmp_path / "q.jsonl", [{"prompt": "1+1=", "answer": "2"}])
    for task, path in (("val", None), (questions, None), ("lambada", exported / "l.jsonl")):
        with user_error(message):
            evaluate.open_task(str(task), path, config, scorer, load_tokenizer("bytes"))


def test_an_error_of_one_process_is_named_and_nobody_waits(scored, tmp_path):
    """All go on past data that one of them cannot open, none past an error while it scores."""
    args, _, folder = scored
    (tmp_path / "bad.jsonl").write_text("{}\n")
    other = [tmp_path / "bad.jsonl" if arg == folder / "h.jsonl" else arg for arg in args]
    out = ["--limit", 20, "--batch_size", 1, "--out", tmp_path / "e.json"]
    ranks = run_ranks([[*args, *out], [*other, *out]], code=1)
    assert "hellaswag could not be scored: hellaswag cannot use" in ranks[0].stdout
    assert {task for task, *_ in results(tmp_path / "e.json")} == {"val", "lambada", "cbt_cn"}

    patched = tmp_path / "evaluate_with_a_fault.py"
    patched.write_text(
        "import os, evaluate\n"
        "from evaluation import scoring\n"
        "from utils.errors import UserError\n"
        "score_batch = scoring.score_batch\n"
        "def fail(scorer, banned_ids, packed_items):\n"
        "    if os.environ['RANK'] == '1' and packed_items[0].first_index == 3:\n"
        "        raise UserError('the disk is gone')\n"
        "    return score_batch(scorer, banned_ids, packed_items)\n"
        "scoring.score_batch = fail\n"
        "evaluate.start_script(evaluate.main, evaluate.EvalOptions)\n"
    )
    env = environment() | {"PYTHONPATH": str(ROOT)}
    ranks = torchrun(2, patched, *args[1:], *out, code=2, env=env)
    assert "another process has ended" in ranks[0].stderr
    assert ranks[1].stderr.endswith("error on rank 1: the disk is gone\n")


def test_a_path_wins_over_the_name_of_a_benchmark(monkeypatch, tmp_path):
    """A folder without tasks, in which the data of a benchmark may lie, is none."""
    monkeypatch.chdir(tmp_path)
    for folder in ("hellaswag", "core"):
        Path(folder).mkdir()
    for file in ("core/core.yaml", "lambada"):
        Path(file).touch()
    tasks = ("hellaswag", "lambada", "core")
    config = evaluate.EvalOptions(tasks=tasks, data=(Path("h.jsonl"),))
    data_paths = evaluate.check_options(config)

    monkeypatch.setattr(evaluate, "open_benchmark", lambda task, path, *_: (task.name, path))
    monkeypatch.setattr(evaluate, "open_questions", lambda path, *_: [path])
    scorer = SimpleNamespace(process=ALONE, model=SimpleNamespace(config=GPTConfig()))

    hellaswag, lambada, core = [
        evaluate.open_task(task, data_paths.get(task), config, scorer, None) for task in tasks
    ]
    assert hellaswag == ("hellaswag", config.data[0]) and core == ("core", Path("core"))
    assert lambada.args[:2] == ("lambada", [Path("lambada")])


def test_a_score_beyond_any_float_is_written(exported, shards, tmp_path):
    """Also of a text that is empty once WikiHow's marks are taken away."""
    model = load_pretrained(exported)
    model.transformer.ln_f.weight.data *= 1e4
    save_pretrained(model, tmp_path)
    shutil.copy(exported / "tokenizer.json", tmp_path)
    row = {"ctx": "A dog", "endings": ["a", "[title]", "c"], "label": 1}
    rows = write_rows(tmp_path / "h.jsonl", [row, row])
    out = tmp_path / "out.json"
    evaluate.main(
        evaluate.EvalOptions(
            model=str(tmp_path), tasks=("val", "hellaswag", "lambada"), data_dir=(shards,),
            data=(rows, exported / "l.jsonl"), val_tokens=512, out=out, device="cpu",
        )
    )  # fmt: skip
    found = results(out)
    assert found["val", shards.name, "loss"] > 1000
    assert found["val", shards.name, "perplexity"] is None
    assert found["hellaswag", "lm-eval, ctx alone", "acc_norm"] == 0


def test_a_table_is_printed_before_it_is_written(exported, capsys):
    out = exported / "h.jsonl" / "e.json"  # in a file: no folder can be made there
    config = evaluate.EvalOptions(model=str(exported), tasks=("lambada",), device="cpu", out=out)
    with pytest.raises(OSError):
        evaluate.main(replace(config, data=(exported / "l.jsonl",), limit=2))
    assert "last token" in capsys.readouterr().out


def test_a_model_of_gpt3_s_small_size_is_compared_with_gpt2():
    small = GPTConfig(n_layer=12, n_head=12, n_embd=768, block_size=2048)
    assert openai_model_type(small) == "gpt2"
    # GPT-2 has no such size: its smallest
    assert openai_model_type(replace(small, n_layer=24, n_embd=1536)) == "gpt2"


def test_bad_settings_are_sentences(trained, exported, tmp_path):
    shutil.copytree(exported, tmp_path / "nan")
    model = load_pretrained(exported)
    model.transformer.wte.weight.data[0] = torch.inf
    save_pretrained(model, tmp_path / "nan")
    of_nan = {"model": str(tmp_path / "nan"), "out": tmp_path / "e.json"}
    for options, message in (
        (
            {"tasks": ("hellaswagg",)},
            "no task hellaswagg; --tasks takes val, hellaswag, lambada, cbt_cn, cbt_ne, core, FILE",
        ),
        ({"tasks": ("a/q.jsonl", "b/q.jsonl")}, "two tasks have one name"),
        ({"out": trained / "checkpoints/model_last.pt"}, "--out .* must end in .json, and not"),
        ({"dump": trained / "checkpoints/model_last.pt"}, "--dump .* must end in .jsonl"),
        ({"dump": Path("answers.txt")}, "--dump answers.txt must end in .jsonl"),  # not yet there
        ({"dump": tmp_path / "l.jsonl", "data": (tmp_path / "x/../l.jsonl",)}, "not be a file of"),
        ({"data": (tmp_path / "none",)}, "lambada cannot use"),
        ({"data": (tmp_path, tmp_path)}, "2 files for 1 benchmarks"),
        ({"model": str(exported), "tasks": ("val",)}, "needs --data_dir"),
        ({**of_nan, "data": (exported / "l.jsonl",)}, "gives NaN or infinity"),
    ):
        config = evaluate.EvalOptions(trained / "checkpoints", tasks=("lambada",), device="cpu")
        with user_error(message):
            evaluate.main(replace(config, **options))
    assert not (tmp_path / "e.json").exists()


# what `python tests/record_harness.py` gave for tests/harness_model.py, lm_eval 0.4.13
HARNESS = {"acc": 0.222, "acc_norm": 0.286, "lambada acc": 0.001, "perplexity": 22325077.53}
# what evaluate.py, with these very values for all 1000 items, gives for 30 spread over them
SPREAD = {"acc": 10 / 30, "acc_norm": 10 / 30, "lambada acc": 0.0, "perplexity": 43203348.41}


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data/hellaswag_val_1000.jsonl")
@pytest.mark.parametrize("limit, expected", [(30, SPREAD), slow(1000, HARNESS)])
def test_metrics_are_those_of_lm_evaluation_harness(tmp_path, limit, expected):
    try:
        harness_model.write(tmp_path / "model")
    except UserError as error:
        pytest.skip(str(error))
    full = tmp_path / "full.jsonl"
    short = SHARED / "data" / "hellaswag_val_1000.jsonl"
    write_rows(full, [with_all_fields(row) for row in read_rows(short)])
    args = ["--tasks", "hellaswag", "lambada", "--data", full]
    args += [SHARED / "data" / "lambada_test_1000.jsonl", "--out", tmp_path / "e.json"]
    options = ["--limit", limit, "--device", "cpu", "--dtype", "float32"]
    script("evaluate.py", "--model", tmp_path / "model", *args, *options)
    found = results(tmp_path / "e.json")
    perplexity = found["lambada", "lm-eval", "perplexity"]
    assert perplexity == pytest.approx(expected["perplexity"], rel=1e-5)
    assert found["hellaswag", "lm-eval", "acc"] == expected["acc"]
    assert found["hellaswag", "lm-eval", "acc_norm"] == expected["acc_norm"]
    assert found["lambada", "lm-eval", "acc"] == expected["lambada acc"]


def test_without_tasks_the_loss_is_scored_where_the_run_has_its_shards(trained, tmp_path):
    best = trained / "checkpoints/model_best.pt"
    network = ("hellaswag", "lambada")
    options = evaluate.EvalOptions()
    assert evaluate.default_tasks(options, best) == ("val",)
    assert evaluate.default_tasks(replace(options, data=(tmp_path,)), best) == network
    assert evaluate.default_tasks(options, None) == network
    assert evaluate.default_tasks(replace(options, data_dir=(tmp_path,)), None) == ("val",)
    weighted = (Path(f"{tmp_path}:0.7"), Path("gone:0.3"))
    assert evaluate.default_tasks(replace(options, data_dir=weighted), None) == ("val",)
    moved = tmp_path / "moved.pt"
    content = torch.load(best, weights_only=True)
    torch.save(content | {"config": content["config"] | {"data_dir": ["gone"]}}, moved)
    assert evaluate.default_tasks(options, moved) == network
