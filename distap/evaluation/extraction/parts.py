"""Describe a data set in parts, each by one rank. The descriptors do not depend on the number of ranks."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from distap.data.images.decoding import Box, DamagedImageError
from distap.data.images.image_sets import ImageSet
from distap.data.images.whole_images import SizedChunk, SizedImages, batches_of_one_shape, sized_chunks
from distap.errors import DistapError
from distap.evaluation.extraction.image_describer import ImageDescriber
from distap.telemetry.terminal import counting
from distap.world import World

FEWEST, MOST = 128, 4096  # images of a part
PARTS = 64  # of a small data set: enough for many ranks
CHUNK = 16  # images that a worker hands over at once, at most
PROGRESS_SECONDS = 2.0
SUMMED_ROWS = 16_384  # descriptors shared among the ranks at once
NOT_FINITE = "its descriptor is not finite"


@dataclass(frozen=True)
class PartPlan:
    """How a data set of N images is split."""

    parts: list[NDArray[np.int64]]  # image numbers of each part
    areas: NDArray[np.int64]  # (N,) expected height times width of each image, 0 if unknown
    boxes: Mapping[int, Box]  # by image number, the part of an image to describe


@dataclass(frozen=True)
class DescribedPart:
    """Descriptors of the n images of a part that could be described, and why the others could not."""

    samples: NDArray[np.int64]  # (n,) image numbers
    descriptors: NDArray[np.float32]  # (n, D)
    left_out: dict[int, str]  # reason by image number


class BrokenOffError(Exception):
    """A rank was asked to stop. All ranks raise this after the same exchange of their progress."""


def extract_descriptors(
    describer: ImageDescriber,
    images: ImageSet,
    world: World,
    boxes: Mapping[str, Sequence[float]] | None = None,
    *,
    workers: int = 2,
    shown: bool = False,
    is_asked_to_stop: Callable[[], bool] = lambda: False,
) -> tuple[NDArray[np.int64], NDArray[np.float32], dict[int, str]]:
    """Describe every image of a data set into the memory of every rank.

    Args:
        describer, images, world, boxes, workers, shown: as in `extract_to_folder`.
        is_asked_to_stop: whether this rank asks all ranks to stop.
    Returns:
        Numbers (n,) of the images that could be described, ascending; their descriptors (n, D) of length 1; and the
        reason by number for each of the others.
    Raises:
        BrokenOffError: a rank was asked to stop.
        DistapError: the ranks see different images, a box is invalid, or no image can be described.
    """
    require_same_images(images, world)
    plan = plan_parts(images, describer, boxes_by_number(images, boxes), part_size(len(images)), world)
    descriptors = np.zeros((len(images), describer.dimensions), np.float32)
    is_described = np.zeros((len(images), 1), np.float32)
    own_left_out: dict[int, str] = {}
    every = range(len(plan.parts))
    for _, part in describe_parts(describer, images, plan, every, world, workers, shown, is_asked_to_stop):
        descriptors[part.samples], is_described[part.samples] = part.descriptors, 1
        own_left_out |= part.left_out
    # Each row is zero on all ranks but one, so the sum over the ranks is exact.
    for values in (descriptors, is_described):
        for start in range(0, len(images) if world.size > 1 else 0, SUMMED_ROWS):
            rows = torch.from_numpy(values[start : start + SUMMED_ROWS]).to(world.device)
            values[start : start + SUMMED_ROWS] = world.sum(rows).cpu().numpy()
    told = world.gather_texts([json.dumps(list(own_left_out.items()))], world.size)
    left_out = dict(sorted(tuple(pair) for text in told for pair in json.loads(text)))
    samples = np.flatnonzero(is_described)
    if not len(samples):
        raise DistapError(f"{images.name}: none of its {len(images)} images can be described: {left_out.get(0)}")
    return samples, descriptors if len(samples) == len(images) else descriptors[samples], left_out


def require_same_images(images: ImageSet, world: World) -> None:
    """Raise a DistapError if the ranks see different images."""
    if not world.all_same(int(images.fingerprint[:12], 16)):
        raise DistapError(
            f"{images.name}: the ranks see different images; rank {world.rank} has fingerprint "
            f"{images.fingerprint[:12]}"
        )


def part_size(images: int) -> int:
    """Number of images in a part, independent of the number of ranks."""
    return min(max(-(-images // PARTS), FEWEST), MOST)


def plan_parts(
    images: ImageSet, describer: ImageDescriber, boxes: Mapping[int, Box], size: int, world: World
) -> PartPlan:
    """Split a data set into parts of `size` images.

    Images that are all cropped to one shape keep their order, since neighbours in a shard are read fastest together.
    Whole images are sorted from the largest to the smallest, so that images of one shape are together and too little
    memory is noticed soon.
    """
    order = np.arange(len(images), dtype=np.int64)
    if describer.sizing.kind == "crop":
        height, width = describer.sizing.shape(1, 1)
        areas = np.full(len(images), height * width, dtype=np.int64)
    else:
        heights, widths = _shapes(images, describer, boxes, world).T
        areas = heights * widths
        order = np.lexsort((order, widths, heights, -areas))
    return PartPlan([order[start : start + size] for start in range(0, len(order), size)], areas, boxes)


def boxes_by_number(images: ImageSet, boxes: Mapping[str, Sequence[float]] | None) -> dict[int, Box]:
    """Convert boxes by image key to boxes of whole pixels by image number."""
    if not boxes:
        return {}
    numbers = {key: number for number, key in enumerate(images.keys.tolist())}
    found = {}
    for key, box in boxes.items():
        if key not in numbers:
            raise DistapError(f"{images.name}: a box is given for {key!r}, but no image is called so")
        edges = [round(edge) for edge in box]
        if len(edges) != 4 or edges[0] >= edges[2] or edges[1] >= edges[3]:
            raise DistapError(f"{images.name}: the box of {key!r} is {list(box)}; expected left, top, right, bottom")
        found[numbers[key]] = (edges[0], edges[1], edges[2], edges[3])
    return found


def describe_parts(
    describer: ImageDescriber,
    images: ImageSet,
    plan: PartPlan,
    missing: Sequence[int],
    world: World,
    workers: int,
    shown: bool,
    is_asked_to_stop: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[int, DescribedPart]]:
    """Yield this rank's share of the parts with the numbers `missing`; workers read ahead across their borders."""
    limit = max(int(describer.batch_pixels / max(1.0, *describer.network.scales) ** 2), 1)
    mine = missing[world.rank :: world.size]
    requests = [worker_requests(plan.parts[number].tolist(), plan.areas, limit) for number in mine]
    sized = SizedImages(images.reader, describer.sizing, plan.boxes, describer.scaled)
    chunks = sized_chunks(sized, (request for part in requests for request in part), workers)
    done = len(images) - sum(len(plan.parts[number]) for number in missing)
    with closing(chunks), counting(f"describing {images.name}", len(images), done, shown and world.rank == 0) as show:
        progress = SharedProgress(world, show, is_asked_to_stop)
        for number, part in zip(mine, requests, strict=True):
            with describer.evaluating():
                described = _described(describer, islice(chunks, len(part)), limit, progress.add)
            yield number, described
        progress.finish()


def worker_requests(samples: list[int], areas: NDArray[np.int64], limit: int) -> list[list[int]]:
    """Split images into requests, each read by one worker: at most CHUNK images, or `limit` pixels, or one image.

    The pixels of a request pass through shared memory, so its size matters.
    """
    requests: list[list[int]] = [[]]
    held = 0
    for sample, area in zip(samples, areas[samples].tolist(), strict=True):
        if requests[-1] and (held + area > limit or len(requests[-1]) == CHUNK):
            requests.append([])
            held = 0
        requests[-1].append(sample)
        held += area
    return requests


class SharedProgress:
    """Exchange the ranks' progress every few seconds.

    Rank 0 can then show the progress of all. And however uneven the work is, no rank waits in a collective for longer
    than these seconds and one batch. A BrokenOffError is raised on every rank if one asks to stop.
    """

    def __init__(self, world: World, show: Callable[[int], None], is_asked_to_stop: Callable[[], bool]) -> None:
        self._world, self._show, self._is_asked_to_stop = world, show, is_asked_to_stop
        self._images, self._last = 0, time.monotonic()

    def add(self, images: int) -> None:
        """Add images that this rank has done."""
        self._images += images
        if self._world.size == 1 or time.monotonic() - self._last > PROGRESS_SECONDS:
            self._exchange(finished=False)

    def finish(self) -> None:
        """Wait until all ranks have done their work."""
        while not self._exchange(finished=True):
            pass

    def _exchange(self, finished: bool) -> bool:
        mine = [self._images, int(finished), int(self._is_asked_to_stop())]
        counts = torch.tensor(mine, dtype=torch.int64, device=self._world.device)
        images, done, asked = self._world.sum(counts).tolist()
        if asked:
            raise BrokenOffError
        self._show(images)
        self._last = time.monotonic()
        return bool(done == self._world.size)


def _described(
    describer: ImageDescriber, chunks: Iterator[SizedChunk], limit: int, report: Callable[[int], None]
) -> DescribedPart:
    left_out: dict[int, str] = {}
    samples: list[int] = []
    descriptors = []

    def images() -> Iterator[tuple[int, torch.Tensor]]:
        for chunk in chunks:
            left_out.update(chunk.damaged)
            report(len(chunk.damaged))
            yield from chunk.images()

    for numbers, pixels in batches_of_one_shape(images(), limit):
        try:
            descriptors.append(describer(pixels).float())
            samples += numbers
        except DamagedImageError as error:
            left_out.update(dict.fromkeys(numbers, str(error)))
        report(len(numbers))
    rows = torch.cat(descriptors).cpu().numpy() if descriptors else np.empty((0, describer.dimensions), np.float32)
    finite = np.isfinite(rows).all(axis=1)
    described = np.array(samples, dtype=np.int64)
    left_out.update(dict.fromkeys(described[~finite].tolist(), NOT_FINITE))
    return DescribedPart(described[finite], rows[finite], left_out)


def _shapes(images: ImageSet, describer: ImageDescriber, boxes: Mapping[int, Box], world: World) -> NDArray[np.int64]:
    """(N, 2) expected height and width of each image, (0, 0) if unknown. Each rank looks at its share."""
    mine = world.slots(len(images))
    shapes = np.zeros((len(mine), 2), dtype=np.int64)
    for row, (sample, (width, height)) in enumerate(zip(mine, images.sizes(mine).tolist(), strict=True)):
        if sample in boxes:
            left, top, right, bottom = boxes[sample]
            width, height = right - left, bottom - top
        shapes[row] = describer.sizing.shape(width, height) if width and height else (0, 0)
    gathered = world.gather_rows(torch.from_numpy(shapes).to(world.device), len(images))
    return np.asarray(gathered.cpu())
