"""What a process of a training says with its exit status, and where a launcher reads each rank's.

| status | name     | meaning                                                            | start it again?          |
|--------|----------|--------------------------------------------------------------------|--------------------------|
| 0      | FINISHED | all steps are done                                                 | nothing is left to do    |
| 1      | FAILED   | a crash, a rank that was lost or hung, a broken network            | yes, a few times         |
| 2      | MISTAKE  | a DistapError: recipe, data or machine need a person               | no, it would fail again  |
| 75     | RESTART  | stopped on request, behind a checkpoint (EX_TEMPFAIL of sysexits)  | yes, as often as needed  |

torchrun's own status is 1 whatever its workers' are, so each rank also leaves its status in a file of the folder
that `distap.launcher` names in the environment.
"""

import os
from pathlib import Path

FINISHED = 0
FAILED = 1
MISTAKE = 2
RESTART = 75

FOLDER = "DISTAP_OUTCOMES"  # the environment variable that names the folder


def record_outcome(status: int) -> None:
    """Leave this rank's exit status for the launcher; without one, do nothing."""
    folder = os.environ.get(FOLDER)
    if folder is not None and "RANK" in os.environ:
        _write(Path(folder), os.environ["RANK"], status)


def recorded_outcomes(folder: Path) -> dict[int, int]:
    """The exit statuses that ranks have left, by rank."""
    return {int(file.name): int(file.read_text()) for file in folder.iterdir() if file.name.isdecimal()}


def _write(folder: Path, rank: str, status: int) -> None:
    """All at once, so that the launcher never reads half of it."""
    draft = folder / f"{rank}.draft"
    draft.write_text(str(status))
    draft.replace(folder / rank)
