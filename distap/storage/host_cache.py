"""Folders in the cache of this user: what is worked out once is there for every process of the host."""

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from distap.storage.atomic import UnwritableError, locked, replacing_folder
from distap.storage.locations import scheme_of


def short_digest(*parts: Any) -> str:
    """Return a name for values that JSON can hold, unlike that of any others."""
    return hashlib.sha256(json.dumps(parts).encode(errors="surrogateescape")).hexdigest()[:32]


def own_folder(kind: str, place: str) -> Path:
    """Return the folder for one `kind` of file about a `place`, a path or URL, or raise an UnwritableError.

    What is in it is believed, so it has to be the user's, and may not come with the data.
    """
    remedy = "set XDG_CACHE_HOME to a folder of your own"
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    except RuntimeError as error:
        raise UnwritableError(f"this user has no home; {remedy}") from error
    folder = cache / "distap" / kind / short_digest(place if scheme_of(place) else str(Path(place).resolve()))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UnwritableError(f"{folder}: cannot be made: {error.strerror}; {remedy}") from error
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise UnwritableError(f"{folder}: somebody else's; {remedy}")
    return folder


def made_once(kind: str, place: str, version: Any, make: Callable[[Path], None]) -> Path:
    """Return the folder that `make` filled for a version of what is at a place, once for all processes of this host.

    Folders of its other versions are removed. Processes that have mapped their files keep them, as these are on the
    same host: hosts that share a home have folders of their own.

    Raises:
        UnwritableError: the folder cannot be written. Others are those of `make`.
    """
    home = own_folder(kind, place) / platform.node()
    folder = home / short_digest(version)
    if not folder.is_dir():
        with ExitStack() as locking:
            try:
                locking.enter_context(locked(home, "writing", wait=True))
            except OSError as error:
                raise UnwritableError(f"{home}: cannot be locked: {error.strerror}") from error
            if not folder.is_dir():
                for old in filter(Path.is_dir, list(home.iterdir())):
                    # Under another name first: a removal that is cut short leaves nothing that looks whole.
                    shutil.rmtree(old.rename(home / f".removed-{old.name}"), ignore_errors=True)
                with replacing_folder(folder) as new:
                    make(new)
    return folder
