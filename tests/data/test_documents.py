"""Files as strangers have them: compressed, in other encodings, with other columns and names."""

import bz2
import gzip
import json
import lzma
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from conftest import documents, losses, script, train_args
from pyarrow import parquet

from data.documents import DocumentStream, read_documents
from data.shards import find_shards
from data.source import list_files
from utils.errors import UserError

TEXTS = ["One.\nTwo", "naïve café 中文 🙂", "three " * 50]
ROWS = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def zstd(data):
    return pa.Codec("zstd").compress(data, asbytes=True)


COMPRESS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd}


def shard(source, out, *extra, **options):
    args = ["--input", *(source if isinstance(source, list) else [source]), "--local_dir", out]
    return script("data/fineweb-edu.py", *args, "--tokenizer", "bytes", *extra, **options)


def texts_in(folder, split="train"):
    tokens = np.concatenate([s.open() for s in find_shards(folder, split)])
    starts = np.flatnonzero(tokens == 256)
    return [bytes(part[1:].astype(np.uint8)).decode() for part in np.split(tokens, starts[1:])]


def read(path, column="text"):
    return list(DocumentStream([str(path)], column))


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_files_are_read_as_what_they_hold(tmp_path, suffix):
    parts = [ROWS[:20], ROWS[20:]]  # as pigz, pbzip2 and zstd -T write
    path = tmp_path / f"B.JSONL.{suffix}"
    path.write_bytes(b"".join(COMPRESS[suffix](part) for part in parts))
    assert read(path) == TEXTS
    (tmp_path / f"a.txt.{suffix}").write_bytes(COMPRESS[suffix](b"plain\r\ntext"))
    shard(tmp_path, tmp_path / "out", "--val_fraction", 0)  # in a folder, too
    assert texts_in(tmp_path / "out") == [*TEXTS, "plain\ntext"]
    path.write_bytes(path.read_bytes()[:-9])
    done = shard(path, tmp_path / "cut", code=2)
    assert f"B.JSONL.{suffix} cannot be read" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_second_part_that_is_damaged_is_not_taken_for_the_end(tmp_path, suffix):
    path = tmp_path / f"a.jsonl.{suffix}"
    first, second = (COMPRESS[suffix](part) for part in (ROWS[:20], ROWS[20:]))
    for rest in (b"no stream", second[:-9], b"X" + second[1:], second + b"no stream"):
        path.write_bytes(first + rest)
        with pytest.raises(UserError, match=f"a.jsonl.{suffix} cannot be read"):
            read(path)
    if suffix == "xz":
        path.write_bytes(first + bytes(20_000) + second + bytes(4))  # the padding of xz
        assert read(path) == TEXTS
        path.write_bytes(first + bytes(3) + second)
        with pytest.raises(UserError, match="padding is not a multiple of four bytes"):
            read(path)


def test_csv_and_json_are_read_and_an_array_is_refused_with_the_command_that_helps(tmp_path):
    (tmp_path / "a.csv").write_text('id,body\n1,"two\nlines, ""quoted"""\n2,\n')
    (tmp_path / "b.TSV").write_text("body\tid\nfirst\t1\n")
    (tmp_path / "c.json").write_bytes(ROWS)
    assert read(tmp_path / "a.csv", "body") == ['two\nlines, "quoted"', ""]
    assert read(tmp_path / "b.TSV", "body") == ["first"]
    assert read(tmp_path / "c.json") == TEXTS
    with pytest.raises(UserError, match="no column 'text' but 'id', 'body'; choose one by --text"):
        read(tmp_path / "a.csv")
    (tmp_path / "d.json").write_text(json.dumps([{"text": "a"}]))
    with pytest.raises(UserError, match=r"one JSON array; .*jq -c '.\[\]' does"):
        read(tmp_path / "d.json")


@pytest.mark.parametrize("name", ["photo.jpg", "archive.zip", "book.tar.gz", "data", "x.pdf"])
def test_what_is_no_text_is_refused_by_name(tmp_path, name):
    content = b"\xff\xd8\xff\xe0\0\x10JFIF" + bytes(range(256)) * 20
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    done = shard(path, tmp_path / "out", code=2)
    assert f"{name} is neither text nor .parquet" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_folder_tells_what_it_leaves_out(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    for name in ("a.txt", "b.TXT", "1.jpg", "2.JPG", "x.pdf", "README"):
        (source / name).write_text(f"text of {name}")
    done = shard(source, tmp_path / "out", "--val_fraction", 0)
    assert texts_in(tmp_path / "out") == ["text of a.txt", "text of b.TXT"]
    assert "left out: 2 .jpg, 1 without a suffix, 1 .pdf" in done.stderr
    (source / "a.txt").unlink()
    (source / "b.TXT").unlink()
    done = shard(source, tmp_path / "none", code=2)
    assert "holds no .parquet" in done.stderr and "it holds 2 .jpg" in done.stderr
    shard(source / "README", tmp_path / "named", "--val_fraction", 0)
    assert texts_in(tmp_path / "named") == ["text of README"]


def test_names_are_names_and_no_patterns(tmp_path):
    folder = tmp_path / "my [texts] *?"
    folder.mkdir()
    (folder / "book [1].txt").write_text("in brackets")
    (folder / "b{a,b}?.jsonl").write_bytes(ROWS)
    parquet.write_table(pa.table({"text": ["rows"]}), folder / "c[0-9].parquet")
    shard(folder, tmp_path / "out", "--val_fraction", 0)
    assert texts_in(tmp_path / "out") == ["in brackets", *TEXTS, "rows"]
    shard(folder / "book [1].txt", tmp_path / "one", "--val_fraction", 0)
    assert texts_in(tmp_path / "one") == ["in brackets"]


def test_another_text_column_is_read_and_rows_without_it_are_named(tmp_path):
    rows = [{"content": "good"}, {"content": 7}, {"content": None}, {"text": "other"}, ["content"]]
    lines = [*map(json.dumps, rows), "{not json", "", '{"content": "last"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    table = pa.table({"id": [1, 2], "content": ["from parquet", None]})
    parquet.write_table(table, tmp_path / "b.parquet")
    args = ["--text_column", "content", "--val_fraction", 0]
    done = shard(tmp_path, tmp_path / "out", *args)
    assert texts_in(tmp_path / "out") == ["good", "last", "from parquet"]
    assert "skipped: 6 without text" in done.stdout
    first = "the first: line 2: 'content' is of type int"
    assert f"a.jsonl: 5 rows without text are skipped; {first}" in done.stderr
    assert "b.parquet: 1 rows without text are skipped; the first: row 2" in done.stderr
    done = shard(tmp_path / "b.parquet", tmp_path / "no", code=2)
    assert "b.parquet has no column 'text' but 'id', 'content'; choose one" in done.stderr
    done = shard(tmp_path / "a.jsonl", tmp_path / "no", "--text_column", "none", code=2)
    assert "a.jsonl holds no text; skipped: 7 without text" in done.stderr
    done = shard(tmp_path, tmp_path / "out", "--text_column", "id", "--val_fraction", 0, code=2)
    assert "text_column 'content', not 'id'" in done.stderr


def test_a_byte_order_mark_is_obeyed_and_what_cannot_be_decoded_is_counted(tmp_path, capsys):
    for name, encoding in (
        ("a", "utf-8-sig"),
        ("b", "utf-16"),
        ("c", "utf-32"),
        ("d", "utf-16-le"),
    ):
        mark = "\ufeff" if name == "d" else ""
        (tmp_path / f"{name}.txt").write_bytes((mark + "Käse\r\nfür").encode(encoding))
        assert read(tmp_path / f"{name}.txt") == ["Käse\nfür"]
        rows = mark + "".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in TEXTS)
        (tmp_path / f"{name}.jsonl").write_bytes(rows.encode(encoding))
        assert read(tmp_path / f"{name}.jsonl") == TEXTS
    assert capsys.readouterr().err == ""
    (tmp_path / "latin.txt").write_bytes("Käse für \ufffd alle".encode("utf-8"))
    assert read(tmp_path / "latin.txt") == ["Käse für \ufffd alle"]  # a U+FFFD that was there
    assert capsys.readouterr().err == ""
    (tmp_path / "latin.txt").write_bytes("Käse für alle".encode("latin-1"))
    assert read(tmp_path / "latin.txt") == ["K\ufffdse f\ufffdr alle"]
    assert "latin.txt is not UTF-8 throughout: U+FFFD replaced 2 characters" in (
        capsys.readouterr().err
    )
    (tmp_path / "cut.txt").write_bytes("Käse".encode("utf-16") + b"\0\xd8a\0")  # half a pair
    assert read(tmp_path / "cut.txt") == ["Käse\ufffda"]
    assert "cut.txt is not UTF-16 throughout: U+FFFD replaced 1 char" in capsys.readouterr().err
    (tmp_path / "image.txt").write_bytes(b"\x89PNG\0\0")
    assert read(tmp_path / "image.txt") == [None]
    assert "it is not text" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv", "txt"])
def test_reading_continues_at_any_document(tmp_path, kind):
    texts = documents()[:50]
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(f"\n{json.dumps({'text': text})}" for text in texts))
    elif kind == "parquet":
        parquet.write_table(pa.table({"text": texts}), path, row_group_size=7)
    elif kind == "csv":
        path.write_text("text\n" + "".join(f"{json.dumps(text)}\n" for text in texts))
        texts = [json.dumps(text)[1:-1] for text in texts]
    else:
        path.write_text("whole")
        texts = ["whole"]
    files = [str(path)] * 2
    for n in range(2 * len(texts) + 1):
        stream = DocumentStream(files, "text")
        before = [text for text, _ in zip(stream, range(n), strict=False)]
        rest = DocumentStream(files, "text")
        # the zip above reads one document more than it keeps
        rest.load_state_dict({"file": n // len(texts), "row": n % len(texts)})
        assert [*before[:n], *rest] == 2 * texts
    assert list(read_documents(str(path), "text", len(texts))) == []


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_one_text_file_is_enough_to_train_on(tmp_path, tokenizer):
    path, out = tmp_path / "book.txt", tmp_path / "out"
    path.write_text("\n\n".join(documents()))
    args = ["--input", path, "--local_dir", out, "--tokenizer", tokenizer]
    if tokenizer == "gpt2":
        from data.tokenizer import load_tokenizer

        try:
            load_tokenizer("gpt2")
        except UserError as error:
            pytest.skip(str(error))
    done = script("data/fineweb-edu.py", *args)
    assert "validation: the tail of the last text, as the hash of the texts left" in done.stdout
    train, val = ([s.open() for s in find_shards(out, split)] for split in ("train", "val"))
    train, val = np.concatenate(train), np.concatenate(val)
    assert len(val) - 1 == (len(train) + len(val) - 1) // 10
    assert train[0] == val[0] and train[0] not in train[1:]  # end of text, once before each
    if tokenizer == "bytes":
        whole = bytes(np.concatenate([train[1:], val[1:]]).astype(np.uint8)).decode()
        assert whole == path.read_text()
        script(*train_args(out, tmp_path / "run", 3))
        assert len(losses(tmp_path / "run")) == 3


def test_the_held_out_tail_does_not_depend_on_workers_kills_or_shard_size(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    for i in range(3):
        (source / f"{i}.txt").write_text("\n".join(documents()[i::3]))
    fraction = ["--val_fraction", 1e-9]

    def tokens(folder):
        return [np.concatenate([s.open() for s in find_shards(folder, s_)]).tolist()
                for s_ in ("train", "val")]  # fmt: skip

    shard(source, tmp_path / "a", *fraction, "--num_workers", 1)
    expected = tokens(tmp_path / "a")
    shard(source, tmp_path / "b", *fraction, "--num_workers", 4, "--shard_size", 1000)
    assert tokens(tmp_path / "b") == expected
    last = max(int(p.stem[6:]) for p in (tmp_path / "b").glob("train_*.npy"))
    for shards in (1, last - 1, last, last + 1):  # stopped, also within the tail, and continued
        out = tmp_path / str(shards)
        shard(source, out, *fraction, "--shard_size", 1000, "--max_shards", shards)
        shard(source, out, *fraction, "--shard_size", 1000)
        assert tokens(out) == expected


def test_skipped_documents_are_counted_once_by_a_run_that_was_stopped(tmp_path):
    rows = [{"text": t} for text in documents()[:40] for t in (text, None, " ")]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    args = ["--val_fraction", 0.2, "--shard_size", 1000]
    whole = shard(tmp_path / "a.jsonl", tmp_path / "whole", *args).stdout
    assert "40 documents" in whole and "skipped: 40 without text, 40 empty" in whole
    for shards in range(1, 9):
        done = shard(tmp_path / "a.jsonl", tmp_path / "out", *args, "--max_shards", shards)
    done = shard(tmp_path / "a.jsonl", tmp_path / "out", *args)
    assert "40 documents" in done.stdout and "skipped: 40 without text, 40 empty" in done.stdout


def test_no_text_at_all_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text(" \n")
    done = shard(tmp_path / "a.txt", tmp_path / "out", code=2)
    assert "a.txt holds no text; skipped: 1 empty" in done.stderr


def test_separators_of_csv_are_found_and_rows_of_another_width_are_counted(tmp_path, capsys):
    path = tmp_path / "a.csv"
    for header in ("text;date", "sep=;\ntext;date"):
        path.write_text(f'{header}\nTomorrow, rain;2\n"two; quoted";3\n')
        assert read(path) == ["Tomorrow, rain", "two; quoted"]
    path.write_text("id\ttext\n1\tone, two\n", encoding="utf-16")
    assert read(path) == ["one, two"] and capsys.readouterr().err == ""
    path.write_text("id,text\n1,Hello, my dear\n\n2,Yes\n3\n")
    assert read(path) == [None, "Yes", None]
    assert "2 rows without text are skipped; the first: line 2 has 3 fields, the header 2" in (
        capsys.readouterr().err
    )
    path.write_text("text,text\n1,2\n")
    with pytest.raises(UserError, match="has 2 columns 'text'"):
        read(path)
    path.write_text('text,who\n"Dear diary,me\n' + "Line,me\n" * 9)
    with pytest.raises(UserError, match="not valid CSV up to line 11"):
        read(path)


def test_a_stray_quote_that_joins_rows_of_a_tsv_is_told(tmp_path, capsys):
    path = tmp_path / "a.tsv"
    path.write_text('id\ttext\n1\t"said he\n2\tmiddle\n3\tbye"\n4\tlast\n')
    assert len(read(path)) == 2
    assert "rows whose quoted text holds tabs and line ends: 1" in capsys.readouterr().err
    path.write_text('id\ttext\n1\t"said\nhe"\n')
    assert read(path) == ["said\nhe"] and not capsys.readouterr().err


def test_folders_that_are_linked_to_are_read_once(tmp_path):
    books, usb = tmp_path / "books", tmp_path / "usb"
    books.mkdir()
    usb.mkdir()
    for folder in (books, usb):
        (folder / f"{folder.name}.txt").write_text(folder.name)
    (books / "linked").symlink_to(usb)
    (books / "again").symlink_to(usb)
    (usb / "back").symlink_to(books)
    (books / "gone.txt").symlink_to(tmp_path / "nothing")
    files, others = list_files((str(books), str(books / "books.txt")))
    assert [Path(name).name for name in files] == ["usb.txt", "books.txt"]
    assert [path.name for path in others] == ["gone.txt"]
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe is neither a file nor a folder"):
        list_files((str(tmp_path / "pipe"),))
    with pytest.raises(UserError, match="--input '' does not exist"):
        list_files(("",))


def test_a_single_text_is_divided_whatever_its_hash_says(tmp_path):
    for n in range(8):  # at 0.5, about half of these are hashed into validation
        path, out = tmp_path / f"{n}.txt", tmp_path / str(n)
        path.write_text(f"My diary number {n}. " + "I went to the shop. " * 200)
        done = shard(path, out, "--val_fraction", 0.5)
        train, val = (sum(s.tokens for s in find_shards(out, split)) for split in ("train", "val"))
        assert train == pytest.approx(val, abs=2), done.stdout
    done = shard(path, out, "--val_fraction", 0.5)
    assert "as the shards were there already" in done.stdout
    path.write_text(path.read_text().upper())  # of the same size
    done = shard(path, out, "--val_fraction", 0.5, code=2)
    assert "of files that are not those of --input" in done.stderr
    done = shard(tmp_path / "1.txt", out, "--val_fraction", 0.5, code=2)
    assert "this one has 1 fewer" in done.stderr and "1 more" in done.stderr


def test_few_documents_that_divide_badly_are_told(tmp_path):
    (tmp_path / "a.txt").write_text("A long text. " * 500)
    (tmp_path / "z.txt").write_text("ok")
    done = shard(tmp_path, tmp_path / "out")
    assert "only 2 validation tokens: name a longer text last in --input\n" in done.stderr


def test_the_validation_fraction_that_a_short_text_is_told_gives_enough(tmp_path):
    (tmp_path / "a.txt").write_text("A short text. " * 500)
    done = shard(tmp_path, tmp_path / "out")
    assert "only 701 validation tokens: give --val_fraction 0.15 or more, or name" in done.stderr
    done = shard(tmp_path, tmp_path / "more", "--val_fraction", 0.15)
    assert "validation tokens:" not in done.stderr


def test_a_folder_without_validation_shards_says_how_to_get_some(tmp_path):
    rows = "".join(json.dumps({"text": text}) + "\n" for text in documents()[:50])
    (tmp_path / "a.jsonl").write_text(rows)
    none = "warning: there are no validation shards, which train.py needs: "
    done = shard(tmp_path / "a.jsonl", tmp_path / "none", "--val_fraction", 0)
    assert f"{none}shard again with --val_fraction above 0\n" in done.stderr
    early = [tmp_path / "a.jsonl", tmp_path / "out", "--shard_size", 1000]
    done = shard(*early, "--max_shards", 1)
    assert f"{none}run the same command without --max_shards\n" in done.stderr
    for refused in (
        script(*train_args(tmp_path / "out", tmp_path / "run", 3), code=2),
        script("data/verify.py", "--data_dir", tmp_path / "out", code=2),
    ):
        assert "shard again with a larger --val_fraction or, where --max_shards" in refused.stderr
    assert "no validation shards" not in shard(*early).stderr


def test_shards_that_are_gone_or_cut_are_named(tmp_path):
    (tmp_path / "a.txt").write_text("Some text. " * 500)
    shard(tmp_path / "a.txt", tmp_path / "out")
    path = tmp_path / "out" / "train_000000.npy"
    path.write_bytes(path.read_bytes()[:2000])
    assert (
        "shard into an empty folder" in shard(tmp_path / "a.txt", tmp_path / "out", code=2).stderr
    )
    path.unlink()
    done = shard(tmp_path / "a.txt", tmp_path / "out", code=2)
    assert "train_000000.npy is missing or not as manifest.json says" in done.stderr
