"""Errors that are no bugs: UserError, which a user can correct, and Disconnected, after a failed
collective. utils/cli.py prints them and exits with code 2."""

import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(ValueError):
    """Mistake of the user, or a fault of a file or of the machine. Scripts print its text, which is
    one sentence, and exit with code 2."""


class Disconnected(BaseException):
    """A collective has failed on this process, which therefore ends.

    It is no Exception, so that code which catches errors and goes on cannot catch it: this process
    does not know whether the others are still in that collective, and would meet them in another.
    """


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error says that the host or a GPU has no memory left."""
    # Compare the text: PyTorch raises a plain RuntimeError for the host, and several classes of
    # errors for GPUs.
    pattern = "can't allocate memory|out of memory|MemoryError"
    return re.search(pattern, f"{type(error).__name__}: {error}") is not None


def check_text(text: str, subject: str) -> None:
    """Raise UserError, which calls the text `subject` ("the prompt"), if it is not valid UTF-8.

    Python turns a byte of an argument or of a pipe that is not valid UTF-8 into half of a surrogate
    pair. A text from JSON can hold such a half, too. No tokenizer or file can take it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # !r, because half of a surrogate pair cannot be printed: repr shows it as \udcff
        raise UserError(f"{subject} is not UTF-8 text: {text!r:.100}") from error


@contextmanager
def reading(path: Path | str, expected: str, verdict: str = "is damaged or not") -> Iterator[None]:
    """Return a context for the code that reads a file: it replaces any error about the content by a
    UserError, "PATH is damaged or not a checkpoint of this project: reason".
    `expected` is "a checkpoint of this project" here. `verdict` replaces "is damaged or not" where
    the file may be sound. A UserError whose text has the path already does not change.
    """
    try:
        yield
    except Exception as error:
        # These errors mean missing memory, permissions or packages, or a faulty disk, and not a
        # damaged file. An OSError without a number is a library's own, about the content.
        is_system_error = isinstance(error, OSError) and error.errno is not None
        if is_system_error or isinstance(error, ImportError) or is_out_of_memory(error):
            raise
        if isinstance(error, UserError):
            reason = str(error)  # a sentence already, for example from GPTConfig
            if str(path) in reason:
                raise
        else:
            reason = f"{type(error).__name__}: {error}"  # "KeyError: 'step'"
        reason = textwrap.shorten(reason, 300)  # at most 300 characters, on one line
        # "a.pt is damaged or not a checkpoint of this project: KeyError: 'step'"
        raise UserError(f"{path} {verdict} {expected}: {reason}") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Return a context for the code that writes a file: it replaces any error by a UserError, "PATH
    could not be written: reason". For a full disk Python raises OSError, torch RuntimeError."""
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        # On a full disk torch raises its own error after an OSError, which has the reason.
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
            cause = error.__context__
        # Only the first line, because torch adds its C++ stack. str(MemoryError()) is empty: then
        # the name of its class.
        reason = str(cause).partition("\n")[0] or type(cause).__name__
        raise UserError(f"{path} could not be written: {reason}") from error
