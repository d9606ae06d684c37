"""Scale images in their own shapes, collect them into large batches of one shape, and make
thumbnails.
"""

import io
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distap.data.images.boxes import Box, Shape
from distap.data.images.damage import DamagedImageError
from distap.data.images.decoding import EncodedImage
from distap.data.shards.parallel import LONGEST_WAIT, in_processes
from distap.data.sizing import Sizing
from distap.errors import DistapError, logger

if TYPE_CHECKING:
    from torch import Tensor

    from distap.data.loading.reader import ImageSet

PREFETCH = 2  # chunks that each worker reads ahead
HELD = 16  # batches whose pixels may wait for others of their shape, all shapes together
QUALITY = 82  # of a thumbnail, from 1 to 95
THUMBNAILS_KEPT = 1024  # thumbnails in memory, of about 10 kB each
Thumbnails = Callable[[int], bytes | None]  # by row


class SizedChunk(NamedTuple):
    """Images from a worker."""

    samples: list[int]
    pixels: list[NDArray[np.uint8]]  # (3, height, width) of each
    damaged: dict[int, str]  # the samples that could not be read, and why


def sized_chunks(
    images: "ImageSet",
    sizing: Sizing,
    boxes: Mapping[int, Box],
    requests: Iterable[Sequence[int]],
    workers: int,
) -> Generator[SizedChunk]:
    """Yield the images of each request in order; one worker (or, with 0, this process) reads a
    whole request.

    `boxes` are the parts of images that count; of others it is the whole.
    """
    read = partial(_chunk, images, sizing, boxes)
    return in_processes(read, requests, workers, PREFETCH, LONGEST_WAIT, lends=True)


def _chunk(
    images: "ImageSet", sizing: Sizing, boxes: Mapping[int, Box], samples: Sequence[int]
) -> SizedChunk:
    present = dict[int, NDArray[np.uint8]]()
    damaged = dict[int, str]()
    for sample in samples:
        try:
            present[sample] = sizing(images.encoded(sample), boxes.get(sample)).numpy()
        except DamagedImageError as error:
            damaged[sample] = str(error)
    return SizedChunk(list(present), list(present.values()), damaged)


def batches_of_one_shape(
    images: Iterable[tuple[int, "Tensor"]], most_pixels: int
) -> Iterator[tuple[list[int], "Tensor"]]:
    """Collect (number, (3, height, width)) images in batches of one shape: numbers and (n, 3,
    height, width).

    A batch is given when no other image of its shape fits into its `most_pixels` (height times
    width, summed up), and all are given at the end. When the images that wait for others of their
    shape have more than HELD times as many, the fullest batches are given early. The batches depend
    on the images alone. A larger image is a batch alone.
    """
    from torch import stack

    waiting: dict[Shape, list[tuple[int, Tensor]]] = defaultdict(list)

    def area(shape: Shape, more: int = 0) -> int:
        return (len(waiting[shape]) + more) * shape[0] * shape[1]

    def take(shape: Shape) -> tuple[list[int], "Tensor"]:
        samples, pixels = zip(*waiting.pop(shape), strict=True)
        return list(samples), stack(pixels)

    for sample, pixels in images:
        shape = (pixels.shape[1], pixels.shape[2])
        # A copy, since the worker reuses the pixels' memory for its next answers while these wait.
        waiting[shape].append((sample, pixels.clone()))
        if area(shape, more=1) > most_pixels:
            yield take(shape)
        while sum(map(area, waiting)) > HELD * most_pixels:
            yield take(max(waiting, key=area))
    for shape in list(waiting):
        yield take(shape)


def thumbnails_of(encoded: Callable[[int], EncodedImage | None], longer_side: int) -> Thumbnails:
    """Return what makes JPEG thumbnails, at most `longer_side` pixels, of the images that `encoded`
    returns by row.

    Where it returns None, or an image that cannot be read, there is no thumbnail. Several threads
    may ask at once.
    """

    @lru_cache(THUMBNAILS_KEPT)
    def made(row: int) -> bytes | None:
        return None if (image := encoded(row)) is None else thumbnail(image, longer_side)

    def jpeg(row: int) -> bytes | None:
        try:
            return made(row)
        except (
            DamagedImageError,
            DistapError,
            OSError,
        ) as error:  # it may pass, and the cache does not keep it
            logger.warning("no thumbnail of row %d: %s", row, error)
            return None

    return jpeg


def thumbnail(
    image: EncodedImage, longer_side: int, form: str = "JPEG", quality: int = QUALITY
) -> bytes:
    """Encode an image in the format `form`, scaled down to `longer_side` pixels if it is larger."""
    buffer = io.BytesIO()
    image.scaled(Sizing("side", longer_side).shape(*image.size)).save(buffer, form, quality=quality)
    return buffer.getvalue()
