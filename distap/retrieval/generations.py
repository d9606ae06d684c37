"""Replace a folder's contents as a whole, while others read it.

FOLDER/current                    the name of the generation that readers open
FOLDER/generations/000003/...     a generation, complete before `current` names it
FOLDER/lock                       locked by the process that writes the next one

A writer that is killed leaves a generation that `current` does not name; the next one removes it.
"""

import fcntl
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from distap.errors import DistapError
from distap.retrieval.descriptor_files import ABOUT_FILE, reading
from distap.storage.atomic import make_folder, write_whole
from distap.storage.texts import read_text

CURRENT_FILE = "current"
GENERATIONS_FOLDER = "generations"
LOCK_FILE = "lock"
KEPT = 2  # generations, so that readers of the one before lose nothing
_NAME = re.compile(r"\d{6}")

T = TypeVar("T")


def current_generation(folder: Path) -> Path:
    """Return the folder of the generation that is current.

    Raises:
        DistapError: there is none.
    """
    if (folder / ABOUT_FILE).exists() and not (folder / CURRENT_FILE).exists():
        raise DistapError(
            "index.old_layout",
            f"{folder}: an earlier distap wrote this index, or it is no index: write it anew with"
            " `distap index DESCRIPTORS NEW-FOLDER`",
        )
    with reading(folder / CURRENT_FILE, "distap index"):
        name = read_text(folder / CURRENT_FILE, 100).strip()
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} names no generation")
    return folder / GENERATIONS_FOLDER / name


@contextmanager
def updating(folder: Path) -> Iterator[None]:
    """Lock a folder, which is made if missing, against other writers.

    Raises:
        DistapError: another process is writing the next generation.
    """
    # The file is never removed: a second writer could lock the removed one while a third locks a
    # new one of the same name, and both would write.
    try:
        make_folder(folder)
        lock = (folder / LOCK_FILE).open("ab")
    except OSError as error:
        raise DistapError(
            "descriptors.not_written", f"{folder}: cannot be written: {error}"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DistapError(
                "index.locked", f"{folder}: another update of this index is under way; wait for it"
            ) from error
        # The kernel drops the lock with the process, also one that is killed, so none is stale.
        yield


def write_generation(folder: Path, write: Callable[[Path], None], check: Callable[[Path], T]) -> T:
    """Write the next generation within `updating`, and return what `check` reads back.

    If either fails, the current generation stays.
    """
    generations = folder / GENERATIONS_FOLDER

    def number_of_current() -> int:
        return int(current_generation(folder).name) if (folder / CURRENT_FILE).exists() else 0

    number = number_of_current() + 1
    new = generations / f"{number:06d}"
    # The name is free, but for what a writer that was killed has left under it.
    shutil.rmtree(new, ignore_errors=True)
    try:
        make_folder(new)
        # The order makes a loss of power harmless: each file of the generation is on the disk, and
        # its record after them, before `current` can name it.
        write(new)
        # What was written is read back from the files, so a disk that lies is found out while the
        # old generation still answers.
        checked = check(new)
        write_whole(folder / CURRENT_FILE, f"{new.name}\n")
    except BaseException:
        # An interrupt, or a disk that cannot flush, may come just after the rename of `current`:
        # readers open the new generation by then, and removing it would leave them none.
        if number_of_current() != number:
            shutil.rmtree(new, ignore_errors=True)
        raise
    # A reader may have read the old name from `current` and not yet opened its files: so the
    # generation before stays. Of those before it, files that a reader has mapped stay on the disk
    # until it closes them.
    for path in sorted(generations.iterdir())[:-KEPT]:
        shutil.rmtree(path, ignore_errors=True)
    return checked
