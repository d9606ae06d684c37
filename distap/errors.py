"""The one exception that is meant for a person."""


class DistapError(Exception):
    """Something the user can mend: the text says what was wrong, where, what was expected and what to do.

    The commands print it without a traceback and exit with status 2.
    """
