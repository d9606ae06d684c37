"""The life of a rank's process: the time of its start, its exit status, and its end when the launcher dies.

torchrun's own status is 1 whatever its workers' are, so each rank also writes its status (see `distap.errors`) to a
file in the folder that `distap.launcher` names in the environment.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from distap.errors import FAILED, MISTAKE, RESTART

# Environment variables of a launcher: the folder of exit statuses, its process id, and when it began to start ranks.
FOLDER, LAUNCHER, STARTED = "DISTAP_OUTCOMES", "DISTAP_LAUNCHER", "DISTAP_STARTED"
PR_SET_PDEATHSIG = 1  # of Linux's prctl


class Startup:
    """Seconds by phase, from the start of the launcher, or of this process if there is none.

    The phases are `launcher` (with the hosts finding each other), `imports`, `joining` (of the ranks), `data`,
    `network` (with its weights and engine), `checkpoint`, `evaluation`, and `first step`.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        started = process_started()
        launched = float(os.environ.get(STARTED, started))
        if launched < started:
            self.seconds["launcher"] = started - launched
        self._last = started

    def reached(self, phase: str) -> None:
        """End a phase: the seconds since the end of the one before belong to it."""
        now = time.time()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def summary(self, first_step: Mapping[str, float]) -> str:
        """Tell the phases, and the longest stages of the first step by their seconds."""
        phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in self.seconds.items())
        longest = sorted(first_step.items(), key=lambda stage: -stage[1])[:3]
        stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in longest)
        return f"the first step was done {sum(self.seconds.values()):.1f} s after the start: {phases} ({stages})"


def process_started() -> float:
    """Return when this process was started, in seconds since the epoch."""
    try:
        # Field 22 counts clock ticks since boot; the second one is the command, which may contain anything.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):  # not Linux
        return time.time() - time.process_time()
    return time.time() - age


def record_outcome(status: int, error: BaseException | None = None) -> None:
    """Write this rank's exit status and error where the launcher looks for them; without a launcher, do nothing."""
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
    """Read the exit statuses that ranks have written, by rank."""
    outcomes: dict[int, int] = {}
    with suppress(FileNotFoundError):  # also while those of an earlier round are removed
        for file in folder.iterdir():
            if file.name.isdecimal():
                outcomes[int(file.name)] = int(file.read_text())
    return outcomes


def status_of(outcomes: dict[int, int]) -> int:
    """Return the exit status of a host whose ranks did not all finish; a rank without an outcome crashed."""
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
