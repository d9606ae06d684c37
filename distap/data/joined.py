"""Several data sets as one: samples count on from set to set."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, reduce
from itertools import combinations
from operator import add
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distap.data.images.damage import DamagedImageError
from distap.data.images.decoding import EncodedImage
from distap.data.labels import table_of_levels
from distap.data.loading.reader import ImageBytes, ImageSet, Shard
from distap.data.plan import Classes, MixedClasses
from distap.data.shards.index import Index
from distap.data.shards.parallel import Fetch
from distap.storage.ranges import Range


class JoinedImages:
    """The images of several sets; a set that is given twice is there once."""

    def __init__(self, sets: Iterable[ImageSet]) -> None:
        self.sets = tuple(dict.fromkeys(sets))
        self._first = np.cumsum([0, *map(len, self.sets)])

    @cached_property
    def first(self) -> dict[ImageSet, int]:
        """Return the number of each set's first sample."""
        return dict(zip(self.sets, self._first.tolist(), strict=False))

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
        return np.concatenate([_contents(images.index) for images in self.sets])

    def samples(self, sets: Iterable[ImageSet]) -> NDArray[np.int64]:
        """Return the numbers of all images of some of the sets, one set after the other."""
        return np.concatenate([self.first[images] + np.arange(len(images)) for images in sets])

    def encoded(self, sample: int) -> EncodedImage:
        """Return an image's file, not decoded yet; raise DamagedImageError if it is damaged."""
        place, local = _place(sample, self._first)
        return self.sets[place].encoded(local)

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


def _place(number: int, first: NDArray[np.int64]) -> tuple[int, int]:
    """Return the set that a sample or shard is in, and its number there.

    `first` has the number of the first one of each set.
    """
    place = int(np.searchsorted(first, number, side="right")) - 1
    return place, number - int(first[place])


def _contents(index: Index) -> NDArray[np.int64]:
    """Return (N,) size times 2^32 plus CRC-32 of each image."""
    return (index.size << 32) + index.crc32


def shared_images(sets: Mapping[str, ImageSet]) -> Iterator[tuple[str, str, int]]:
    """Yield the names of two sets that share images, and how many.

    Images are the same by their names in one place, or by size and CRC-32, if that is known.
    """
    contents = {
        name: np.unique(_contents(images.index)[images.index.crc32 > 0])
        for name, images in sets.items()
    }
    for (name, first), (other, second) in combinations(sets.items(), 2):
        if first.source.base == second.source.base and first.source.kind == second.source.kind:
            shared = len(np.intersect1d(first.keys, second.keys, assume_unique=True))
        else:
            shared = len(np.intersect1d(contents[name], contents[other], assume_unique=True))
        if shared:
            yield name, other, shared


class MixedIndex:
    """The indexes of several sets as one, whose rows are not copied."""

    def __init__(self, sets: Mapping[str, Index]) -> None:
        self.sets = dict(sets)

    def __len__(self) -> int:
        return sum(map(len, self.sets.values()))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the names and fingerprints of all sets."""
        digest = hashlib.sha256()
        for name, index in self.sets.items():
            digest.update(f"{name} {index.fingerprint}\n".encode())
        return digest.hexdigest()

    @cached_property
    def classes(self) -> MixedClasses:
        return MixedClasses([index.classes for index in self.sets.values()])

    @property
    def class_name(self) -> NDArray[np.str_]:
        """Return (K,) the name of each class within its set."""
        return np.concatenate([index.class_name for index in self.sets.values()])


class MixedImages:
    """The images of several named sets to train on: samples and shards count on from set to set."""

    def __init__(self, sets: Mapping[str, ImageSet]) -> None:
        self.names = tuple(sets)
        self.sets = tuple(sets.values())
        self.index = MixedIndex({name: images.index for name, images in sets.items()})
        self.name = ", ".join(images.name for images in self.sets)
        self._first = self.index.classes.first
        self._first_shard = self.index.classes.first_shard

    def _of_sample(self, sample: int) -> tuple[ImageSet, int]:
        place, local = _place(sample, self._first)
        return self.sets[place], local

    def encoded(self, sample: int, file: ImageBytes | None = None) -> EncodedImage:
        """Return an image, not decoded yet; see `ImageSet.encoded`."""
        images, local = self._of_sample(sample)
        return images.encoded(local, file)

    def files(self, samples: Sequence[int], requests: int) -> list[ImageBytes]:
        """Return the bytes of each image; see `ImageSet.files`."""
        files: list[ImageBytes] = [b""] * len(samples)
        places = [_place(sample, self._first) for sample in samples]
        for number, images in enumerate(self.sets):
            rows = [row for row, (place, _) in enumerate(places) if place == number]
            read = images.files([places[row][1] for row in rows], requests) if rows else []
            for row, file in zip(rows, read, strict=True):
                files[row] = file
        return files

    def fetching(self, files: Callable[[Any], Any], count: int, requests: int) -> Fetch | None:
        """Return how `files` is called ahead of decoding; see `ImageSet.fetching`."""
        if any(images.fetching(files, count, requests) is None for images in self.sets):
            return None
        return Fetch(files, self.ahead(count, requests))

    def ahead(self, count: int, requests: int) -> int:
        """Return how often `count` images are read ahead of decoding them."""
        return max(images.ahead(count, requests) for images in self.sets)

    def drained(self) -> Counter[str]:
        """Return what reading has cost since the last call; see `Storage.meter`."""
        return reduce(add, [images.drained() for images in self.sets])

    @property
    def shards(self) -> int:
        """Return the number of shards of all sets."""
        return int(self._first_shard[-1])

    def shard(self, number: int) -> Shard:
        """Return a shard by its number."""
        place, local = _place(number, self._first_shard)
        return self.sets[place].shard(local)

    def range(self, sample: int) -> Range:
        """Return where an image lies in its shard."""
        images, local = self._of_sample(sample)
        return images.range(local)

    def damage(self, sample: int, data: bytes) -> DamagedImageError | None:
        """Return how the bytes of an image differ from the index, if they do."""
        images, local = self._of_sample(sample)
        return images.damage(local, data)

    def name_of_set(self, sample: int) -> str:
        """Return the name of the set that a sample is in."""
        return self.names[_place(sample, self._first)[0]]

    def where(self, sample: int) -> str:
        """Return set, shard and name of a sample, for messages."""
        images, local = self._of_sample(sample)
        return f"{self.name_of_set(sample)}: {images.where(local)}"


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
