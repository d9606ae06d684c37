"""The exceptions that are meant for a person."""

from distap.exits import FAILED, MISTAKE


class DistapError(Exception):
    """Something the user can mend: the text says what was wrong, where, what was expected and what to do.

    The commands print it without a traceback and exit with `status`.
    """

    status = MISTAKE


class CollectiveError(DistapError):
    """The ranks can no longer work together: one is lost, hangs or never came, or the network is broken.

    Nobody's mistake, so starting again may help.
    """

    status = FAILED
