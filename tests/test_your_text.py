"""docs/YOUR_TEXT.md, each command as it is written, with fewer steps."""

import gzip
import re
import shlex

import pyarrow as pa
import pytest
from conftest import ROOT, documents, read_page, script, write_rows, write_texts
from pyarrow import parquet

from data.tokenizer import load_tokenizer
from model.config import GPTConfig
from model.formats.huggingface import save_pretrained
from model.gpt import GPT

SMALLER = {
    "--minutes": "0.2",
    "--max_steps": "3",
    "--eval_every": "2",
    "--total_batch_size": "1024",
}
# beside --minutes: what the user gives wins
TINY = ["--n_layer", "1", "--n_embd", "32", "--n_head", "1", "--max_steps", "3"]


def commands(title):
    """The commands of a section."""
    page = read_page("docs/YOUR_TEXT.md")
    return re.search(rf"\n## {title}\n.*?```sh\n(.*?)\n```", page, re.S)[1].splitlines()


@pytest.fixture
def home(tmp_path):
    """A folder of a user's files, in which the project's scripts are called as in its root."""
    home, texts = tmp_path, documents()
    (home / "book.txt").write_text("\n\n".join(texts[:200]))
    (home / "texts" / "old [1998]").mkdir(parents=True)
    (home / "texts" / "old [1998]" / "a.TXT").write_text(texts[0])
    write_rows(home / "texts" / "b.jsonl", [{"body": text} for text in texts[1:200]])
    (home / "texts" / "cover.jpg").write_bytes(b"\xff\xd8\xff\0")
    (home / "notes.csv").write_text("id,body\n1,a note\n2,another\n")
    parquet.write_table(pa.table({"review": texts[:300]}), home / "reviews.parquet")
    (home / "crawl").mkdir()
    for i in range(3):
        rows = write_texts(tmp_path / "rows.jsonl", texts[200 * i : 200 * (i + 1)])
        (home / "crawl" / f"{i}.jsonl.gz").write_bytes(gzip.compress(rows.read_bytes()))
    return home


def run(title, home):
    """Run the commands of a section in `home`; return what they print."""
    printed = []
    for command in commands(title):
        python, name, *args = shlex.split(command)
        assert python == "python"
        for flag, value in SMALLER.items():
            if flag in args:
                args[args.index(flag) + 1] = value
        if name == "sample.py":
            args += ["--max_new_tokens", "5"]
        if name in ("train.py", "evaluate.py", "sample.py"):
            args += ["--device", "cpu"]
        if "--minutes" in args:
            args += TINY
        done = script(ROOT / name, *args, cwd=home)
        printed.append(done.stdout + done.stderr)
    return printed


def test_one_book_then_scores_plot_export_and_other_files_beside_it(home):
    shards, _, text = run("One book", home)
    assert "validation: the ends of 10 spans of the last text" in shards and "The " in text
    scores, plot, _ = run("Score, plot, convert", home)
    assert "bits_per_byte" in scores and (home / "runs/book/loss.png").stat().st_size > 10_000
    assert (home / "runs/book/hf/config.json").exists()
    (sharded,) = run("A folder of mixed files", home)
    assert "left out: 1 .jpg" in sharded and "documents: 202" in sharded
    (sharded,) = run("A parquet file with another column", home)
    assert "documents: 300" in sharded
    sharded, nothing = run("A compressed crawl", home)
    assert "documents: 600" in sharded and "\nnothing to do" in nothing
    (verified,) = run("Several corpora", home)
    assert verified.count("tokens of bytes, intact") == 4
    _, shards, trained = run("Your own tokenizer", home)
    assert "tokenizer: tokenizer-" in shards and "the same run: python train.py" in trained


def test_fine_tuning(home):
    try:
        load_tokenizer("gpt2")
    except ValueError as error:
        pytest.skip(str(error))
    save_pretrained(GPT(GPTConfig(256, 50257, 2, 2, 16)), home / "gpt2")  # instead of the hub's
    _, trained, text = run("Fine-tune GPT-2", home)
    assert "3 steps of 1,024 tokens" in trained and "The " in text
