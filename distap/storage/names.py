"""Compare names of classes and files whatever their Unicode form: macOS decomposes `é`.

A file is read by the bytes of its name, so names are kept as they are and compared in one form,
NFC. Where two files differ in the form of their names alone, each is found by its own bytes only.
"""

import unicodedata
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def composed(name: str) -> str:
    """Return a name in the form in which names are compared."""
    return unicodedata.normalize("NFC", name)


class Names:
    """Names, each found by any form of it. There may be row numbers in place of names."""

    def __init__(self, names: Iterable[str | int]) -> None:
        self._names = {*names}
        by_form = defaultdict[str, list[str]](list)
        for name in self._names:
            if isinstance(name, str) and not name.isascii():
                by_form[composed(name)].append(name)
        self._of_form = {form: alike[0] for form, alike in by_form.items() if len(alike) == 1}

    def known_as(self, name: T) -> T | str:
        """Return the only one of these names that differs from `name` in its form, else `name`."""
        if name in self._names or not isinstance(name, str):
            return name
        return self._of_form.get(composed(name), name)


def as_on_disk(path: Path) -> Path:
    """Return `path`, or the same path in another form if only a file of that name exists."""
    if str(path).isascii() or path.exists():
        return path
    folder = as_on_disk(path.parent)
    try:
        names = _names_in(folder, folder.stat().st_mtime_ns)
    except OSError:
        return path
    return folder / names.known_as(path.name)


@lru_cache(maxsize=256)
def _names_in(folder: Path, changed: int) -> Names:
    # Once for all lines of a list, as long as the folder has not changed.
    return Names(entry.name for entry in folder.iterdir())
