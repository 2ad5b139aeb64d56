"""The one error a user is meant to read."""


class OnPTQError(Exception):
    """Something the user can mend: it says what was wrong, where, what was expected, and the valid values."""
