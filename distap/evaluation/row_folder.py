"""A folder of `distap extract`, whose rows are joined to images by name."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from distap.errors import DistapError
from distap.retrieval.descriptor_files import (
    EXTRACTION_FILE,
    DescriptorSet,
    Texts,
    read_descriptors,
    reading,
)
from distap.retrieval.row_blocks import given_rows
from distap.retrieval.truth import NONE
from distap.storage.names import Names
from distap.storage.texts import read_json

NAMED = 3  # images that a message names
AFTER_SHARD = ".tar:"  # in a name that `ImageSet.keys` qualifies by its shard


@dataclass(frozen=True, eq=False)
class RowFolder:
    """Rows of N images, such as descriptors by another network, each found by its name."""

    folder: Path
    where: str  # the folder as messages call it
    stored: DescriptorSet
    fingerprint: str = ""  # of the images that were described; "" if it is unknown

    @cached_property
    def _order(self) -> NDArray[np.int64]:
        return np.argsort(self.stored.keys)

    @cached_property
    def _names(self) -> Names:
        return Names(self.stored.keys.tolist())

    def rows_of(self, keys: Texts) -> NDArray[np.int64]:
        """Return (n,) the row of each image, by its name in any Unicode form; NONE without one."""
        rows = self._rows_of(keys)
        lacking = np.flatnonzero(rows == NONE)
        # Another form of a name is rare, and looking for it takes a loop in Python.
        missing: list[str] = keys[lacking].tolist()
        if not all(map(str.isascii, missing)):
            names = [self._names.known_as(name) for name in missing]
            rows[lacking] = self._rows_of(np.array(names, np.str_))
        return rows

    def _rows_of(self, keys: Texts) -> NDArray[np.int64]:
        stored = self.stored.keys
        places = np.searchsorted(stored, keys, sorter=self._order)
        rows: NDArray[np.int64] = self._order[np.minimum(places, len(stored) - 1)]
        return np.where(stored[rows] == keys, rows, NONE)

    def refuse_other_form(self, missing: Texts) -> None:
        """Raise a DistapError if images lack rows only since their shards are named, here or there.

        Which of several shards an image without its shard's name is of cannot be known.
        """
        stored = {*self.stored.keys.tolist()}
        without_shards = {name.partition(AFTER_SHARD)[2] for name in stored}
        names: list[str] = missing.tolist()
        alike = [
            name
            for name in names
            if name in without_shards or name.partition(AFTER_SHARD)[2] in stored
        ]
        if alike:
            raise DistapError(
                "descriptors.other_names",
                f"{self.where}: it was extracted from other shards: either there or in this data"
                f" set alone, names such as {alike[0]} have their shard in front, since several"
                " shards use the same names: extract all images of this data set into a new folder",
            )

    def require(self, keys: Texts, name: str) -> NDArray[np.int64]:
        """Return (n,) the row of each image; raise a DistapError if one is missing.

        Args:
            keys: (n,) names of the images.
            name: name of their data set, for the message.
        """
        rows = self.rows_of(keys)
        missing: list[str] = keys[rows == NONE].tolist()
        if missing:
            self.refuse_other_form(keys[rows == NONE])
            reasons = self.stored.left_out
            examples = ", ".join(
                f"{key} ({reasons[key]})" if key in reasons else key for key in missing[:NAMED]
            )
            raise DistapError(
                "descriptors.missing_rows",
                f"{self.where}: has no rows of {len(missing):,} of the {len(keys):,} images of"
                f" {name}, such as {examples}: give the folder that `distap extract` wrote of these"
                " images, or leave the images out",
            )
        return rows

    def require_dimensions(self, expected: int) -> None:
        """Raise a DistapError if descriptors have other dimensions than the network's."""
        actual = self.stored.descriptors.shape[1]
        if actual != expected:
            raise DistapError(
                "descriptors.wrong_dimensions",
                f"{self.where}: descriptors of {actual} dimensions, but those of the network have"
                f" {expected}, so they cannot be compared",
            )


def open_row_folder(folder: Path, where: str = "") -> RowFolder:
    """Open a folder of `distap extract`, which messages call `where`, or by its path.

    Raises:
        DistapError: it is missing or damaged, or a name stands in it twice.
    """
    stored = read_descriptors(folder)
    where = where or str(folder)
    refuse_repeated_images(stored.keys, where)
    fingerprint = ""
    plan = folder / EXTRACTION_FILE
    if plan.exists():
        with reading(plan, "distap extract"):
            fingerprint = str(read_json(plan)["fingerprint"])
    return RowFolder(folder, where, stored, fingerprint)


def open_descriptors(folder: Path) -> RowFolder:
    """Open a folder of descriptors to compare with others, and read it once to check it.

    Raises:
        DistapError: see `open_row_folder`; or a descriptor is not finite or not of length 1.
    """
    if ":/" in str(folder) and not folder.exists():
        raise DistapError(
            "data.bad_source", f"{folder}: it is read from a disk: copy it from its URL to one"
        )
    rows = open_row_folder(folder)
    given_rows(rows.stored.descriptors, f"{folder}: descriptor")
    return rows


def refuse_repeated_images(names: Texts, where: str) -> None:
    """Raise a DistapError if the name of an image stands twice in `where`."""
    ascending = np.sort(names)
    repeated = np.unique(ascending[1:][ascending[1:] == ascending[:-1]])
    if len(repeated):
        raise DistapError(
            "descriptors.repeated_names",
            f"{where}: {len(repeated):,} names stand there more than once, such as"
            f" {', '.join(repeated[:NAMED].tolist())}, so rows cannot be joined to images by name:"
            " rename the images and extract again",
        )
