"""How an evaluation comes by the descriptors of a data set's images."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distap.data.images.image_sets import ImageSet
from distap.errors import DistapError
from distap.evaluation.extraction import (
    NOT_FINITE,
    ImageDescriber,
    extract_descriptors,
    extract_to_folder,
    left_out_of,
)
from distap.retrieval.descriptor_files import read_descriptors
from distap.world import World

logger = logging.getLogger("distap")


@dataclass(frozen=True)
class Describing:
    """Describes the images of data sets, each rank its share.

    Args:
        describer: of an image.
        world: the ranks.
        workers: processes a rank that read.
        kept_in: folder where descriptors are kept, and found again by the next evaluation of the same network; None
            keeps them in memory only.
        shown: whether rank 0 shows a progress bar.
        is_asked_to_stop: whether this rank is to break off what is described in memory, on all ranks.
    """

    describer: ImageDescriber
    world: World
    workers: int = 2
    kept_in: Path | None = None
    shown: bool = False
    is_asked_to_stop: Callable[[], bool] = lambda: False

    def folder(self, name: str) -> Path | None:
        """Where the descriptors of that name are kept."""
        return None if self.kept_in is None else self.kept_in / name

    def descriptors(
        self, images: ImageSet, name: str, boxes: Mapping[str, Sequence[float]] | None = None
    ) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Numbers of the n images that could be described, ascending, and their descriptors (n, D), on every rank.

        Args:
            images: to describe.
            name: of the folder that they are kept in.
            boxes: by key: the part of an image that counts, pixels.
        Raises:
            BrokenOffError: a rank was asked to stop.
            DistapError: none can be described, the network gives a descriptor that is not finite, or the folder
                holds other descriptors.
        """
        folder = self.folder(name)
        if folder is None:
            extracted = extract_descriptors(
                self.describer,
                images,
                self.world,
                boxes,
                workers=self.workers,
                shown=self.shown,
                is_asked_to_stop=self.is_asked_to_stop,
            )
            self._tell({str(images.keys[number]): reason for number, reason in extracted.left_out.items()}, images)
            return extracted.samples, extracted.descriptors
        extract_to_folder(self.describer, images, self.world, folder, boxes, workers=self.workers, shown=self.shown)
        self.world.barrier()  # rank 0 puts them together
        self._tell(left_out_of(folder), images)
        kept = read_descriptors(folder)
        place = {key: number for number, key in enumerate(images.keys.tolist())}
        return np.array([place[key] for key in kept.keys.tolist()], dtype=np.int64), kept.descriptors

    def _tell(self, left_out: Mapping[str, str], images: ImageSet) -> None:
        """Name the images that cannot be described; where that is the network's fault, there is no figure."""
        broken = [key for key, reason in left_out.items() if reason == NOT_FINITE]
        if broken:
            raise DistapError(
                f"{images.name}: {len(broken)} of {len(images)} descriptors are not finite, such as that of "
                f"{broken[0]}: the network is broken, nothing can be ranked"
            )
        if self.world.rank == 0:
            for key, reason in left_out.items():
                logger.warning("left out of the evaluation: %s of %s: %s", key, images.name, reason)
