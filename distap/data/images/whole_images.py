"""Scale images in their own shapes, batch those of one shape, and make thumbnails."""

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
from distap.storage.remotes import CONNECTIONS

if TYPE_CHECKING:
    from torch import Tensor

    from distap.data.loading.reader import ImageBytes, ImageSet

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
    size: int,
    most_requests: int = CONNECTIONS,
) -> Generator[SizedChunk]:
    """Yield the images of each request, of at most `size` images, in order.

    One worker (or, with 0, this process) reads all images of a request. `boxes` are the parts of
    images to take; other images are taken whole. A worker has at most `most_requests` requests to a
    store under way.
    """
    return in_processes(
        partial(_chunk, images, sizing, boxes),
        requests,
        workers,
        PREFETCH,
        LONGEST_WAIT,
        lends=True,
        fetch=images.fetching(partial(images.files, requests=most_requests), size, most_requests),
    )


def _chunk(
    images: "ImageSet",
    sizing: Sizing,
    boxes: Mapping[int, Box],
    samples: Sequence[int],
    files: "Sequence[ImageBytes] | None" = None,
) -> SizedChunk:
    present = dict[int, NDArray[np.uint8]]()
    damaged = dict[int, str]()
    for row, sample in enumerate(samples):
        file = None if files is None else files[row]
        try:
            present[sample] = sizing(images.encoded(sample, file), boxes.get(sample)).numpy()
        except DamagedImageError as error:
            damaged[sample] = str(error)
    return SizedChunk(list(present), list(present.values()), damaged)


def batches_of_one_shape(
    images: Iterable[tuple[int, "Tensor"]], most_pixels: int
) -> Iterator[tuple[list[int], "Tensor"]]:
    """Collect images (number, (3, height, width)) in batches of one shape.

    Yields their numbers and pixels (n, 3, height, width). A batch is full when another image of its
    shape would exceed `most_pixels` (height times width, summed up); the rest are yielded at the
    end. When the images that wait have more than HELD times as many pixels in all, the largest
    batches are yielded early. The batches depend on the images alone. A larger image is a batch
    alone.
    """
    from torch import stack

    waiting: dict[Shape, list[tuple[int, Tensor]]] = defaultdict(list)

    def area(shape: Shape) -> int:
        return len(waiting[shape]) * shape[0] * shape[1]

    def take(shape: Shape) -> tuple[list[int], "Tensor"]:
        samples, pixels = zip(*waiting.pop(shape), strict=True)
        return list(samples), stack(pixels)

    for sample, pixels in images:
        _, height, width = pixels.shape
        shape = height, width
        # A copy, since the worker reuses the pixels' memory for its next answers while these wait.
        waiting[shape].append((sample, pixels.clone()))
        if area(shape) + height * width > most_pixels:
            yield take(shape)
        while sum(map(area, waiting)) > HELD * most_pixels:
            yield take(max(waiting, key=area))
    for shape in list(waiting):
        yield take(shape)


def thumbnails_of(encoded: Callable[[int], EncodedImage | None], longer_side: int) -> Thumbnails:
    """Return a function that makes JPEG thumbnails of images by their row.

    A thumbnail has at most `longer_side` pixels on its longer side. The function returns None if
    `encoded` returns None for the row, or an image that cannot be read. Several threads may call it
    at once.
    """

    @lru_cache(THUMBNAILS_KEPT)
    def encode(row: int) -> bytes | None:
        image = encoded(row)
        return None if image is None else thumbnail(image, longer_side)

    def jpeg(row: int) -> bytes | None:
        try:
            return encode(row)
        # The error may pass, so the cache does not keep it.
        except (DamagedImageError, DistapError, OSError) as error:
            logger.warning("no thumbnail of row %d: %s", row, error)
            return None

    return jpeg


def thumbnail(
    image: EncodedImage, longer_side: int, form: str = "JPEG", quality: int = QUALITY
) -> bytes:
    """Encode an image in the format `form`, scaled down to `longer_side` pixels if it is larger."""
    buffer = io.BytesIO()
    scaled = image.scaled(Sizing("side", longer_side).shape(*image.size))
    scaled.save(buffer, form, quality=quality)
    return buffer.getvalue()
