"""Errors that a user can correct. utils/cli.py prints them and exits with code 2."""

import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(ValueError):
    """Mistake of the user, or a fault of a file or the machine; its text is one sentence, which
    scripts print before they exit with code 2."""


def is_out_of_memory(error: Exception) -> bool:
    """Return whether the host or a GPU has no memory left; PyTorch says so in several ways."""
    # PyTorch's host allocator raises a plain RuntimeError, CUDA raises errors of several classes
    messages = "can't allocate memory|out of memory|MemoryError"
    return re.search(messages, f"{type(error).__name__}: {error}") is not None


def check_text(text: str, name: str) -> None:
    """Raise UserError for a text that is not UTF-8. A byte that is none, of an argument or of a
    pipe, becomes half of a surrogate pair in Python, and JSON can hold one."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{name} is not UTF-8 text: {text!r:.100}") from error


@contextmanager
def reading(path: Path | str, kind: str) -> Iterator[None]:
    """Turn what Python, NumPy or torch raise for the content of a file into a UserError of one
    sentence: PATH is damaged or not KIND: reason. A UserError that names the path has its sentence
    already."""
    try:
        yield
    except Exception as error:
        # Missing memory, permissions or packages, or a faulty disk: the file is not damaged.
        if isinstance(error, OSError | ImportError) or is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {error}"  # "KeyError: 'step'"
        if isinstance(error, UserError):
            reason = str(error)  # already a sentence, for example from GPTConfig
            if str(path) in reason:
                raise
        reason = textwrap.shorten(reason, 300)  # at most 300 characters, on one line
        raise UserError(f"{path} is damaged or not {kind}: {reason}") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the body of a with statement raises into a UserError of one sentence: PATH could
    not be written: reason. A full disk is an OSError to Python and a RuntimeError to torch."""
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        # On a full disk torch raises its own error, after the OSError that has the reason.
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
            cause = error.__context__
        # only the first line, as torch adds its C++ stack; a MemoryError has no text
        reason = str(cause).partition("\n")[0] or type(cause).__name__
        raise UserError(f"{path} could not be written: {reason}") from error
