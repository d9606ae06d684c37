"""What a data set holds, counted from its index: classes, sizes, and what each way of sampling would make of it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distap.data.images.decoding import DamagedImageError
from distap.data.loading.reading import Reader
from distap.data.plan import Classes
from distap.data.sampling.draws import available
from distap.data.shards.index import Index
from distap.randomness import permutation

LOOKED_AT = 256  # images whose bytes are looked at for their format; reading all would take as long as an epoch
LARGEST = 10  # classes that are named
MOST_SINGLE_BINS = 24  # more values than this share bins
IMAGES_A_CLASS = (2, 3, 4, 5, 8, 10, 16, 32)  # K of p_by_k to tell of
BATCHES = (256, 1024, 4096, 16384)  # B of random batches to tell of
ASPECTS = (0.0, 1 / 3, 1 / 2, 2 / 3, 0.9, 1.1, 3 / 2, 2.0, 3.0, np.inf)
ASPECT_NAMES = ("<1:3", "1:3-1:2", "1:2-2:3", "2:3-0.9", "square", "1.1-3:2", "3:2-2:1", "2:1-3:1", ">3:1")
SIGNATURES = ((b"\xff\xd8\xff", "JPEG"), (b"\x89PNG", "PNG"), (b"GIF8", "GIF"), (b"BM", "BMP"))

Histogram = tuple[tuple[str, int], ...]  # what a bin holds, as text, and how many


@dataclass(frozen=True)
class Spread:
    """How values are spread: the least, the greatest, and those that 5%, half and 95% are at most."""

    least: float
    low: float
    median: float
    mean: float
    high: float
    greatest: float


@dataclass(frozen=True)
class PByK:
    """What p_by_k would find for K images a class."""

    images: int  # K
    classes: int  # with K images or more; smaller ones are filled up from others
    most_classes: int  # the greatest P of a batch


@dataclass(frozen=True)
class RandomBatch:
    """What a random batch of B images would hold on average."""

    size: int  # B
    with_positive: float  # share of its images that have another of their class in it


@dataclass(frozen=True)
class Statistics:
    """A data set in figures. Sizes are of the files as stored, whatever EXIF says of their orientation."""

    fingerprint: str
    images: int
    classes: int
    groups: int
    shards: int
    bytes: int  # of the images; the shards hold headers and labels besides
    singletons: int  # classes of one image, whose image is never a query
    images_a_class: Spread
    width: Spread  # pixels
    height: Spread  # pixels
    shorter_side: Spread  # pixels
    megapixels: Spread
    aspect: Spread  # width over height
    image_bytes: Spread
    formats: dict[str, int]  # of `looked_at` images, drawn at random
    looked_at: int
    largest: dict[str, int]  # images of the largest classes, by name
    group_sizes: dict[str, tuple[int, int]]  # classes and images of each super-category
    without_group: int  # classes
    classes_a_shard: Spread
    mixed: float  # classes a shard over what a random order would give: near 1 is good for streamed reading
    images_a_class_histogram: Histogram
    shorter_side_histogram: Histogram
    megapixels_histogram: Histogram
    aspect_histogram: Histogram
    image_bytes_histogram: Histogram
    p_by_k: tuple[PByK, ...]
    random: tuple[RandomBatch, ...]
    smallest_classes_batch: int  # the least batch of sampling by `classes`


def statistics(index: Index, reader: Reader | None = None) -> Statistics:
    """Count.

    Args:
        index: of the data set.
        reader: of the same data set, to tell formats; without it they are left out.
    """
    classes = Classes(index.label, index.class_group)
    shorter = np.minimum(index.width, index.height)
    pixels = index.width.astype(np.int64) * index.height
    aspect = index.width / np.maximum(index.height, 1)
    looked_at = permutation(len(index), 0)[:LOOKED_AT] if reader else np.empty(0, np.int64)
    order = np.argsort(-classes.sizes, kind="stable")[:LARGEST].tolist()
    a_shard, mixed = _mixing(index, classes)
    return Statistics(
        fingerprint=index.fingerprint,
        images=len(index),
        classes=classes.count,
        groups=len(np.unique(index.class_group[index.class_group != ""])),
        shards=len(index.shard_name),
        bytes=int(index.size.sum()),
        singletons=int((classes.sizes == 1).sum()),
        images_a_class=_spread(classes.sizes),
        width=_spread(index.width),
        height=_spread(index.height),
        shorter_side=_spread(shorter),
        megapixels=_spread(pixels / 1e6),
        aspect=_spread(aspect),
        image_bytes=_spread(index.size),
        formats=_formats(reader, looked_at) if reader else {},
        looked_at=len(looked_at),
        largest={str(index.class_name[label]): int(classes.sizes[label]) for label in order},
        group_sizes=_groups(index.class_group, classes),
        without_group=int((index.class_group == "").sum()),
        classes_a_shard=_spread(a_shard),
        mixed=mixed,
        images_a_class_histogram=_doubling(classes.sizes),
        shorter_side_histogram=_round_bins(shorter),
        megapixels_histogram=_round_bins(pixels / 1e6),
        aspect_histogram=_trimmed(np.histogram(aspect, ASPECTS)[0], ASPECT_NAMES),
        image_bytes_histogram=_round_bins(index.size),
        p_by_k=tuple(_p_by_k(classes, images) for images in IMAGES_A_CLASS),
        random=tuple(RandomBatch(b, _with_positive(classes, b)) for b in BATCHES if b <= len(index)),
        smallest_classes_batch=2 * classes.count,
    )


def _spread(values: NDArray[Any]) -> Spread:
    least, low, median, high, greatest = np.percentile(values, [0, 5, 50, 95, 100]).tolist()
    return Spread(least, low, median, float(values.astype(np.float64).mean()), high, greatest)


def _p_by_k(classes: Classes, images: int) -> PByK:
    usable = classes.with_pairs
    most = min(len(usable), available(classes, usable, images) // images) if len(usable) else 0
    return PByK(images, int((classes.sizes >= images).sum()), most)


def _with_positive(classes: Classes, batch: int) -> float:
    """Mean over images of 1 - C(N - s, B - 1) / C(N - 1, B - 1), s images being in the image's class."""
    total = len(classes)
    sizes, counts = np.unique(classes.sizes, return_counts=True)
    share = 0.0
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        others = np.arange(size - 1)
        alone = np.prod(np.maximum(total - batch - others, 0) / (total - 1 - others)) if size > 1 else 1.0
        share += size * count / total * (1 - float(alone))
    return share


def _mixing(index: Index, classes: Classes) -> tuple[NDArray[np.int64], float]:
    """(S,) classes in each shard, and their sum over what is expected of shards that are filled at random."""
    pairs = np.unique(index.shard.astype(np.int64) * classes.count + index.label)
    found = np.bincount(pairs // classes.count, minlength=len(index.shard_name))
    images = np.bincount(index.shard, minlength=len(index.shard_name))
    sizes, counts = np.unique(classes.sizes, return_counts=True)
    shares = images[:, None] / len(index)
    expected = float(((1 - (1 - shares) ** sizes) * counts).sum())
    return found, float(found.sum()) / expected


def _groups(group: NDArray[np.str_], classes: Classes) -> dict[str, tuple[int, int]]:
    members = {str(name): group == name for name in np.unique(group) if name}
    return {name: (int(own.sum()), int(classes.sizes[own].sum())) for name, own in members.items()}


def _formats(reader: Reader, samples: NDArray[np.int64]) -> dict[str, int]:
    return dict(Counter(_format(reader, sample) for sample in samples.tolist()).most_common())


def _format(reader: Reader, sample: int) -> str:
    try:
        data = reader.data(sample)
    except DamagedImageError:
        return "damaged"
    if data[:4] in (b"II*\0", b"MM\0*"):
        return "TIFF"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    return next((name for signature, name in SIGNATURES if data.startswith(signature)), "other")


def _doubling(values: NDArray[np.int64]) -> Histogram:
    """A bin a value where there are few; otherwise 1, 2, 3-4, 5-8, 9-16 and so on."""
    most = int(values.max())
    if most <= MOST_SINGLE_BINS:
        counts = np.bincount(values, minlength=most + 1)[1:]
        return _trimmed(counts, [str(value) for value in range(1, most + 1)])
    tops = [1 << power for power in range(most.bit_length() + (most & (most - 1) != 0))]
    names = [str(top) if top <= 2 else f"{top // 2 + 1}-{top}" for top in tops]
    return _trimmed(np.bincount(np.searchsorted(tops, values), minlength=len(tops)), names)


def _round_bins(values: NDArray[Any]) -> Histogram:
    """Bins between 1, 2 and 5 times the powers of ten."""
    numbers = values.astype(np.float64)
    smallest = np.floor(np.log10(max(float(numbers.min()), 1e-6))) - 1
    powers = np.arange(smallest, np.ceil(np.log10(max(float(numbers.max()), 1e-6))) + 2)
    edges = [float(f"{factor}e{int(power)}") for power in powers for factor in (1, 2, 5)]
    names = [f"{_short(low)}-{_short(high)}" for low, high in pairwise(edges)]
    return _trimmed(np.histogram(numbers, edges)[0], names)


def _short(value: float) -> str:
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"


def _trimmed(counts: NDArray[np.int64], names: Sequence[str]) -> Histogram:
    """Without the empty bins at both ends."""
    filled = np.flatnonzero(counts)
    return tuple((names[place], int(counts[place])) for place in range(filled[0], filled[-1] + 1))
