"""What a converter says of a data set: its parts, and where its authors offer it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distap.data.shards.sources import ImageFile

GROUND_TRUTH_FILE = "ground_truth.json"  # beside the splits of a data set whose matches a list names


@dataclass(frozen=True)
class Count:
    """Images and classes that a complete list has; None where no publication says."""

    images: int | None = None
    classes: int | None = None

    def agrees(self, images: int, classes: int) -> bool:
        """Whether a list with these numbers may be the published one."""
        return self.images in (None, images) and self.classes in (None, classes)

    def __str__(self) -> str:
        parts = ((self.images, "images"), (self.classes, "classes"))
        return ", ".join(f"{number:,} {what}" for number, what in parts if number is not None)


@dataclass(frozen=True)
class Record:
    """A JSON file to write beside the shards, and what it holds, read from the source folder."""

    file: str
    contents: Callable[[Path], Any]


@dataclass(frozen=True)
class Split:
    """One part of a data set."""

    name: str  # folder of its shards
    images: Callable[[Path], Iterator[ImageFile]]  # all that its list names, whether they are there or not
    published: tuple[Count, ...] = ()  # more than one where the authors' paper and files differ
    on_request: bool = False  # converted only when it is named
    record: Record | None = None


@dataclass(frozen=True)
class Dataset:
    """A data set that can be converted."""

    title: str
    site: str  # where its authors offer it
    splits: tuple[Split, ...]
