"""Count a data set from its index: classes, sizes, and the batches that each way of sampling would give."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distap.data.images.decoding import DamagedImageError
from distap.data.images.formats import format_of
from distap.data.loading.indexed import Reader
from distap.data.plan import Classes
from distap.data.shards.index import Index
from distap.randomness import permutation

LOOKED_AT = 256  # images whose format is looked at; reading all of them would take as long as an epoch
LARGEST = 10  # largest classes to name
MOST_SINGLE_BINS = 24  # with more distinct values, several values share a bin
IMAGES_A_CLASS = (2, 3, 4, 5, 8, 10, 16, 32)  # values of K to count for p_by_k
BATCHES = (64, 256, 1024, 4096, 16384)  # values of B to count for random batches
ASPECTS = (0.0, 1 / 3, 1 / 2, 2 / 3, 0.9, 1.1, 3 / 2, 2.0, 3.0, np.inf)
ASPECT_NAMES = ("<1:3", "1:3-1:2", "1:2-2:3", "2:3-0.9", "square", "1.1-3:2", "3:2-2:1", "2:1-3:1", ">3:1")
UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))

Histogram = tuple[tuple[str, int], ...]  # name and count of each bin
Statistics = dict[str, Any]  # the figures that `statistics` returns, ready for JSON


def statistics(reader: Reader) -> Statistics:
    """Count a data set. Sizes are those of the stored files, whatever EXIF says; unknown ones are left out."""
    index = reader.index
    classes = index.classes
    width, height = (side[index.width > 0] for side in (index.width, index.height))
    size = index.size[index.size > 0]
    shorter = np.minimum(width, height)
    megapixels = width.astype(np.int64) * height / 1e6
    aspect = width / height
    looked_at = permutation(len(index), 0)[:LOOKED_AT].tolist()
    formats = Counter(_format(reader, sample) for sample in looked_at)
    largest = np.argsort(-classes.sizes, kind="stable")[:LARGEST].tolist()
    members = {str(name): index.class_group == name for name in np.unique(index.class_group) if name}
    classes_a_shard, mixed = _mixing(index, classes)
    return {
        "fingerprint": index.fingerprint,
        "images": len(index),
        "classes": classes.count,
        "groups": len(members),
        "shards": len(index.shard_name),
        "bytes": int(index.size.sum()),  # of the images; the shards hold headers and labels besides
        "singletons": int((classes.sizes == 1).sum()),  # classes of one image, which is never a query
        "images_a_class": _spread(classes.sizes),
        "width": _spread(width),  # pixels, like height and shorter_side
        "height": _spread(height),
        "shorter_side": _spread(shorter),
        "megapixels": _spread(megapixels),
        "aspect": _spread(aspect),  # width over height
        "image_bytes": _spread(size),
        "formats": dict(formats.most_common()),  # of `looked_at` images, drawn at random
        "looked_at": len(looked_at),
        "largest": {str(index.class_name[label]): int(classes.sizes[label]) for label in largest},
        # Classes and images of each super-category.
        "group_sizes": {name: (int(own.sum()), int(classes.sizes[own].sum())) for name, own in members.items()},
        "without_group": int((index.class_group == "").sum()),  # classes
        "classes_a_shard": _spread(classes_a_shard),
        # Near 1 for a random order, which is good for streamed reading; near 0 for class by class.
        "mixed": mixed,
        "images_a_class_histogram": doubling_histogram(classes.sizes),
        "shorter_side_histogram": decimal_histogram(shorter),
        "megapixels_histogram": decimal_histogram(megapixels),
        "aspect_histogram": _trimmed(np.histogram(aspect, ASPECTS)[0], ASPECT_NAMES),
        "image_bytes_histogram": decimal_histogram(size),
        # K, classes with K images or more (smaller ones are filled up from others), and the greatest P of a batch.
        "p_by_k": [
            {"images": k, "classes": int((classes.sizes >= k).sum()), "most_classes": most_classes(classes, k)}
            for k in IMAGES_A_CLASS
        ],
        # Mean share of the images of a random batch that have another image of their class in it.
        "random": [
            {"size": size, "with_positive": share_with_positive(classes, size)}
            for size in BATCHES
            if size <= len(index)
        ],
        "smallest_classes_batch": 2 * classes.count,  # of sampling by `classes`
    }


def most_classes(classes: Classes, images: int) -> int:
    """The greatest P for which p_by_k with K = `images` finds enough images for a batch."""
    usable = classes.with_pairs
    return min(len(usable), classes.available(usable, images) // images) if len(usable) else 0


def share_with_positive(classes: Classes, batch: int) -> float:
    """The mean share of a random batch's images that have another image of their class in it.

    An image whose class has s of the N images is alone with probability C(N - s, B - 1) / C(N - 1, B - 1).
    """
    total = len(classes)
    share = 0.0
    for size, count in Counter(classes.sizes.tolist()).items():
        others = np.arange(size - 1)
        alone = np.prod(np.maximum(total - batch - others, 0) / (total - 1 - others))
        share += size * count / total * (1 - float(alone))
    return share


def doubling_histogram(values: NDArray[np.int64]) -> Histogram:
    """Count positive integers, in a bin for each value if they are few, otherwise in 1, 2, 3-4, 5-8, 9-16 ..."""
    most = int(values.max())
    powers = [1 << power for power in range((most - 1).bit_length() + 1)]
    tops = powers if most > MOST_SINGLE_BINS else range(1, most + 1)
    names = [str(top) if top == below + 1 else f"{below + 1}-{top}" for below, top in pairwise([0, *tops])]
    return _trimmed(np.bincount(np.searchsorted(tops, values), minlength=len(tops)), names)


def decimal_histogram(values: NDArray[Any]) -> Histogram:
    """Count positive numbers in bins between 1, 2 and 5 times the powers of ten."""
    low, high = np.log10(np.maximum([values.min(initial=1), values.max(initial=1)], 1e-6))
    powers = range(int(np.floor(low)) - 1, int(np.ceil(high)) + 2)
    edges = [float(f"{factor}e{power}") for power in powers for factor in (1, 2, 5)]
    names = [f"{_short(first)}-{_short(last)}" for first, last in pairwise(edges)]
    return _trimmed(np.histogram(values.astype(np.float64), edges)[0], names)


def _spread(values: NDArray[Any]) -> dict[str, float]:
    """Minimum, mean, maximum, and the values that 5%, 50% and 95% do not exceed."""
    if not len(values):
        return {}
    least, low, median, high, greatest = np.percentile(values, [0, 5, 50, 95, 100]).tolist()
    mean = float(values.mean(dtype=np.float64))
    return {"least": least, "low": low, "median": median, "mean": mean, "high": high, "greatest": greatest}


def _mixing(index: Index, classes: Classes) -> tuple[NDArray[np.int64], float]:
    """Return the (S,) classes in each shard, and how well classes are mixed.

    That is the sum of these classes, or the number of neighbours of different classes, over what is expected in a
    random order, whichever is less.
    """
    pairs = np.unique(index.shard.astype(np.int64) * classes.count + index.label)
    found = np.bincount(pairs // classes.count, minlength=len(index.shard_name))
    sizes, counts = np.unique(classes.sizes, return_counts=True)
    shares = index.shard_counts[:, None] / len(index)
    expected = float(((1 - (1 - shares) ** sizes) * counts).sum())
    order = np.lexsort((index.offset, index.shard))
    shard, label = index.shard[order], index.label[order]
    beside = shard[1:] == shard[:-1]
    differ = float((label[1:] != label[:-1])[beside].mean()) if beside.any() else 1.0
    by_chance = 1 - float(((classes.sizes / len(index)) ** 2).sum())
    return found, min(float(found.sum()) / expected, differ / by_chance if by_chance else 1.0)


def _format(reader: Reader, sample: int) -> str:
    try:
        data = reader.data(sample)
    except DamagedImageError:
        return "damaged"
    found = format_of(data)
    return found.name if found else "other"


def _short(value: float) -> str:
    unit, name = next(((unit, name) for unit, name in UNITS if value >= unit), (1, ""))
    return f"{value / unit:g}{name}"


def _trimmed(counts: NDArray[np.int64], names: Sequence[str]) -> Histogram:
    filled = np.flatnonzero(counts).tolist() or [0, -1]
    return tuple((names[place], int(counts[place])) for place in range(filled[0], filled[-1] + 1))
