"""Count a data set from its index: classes, sizes, and the batches that each way of sampling would give."""

from collections import Counter
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
IMAGES_A_CLASS = (2, 3, 4, 5, 8, 10, 16, 32)  # values of K to count for p_by_k
BATCHES = (64, 256, 1024, 4096, 16384)  # values of B to count for random batches

Statistics = dict[str, Any]  # the figures that `statistics` returns, ready for JSON


def statistics(reader: Reader) -> Statistics:
    """Count a data set's images, classes and sizes. Sizes are those of stored files before rotation by EXIF."""
    index = reader.index
    classes = index.classes
    width, height = (side[index.width > 0] for side in (index.width, index.height))
    looked_at = permutation(len(index), 0)[:LOOKED_AT].tolist()
    largest = np.argsort(-classes.sizes, kind="stable")[:LARGEST].tolist()
    members = {str(name): index.class_group == name for name in np.unique(index.class_group) if name}
    spreads: dict[str, NDArray[Any]] = {
        "images_a_class": classes.sizes,
        "width": width,  # pixels, like height and shorter_side
        "height": height,
        "shorter_side": np.minimum(width, height),
        "megapixels": width.astype(np.int64) * height / 1e6,
        "aspect": width / height,
        "image_bytes": index.size[index.size > 0],
    }
    return {
        "fingerprint": index.fingerprint,
        "images": len(index),
        "classes": classes.count,
        "shards": len(index.shard_name),
        "bytes": int(index.size.sum()),  # of the images; the shards hold headers and labels besides
        "singletons": int((classes.sizes == 1).sum()),  # classes of one image, which is never a query
        **{name: _spread(values) for name, values in spreads.items()},
        "formats": dict(Counter(_format(reader, sample) for sample in looked_at).most_common()),
        "looked_at": len(looked_at),  # images drawn at random for `formats`
        "largest": {str(index.class_name[label]): int(classes.sizes[label]) for label in largest},
        # Classes and images of each super-category.
        "group_sizes": {name: (int(own.sum()), int(classes.sizes[own].sum())) for name, own in members.items()},
        "without_group": int((index.class_group == "").sum()),  # classes
        # Near 1 for a random order, which is good for streamed reading; near 0 for class by class.
        "mixed": _mixing(index, classes),
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
    """Return the greatest P for which p_by_k with K = `images` can fill a batch."""
    usable = classes.with_pairs
    return min(len(usable), classes.available(usable, images) // images) if len(usable) else 0


def share_with_positive(classes: Classes, batch: int) -> float:
    """Return the mean share of a random batch's images with another image of their class in the batch.

    An image whose class has s of the N images is alone with probability C(N - s, B - 1) / C(N - 1, B - 1).
    """
    total = len(classes)
    share = 0.0
    for size, count in Counter(classes.sizes.tolist()).items():
        others = np.arange(size - 1)
        alone = np.prod(np.maximum(total - batch - others, 0) / (total - 1 - others))
        share += size * count / total * (1 - float(alone))
    return share


def _spread(values: NDArray[Any]) -> dict[str, float]:
    if not len(values):
        return {}
    least, low, median, high, greatest = np.percentile(values, [0, 5, 50, 95, 100]).tolist()
    mean = float(values.mean(dtype=np.float64))
    return {"least": least, "5%": low, "median": median, "mean": mean, "95%": high, "greatest": greatest}


def _mixing(index: Index, classes: Classes) -> float:
    # How well classes are mixed: the classes in each shard, summed, or the number of neighbours of different classes,
    # over what is expected in a random order, whichever is less. Shards of whole classes fail the first, one shard
    # that holds class after class fails the second.
    found = len(np.unique(index.shard.astype(np.int64) * classes.count + index.label))
    sizes, counts = np.unique(classes.sizes, return_counts=True)
    shares = index.shard_counts[:, None] / len(index)
    expected = float(((1 - (1 - shares) ** sizes) * counts).sum())
    order = np.lexsort((index.offset, index.shard))
    shard, label = index.shard[order], index.label[order]
    same_shard = shard[1:] == shard[:-1]
    differ = float((label[1:] != label[:-1])[same_shard].mean()) if same_shard.any() else 1.0
    by_chance = 1 - float(((classes.sizes / len(index)) ** 2).sum())
    return min(found / expected, differ / by_chance if by_chance else 1.0)


def _format(reader: Reader, sample: int) -> str:
    try:
        data = reader.data(sample)
    except DamagedImageError:
        return "damaged"
    found = format_of(data)
    return found.name if found else "other"
