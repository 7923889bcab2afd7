"""Random trees of files against the ledger: each text is in the shards, each other row is counted
under its file and reason, also by a run that was killed."""

import csv
import io
import json
import tempfile
from collections import Counter
from pathlib import Path
from unittest import mock

import pyarrow as pa
from conftest import user_error
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from test_fineweb_edu import digests, shard, texts_in
from test_source import COMPRESS

from data import sharder
from data.manifest import write_manifest

COUNTS = ("rows", "texts", "bytes", "skipped")
BAD = "a row that its format does not allow"
DEEP = "JSON of more brackets within each other than Python reads"
# texts, and what is none in one format or another: half of a pair, a byte that is not UTF-8, ...
CHARACTERS = st.sampled_from('ab \t\r\n",[{\0\ufeff\u2028ü\ud800\udc80')
# a whole pair is a character in JSON
TEXTS = st.text(CHARACTERS, max_size=5).filter(lambda text: "\ud800\udc80" not in text)
VALUES = st.one_of(TEXTS, st.sampled_from(["good", None, 7, True, ["x"], {"y": 1}, BAD, DEEP]))
FILES = st.tuples(
    st.sampled_from(["txt", "py", "json", "jsonl", "ndjson", "csv", "tsv", "parquet"]),
    st.sampled_from(sorted(COMPRESS)),
    st.lists(VALUES, max_size=8),
    st.sampled_from(["", "\n", "\r\n"]),  # between rows, or none
)


def fate(value, suffix):
    """Return the text that a value is, or the first word of its reason."""
    if value in (BAD, DEEP):
        return "not CSV" if suffix in ("csv", "tsv") else "not JSON"
    if not isinstance(value, str):
        return "without text"
    if not value.strip():
        return "empty"
    if "\udc80" in value or "\ud800" in value:
        return "not UTF-8, or half of a surrogate pair"
    return "with U+0000" if "\0" in value else (value,)


def as_json(value):
    if value == DEEP:
        return '{"text": "", "x": ' + "[" * 100_000 + "]" * 100_000 + "}"
    return "{bad" if value == BAD else json.dumps({"text": value})


def content_of(suffix, values, end):
    """Return the bytes of a file and the values that it has rows for."""
    if suffix in ("jsonl", "ndjson"):
        lines = [as_json(value) for value in values]
        return (end or "\n").join(["", *lines, ""]).encode(), values
    if suffix not in ("csv", "tsv"):
        values = [value for value in values if value != BAD]
    if suffix == "json":  # an array is one value
        values = [value for value in values if value != DEEP]
        rows = [{"text": value} for value in values]
        return json.dumps(rows, indent=1 if end else None).encode(), values
    values = [x for x in values if x is None or isinstance(x, str) and "\ud800" not in x]
    values = [value for value in values if value != DEEP]
    if suffix == "parquet":
        values = [x and x.encode(errors="surrogateescape") for x in values]
        column = pa.array(values, pa.binary())
        if end:  # nobody checks that strings are UTF-8
            validity, *buffers = column.buffers()
            column = pa.StringArray.from_buffers(len(column), *buffers, validity)
        parquet.write_table(pa.table({"text": column}), file := io.BytesIO())
        return file.getvalue(), [x and x.decode(errors="surrogateescape") for x in values]
    values = [value for value in values if value is not None]
    file = io.StringIO(newline="")
    if suffix in ("csv", "tsv"):
        delimiter = "," if suffix == "csv" else "\t"
        options = {"lineterminator": end or "\n", "quoting": csv.QUOTE_ALL}
        writer = csv.writer(file, delimiter=delimiter, **options)
        writer.writerow(["id", "text"])
        for value in values:
            if value == BAD:
                file.write(f'1{delimiter}"without an end' + (end or "\n"))
            else:
                writer.writerow([1, value])
    else:
        text = "".join(values).lstrip("\ufeff")
        values = [text] if text else []  # an empty file has no row
        file.write(text)
    return file.getvalue().encode(errors="surrogateescape"), values


@settings(max_examples=30, deadline=None)
@given(st.lists(FILES, min_size=1, max_size=5), st.integers(1, 6))
def test_every_row_is_in_the_shards_or_counted_under_its_file_and_reason(files, num_saves):
    with tempfile.TemporaryDirectory() as name, mock.patch("os.fsync"):  # hundreds of shards
        folder = Path(name)
        ledger, texts = {}, []
        for index, (suffix, compression, values, end) in enumerate(files):
            content, values = content_of(suffix, values, end)
            if suffix == "parquet":
                compression = ""
            path = folder / f"{index}.{suffix}{compression}"
            path.write_bytes(COMPRESS[compression](content))
            fates = [fate(value, suffix) for value in values]
            reasons = Counter(x for x in fates if isinstance(x, str))
            of_file = [x[0] for x in fates if isinstance(x, tuple)]
            num_bytes = len("".join(of_file).encode())
            ledger[str(path)] = (len(fates), len(of_file), num_bytes, reasons)
            texts += of_file
        options = {"val_fraction": 0, "shard_size": 7}
        if not texts:
            with user_error("holds no text$"):
                shard(list(ledger), folder / "whole", **options)
            return
        whole = shard(list(ledger), folder / "whole", **options)
        assert texts_in(folder / "whole", "train") == texts
        for path, entry in whole.ledger.items():
            counts = vars(entry) | {"skipped": Counter()}
            for reason, count in entry.skipped.items():
                counts["skipped"][reason.partition(" (")[0]] += count
            assert tuple(counts[key] for key in COUNTS) == ledger[path]
        assert list(whole.ledger) == list(ledger) and whole.documents == len(texts)

        saves = []

        def write_or_die(*args):
            saves.append(args)
            if len(saves) > num_saves:
                raise KeyboardInterrupt
            write_manifest(*args)

        with mock.patch.object(sharder, "write_manifest", write_or_die):
            try:
                shard(list(ledger), folder / "killed", **options)
            except KeyboardInterrupt:
                pass
        assert shard(list(ledger), folder / "killed", **options) == whole
        assert digests(folder / "killed") == digests(folder / "whole")
