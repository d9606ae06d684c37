"""Small JPEG files of images, for pages."""

import io
import logging
import threading
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from distap.data.images.decoding import DamagedImageError, EncodedImage
from distap.data.images.whole_images import EncodedImages, Sizing
from distap.errors import DistapError

QUALITY = 82  # of JPEG, from 1 to 95
KEPT = 1024  # thumbnails in memory, of about 10 kB each
logger = logging.getLogger("distap")


class Thumbnails:
    """Thumbnails of a data set's images; several threads may ask at once.

    Args:
        reader: reads the images; None if there is no data set, and so no thumbnail.
        samples: (N,) the image of each row by its number in the data set, -1 for one that is not there.
        longer_side: at most, pixels.
    """

    def __init__(self, reader: EncodedImages | None, samples: NDArray[np.int64], longer_side: int) -> None:
        self._reader, self._samples, self._longer_side = reader, samples, longer_side
        self._reading = threading.Lock()  # a reader of shards keeps files open for one thread
        self._kept = lru_cache(KEPT)(self._made)

    def jpeg(self, row: int) -> bytes | None:
        """The thumbnail of a row; None if there is no such row or its image cannot be read."""
        return self._kept(row) if 0 <= row < len(self._samples) else None

    def _made(self, row: int) -> bytes | None:
        sample = int(self._samples[row])
        if self._reader is None or sample < 0:
            return None
        try:
            with self._reading:
                image = self._reader.encoded(sample)
            return thumbnail(image, self._longer_side)
        except (DamagedImageError, DistapError) as error:
            logger.warning("no thumbnail of image %d: %s", sample, error)
            return None


def thumbnail(image: EncodedImage, longer_side: int) -> bytes:
    """A JPEG file of the image, scaled down to `longer_side` pixels if it is larger.

    Raises:
        DamagedImageError: the image cannot be decoded.
    """
    pixels = Sizing("side", longer_side)(image).permute(1, 2, 0).numpy()
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()
