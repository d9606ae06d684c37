"""Count what a data set holds."""

from typing import Any

import numpy as np

from distap.data.shards.index import Index


def statistics(index: Index) -> dict[str, Any]:
    """Count a data set's images, classes, bytes and left-out files, ready for JSON."""
    sizes = index.classes.sizes
    return {
        "images": len(index),
        "classes": len(sizes),
        "classes_of_one_image": int((sizes == 1).sum()),  # which is never a query
        "images_a_class_min": int(sizes.min()),
        "images_a_class_median": float(np.median(sizes)),
        "images_a_class_max": int(sizes.max()),
        "bytes": int(index.size.sum()),  # of the images; the shards hold headers and labels besides
        "left_out": len(index.left_out),
        **(index.scaling._asdict() if index.scaling else {}),
    }
