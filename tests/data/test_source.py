"""Files as strangers have them: compressed, in other formats, with other columns and names."""

import bz2
import gzip
import json
import lzma
import re
from functools import partial

import pyarrow as pa
import pytest
from conftest import documents
from pyarrow import parquet
from test_fineweb_edu import shard, texts_in

from data.source import Skipped, Source, list_files
from utils.errors import UserError

TEXTS = documents()[:230]
COMPRESS = {
    "": bytes,
    ".gz": partial(gzip.compress, mtime=0),  # the time would be in the names of tests
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pa.Codec("zstd").compress(data, asbytes=True),
}


def batches(*files, position=None, column="text"):
    return list(Source([str(file) for file in files], column=column).batches(position))


def read(*files, **options):
    return [row for batch in batches(*files, **options) for row in batch.rows]


def test_every_format_gives_its_texts_and_is_continued_at_any_batch(tmp_path):
    table = pa.table({"id": range(230), "text": TEXTS})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=70)
    (tmp_path / "b.json").write_text(json.dumps([{"text": text} for text in TEXTS]))
    lines = "".join(f'{i},"{text}"\n' for i, text in enumerate(TEXTS))
    (tmp_path / "c.csv.gz").write_bytes(gzip.compress(f"id,text\n{lines}".encode()))
    rows = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    for suffix, compress in COMPRESS.items():
        (tmp_path / f"d{suffix}.txt{suffix}").write_bytes(compress("a\r\nnaïve book".encode()))
        # two parts, as pigz, pbzip2 and zstd -T write; [1]* is a name, no pattern
        content = compress("".join(rows[:9]).encode()) + compress("".join(rows[9:]).encode())
        (tmp_path / f"e [1]*.JSONL{suffix}").write_bytes(content)
    files = sorted(tmp_path.iterdir())
    expected = [*TEXTS * 3, *["a\nnaïve book"] * 5, *TEXTS * 5]
    assert read(*files) == expected
    num_before = 0
    for batch in batches(*files):
        position = json.loads(json.dumps(batch.position))
        assert read(*files, position=position) == expected[num_before:]
        num_before += len(batch.rows)


def test_rows_without_a_text_are_counted_and_a_missing_column_names_those_there(tmp_path, capsys):
    lines = ['{"content": "good"}', '{"content": 7}', '{"text": "x"}', "{not json", "[]", ""]
    lines += ['{"content": "\\ud800"}', '{"content": "\\ud800 \\udcff"}', '{"content": " "}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    table = pa.table({"id": [1, 2], "content": ["from parquet", None]})
    parquet.write_table(table, tmp_path / "b.parquet")
    (tmp_path / "c.csv").write_text('id,content\n1,"two\nlines, ""quoted"""\n2,NA\n')
    (tmp_path / "d.TSV").write_text("content\tid\nfirst\t1\n")
    files = sorted(tmp_path.iterdir())
    shard(files, tmp_path / "out", text_column="content", val_fraction=0)
    expected = ["good", "from parquet", 'two\nlines, "quoted"', "NA", "first"]
    assert texts_in(tmp_path / "out", "train") == expected
    counts = "skipped: 5 without text, 1 not tokenizable, 1 not UTF-8, 1 empty"
    assert counts in capsys.readouterr().out
    with pytest.raises(UserError, match="holds no text .* skipped: 2 without text"):
        shard(tmp_path / "b.parquet", tmp_path / "none", text_column="id")
    for path in files:
        with pytest.raises(UserError, match=f"{path.name} has no --text_column 'x', but .*content"):
            read(path, column="x")


@pytest.mark.parametrize("text", ["Käse", "\ufeffKäse", "K\ufffdse"])
def test_text_is_utf8_with_or_without_a_mark_and_may_hold_the_replacement_character(tmp_path, text):
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    assert read(tmp_path / "a.txt") == [text.removeprefix("\ufeff")]


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
        "f.txt": "UTF-16 without a mark".encode("utf-16-le"),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    bad = Skipped("not UTF-8")
    assert read(*sorted(tmp_path.iterdir())) == [
        bad,
        bad,
        bad,
        "naïve",
        bad,
        bad,
        "naïve",
        bad,
        bad,
    ]
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 6 and "a.txt is not UTF-8: damaged, or gb18030" in warnings[0]
    for warning in warnings[1:4]:
        encoding = re.search(" or (.*); such", warning)[1]
        assert latin.decode(encoding) == german


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl", lambda rows: "\n".join(map(json.dumps, rows))),
        ("a.json", lambda rows: "\n".join(["", *map(json.dumps, rows)])),
        ("a.json", json.dumps),
    ],
)
def test_a_value_that_is_no_text_changes_no_other_row_of_json(tmp_path, name, write):
    values = ["first", 7, "second", None, ["x"], {"y": 1}, True, "1", "null"]
    rows = [{"text": value, "id": 1} for value in values] + [{"title": "none"}, "bare", 5]
    (tmp_path / name).write_text(write(rows))
    assert read(tmp_path / name) == [*values, None, "bare", 5]


def test_a_value_that_is_no_text_changes_no_other_row_of_a_dataset(tmp_path):
    values = ["first", 7, "second", None, ["x"]]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": x}) for x in values))
    dataset = Source(dataset=str(tmp_path), remote_name="default")  # a folder, as from the hub
    (batch,) = dataset.batches({"revision": "main", "stream": None})
    assert batch.rows == values


def test_a_row_of_csv_that_is_wider_than_the_header_is_no_text_and_shifts_none(tmp_path):
    (tmp_path / "a.csv").write_text("id,text\n1,wide,2\n2,good\n3,wide,4\n5,fine,,\n6,last\n")
    wide = Skipped("wider than the header")
    assert read(tmp_path / "a.csv") == [wide, "good", wide, "fine", "last"]


def test_csv_keeps_line_ends_and_long_cells(tmp_path):
    long = "a\nb " * 100_000
    (tmp_path / "a.csv").write_text(f'id,text\n1,"{long}"\n\n2,5 " inch\n')
    assert read(tmp_path / "a.csv") == [long, '5 " inch']


def test_a_folder_is_read_in_name_order_and_tells_what_it_leaves_out(tmp_path, capsys):
    names = ["a.txt", "b.py", "c.jsonl", "sub/a.TXT", "1.jpg", ".hidden/x.txt", "README", "2.jpg"]
    for name in [*names, "site-packages/x.py"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    (tmp_path / "linked.txt").symlink_to(tmp_path / "README")
    read_names = ["a.txt", "b.py", "c.jsonl", "linked.txt", "sub/a.TXT"]
    assert list(list_files((str(tmp_path),))) == [str(tmp_path / name) for name in read_names]
    assert "left out: 2 .jpg, 1 without a suffix;" in capsys.readouterr().err
    assert list_files((str(tmp_path / "README"),)) == {str(tmp_path / "README"): 14}
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty holds none of \('.parquet', .*, but nothing"):
        list_files((str(tmp_path / "empty"),))


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.parquet", b"PAR1 no parquet", ""),
        ("a.json", b'[{"text": "cut"},', ".JSONDecodeError"),
        ("a.csv", b'id,text\n1,"never closed\n2,b\n', ".* line 3: unexpected end of data"),
        *((f"a.txt{x}", compress(b"some text")[:-9], "") for x, compress in COMPRESS.items() if x),
    ],
)
def test_a_damaged_file_among_others_is_named(tmp_path, name, content, reason):
    (tmp_path / "0.txt").write_text("good")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name} is damaged or cannot be read {reason}"):
        read(tmp_path / "0.txt", tmp_path / name)
