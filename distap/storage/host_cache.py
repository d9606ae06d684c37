"""This user's cache folder, shared by the processes of a host."""

import hashlib
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distap.storage.atomic import UnwritableError, locked, replacing
from distap.storage.locations import scheme_of


def short_digest(*parts: Any) -> str:
    """Hash values that JSON can hold to a short name."""
    return hashlib.sha256(json.dumps(parts).encode(errors="surrogateescape")).hexdigest()[:32]


def own_folder(kind: str, place: str) -> Path:
    """Return the folder for one `kind` of file about a `place` (path or URL); raise an UnwritableError on failure.

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


def kept_copy(place: str, version: Any, size: int, fetch: Callable[[Path], None]) -> Path:
    """Return this host's copy of a version of the file behind a URL, `size` bytes; the first that asks fetches it.

    Copies of other versions are removed. Hosts that share a home have copies of their own.

    Raises:
        UnwritableError: the copy cannot be written. Others are those of `fetch`.
    """
    path = own_folder("copies", place) / platform.node() / short_digest(version)
    try:
        with locked(path.parent, "writing", wait=True):
            if not path.exists() or path.stat().st_size != size:
                for old in path.parent.iterdir():
                    if old.name != "lock":
                        old.unlink()
                with replacing(path) as file:
                    fetch(Path(file.name))
                    if Path(file.name).stat().st_size != size:
                        raise UnwritableError(f"{place}: its copy breaks off before its {size:,} bytes")
    except OSError as error:
        raise UnwritableError(f"{path}: cannot be written: {error.strerror or error}") from error
    return path
