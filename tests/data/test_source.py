"""Files as strangers have them: compressed, in other formats, with other columns and names."""

import bz2
import gzip
import json
import lzma
import os
import re

import pyarrow as pa
import pytest
from conftest import documents, script
from pyarrow import parquet
from test_fineweb_edu import shard, texts_in

from data.source import Skipped, Source, list_files
from utils.errors import UserError

TEXTS = documents()[:230]
COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pa.Codec("zstd").compress(data, asbytes=True),
}


def source(*files, column="text"):
    return Source([str(file) for file in files], column=column)


def read(*files, position=None, **options):
    return [t for _, texts in source(*files, **options).batches(position) for t in texts]


def rows(texts=TEXTS):
    """JSON lines of which some have a field more."""
    extra = [{"text": text, **({"id": i} if i % 7 == 3 else {})} for i, text in enumerate(texts)]
    return "".join(json.dumps(row) + "\n" for row in extra).encode()


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Files of every format."""
    folder = tmp_path_factory.mktemp("mixed")
    table = pa.table({"id": range(230), "text": TEXTS})
    parquet.write_table(table, folder / "a.parquet", row_group_size=70)
    parquet.write_table(pa.table({"text": TEXTS[:99]}), folder / "b.parquet")
    for suffix, compress in COMPRESS.items():
        (folder / f"c.jsonl{suffix}").write_bytes(compress(rows()))
        (folder / f"d{suffix[1:]}.txt{suffix}").write_bytes(compress("a\r\nnaïve book".encode()))
    table = "".join(f'{i},"{text}"\n' for i, text in enumerate(TEXTS))
    (folder / "e.csv.gz").write_bytes(gzip.compress(f"id,text\n{table}".encode()))
    (folder / "f.json").write_text(json.dumps([{"text": text} for text in TEXTS]))
    return folder


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_files_are_read_as_what_they_hold(tmp_path, suffix):
    parts = [rows(TEXTS[:9]), rows(TEXTS[9:])]  # as pigz, pbzip2 and zstd -T write
    path = tmp_path / ("B.JSONL" + suffix if suffix else "B [1]*.JSONL")  # a name, no pattern
    path.write_bytes(b"".join(COMPRESS[suffix](part) for part in parts))
    assert read(path) == TEXTS
    if suffix:
        path.write_bytes(path.read_bytes()[:-9])
        with pytest.raises(UserError, match="JSONL.* is damaged or cannot be read"):
            read(path)


def test_every_format_gives_its_texts_and_is_continued_at_any_batch(mixed):
    files = sorted(mixed.iterdir())
    book = ["a\nnaïve book"]
    expected = [*TEXTS, *TEXTS[:99], *TEXTS * 5, *book * 5, *TEXTS, *TEXTS]
    assert read(*files) == expected
    batches, before = list(source(*files).batches(None)), 0
    assert len(batches) > 20
    for position, texts in batches:
        assert read(*files, position=json.loads(json.dumps(position))) == expected[before:]
        before += len(texts)


def test_rows_without_a_text_are_counted_and_a_missing_column_names_those_there(tmp_path):
    lines = ['{"content": "good"}', '{"content": 7}', '{"text": "x"}', "{not json", "[]", ""]
    lines += ['{"content": "\\ud800"}', '{"content": "\\ud800 \\udcff"}', '{"content": " "}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    table = pa.table({"id": [1, 2], "content": ["from parquet", None]})
    parquet.write_table(table, tmp_path / "b.parquet")
    (tmp_path / "c.csv").write_text('id,content\n1,"two\nlines, ""quoted"""\n2,NA\n')
    (tmp_path / "d.TSV").write_text("content\tid\nfirst\t1\n")
    args = ["--text_column", "content", "--val_fraction", 0]
    files = sorted(tmp_path.iterdir())
    done = shard(files, tmp_path / "out", *args)
    expected = ["good", "from parquet", 'two\nlines, "quoted"', "NA", "first"]
    assert texts_in(tmp_path / "out", "train") == expected
    assert "skipped: 5 without text, 1 not tokenizable, 1 not UTF-8" in done.stdout
    for path in files:
        names = "content, id" if path.suffix == ".TSV" else "content"
        message = f"{path.name} has no --text_column 'body', but .*{names}"
        with pytest.raises(UserError, match=message):
            read(path, column="body")


def test_text_is_utf8_with_or_without_a_mark_and_may_hold_the_replacement_character(tmp_path):
    path = tmp_path / "a.txt"
    for encoding, text in (("utf-8", "Käse"), ("utf-8-sig", "Käse"), ("utf-8", "K\ufffdse")):
        path.write_bytes(text.encode(encoding))
        assert read(path) == [text]


def test_texts_that_are_not_utf8_are_left_out_and_one_warning_a_file_names_the_encoding(
    tmp_path, capsys
):
    german, chinese = "Der Käse über größeren Straßen.", "我今天去北京看朋友，天气非常好。"
    latin, good = german.encode("latin-1"), "naïve".encode()
    contents = {
        "a.txt": chinese.encode("gbk"),
        "b.txt.gz": gzip.compress(latin),
        "c.csv": b"text\n%b\n%b\n%b\n" % (latin, good, latin),
        "d.jsonl": b'{"text": "%b"}\n{"text": "%b"}\n' % (latin, good),
        "e.jpg": b"\xff\xd8\xff\xe0\0\x10JFIF",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    bad = Skipped("not UTF-8")
    assert read(*sorted(tmp_path.iterdir())) == [bad, bad, bad, "naïve", bad, bad, "naïve", bad]
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 5 and "a.txt is not UTF-8: damaged, or gb18030" in warnings[0]
    for warning in warnings[1:4]:
        encoding = re.search(" or (.*); such", warning)[1]
        assert latin.decode(encoding) == german  # cp1250 and cp1252 are the same for German


VALUES = ["first", 7, "second", None, ["x"], {"y": 1}, True, "1", "null"]


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl", lambda rows: "\n".join(map(json.dumps, rows))),
        ("a.json", lambda rows: "\n".join(map(json.dumps, rows))),
        ("a.json", json.dumps),
        ("a.json", lambda rows: json.dumps(rows, indent=1)),
    ],
)
def test_a_value_that_is_no_text_changes_no_other_row_of_json(tmp_path, name, write):
    """The first and the last row have other fields than the others."""
    rows = [{"text": value, "id": 1} for value in VALUES] + [{"title": "none"}, {"text": "last"}]
    path = tmp_path / name
    path.write_text(write(rows * 60))
    expected = [*VALUES, None, "last"] * 60
    batches = list(source(path).batches(None))
    assert [value for _, texts in batches for value in texts] == expected
    position = json.loads(json.dumps(batches[3][0]))
    assert read(path, position=position) == expected[300:]


def test_a_dataset_of_json_lines_with_a_value_that_is_no_text_is_read_as_its_files_are(tmp_path):
    rows = [{"text": value} for value in ("first", 7, "second", None, ["x"])]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    dataset = Source(dataset=str(tmp_path), remote_name="default")  # a folder, as from the hub
    position = {"revision": "main", "stream": None}
    ((_, texts),) = dataset.batches(position)
    assert texts == ["first", 7, "second", None, ["x"]]


def test_a_json_of_texts_and_one_of_objects_are_read(tmp_path):
    (tmp_path / "a.json").write_text('["one", 2, "three"]')
    (tmp_path / "c.json").write_text('\n{"text": "five"}\n{"text": "six"}\n')
    assert read(*sorted(tmp_path.iterdir())) == ["one", 2, "three", "five", "six"]
    (tmp_path / "a.json").write_text('[{"text": "cut"},')
    with pytest.raises(UserError, match="a.json is damaged or cannot be read .JSONDecodeError"):
        read(tmp_path / "a.json")


@pytest.mark.parametrize("rows", [["1,good", "2,wide,3", "4,fine,,"], ["1,wide,2", "2,wide,3"]])
def test_a_row_of_csv_that_is_wider_than_the_header_is_no_text_and_shifts_none(tmp_path, rows):
    (tmp_path / "a.csv").write_text("\n".join(["id,text", *rows, "5,last", ""]))
    wide = Skipped("wider than the header")
    expected = [wide if "wide" in row else row.split(",")[1] for row in rows]
    assert read(tmp_path / "a.csv") == [*expected, "last"]


def test_csv_keeps_line_ends_and_long_cells_and_an_open_quote_is_an_error(tmp_path):
    long = "a\nb " * 100_000
    (tmp_path / "a.csv").write_text(f'id,text\n1,"{long}"\n\n2,5 " inch\n')
    assert read(tmp_path / "a.csv") == [long, '5 " inch']
    (tmp_path / "a.csv").write_text('id,text\n1,"never closed\n2,b\n')
    with pytest.raises(UserError, match="a.csv is damaged .* line 3: unexpected end of data"):
        read(tmp_path / "a.csv")


def test_a_folder_is_read_in_name_order_and_tells_what_it_leaves_out(tmp_path):
    folder = tmp_path / "in"
    names = ["a.txt", "b.py", "c.jsonl", "sub/a.TXT", "1.jpg", ".hidden/x.txt", "README", "2.jpg"]
    for name in [*names, "site-packages/x.py"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"text of {name}")
    (folder / "linked.txt").symlink_to(folder / "README")
    done = script("data/fineweb-edu.py", "--input", folder, "--local_dir", tmp_path / "out",
                  "--tokenizer", "bytes", "--val_fraction", 0)  # fmt: skip
    texts = [f"text of {name}" for name in ("a.txt", "b.py", "README", "sub/a.TXT")]
    assert texts_in(tmp_path / "out", "train") == texts  # c.jsonl is none
    assert "left out: 2 .jpg, 1 without a suffix;" in done.stderr
    assert list_files((str(folder / "README"),)) == {str(folder / "README"): 14}
    done = shard(folder / "nothing", tmp_path / "none", code=2)
    assert "nothing: No such file or directory" in done.stderr
    os.mkdir(folder / "empty")
    with pytest.raises(UserError, match=r"empty holds none of \('.parquet', .*, but nothing"):
        list_files((str(folder / "empty"),))


def test_a_damaged_file_among_others_is_named(tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.txt.gz").write_bytes(gzip.compress(b"some text")[: 99 if i != 1 else -9])
    with pytest.raises(UserError, match="1.txt.gz is damaged or cannot be read"):
        read(*sorted(tmp_path.iterdir()))
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no parquet")
    with pytest.raises(UserError, match="a.parquet is damaged or cannot be read"):
        read(tmp_path / "a.parquet")
