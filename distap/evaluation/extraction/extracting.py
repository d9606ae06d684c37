"""Describe a data set in parts, each on one rank.

Descriptors do not depend on the number of ranks.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain, islice

import numpy as np
import torch
from numpy.typing import NDArray

from distap.data.images.boxes import Box
from distap.data.images.damage import DamagedImageError
from distap.data.images.whole_images import SizedChunk, batches_of_one_shape, sized_chunks
from distap.data.loading.reader import ImageSet
from distap.errors import DistapError
from distap.evaluation.extraction.image_describer import ImageDescriber
from distap.storage.remotes import CONNECTIONS
from distap.telemetry.terminal import progress
from distap.world import World

# images of a part
FEWEST = 128
MOST = 4096
PARTS = 1024  # enough for many ranks, unless they would be small
HANDED_OVER = 16  # images that a worker hands over at once, at most
PROGRESS_SECONDS = 2.0
SUMMED_ROWS = 16_384  # descriptors shared among the ranks at once
NOT_FINITE = "its descriptor is not finite"


@dataclass(frozen=True)
class DescribedPart:
    """Descriptors of a part's n images, without failed ones, and the reason for each failure."""

    samples: NDArray[np.int64]  # (n,) image numbers, ascending
    descriptors: NDArray[np.float32]  # (n, D)
    left_out: dict[int, str]  # reason by image number


class BrokenOffError(Exception):
    """Raised on all ranks, at the same exchange of progress, if any rank was asked to stop."""


@dataclass(frozen=True)
class Describing:
    """Settings by which all ranks describe the images of data sets."""

    describer: ImageDescriber
    world: World
    workers: int = 2  # loader processes of each rank; 0 loads in the rank itself
    requests: int = CONNECTIONS  # to a store that a worker has under way
    shown: bool = False  # whether rank 0 shows a progress bar
    is_asked_to_stop: Callable[[], bool] = lambda: False  # then all ranks raise a BrokenOffError


@dataclass(frozen=True, eq=False)
class Extraction:
    """A data set to describe on all ranks; raise a DistapError if ranks see other images."""

    describing: Describing
    images: ImageSet
    # by image number, the part to describe, in pixels
    boxes: Mapping[int, Box] = field(default_factory=dict)
    only: NDArray[np.int64] | None = None  # numbers of the images to describe, ascending; None: all

    def __post_init__(self) -> None:
        self.describing.world.agreed(
            None, [self.images.index.fingerprint[:12]], None, f"images in {self.images.name}"
        )

    @property
    def samples(self) -> Sequence[int]:
        """Return the numbers of the images to describe, ascending."""
        return range(len(self.images)) if self.only is None else self.only.tolist()

    @property
    def part_size(self) -> int:
        """Number of images in a part, the same for any number of ranks."""
        return min(max(-(-len(self.samples) // PARTS), FEWEST), MOST)

    @property
    def parts(self) -> list[Sequence[int]]:
        """Return the image numbers of each part, in order: neighbours in a shard are read fastest
        together.
        """
        size = self.part_size
        samples = self.samples
        return [samples[start : start + size] for start in range(0, len(samples), size)]

    def described(self, missing: Sequence[int]) -> Iterator[tuple[int, DescribedPart]]:
        """Describe this rank's share of the parts numbered `missing`.

        Workers read ahead from part to part.
        """
        describing = self.describing
        describer = describing.describer
        world = describing.world
        images = self.images
        parts = self.parts
        limit = max(int(describer.most_pixels / max(1.0, *describer.network.scales) ** 2), 1)
        share = missing[world.rank :: world.size]
        size = HANDED_OVER if describer.sizing.kind == "crop" else 1  # whole images may be large
        requests = [
            [part[at : at + size] for at in range(0, len(part), size)]
            for part in (parts[number] for number in share)
        ]
        chunks = sized_chunks(
            images,
            describer.sizing,
            self.boxes,
            chain.from_iterable(requests),
            describing.workers,
            size,
            describing.requests,
        )
        total = len(self.samples)
        done = total - sum(len(parts[number]) for number in missing)
        shown = describing.shown and world.rank == 0
        with (
            closing(chunks),
            progress(f"describing {images.name}", total, done, shown) as show,
        ):
            shared = SharedProgress(
                world, lambda described: show(done + described), describing.is_asked_to_stop
            )
            for number, part in zip(share, requests, strict=True):
                with describer.evaluating():
                    described = _described(describer, islice(chunks, len(part)), limit, shared.add)
                yield number, described
            shared.finish()


def extract_descriptors(
    extraction: Extraction,
) -> tuple[NDArray[np.int64], NDArray[np.float32], dict[int, str]]:
    """Describe every image of a data set into the memory of every rank.

    Returns:
        Numbers (n,) of the images that could be described, ascending; their descriptors (n, D) of
        length 1; and the reason by number for each of the others.
    """
    images = extraction.images
    world = extraction.describing.world
    dimensions = extraction.describing.describer.dimensions
    descriptors = np.zeros((len(images), dimensions), np.float32)
    reasons: dict[int, str] = {}  # of this rank's images
    for _, part in extraction.described(range(len(extraction.parts))):
        descriptors[part.samples] = part.descriptors
        reasons |= part.left_out
    # Each row is zero on all ranks but one, so the sum over the ranks is exact.
    for start in range(0, len(images) if world.size > 1 else 0, SUMMED_ROWS):
        rows = torch.from_numpy(descriptors[start : start + SUMMED_ROWS]).to(world.device)
        descriptors[start : start + SUMMED_ROWS] = world.sum(rows).cpu().numpy()
    by_rank = world.gather_values(list(reasons.items()))
    left_out = dict(sorted(tuple(pair) for pairs in by_rank for pair in pairs))
    broken = [
        str(images.keys[number]) for number, reason in left_out.items() if reason == NOT_FINITE
    ]
    if broken:
        raise DistapError(
            "network.not_finite",
            f"{images.name}: {len(broken)} of {len(images)} descriptors are not finite, such as"
            f" that of {broken[0]}: the network is broken",
        )
    samples = np.setdiff1d(extraction.samples, [*left_out])
    # Who names images gets those that can be described, be it none.
    if not len(samples) and extraction.only is None:
        raise DistapError(
            "data.none_described",
            f"{images.name}: none of its {len(images)} images can be described: {left_out.get(0)}",
        )
    return samples, descriptors if len(samples) == len(images) else descriptors[samples], left_out


class SharedProgress:
    """Exchange the ranks' progress every few seconds.

    Every rank raises a BrokenOffError if one must stop. Rank 0 can show the progress of all.
    However uneven the work is, no rank waits in a collective for longer than these seconds and one
    batch.
    """

    def __init__(
        self, world: World, show: Callable[[int], None], is_asked_to_stop: Callable[[], bool]
    ) -> None:
        self._world = world
        self._show = show
        self._is_asked_to_stop = is_asked_to_stop
        self._images = 0
        self._last = time.monotonic()

    def add(self, images: int) -> None:
        self._images += images
        if self._world.size == 1 or time.monotonic() - self._last > PROGRESS_SECONDS:
            self._exchange(finished=False)

    def finish(self) -> None:
        """Wait until all ranks have done their work."""
        while not self._exchange(finished=True):
            pass

    def _exchange(self, finished: bool) -> bool:
        counts = torch.tensor(
            [self._images, int(finished), int(self._is_asked_to_stop())],
            dtype=torch.int64,
            device=self._world.device,
        )
        images, done, asked = self._world.sum(counts).tolist()
        if asked:
            raise BrokenOffError
        self._show(images)
        self._last = time.monotonic()
        return bool(done == self._world.size)


def _described(
    describer: ImageDescriber,
    chunks: Iterator[SizedChunk],
    limit: int,
    report: Callable[[int], None],
) -> DescribedPart:
    left_out: dict[int, str] = {}
    samples: list[int] = []
    descriptors = []

    def images() -> Iterator[tuple[int, torch.Tensor]]:
        for chunk in chunks:
            left_out.update(chunk.damaged)
            report(len(chunk.damaged))
            yield from zip(chunk.samples, map(torch.from_numpy, chunk.pixels), strict=True)

    for numbers, pixels in batches_of_one_shape(images(), limit):
        try:
            descriptors.append(describer(pixels).float())
            samples += numbers
        except DamagedImageError as error:
            left_out.update(dict.fromkeys(numbers, str(error)))
        report(len(numbers))
    rows = (
        torch.cat(descriptors).cpu().numpy()
        if descriptors
        else np.empty((0, describer.dimensions), np.float32)
    )
    described = np.array(samples, dtype=np.int64)
    left_out.update(dict.fromkeys(described[~np.isfinite(rows).all(axis=1)].tolist(), NOT_FINITE))
    order = np.argsort(described)  # as in the data set, which the batches of one shape mix
    order = order[~np.isin(described[order], [*left_out])]
    return DescribedPart(described[order], rows[order], left_out)
