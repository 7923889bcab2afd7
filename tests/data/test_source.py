"""Files as strangers have them: compressed, in other formats, with other columns and names."""

import bz2
import errno
import gzip
import json
import lzma
import os
import re
import shlex
import subprocess
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import gettempdir

import pyarrow as pa
import pytest
from conftest import documents, user_error
from pyarrow import parquet

from data import source
from data.manifest import SourceSettings
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


def open_source(*files, **settings):
    sizes = [file.stat().st_size for file in files]
    settings = SourceSettings(files=list(map(str, files)), sizes=sizes, **settings)
    return Source(settings, Path(gettempdir()))


def batches(*files, position=None):
    found = []
    try:
        for batch in open_source(*files).batches(position):
            found.append(batch)
    except UserError as error:  # at the end, where no row is a text
        if "holds no text" not in str(error):
            raise
    return found


def read(*files, **options):
    return [row for batch in batches(*files, **options) for row in batch.rows]


def test_every_compression_is_read_and_a_file_is_continued_at_any_batch(tmp_path):
    table = pa.table({"id": range(230), "text": TEXTS})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=70)
    for suffix, compress in COMPRESS.items():
        # two parts, as pigz, pbzip2 and zstd -T write; [1]* is a name, no pattern
        content = compress(objects(*TEXTS[:9]).encode()) + compress(objects(*TEXTS[9:]).encode())
        (tmp_path / f"b [1]*.JSONL{suffix}").write_bytes(content)
        (tmp_path / f"c{suffix}.txt{suffix}").write_bytes(compress("a\r\nnaïve book".encode()))
    files = sorted(tmp_path.iterdir())
    expected = [*TEXTS * 6, *["a\r\nnaïve book"] * 5]
    num_before = 0
    for batch in batches(*files):
        position = json.loads(json.dumps(asdict(batch.position)))
        assert read(*files, position=position) == expected[num_before:]
        num_before += len(batch.rows)
    assert num_before == len(expected)


def objects(*texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


NO_TEXT, EMPTY, NO_JSON = Skipped("without text"), Skipped("empty"), Skipped("not JSON")
WIDE, BAD = Skipped("wider than the header"), Skipped("not UTF-8, or half of a surrogate pair")


def test_lines_of_json_may_be_larger_than_memory():
    lines = iter(["1\n"] * 5)
    reader = source.read_json(lines)
    assert [next(reader), next(reader)] == [1, 1] and len(list(lines)) == 3


@pytest.mark.parametrize(
    "name, content, rows",
    [
        ("a.txt", "\ufeffKäse\r\n\rK\ufffdse\n", ["Käse\r\n\rK\ufffdse\n"]),
        ("a.txt", "\ufeff \n", [EMPTY]),
        ("a.txt", "\ufeff", []),
        (
            "a.csv",
            "id,text\n1,wide,2\n2,good\n3,\n5,fine,,\n6",
            [WIDE, "good", EMPTY, "fine", NO_TEXT],
        ),
        (
            "a.csv",
            'text\r\n"two\r\nlines, ""b"""\r\n\r\n5 " inch\r\n',
            ['two\r\nlines, "b"', '5 " inch'],
        ),
        ("a.TSV", f"text\tid\n{'a b ' * 100_000}\t1\n", ["a b " * 100_000]),
        ("a.jsonl", '{"body": "x"}\n{"title": "y"}\n', [None, None]),
        ("a.csv", 'text\n"never closed\n"1" more\n"b"\n', ["not CSV", "not CSV", "b"]),
        ("a.json", '["a", {"x": [1}, "b"]', [NO_JSON]),
        ("a.json", '[\n"a",\n{bad},\n"b"\n]', ["a", NO_JSON, "b"]),
        ("a.jsonl", '["a"]\n{"text": "b"}\n', [NO_TEXT, "b"]),
        ("a.ndjson", '\n{"id": [1], "text": "a"}\r\n\n"bare"\n5', ["a", "bare", NO_TEXT]),
        ("a.json", '{"text": "cut"\n{"text": "a"}\n{"text": "cut\n', [NO_JSON, "a", NO_JSON]),
        ("a.json", '{\n "text": "a"\n}', [NO_JSON] * 3),
        ("a.jsonl", '"word" of prose\n{"text": "a"} more\n"b"\n', [NO_JSON, NO_JSON, "b"]),
        ("a.jsonl", "9" * 5000 + '\n["a"]', [NO_JSON, NO_TEXT]),
        ("a.json", "\n[\n" + '{"text":\n"a"},\n' * 300 + "5]", [*["a"] * 300, NO_TEXT]),
        ("a.json", f'[\n{"[" * 9999},\n"b"\n]', [NO_JSON, "b"]),
        ("a.jpg", b"\xff\xd8\xff\xe0\0\x10JFIF", [BAD]),
        ("a.parquet", "PAR1 no parquet", ["Arrow"]),
        ("a.txt.gz", "no gzip", ["BadGzipFile: Not a gzipped file"]),
    ],
)
def test_a_row_is_its_text_or_the_reason_why_it_is_none(tmp_path, name, content, rows, capsys):
    """None stands for a missing column, a string for how a damaged file ends."""
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    found = read(tmp_path / name)
    assert len(set(found)) == len(set(rows))  # one reason for all rows without the column
    for row, expected in zip(found, rows, strict=True):
        if isinstance(row, Skipped) and not isinstance(expected, Skipped):
            assert (expected or "without a column 'text', but ") in row.reason
        else:
            assert row == expected
    named = f"{name} gave 0 texts in {len(rows)} rows" in capsys.readouterr().err
    assert named == (bool(found) and not any(isinstance(row, str) for row in found))


WINDOWS = "\u201cNa\xefve\u201d costs 5 \u20ac \u2013 \u201equoted\u201c in a text of Windows.\r\n"


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.txt.gz"])
@pytest.mark.parametrize(
    "encoding", ["cp1252", "latin1", "utf-16", "utf-16-le", "utf-16-be", "utf-32"]
)
def test_the_advice_of_a_file_that_is_not_utf8_makes_it_readable(tmp_path, capsys, name, encoding):
    text = WINDOWS if encoding != "latin1" else "Gr\xf6\xdfe und \xc4pfel\r\n"
    row = {"txt": text, "csv": f'text\n"{text}"\n'}.get(name.split(".")[1])
    row = row or json.dumps({"text": text}, ensure_ascii=False)
    content = row.encode(encoding)
    path, new = tmp_path / name, tmp_path / name.removesuffix(".gz").replace("a", "new")
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert not [row for row in read(path) if isinstance(row, str)]
    said = capsys.readouterr().err
    command = re.search(r"iconv -f (\S+) -t utf-8 OLD > NEW", said)
    assert command and "latin1" not in said
    old = tmp_path / "old"
    old.write_bytes(content)
    line = command[0].replace("OLD", str(old)).replace("NEW", str(new))
    subprocess.run(line, shell=True, check=True)
    assert read(new) == [text]
    assert not capsys.readouterr().err
    if encoding in ("cp1252", "latin1"):
        assert f"byte {content.index(max(content, key=lambda x: x > 127)) + 1} is 0x" in said


def test_a_bad_byte_in_a_utf8_text_is_named_and_replaced_where_that_is_asked_for(tmp_path, capsys):
    text = "naïve text, " * 30_000
    content = text.encode() + b"\x81 \xe2\x82 end"
    (tmp_path / "a.txt").write_bytes(content)
    values = pa.array([b"fine", content], pa.binary())
    _, *buffers = values.buffers()
    strings = pa.StringArray.from_buffers(2, *buffers)
    parquet.write_table(pa.table({"text": strings}), tmp_path / "b.parquet")
    files = sorted(tmp_path.iterdir())
    assert read(*files) == [BAD, "fine", BAD]
    said = capsys.readouterr().err
    assert f"its byte {len(text.encode()) + 1:,} is 0x81" in said and "--replace_bad_bytes" in said
    batches = open_source(*files, replace_bad_bytes=True).batches()
    expected = text + "\ufffd \ufffd end"
    assert [row for batch in batches for row in batch.rows] == [expected, "fine", expected]


@pytest.mark.parametrize("control", ["\x92", "\x80", "\x9f"])
def test_text_of_windows_that_was_read_as_latin1_gets_one_warning(tmp_path, capsys, control):
    (tmp_path / "a.txt").write_text(f"it{control}s\n" * 5)
    (tmp_path / "b.jsonl").write_text(objects("fine", f"na\xefve{control}") * 3)
    assert len(read(*sorted(tmp_path.iterdir()))) == 7
    said = capsys.readouterr().err
    assert said.count("warning") == 1 and f"such as U+{ord(control):04X} after 'it'" in said


@pytest.mark.parametrize(
    "separator, content, rows",
    [
        ("<|endoftext|>", "One\r\n<|endoftext|>\r\nTwo\n<|endoftext|>", ["One\r\n", "Two\n"]),
        ("[EOS]", "a[EOS]b[EOS]\n[EOS] ", ["a", "b", EMPTY]),
        ("%", "%\n50% %\n%\n%%\n%", ["50% %\n", "%%\n"]),
        ("* * *", "a\n* * *\n* * *\r\n* * *b", ["a\n", "* * *b"]),
        ("", "a\nb\n\n\nc", ["a\nb\n", "c"]),
        ("##", "a\n## \nb\n## \t\r\n## c\n##  ", ["a\n", "b\n", "## c\n"]),
        (r"\n\n", "a\nb\r\n\r\n\r\nc\n", ["a\nb", "c\n"]),
        (r"\r\n\r\n", "a\n\nb\r\n\r\n", ["a", "b"]),
        ("###", "none of it", ["none of it"]),
    ],
)
@pytest.mark.parametrize("piece", [1, 2, 5, 2**18])
def test_a_separator_cuts_a_text_file_wherever_its_pieces_end(
    tmp_path, monkeypatch, capsys, separator, content, rows, piece
):
    monkeypatch.setattr(source, "PIECE_CHARACTERS", piece)
    (tmp_path / "a.txt").write_bytes(content.encode())
    texts = open_source(tmp_path / "a.txt", separator=separator)
    assert [row for batch in texts.batches() for row in batch.rows] == rows
    assert ("no text file has --separator '###'" in capsys.readouterr().err) == (len(rows) == 1)


@pytest.mark.parametrize("mark", ["<|endoftext|>", "<|im_end|>", "=====", "[SEP]", "* * *"])
def test_a_mark_that_stands_on_many_lines_is_named_once_with_the_flag(tmp_path, capsys, mark):
    for name in ("a.txt", "b.txt"):
        line_break = "" if mark == "<|im_end|>" else " \r\n"
        (tmp_path / name).write_text(f"A story.{line_break}{mark}{line_break}" * 40)
    (tmp_path / "c.py").write_text("-----\n" * 40)
    for name in ("d.txt", "e.txt"):  # a line below each of a few titles
        (tmp_path / name).write_text("one\n-----\n* item\n" * 9)
    read(*(tmp_path / name for name in ("c.py", "d.txt", "e.txt")))
    assert capsys.readouterr().err == ""
    read(*sorted(tmp_path.iterdir()))
    said = capsys.readouterr().err
    assert f"note: {mark} occurs often in {tmp_path}/a.txt" in said
    assert f"--separator {shlex.quote(mark)}\n" in said and said.count("note") == 1


def test_a_dataset_is_read_as_files_are_and_a_missing_column_ends_the_run(tmp_path):
    (tmp_path / "a.jsonl").write_text(objects("one\r\n", None, "\ufefftwo", " "))
    dataset = open_source(dataset=str(tmp_path), remote_name="default")  # a folder, not the hub
    position = {"revision": "main"}
    (batch,) = dataset.batches(position)
    assert batch.rows == read(tmp_path / "a.jsonl")
    assert batch.rows == ["one\r\n", NO_TEXT, "\ufefftwo", EMPTY]
    dataset.settings.worker_index, dataset.settings.worker_count = 4, 5
    with user_error("has 1 files, none for worker 4 of 5"):
        next(dataset.batches(position))
    dataset.settings.worker_index = 0
    dataset.settings.text_column = "x"
    with user_error("is without a column 'x', but 'text'; name the column"):
        next(dataset.batches(position))


def test_a_folder_is_read_in_name_order_and_tells_what_it_leaves_out(tmp_path, capsys):
    names = ["a.txt", "b.py", "c.jsonl", "sub/a.TXT", "1.jpg", ".hidden/x.txt", "README", "2.jpg"]
    for name in [*names, "site-packages/x.py", "manifest.json", "sub/tokenizer.json"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    (tmp_path / "linked.txt").symlink_to(tmp_path / "README")
    (tmp_path / "books").symlink_to(tmp_path / "sub")
    read_names = ["a.txt", "b.py", "c.jsonl", "linked.txt", "sub/a.TXT"]
    assert list(list_files((str(tmp_path),))) == [str(tmp_path / name) for name in read_names]
    assert "left out: 2 .jpg, 1 link to a folder, 1 without a suffix;" in capsys.readouterr().err
    assert list_files((str(tmp_path / "README"),)) == {str(tmp_path / "README"): 14}
    (tmp_path / "empty").mkdir()
    with user_error("empty holds none of .parquet, .*, but nothing"):
        list_files((str(tmp_path / "empty"),))
    (tmp_path / "empty/a.png").touch()
    with user_error("but 1 .png; to read other files, name them one by one, such as .*/empty/[*]$"):
        list_files((str(tmp_path / "empty"),))


@pytest.mark.parametrize("names", ["a.csv b.CSV.gz", "a.tsv", "sub/a.json c.ndjson", "a.md b.md"])
def test_a_folder_without_the_usual_files_is_read_all_the_same(tmp_path, capsys, names):
    (tmp_path / "sub").mkdir()
    expected = [str(tmp_path / name) for name in names.split()]
    for name in [*expected, str(tmp_path / "x.png")]:
        open(name, "w").close()
    assert sorted(list_files((str(tmp_path),))) == sorted(expected)
    assert "left out: 1 .png;" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_a_file_is_read_up_to_its_damage_and_the_next_one_follows(tmp_path, suffix, capsys):
    content = COMPRESS[suffix](objects(*TEXTS).encode())
    (tmp_path / f"a.jsonl{suffix}").write_bytes(content[:-9])
    (tmp_path / "b.txt").write_text("good")
    *rows, damage, last = read(*sorted(tmp_path.iterdir()))
    assert rows in (TEXTS[: len(rows)], [*TEXTS[: len(rows) - 1], NO_JSON]) and last == "good"
    assert damage.reason.startswith("damaged from here on (")
    assert f"a.jsonl{suffix} gave " in capsys.readouterr().err


@pytest.mark.parametrize("rest", [b"\n", b"\0" * 12, b"more than 8 KB " * 999])
@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_bytes_after_the_end_of_a_compressed_file_cost_nothing_before(tmp_path, suffix, rest):
    for name, content in (("a.txt", "".join(TEXTS)), ("a.jsonl", objects(*TEXTS).strip())):
        path = tmp_path / f"{name}{suffix}"
        path.write_bytes(COMPRESS[suffix](content.encode()) + rest)
        rows = read(path)
        if isinstance(rows[-1], Skipped):  # Python's bz2 and lzma do not tell of all such bytes
            assert rows.pop().reason.startswith("damaged from here on (")
        assert rows == (TEXTS if name == "a.jsonl" else [content])


def test_a_folder_that_cannot_be_listed_or_a_broken_link_is_named(tmp_path, monkeypatch):
    (tmp_path / "b.txt").symlink_to("b.txt")
    with pytest.raises(OSError, match="Too many levels of symbolic links: .*b.txt"):
        list_files((str(tmp_path),))
    (tmp_path / "b.txt").unlink()

    def fail(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", fail)
    with pytest.raises(PermissionError, match="Permission denied: .*"):
        list_files((str(tmp_path),))


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output"), TypeError("Input/output")])
def test_only_an_error_of_the_format_is_damage(tmp_path, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setitem(source.READERS, ".jsonl", fail)
    (tmp_path / "a.jsonl").write_text("{}")
    with user_error("a.jsonl cannot be read .*Input/output"):
        read(tmp_path / "a.jsonl")
