"""The base class of every error that a user can mend."""


class UserError(ValueError):
    """A mistake of the user, or of a file or machine: scripts print its one sentence and exit 2."""
