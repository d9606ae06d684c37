"""A rank's exit status, and the end of a rank when its launcher dies.

torchrun's own status is 1 whatever its workers' are, so each rank also writes its status (see `distap.errors`) to a
file in the folder that `distap.launcher` names in the environment.
"""

import ctypes
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from distap.errors import FAILED, MISTAKE, RESTART

# Environment variables of a launcher: the folder of exit statuses, its process id, and its job of several hosts.
FOLDER, LAUNCHER, JOB = "DISTAP_OUTCOMES", "DISTAP_LAUNCHER", "DISTAP_JOB"
PR_SET_PDEATHSIG = 1  # of Linux's prctl


def record_outcome(status: int, error: BaseException | None = None) -> None:
    """Write this rank's exit status and error for the launcher; without a launcher, do nothing."""
    folder = os.environ.get(FOLDER)
    # A full disk, or a folder that was tidied away, must not keep a rank from leaving.
    with suppress(OSError):
        if folder is not None and "RANK" in os.environ:
            Path(folder).mkdir(mode=0o700, exist_ok=True)  # temporary folders are tidied
            # All at once, so that the launcher never reads half of it.
            draft = Path(folder, f"{os.environ['RANK']}.draft")
            draft.write_text(str(status))
            draft.replace(draft.with_suffix(""))
        if error is not None and not isinstance(error, SystemExit) and "TORCHELASTIC_ERROR_FILE" in os.environ:
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler  # slow

            get_error_handler().record_exception(error)  # for torchrun's summary


def recorded_outcomes(folder: Path) -> dict[int, int]:
    """Read the exit statuses that ranks wrote, by rank."""
    outcomes: dict[int, int] = {}
    with suppress(FileNotFoundError):  # also while those of an earlier round are removed
        for file in folder.iterdir():
            if file.name.isdecimal():
                outcomes[int(file.name)] = int(file.read_text())
    return outcomes


def status_of(outcomes: dict[int, int]) -> int:
    """Return the exit status of a host with failed ranks; a rank without a record has crashed."""
    if MISTAKE in outcomes.values():
        return MISTAKE
    # One that was asked to stop and could not wait for the others has left them without it.
    return RESTART if RESTART in outcomes.values() else FAILED


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_launcher() -> None:
    """Ask the kernel to kill this process when its launcher dies."""
    die_with_parent()
    if sys.platform == "linux" and os.environ.get(LAUNCHER, str(os.getppid())) != str(os.getppid()):
        os._exit(FAILED)  # it has died already
