"""The exceptions that are meant for a person, and the exit statuses of every distap process.

| status | name     | meaning                                                            | start it again?          |
|--------|----------|--------------------------------------------------------------------|--------------------------|
| 0      | FINISHED | all steps are done                                                 | nothing is left to do    |
| 1      | FAILED   | a crash, a rank that was lost or hung, a broken network            | yes, a few times         |
| 2      | MISTAKE  | a DistapError: recipe, data or machine need a person               | no, it would fail again  |
| 75     | RESTART  | stopped on request, behind a checkpoint of what was done, if the   | yes, as often as needed  |
|        |          | grace time was long enough for one (EX_TEMPFAIL of sysexits)       |                          |
"""

FINISHED = 0
FAILED = 1
MISTAKE = 2
RESTART = 75
CAUSES = "too high a learning rate, or damaged weights"  # of numbers that are not finite, and of a collapse


class DistapError(Exception):
    """Something the user can mend: the text says what was wrong, where, what was expected and what to do.

    The commands print it without a traceback and exit with `status`.
    """

    status = MISTAKE
    is_on_all_ranks = False  # so that one rank of a host tells it


class CollectiveError(DistapError):
    """The ranks can no longer work together: one is lost, hangs or never came, or the network is broken.

    Nobody's mistake, so starting again may help.
    """

    status = FAILED
