"""Descriptors that another network stored of a set's images, joined to them by name."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distap.data.joined import JoinedImages
from distap.data.loading.reader import ImageSet
from distap.errors import DistapError, logger
from distap.evaluation.row_folder import RowFolder
from distap.evaluation.upgrade import NEW_TO_OLD, OLD_TO_NEW, OLD_TO_OLD
from distap.retrieval.truth import NONE


def folders_of_sets(
    sets: Sequence[ImageSet], folders: Sequence[RowFolder]
) -> dict[ImageSet, RowFolder]:
    """Return the folder that has the images of each set; a set of which none has any is left out.

    A folder that was extracted from one of the sets, by the fingerprint of its index, is that set's
    alone; others are recognised by the names in them.

    Raises:
        DistapError: several folders may be a set's, or a name is in several sets of a folder.
    """
    fingerprints = {images.index.fingerprint for images in sets}
    recognised = dict[ImageSet, RowFolder]()
    for images in sets:
        candidates = [rows for rows in folders if rows.fingerprint == images.index.fingerprint]
        if not candidates:
            candidates = [
                rows
                for rows in folders
                if rows.fingerprint not in fingerprints and (rows.rows_of(images.keys) >= 0).any()
            ]
        if len(candidates) > 1:
            raise DistapError(
                "descriptors.ambiguous_rows",
                f"{images.name}: {candidates[0].where} and {candidates[1].where} both have"
                " images of these names: give one folder for each data set",
            )
        if candidates:
            recognised[images] = candidates[0]
    for (images, rows), (others, other_rows) in combinations(recognised.items(), 2):
        shared = list[str]()
        if rows is other_rows:
            shared = np.intersect1d(images.keys, others.keys).tolist()
        if shared:
            raise DistapError(
                "descriptors.ambiguous_rows",
                f"{rows.where}: {images.name} and {others.name} both have images of the names in"
                f" it, such as {shared[0]}: `distap extract` each of them, and give both folders",
            )
    return recognised


@dataclass(frozen=True, eq=False)
class JoinedRows:
    """Folders of another network's rows, joined with the images of an evaluation."""

    images: JoinedImages
    queries: tuple[ImageSet, ...]
    gallery: tuple[ImageSet, ...]  # empty if the queries are the gallery
    folders: tuple[RowFolder, ...]  # empty without another network
    has_boxes: bool  # whether queries are parts of images, which `distap extract` describes whole
    # old-to-old figures by images and refinement, which no training changes
    constant: dict[Any, dict[str, float]] = field(default_factory=dict)

    @cached_property
    def of_set(self) -> dict[ImageSet, RowFolder]:
        """Return the folder that has the images of each set.

        Raises:
            DistapError: see `folders_of_sets`; or the gallery, or some images of a set, lack rows;
                or several networks have described a folder.
        """
        for rows in self.folders:
            rows.stored.require_one_network("these are compared with rows of one network")
        stored = folders_of_sets(self.images.sets, self.folders)
        required = dict.fromkeys((*stored, *(self.gallery or self.queries)))
        for images in required if self.folders else ():
            rows = stored.get(images, self.folders[0])
            failed = np.isin(images.keys, [*rows.stored.left_out])
            rows.require(images.keys[~failed], images.name)
            if failed.any():
                first = str(images.keys[failed][0])
                logger.warning(
                    "left out of the evaluation: %d images of %s that %s left out, such as %s: %s",
                    failed.sum(),
                    images.name,
                    rows.where,
                    first,
                    rows.stored.left_out[first],
                )
        return stored

    @cached_property
    def directions(self) -> tuple[str, ...]:
        """Return the prefixes of the figures that can be computed."""
        if not self.of_set:
            return ()
        if self.has_boxes or any(images not in self.of_set for images in self.queries):
            return (NEW_TO_OLD,)
        return NEW_TO_OLD, OLD_TO_NEW, OLD_TO_OLD

    def require_dimensions(self, expected: int) -> None:
        """Raise a DistapError if descriptors have other dimensions than the network's."""
        for rows in self.folders:
            rows.require_dimensions(expected)

    def with_rows(
        self, images: ImageSet, samples: NDArray[np.int64], descriptors: NDArray[Any]
    ) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Return the samples (n,) and descriptors (n, D) of a set, without those that the other
        network left out, so that all directions have the same images.
        """
        if images not in self.of_set:
            return samples, descriptors
        has_row = self.of_set[images].rows_of(images.keys[samples]) != NONE
        return samples[has_row], descriptors[has_row]

    def rows(self, sets: tuple[ImageSet, ...], samples: NDArray[np.int64]) -> NDArray[Any]:
        """Return the (n, C) descriptors of some samples, which are in the order of these sets."""
        descriptors = list[NDArray[Any]]()
        for images in sets:
            local = samples - self.images.first[images]
            local = local[(local >= 0) & (local < len(images))]
            rows = self.of_set[images]
            places = rows.require(images.keys[local], images.name)
            descriptors.append(rows.stored.descriptors[places])
        return np.concatenate(descriptors)
