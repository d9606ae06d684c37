"""A data set in parts, each described by one rank; what a part's descriptors are does not depend on the ranks."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from distap.data.images.decoding import Box, DamagedImageError
from distap.data.images.image_sets import ImageSet
from distap.data.images.whole_images import SizedChunk, SizedImages, batches_of_one_shape, sized_chunks
from distap.errors import DistapError
from distap.evaluation.extraction.describer import ImageDescriber
from distap.world import World

FEWEST, MOST = 128, 4096  # images of a part
PARTS = 64  # of a small data set: enough for many ranks
CHUNK = 16  # images that a worker hands over at once, at most
MEETING_SECONDS = 2.0
NOT_FINITE = "its descriptor is not finite"


@dataclass(frozen=True)
class PartPlan:
    """What a data set's parts are."""

    parts: list[NDArray[np.int64]]  # numbers of each part's images
    areas: NDArray[np.int64]  # (N,) height times width that each image will have, as far as is known


@dataclass(frozen=True)
class DescribedPart:
    """The n images of a part that could be described, and the others."""

    samples: NDArray[np.int64]  # (n,) numbers in the data set
    descriptors: NDArray[np.float32]  # (n, D)
    left_out: dict[int, str]  # by number, why
    batches: int  # in which they were described


def require_same_images(images: ImageSet, world: World) -> None:
    """Raise a DistapError where the ranks see different images."""
    if not world.all_same(int(images.fingerprint[:12], 16)):
        raise DistapError(
            f"{images.name}: the ranks see different images; rank {world.rank} has fingerprint "
            f"{images.fingerprint[:12]}"
        )


def part_size(images: int) -> int:
    """Images of a part of a data set, whatever the number of ranks."""
    return min(max(-(-images // PARTS), FEWEST), MOST)


def plan_parts(
    images: ImageSet, describer: ImageDescriber, boxes: Mapping[int, Box], size: int, world: World
) -> PartPlan:
    """The parts: whole images from the largest to the smallest, those of one shape together.

    Images that are all cropped to one shape stay in order. So do those of one shape, since neighbours in a shard are
    read fastest one after the other. The largest come first, so that memory that does not suffice is soon noticed.
    """
    order = np.arange(len(images), dtype=np.int64)
    if describer.sizing.kind == "crop":
        height, width = describer.sizing.shape(1, 1)
        areas = np.full(len(images), height * width, dtype=np.int64)
    else:
        heights, widths = _shapes(images, describer, boxes, world).T
        areas = heights * widths
        order = np.lexsort((order, widths, heights, -areas))
    return PartPlan([order[start : start + size] for start in range(0, len(order), size)], areas)


def boxes_by_number(images: ImageSet, boxes: Mapping[str, Sequence[float]] | None) -> dict[int, Box]:
    """Boxes of images, given by key with any numbers, by number in whole pixels.

    Raises:
        DistapError: a key is none of the images', or a box has no four edges in order.
    """
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
    mine: Sequence[int],
    boxes: Mapping[int, Box],
    workers: int,
    report: Callable[[int], None],
) -> Iterator[DescribedPart]:
    """Describe parts one after the other; workers read ahead over their borders.

    Args:
        describer: of the images.
        images: the data set.
        plan: its parts.
        mine: numbers of the parts to describe.
        boxes: by number: the part of an image that counts.
        workers: processes that read; 0 reads in this one.
        report: is told after each batch how many images more are done.
    """
    limit = max(int(describer.batch_pixels / max(1.0, *describer.network.scales) ** 2), 1)
    requests = [_requests(plan.parts[part].tolist(), plan.areas, limit) for part in mine]
    sized = SizedImages(images.reader, describer.sizing, boxes, describer.scaled)
    chunks = sized_chunks(sized, (request for part in requests for request in part), workers)
    try:
        for part in requests:
            with describer.evaluating():
                described = _described(describer, islice(chunks, len(part)), limit, report)
            yield described
    finally:
        chunks.close()


class BrokenOffError(Exception):
    """A rank was asked to stop: all ranks have stopped describing, after the same meeting."""


class Meetings:
    """The ranks tell each other how far they are, every few seconds.

    None then waits for another in a collective for longer than that and a batch, however uneven their work is, and
    rank 0 can show the progress of all.

    Args:
        world: the ranks.
        show: is told on rank 0 how many images are done by all ranks.
        is_asked_to_stop: whether this rank is.
    Raises:
        BrokenOffError: a rank is, from `report` and `finish` of all.
    """

    def __init__(
        self, world: World, show: Callable[[int], None], is_asked_to_stop: Callable[[], bool] = lambda: False
    ) -> None:
        self._world, self._show, self._is_asked_to_stop = world, show, is_asked_to_stop
        self._images, self._last = 0, time.monotonic()

    def report(self, images: int) -> None:
        """This rank has done so many more."""
        self._images += images
        if self._world.size == 1 or time.monotonic() - self._last > MEETING_SECONDS:
            self._meet(finished=False)

    def finish(self) -> None:
        """This rank has done all of its work; returns when all have."""
        while not self._meet(finished=True):
            pass

    def _meet(self, finished: bool) -> bool:
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
    return DescribedPart(described[finite], rows[finite], left_out, len(descriptors))


def _requests(samples: list[int], areas: NDArray[np.int64], limit: int) -> list[list[int]]:
    """What workers hand over at once: no more pixels than a batch, since they pass through shared memory."""
    requests: list[list[int]] = [[]]
    held = 0
    for sample, area in zip(samples, areas[samples].tolist(), strict=True):
        if requests[-1] and (held + area > limit or len(requests[-1]) == CHUNK):
            requests.append([])
            held = 0
        requests[-1].append(sample)
        held += area
    return requests


def _shapes(images: ImageSet, describer: ImageDescriber, boxes: Mapping[int, Box], world: World) -> NDArray[np.int64]:
    """(N, 2) height and width that each image will have, as far as is known; each rank looks at its share."""
    mine = world.slots(len(images))
    shapes = np.zeros((len(mine), 2), dtype=np.int64)
    for row, (sample, (width, height)) in enumerate(zip(mine, images.sizes(mine).tolist(), strict=True)):
        if sample in boxes:
            left, top, right, bottom = boxes[sample]
            width, height = right - left, bottom - top
        shapes[row] = describer.sizing.shape(width, height) if width and height else (0, 0)
    gathered: NDArray[np.int64] = (
        world.gather_rows(torch.from_numpy(shapes).to(world.device), len(images)).cpu().numpy()
    )
    return gathered
