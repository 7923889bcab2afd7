"""The base class of every error that a user can correct."""

import re
from difflib import get_close_matches

NO_MEMORY = "can't allocate memory|out of memory"  # messages of PyTorch


class UserError(ValueError):
    """Mistake of the user, or of a file or machine; scripts print its sentence and exit 2."""


def is_out_of_memory(error: Exception) -> bool:
    """Return whether a process or a GPU has no memory left."""
    return isinstance(error, MemoryError) or re.search(NO_MEMORY, str(error)) is not None


def is_of_machine(error: Exception) -> bool:
    """Return whether an error says nothing of the content of a file: memory, rights, a disk."""
    return isinstance(error, OSError) or is_out_of_memory(error)


def did_you_mean(name: str, known: list[str]) -> str:
    """Return "; did you mean X?" for the known name that is most like `name`, "" if none is."""
    near = get_close_matches(name, known, 1)
    return f"; did you mean {near[0]}?" if near else ""
