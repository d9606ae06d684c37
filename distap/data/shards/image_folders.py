"""Walk through folders, and give a reason for leaving out each file that is no image."""

import os
import re
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from distap.data.images.formats import FORMAT_BY_SUFFIX, START_BYTES, format_of, missing_reader
from distap.errors import logger
from distap.storage.texts import as_line

_EXTENSION = re.compile(r"\.(?=[a-z0-9]{1,5}$)\d*[a-z]\w*")  # ".mp4", but not ".02" or ".jpg_large"


class Skipped(NamedTuple):
    """A file that was left out, and the reason."""

    name: str
    reason: str


def counted(left_out: Iterable[Skipped]) -> list[str]:
    """Return one line per reason: the number of files, the reason, and one file as an example."""
    groups = defaultdict[str, list[Skipped]](list)
    for skipped in left_out:
        groups[skipped.reason.partition(":")[0]].append(skipped)
    ordered = sorted(groups.values(), key=lambda group: (-len(group), group[0].reason))
    return [f"{len(group):,} {group[0].reason} ({as_line(group[0].name)})" for group in ordered]


@cache
def warn_of(source: str, left_out: tuple[Skipped, ...]) -> None:
    """Log one warning that counts the files left out of a source, by reason."""
    for line in counted(left_out):
        logger.warning("%s: left out: %s", source, line)


def walk_images(folder: Path) -> tuple[list[Path], list[Skipped]]:
    """Return the paths of all images below a folder, and its other files.

    Links to folders are followed; what they lead to is not listed a second time.
    """
    images = list[Path]()
    left_out = list[Skipped]()
    seen = set[str]()

    def unreadable(error: OSError) -> None:
        reason = f"folders that cannot be read: {error.strerror}"
        left_out.append(Skipped(str(error.filename), reason))

    tops = [str(folder)]
    for top in tops:  # grows by the links found, so that folders come before links to them
        for parent, folders, names in os.walk(top, onerror=unreadable):
            real = os.path.realpath(parent)
            if real in seen:
                folders.clear()
                left_out.append(Skipped(parent, "links to a folder that is listed already"))
                continue
            seen.add(real)
            folders.sort()
            tops += filter(os.path.islink, (os.path.join(parent, name) for name in folders))  # noqa: PTH118
            above = Path(parent).parts[len(folder.parts) :]
            is_hidden = any(name.startswith(".") for name in above)
            for path in (Path(parent, name) for name in sorted(names)):
                reason = _why_left_out(path, is_hidden)
                if reason:
                    left_out.append(Skipped(str(path), reason))
                else:
                    images.append(path)
    return images, left_out


def _why_left_out(path: Path, is_hidden: bool) -> str:
    """Return why a file is no readable image, judging by its name; "" for an image.

    A file without an extension is judged by its first bytes. `is_hidden` is true if a folder above
    the file is hidden.
    """
    suffix = path.suffix.lower()
    if path.name.startswith("._"):
        return "._ files of macOS, which hold no image"
    if is_hidden or path.name.startswith("."):
        return "hidden files"
    form = FORMAT_BY_SUFFIX.get(suffix)
    if form is None:
        if _EXTENSION.fullmatch(suffix):
            return f"{suffix}, no format of images that is read"
        try:
            if not path.is_file():
                return "links to nothing" if path.is_symlink() else "no regular files"
            with path.open("rb") as file:
                form = format_of(file.read(START_BYTES))
        except OSError as error:
            return f"files that cannot be read: {error.strerror}"
        if form is None:
            return "without an extension, and by their content no images"
        suffix = f"{form.name} without an extension"
    missing = missing_reader(form)
    return f"{suffix}, no reader: {missing}" if missing else ""
