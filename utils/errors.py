"""The base class of every error that a user can correct."""


class UserError(ValueError):
    """Mistake of the user, or of a file or machine; scripts print its sentence and exit 2."""
