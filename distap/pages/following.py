"""Rewrite a run's page at an interval while the run trains."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from distap.checkpoint.lease import FILE, RENEW_SECONDS, STALE_RENEWALS
from distap.errors import DistapError
from distap.telemetry.terminal import print_warning


def follow_run(folder: Path, seconds: float, write: Callable[[], Any]) -> None:
    """Call `write` at an interval until the run in `folder` no longer trains, or until Ctrl-C."""
    with suppress(KeyboardInterrupt):
        while is_training(folder):
            try:
                write()
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
