"""Rewrite a run's page at an interval while the run trains."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from distap.checkpoint.lease import FILE, RENEW_SECONDS, STALE_RENEWALS
from distap.errors import DistapError
from distap.telemetry.terminal import print_warning, tell


def follow_runs(folders: Sequence[Path], seconds: float, write: Callable[[], Path]) -> None:
    """Call `write` at an interval until no run in `folders` trains, or until Ctrl-C."""
    told = False
    with suppress(KeyboardInterrupt):
        while any(is_training(folder) for folder in folders):
            try:
                page = write()
                if not told:  # once is enough
                    tell(f"{page}: written every {seconds:g} s until the training ends; Ctrl-C ends this earlier")
                told = True
            except DistapError as error:  # its training may not have written its first line, or goes on just now
                print_warning(f"{error}; trying again in {seconds:g} s")
            time.sleep(seconds)


def is_training(folder: Path) -> bool:
    """Tell whether a training holds the lease of a run folder: a training renews it, and removes it at its end."""
    try:
        age = time.time() - (folder / FILE).stat().st_mtime
    except FileNotFoundError:
        return False
    return age < STALE_RENEWALS * RENEW_SECONDS
