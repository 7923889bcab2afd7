"""The base class of every error that a user can correct."""

from difflib import get_close_matches


class UserError(ValueError):
    """Mistake of the user, or of a file or machine; scripts print its sentence and exit 2."""


def did_you_mean(name: str, known: list[str]) -> str:
    """Return "; did you mean X?" for the known name that is most like `name`, "" if none is."""
    near = get_close_matches(name, known, 1)
    return f"; did you mean {near[0]}?" if near else ""
