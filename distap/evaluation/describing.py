"""Get the descriptors of a data set for an evaluation: computed in memory, or kept in a folder."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distap.data.images.image_sets import ImageSet
from distap.data.shards.image_folders import warn_of
from distap.errors import DistapError
from distap.evaluation.extraction.image_describer import ImageDescriber
from distap.evaluation.extraction.parts import NOT_FINITE, Extraction, extract_descriptors
from distap.evaluation.extraction.to_folder import extract_to_folder, left_out_of
from distap.retrieval.descriptor_files import DESCRIPTORS_FILE, read_descriptors
from distap.world import World

ROWS_SENT = 16_384  # descriptors at once
logger = logging.getLogger("distap")


@dataclass(frozen=True)
class Describing:
    """Describes the images of data sets on all ranks; see `Extraction`."""

    describer: ImageDescriber
    world: World
    workers: int = 2
    kept_in: Path | None = None  # keeps descriptors for the next evaluation of the same network; None: in memory only
    shown: bool = False
    is_asked_to_stop: Callable[[], bool] = lambda: False

    def folder(self, name: str) -> Path | None:
        return None if self.kept_in is None else self.kept_in / name

    def descriptors(
        self, images: ImageSet, name: str, boxes: Mapping[str, Sequence[float]] | None = None
    ) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Numbers (n,) of the images that could be described, ascending, and their descriptors (n, D), on every rank.

        Args:
            name: of the folder to keep them in.
            boxes: by key, the part of an image to describe, in pixels.
        Raises:
            BrokenOffError: a rank was asked to stop.
        """
        extraction = Extraction(
            self.describer, images, self.world, boxes, self.workers, self.shown, self.is_asked_to_stop
        )
        folder = self.folder(name)
        if folder is None:
            samples, descriptors, reasons = extract_descriptors(extraction)
            self._tell({str(images.keys[number]): reason for number, reason in reasons.items()}, images)
            return samples, descriptors
        extract_to_folder(extraction, folder)
        self.world.barrier()  # rank 0 joins the parts
        kept, is_described = None, torch.zeros(len(images), dtype=torch.uint8, device=self.world.device)
        if self.world.rank == 0:
            stored = read_descriptors(folder)
            kept, described = stored.descriptors, np.isin(images.keys, stored.keys)
            is_described[torch.from_numpy(np.flatnonzero(described)).to(is_described.device)] = 1
        self._tell(left_out_of(folder) if self.world.rank == 0 else {}, images)
        samples = np.flatnonzero(self.world.broadcast(is_described).cpu().numpy())
        return samples, on_all_ranks(self.world, kept, folder / DESCRIPTORS_FILE)

    def _tell(self, left_out: Mapping[str, str], images: ImageSet) -> None:
        """Log the images that cannot be described. Every rank raises a DistapError if the network is to blame."""
        broken = [key for key, reason in left_out.items() if reason == NOT_FINITE]
        if count := int(self.world.maximum(len(broken))):
            example = f", such as that of {broken[0]}" if broken else ""
            raise DistapError(
                f"{images.name}: {count} of {len(images)} descriptors are not finite{example}: the network is broken"
            )
        if self.world.rank == 0:
            warn_of(images.name, images.left_out)
            told = dict(images.left_out)
            for key, reason in left_out.items():
                if key not in told:
                    logger.warning("left out of the evaluation: %s of %s: %s", key, images.name, reason)


def on_all_ranks(world: World, array: NDArray[Any] | None, path: Path) -> NDArray[Any]:
    """Rank 0's array (n, C), which it has at `path`: that file where all ranks see it, otherwise copies in memory."""
    try:
        status = path.stat()
        seen = [status.st_ino, status.st_size, status.st_mtime_ns]
    except OSError:
        seen = []
    of_ranks = world.gather_values(seen)
    (shape, dtype), *_ = world.gather_values(None if array is None else [array.shape, array.dtype.str])
    if of_ranks.count(of_ranks[0]) == world.size:
        return np.load(path, mmap_mode="r") if array is None else array
    received = np.empty(shape, dtype) if array is None else array
    for start in range(0, len(received), ROWS_SENT):
        rows = torch.from_numpy(np.array(received[start : start + ROWS_SENT])).to(world.device)
        sent = world.broadcast(rows)
        if array is None:
            received[start : start + ROWS_SENT] = sent.cpu().numpy()
    return received
