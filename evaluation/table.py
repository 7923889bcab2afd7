"""The table of evaluate.py: as text, and as JSON in a file that gathers it from several calls."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from evaluation.metrics import Result
from evaluation.published import PUBLISHED
from utils.errors import UserError
from utils.files import atomic_write

IDENTITY = ("task", "protocol", "metric", "n", "weights", "dtype")  # of a figure


@contextmanager
def naming_write_errors(path: Path, flag: str) -> Iterator[None]:
    """Turn an OSError into a UserError that names the path and the option that changes it."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path} could not be written: {error.strerror}; give another {flag}"
        ) from error


def is_table(text: str) -> bool:
    """Return whether the text of a file is a table of results."""
    return all(type(row) is dict for row in json.loads(text)["results"])


def is_dump(text: str) -> bool:
    """Return whether the text of a file is a row per example."""
    return {"task", "index"} <= json.loads(text.partition("\n")[0]).keys()


def check_replaceable(path: Path, flag: str, is_ours: Callable[[str], bool]) -> None:
    """Raise UserError, before anything is scored, unless a file can be written and is new, empty
    or by its text one of this script's."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} could not be written: it is no file; give another {flag}")
    existed = path.exists()
    with naming_write_errors(path, flag):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+", encoding="utf-8", errors="replace") as file:
            file.seek(0)
            text = file.read()
        if not text:
            if not existed:
                path.unlink(missing_ok=True)  # another process may have been faster
            return
    with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        if is_ours(text):
            return
    raise UserError(f"{flag} {path} exists and was not written by evaluate.py; give another file")


def table_rows(results: list[Result], origin: dict, size: str) -> list[dict]:
    """Return results as rows of the table, with the figures published for a size of OpenAI's GPT-2;
    `origin` says whose they are: model, dtype, weights."""
    rows = []
    for r in results:
        published = PUBLISHED.get((r.task, r.protocol, r.metric, size))
        rows.append(asdict(r) | {"published": published, "published_size": size} | origin)
    return rows


def format_table(rows: list[dict], size: str) -> str:
    """Format the rows of the JSON file as an aligned table with footnotes."""
    lines = [["task", "protocol", "metric", "n", "value", "", f"OpenAI's {size}"]]
    marks: dict[str, str] = {}  # by source
    for row in rows:
        stderr, theirs = "" if row["stderr"] is None else f"± {row['stderr']:.4f}", ""
        if row["published"]:
            value, source = row["published"]
            theirs = f"{value:.4f} {marks.setdefault(source, f'[{len(marks) + 1}]')}"
        numbers = [f"{row['n']:,}", f"{row['value']:.4f}", stderr, theirs]
        lines.append([row["task"], row["protocol"], row["metric"], *numbers])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    form = "  ".join(f"{{:{'>' if i in (3, 4) else '<'}{w}}}" for i, w in enumerate(widths))
    notes = [f"{mark} {source}" for source, mark in marks.items()]
    return "\n".join([form.format(*line).rstrip() for line in lines] + notes)


def write_table(path: Path, rows: list[dict], origin: dict) -> None:
    """Add rows to a JSON file, where they replace those of equal IDENTITY."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    earlier = json.loads(text)["results"] if text else []
    new = [[row[name] for name in IDENTITY] for row in rows]
    kept = [row for row in earlier if [row.get(name) for name in IDENTITY] not in new]
    with naming_write_errors(path, "--out"), atomic_write(path) as file:
        file.write(json.dumps({**origin, "results": kept + rows}, indent=1).encode())


def write_dump(path: Path, examples: list[dict]) -> None:
    """Write a line of JSON for each example."""
    with naming_write_errors(path, "--dump"), atomic_write(path) as file:
        file.writelines(f"{json.dumps(example)}\n".encode() for example in examples)
