"""Several data sets as one: samples count on from set to set."""

from collections.abc import Iterable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from distap.data.images.decoding import EncodedImage
from distap.data.labels import table_of_levels
from distap.data.loading.reader import ImageSet
from distap.data.plan import Classes


class JoinedImages:
    """The images of several sets; a set that is given twice is there once."""

    def __init__(self, sets: Iterable[ImageSet]) -> None:
        self.sets = tuple(dict.fromkeys(sets))
        self._ends = np.cumsum([len(images) for images in self.sets])

    @cached_property
    def first(self) -> dict[ImageSet, int]:
        """Return the number of each set's first sample."""
        return dict(zip(self.sets, [0, *self._ends.tolist()], strict=False))

    @cached_property
    def keys(self) -> NDArray[np.str_]:
        """Return (N,) the name of each image within its set."""
        return np.concatenate([images.keys for images in self.sets])

    @cached_property
    def classes(self) -> NDArray[np.str_]:
        """Return (N,) the name of each image's class, "" for none."""
        return np.concatenate([images.classes for images in self.sets])

    @property
    def fingerprint(self) -> str:
        """Return the fingerprints of all sets."""
        return "+".join(images.index.fingerprint for images in self.sets)

    @property
    def contents(self) -> NDArray[np.int64]:
        """Return (N,) what the images' files hold: size times 2^32 plus CRC-32, which is 0 if it is
        unknown.
        """
        indexes = [images.index for images in self.sets]
        return np.concatenate([(index.size << 32) + index.crc32 for index in indexes])

    def samples(self, sets: Iterable[ImageSet]) -> NDArray[np.int64]:
        """Return the numbers of all images of some of the sets, one set after the other."""
        return np.concatenate([self.first[images] + np.arange(len(images)) for images in sets])

    def encoded(self, sample: int) -> EncodedImage:
        """Return an image's file, not decoded yet; raise DamagedImageError if it is damaged."""
        images = self.sets[int(np.searchsorted(self._ends, sample, side="right"))]
        return images.encoded(sample - self.first[images])

    def labels(self, samples: NDArray[np.int64], with_levels: bool) -> NDArray[np.int64]:
        """Number the classes of some samples; a class has one number in all sets, by its name.

        Returns:
            (n,) numbers, below 0 without a class; or (n, L) if asked for the levels, the finest
            first, and the classes are in coarser ones.
        """
        names, numbers = np.unique(self.classes[samples], return_inverse=True)
        numbers = np.where(names[numbers] == "", -1, numbers)
        if not with_levels:
            return numbers
        levels = dict[str, list[str]]()
        for images in self.sets:
            index = images.index
            levels |= dict(zip(index.class_name.tolist(), index.class_levels.tolist(), strict=True))
        table = table_of_levels([tuple(levels.get(name, ())) for name in names.tolist()])
        if not table.size:
            return numbers
        of_levels = Classes(np.arange(len(names)), table).numbers[numbers]
        return np.where(numbers[:, None] < 0, -1, of_levels)


def numbered_apart(labels: NDArray[np.int64], sets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number classes so that no two sets share one: those of each set follow the last one's.

    Args:
        labels: (N,) or (N, L) class of each sample, below 0 for none.
        sets: (N,) number of the set that each sample is in, below 0 for none.
    Returns:
        Numbers of the shape of `labels`, -1 for a sample without a class or a set.
    """
    sets = sets.reshape(-1, *[1] * (labels.ndim - 1))
    return np.where((labels < 0) | (sets < 0), -1, sets * (labels.max(initial=0) + 1) + labels)
