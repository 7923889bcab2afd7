"""Rows of a .jsonl file for fine-tuning, checked for the fields that a method needs.

docs/FINETUNING.md describes the fields.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from utils.errors import UserError

ROLES = {"system": "System", "user": "User", "assistant": "Assistant"}


class Row(dict):
    """Fields of a line of a file; `where` names file and line."""

    def __init__(self, fields: dict, where: str) -> None:
        super().__init__(fields)
        self.where = where


def read_rows(path: Path, fields: Sequence[str]) -> list[Row]:
    """Return the rows of a .jsonl file; raise UserError naming file and line for one that is no
    object, or lacks a field of `fields` or has one of a wrong type."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeError as error:
        packed = path.suffix in (".gz", ".bz2", ".xz", ".zst")
        remedy = "unpack it" if packed else "save it as UTF-8"
        raise UserError(f"{path} is not UTF-8 text: {remedy}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{where}, is not JSON ({error}); give one object a line, as jq -c . writes them"
            ) from error
        if problem := find_problem(row, fields):
            raise UserError(f"{where}: {problem}")
        rows.append(Row(row, where))
    if not rows:
        raise UserError(f"{path} holds no rows; give one JSON object per line")
    return rows


def find_problem(row: object, fields: Sequence[str]) -> str | None:
    """Return what is wrong with a row, None if nothing is."""
    if type(row) is not dict:
        hint = "; of a list, jq -c .[] writes one a line" if type(row) is list else ""
        return f'expected a JSON object, as {{"prompt": ..., ...}}{hint}'
    if "messages" in row and "messages" in fields:
        if problem := find_problem_of_messages(row["messages"]):
            return f'"messages" {problem}'
        spoken = any(message["role"] == "assistant" for message in row["messages"])
        return None if spoken else '"messages" has no turn of the role "assistant" to learn'
    for name in fields:
        if name == "messages":
            continue
        if name not in row:
            found = ", ".join(map(str, row)) or "nothing"
            needed = " and ".join(f'"{field}"' for field in fields if field != "messages")
            either = '"messages", or ' if "messages" in fields else ""
            return f'there is no "{name}"; a row needs {either}{needed}, and this one has {found}'
        value = row[name]
        if name == "prompt" and type(value) is list:
            if problem := find_problem_of_messages(value):
                return f'"prompt" {problem}'
            if value[-1]["role"] == "assistant":
                return '"prompt" ends with a turn of the assistant; it must end before it'
        elif name == "answer" and type(value) in (int, float):
            continue
        elif problem := find_problem_of_text(value):
            return f'"{name}" {problem}'
    return None


def find_problem_of_messages(messages: object) -> str | None:
    """Return what is wrong with a list of messages, None if nothing is."""
    if type(messages) is not list or not messages:
        return 'must be a list of messages, as [{"role": "user", "content": "..."}]'
    for message in messages:
        if type(message) is not dict or message.get("role") not in ROLES:
            return f'holds a message whose "role" is none of {", ".join(ROLES)}'
        if problem := find_problem_of_text(message.get("content")):
            return f'holds a message whose "content" {problem}'
    return None


def find_problem_of_text(text: object) -> str | None:
    """Return what is wrong with a text, None if nothing is."""
    if type(text) is not str:
        return f"must be a text, not {type(text).__name__}"
    try:
        text.encode()
    except UnicodeError:
        return "holds a lone surrogate, which is no character"
    return None
