"""Thumbnails of a gallery's images by their row in the index, read from the data set that was indexed."""

import logging
import threading
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from distap.data.images.decoding import DamagedImageError, EncodedImage
from distap.data.images.image_sets import ImageSet, open_images
from distap.data.images.thumbnails import as_jpeg
from distap.data.images.whole_images import Sizing
from distap.errors import DistapError
from distap.retrieval.index_files import SearchIndex
from distap.storage.remotes import RemoteSettings

LONGER_SIDE = 240  # pixels
KEPT = 1024  # thumbnails, of about 10 kB
logger = logging.getLogger("distap")


class Pictures:
    """JPEG thumbnails; several threads may ask at once.

    Args:
        images: the data set, or None where it cannot be had.
        samples: (N,) number in it of each row of the index, -1 for an image that is not there.
    """

    def __init__(self, images: ImageSet | None, samples: NDArray[np.int64]) -> None:
        self._images, self._samples = images, samples
        self._reading = threading.Lock()  # a reader of shards keeps files open for one thread
        self._kept = lru_cache(KEPT)(self._made)

    @property
    def missing(self) -> int:
        """Rows without a picture, as far as that is known without reading."""
        return int((self._samples < 0).sum())

    def thumbnail(self, row: int) -> bytes | None:
        """A JPEG file, or None where the image is not there or cannot be read."""
        return self._kept(row) if 0 <= row < len(self._samples) else None

    def _made(self, row: int) -> bytes | None:
        sample = int(self._samples[row])
        if self._images is None or sample < 0:
            return None
        try:
            with self._reading:
                image = self._images.reader.encoded(sample)
            return small(image)
        except (DamagedImageError, DistapError) as error:
            logger.warning("no picture of row %d: %s", row, error)
            return None


def small(image: EncodedImage) -> bytes:
    """A JPEG file of an image, decoded no larger than it is shown.

    Raises:
        DamagedImageError: it cannot be decoded.
    """
    pixels = Sizing("side", LONGER_SIDE)(image).permute(1, 2, 0).numpy()
    return as_jpeg(Image.fromarray(pixels), quality=82)


def open_pictures(index: SearchIndex, source: str | None = None, remote: RemoteSettings | None = None) -> Pictures:
    """Pictures of an index's images; where some or all cannot be had, that is told and no error.

    Args:
        index: whose images.
        source: where the data set is now; None where it was when it was described.
        remote: how a remote one is reached.
    """
    where = source or index.data
    none = np.full(len(index), -1, dtype=np.int64)
    try:
        images = open_images(where, remote=remote)
    except DistapError as error:
        logger.warning("hits are shown without pictures: %s; name the data set with --images", error)
        return Pictures(None, none)
    numbers = {key: sample for sample, key in enumerate(images.keys.tolist())}
    samples = np.fromiter((numbers.get(key, -1) for key in index.keys.tolist()), np.int64, len(index))
    pictures = Pictures(images, samples)
    if pictures.missing:
        logger.warning(
            "%s has no image for %d of the %d keys of the index: they are shown without pictures; is it the data "
            "set that was indexed?",
            *(where, pictures.missing, len(index)),
        )
    return pictures
