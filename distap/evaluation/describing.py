"""Get a data set's descriptors for an evaluation: computed in memory, or kept in a folder."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distap.data.images.cropping import Box
from distap.data.images.image_sets import ImageSet
from distap.data.shards.image_folders import warn_of
from distap.errors import DistapError
from distap.evaluation.extraction.extracted_folder import extract_to_folder
from distap.evaluation.extraction.extracting import NOT_FINITE, Extraction, extract_descriptors
from distap.evaluation.extraction.image_describer import ImageDescriber
from distap.world import World

NO_BOXES: Mapping[int, Box] = {}
logger = logging.getLogger("distap")


@dataclass(frozen=True)
class Describing:
    """Describe the images of data sets on all ranks; see `Extraction`."""

    describer: ImageDescriber
    world: World
    workers: int = 2
    kept_in: Path | None = None  # keeps descriptors for the next evaluation of the same network; None: in memory only
    shown: bool = False
    is_asked_to_stop: Callable[[], bool] = lambda: False

    def folder(self, name: str) -> Path | None:
        return None if self.kept_in is None else self.kept_in / name

    def descriptors(
        self, images: ImageSet, name: str, boxes: Mapping[int, Box] = NO_BOXES
    ) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Return image numbers (n,), ascending, without failed images, and descriptors (n, D), on every rank.

        Args:
            name: name of the folder to keep descriptors in.
            boxes: by image number, the part of an image to describe, in pixels.
        Raises:
            BrokenOffError: a rank was asked to stop.
        """
        extraction = Extraction(
            self.describer, images, self.world, boxes, self.workers, self.shown, self.is_asked_to_stop
        )
        folder = self.folder(name)
        if folder is None:
            samples, descriptors, reasons = extract_descriptors(extraction)
            left_out: Mapping[str, str] = {str(images.keys[number]): reason for number, reason in reasons.items()}
        else:
            stored = extract_to_folder(extraction, folder)
            samples, descriptors = np.flatnonzero(np.isin(images.keys, stored.keys)), stored.descriptors
            left_out = stored.left_out
        if broken := [key for key, reason in left_out.items() if reason == NOT_FINITE]:
            raise DistapError(
                f"{images.name}: {len(broken)} of {len(images)} descriptors are not finite, such as that of "
                f"{broken[0]}: the network is broken"
            )
        if self.world.rank == 0:
            warn_of(images.name, images.left_out)
            for key in left_out.keys() - dict(images.left_out).keys():
                logger.warning("left out of the evaluation: %s of %s: %s", key, images.name, left_out[key])
        return samples, descriptors
