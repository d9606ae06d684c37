"""Count a data set from its index: classes, sizes, and the batches that each way of sampling would give."""

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distap.data.plan import Classes
from distap.data.shards.index import Index

LARGEST = 10  # largest classes to name
IMAGES_A_CLASS = (2, 3, 4, 5, 8, 10, 16, 32)  # values of K to count for p_by_k
BATCHES = (64, 256, 1024, 4096, 16384)  # values of B to count for random batches

Statistics = dict[str, Any]  # the figures that `statistics` returns, ready for JSON


def statistics(index: Index) -> Statistics:
    """Count a data set's images, classes and sizes. Sizes are those of stored files before rotation by EXIF."""
    classes = index.classes
    width, height = (side[index.width > 0] for side in (index.width, index.height))
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
        "largest": {str(index.class_name[label]): int(classes.sizes[label]) for label in largest},
        # Classes and images of each super-category.
        "group_sizes": {name: (int(own.sum()), int(classes.sizes[own].sum())) for name, own in members.items()},
        "without_group": int((index.class_group == "").sum()),  # classes
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
