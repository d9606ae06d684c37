"""Descriptors of a whole data set in the memory of every rank, for evaluation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from distap.data.images.image_sets import ImageSet
from distap.errors import DistapError
from distap.evaluation.extraction.describer import ImageDescriber
from distap.evaluation.extraction.parts import (
    Meetings,
    boxes_by_number,
    describe_parts,
    part_size,
    plan_parts,
    require_same_images,
)
from distap.retrieval.descriptor_files import DescriptorSet
from distap.telemetry.terminal import counting
from distap.world import World

GATHERED_ROWS = 16_384  # of each rank at once


@dataclass(frozen=True)
class Extracted:
    """Descriptors of the n images of a data set that could be described, in its order."""

    images: ImageSet
    samples: NDArray[np.int64]  # (n,) numbers in the data set
    descriptors: NDArray[np.float32]  # (n, D), of length 1
    left_out: dict[int, str]  # the others by number, and why
    batches: int  # in which all were described

    def as_set(self, describer: ImageDescriber) -> DescriptorSet:
        """As a file would have them."""
        keys, classes = self.images.keys[self.samples], self.images.classes[self.samples]
        return DescriptorSet(self.descriptors, keys, classes, describer.described_by, self.images.name)


def extract_descriptors(
    describer: ImageDescriber,
    images: ImageSet,
    world: World,
    boxes: Mapping[str, Sequence[float]] | None = None,
    *,
    workers: int = 2,
    shown: bool = False,
    is_asked_to_stop: Callable[[], bool] = lambda: False,
) -> Extracted:
    """Describe every image of a data set; every rank gets all descriptors.

    Args:
        describer: of the images, the same on every rank.
        images: the data set, the same on every rank.
        world: the ranks; each describes its share.
        boxes: by key: the part of an image that counts, pixels; the whole of the others.
        workers: processes a rank that read; 0 reads in the rank itself.
        shown: whether rank 0 shows a progress bar.
        is_asked_to_stop: whether this rank is to break it off, on all ranks.
    Raises:
        BrokenOffError: one was.
        DistapError: the ranks see different images, a box is of no image, or no image can be described.
    """
    require_same_images(images, world)
    numbered = boxes_by_number(images, boxes)
    plan = plan_parts(images, describer, numbered, part_size(len(images)), world)
    mine = world.slots(len(plan.parts))
    with counting(f"describing {images.name}", len(images), shown=shown and world.rank == 0) as show:
        meetings = Meetings(world, show, is_asked_to_stop)
        parts = list(describe_parts(describer, images, plan, mine, numbered, workers, meetings.report))
        meetings.finish()
    samples = np.concatenate([np.empty(0, np.int64), *(part.samples for part in parts)])
    rows = np.concatenate([np.empty((0, describer.dimensions), np.float32), *(part.descriptors for part in parts)])
    left_out = {sample: reason for part in parts for sample, reason in part.left_out.items()}
    batches = int(world.sum(torch.tensor(sum(part.batches for part in parts), device=world.device)))
    samples, rows = _gathered(samples, rows, world)
    if not len(samples):
        raise DistapError(f"{images.name}: none of its {len(images)} images can be described: {_first(left_out)}")
    order = np.argsort(samples)
    return Extracted(images, samples[order], rows[order], _gathered_texts(left_out, world), batches)


def _first(left_out: dict[int, str]) -> str:
    return next(iter(left_out.values()), "see what the other ranks say")


def _gathered(
    samples: NDArray[np.int64], rows: NDArray[np.float32], world: World
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """All ranks' samples and rows, some at a time; each rank may have another number of them."""
    if world.size == 1:
        return samples, rows
    most = int(world.maximum(len(samples)))
    found: list[tuple[NDArray[np.int64], NDArray[np.float32]]] = []
    for start in range(0, most, GATHERED_ROWS):
        count = min(GATHERED_ROWS, most - start)
        numbers = np.full(count, -1, dtype=np.int64)
        block = np.zeros((count, rows.shape[1]), dtype=np.float32)
        held = len(samples[start : start + count])
        numbers[:held], block[:held] = samples[start : start + held], rows[start : start + held]
        total = world.size * count
        numbers = world.gather_rows(torch.from_numpy(numbers).to(world.device), total).cpu().numpy()
        block = world.gather_rows(torch.from_numpy(block).to(world.device), total).cpu().numpy()
        found.append((numbers[numbers >= 0], block[numbers >= 0]))
    if not found:
        return samples, rows
    return np.concatenate([part[0] for part in found]), np.concatenate([part[1] for part in found])


def _gathered_texts(texts: dict[int, str], world: World) -> dict[int, str]:
    most = int(world.maximum(len(texts)))
    if world.size == 1 or most == 0:
        return texts
    lines = [f"{number} {text}" for number, text in texts.items()]
    gathered = world.gather_texts(lines + [""] * (most - len(lines)), world.size * most)
    pairs = (line.partition(" ") for line in gathered if line)
    return {int(number): text for number, _, text in sorted(pairs)}
