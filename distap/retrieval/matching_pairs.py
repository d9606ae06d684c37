"""Pairs of matching images, as the converters write them beside a data set."""

import json
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from distap.errors import DistapError
from distap.retrieval.descriptor_files import DescriptorSet


def read_pairs(path: Path, descriptors: DescriptorSet) -> Int64[np.ndarray, "P 2"]:
    """Rows of the images that a JSON list of {"query", "positive"} names, by their keys, or by their classes.

    Converted sets without classes have each image's name as its class, so a class of one image names it.

    Raises:
        DistapError: the file is not such a list, or names an image that was not described.
    """
    try:
        named = [(str(pair["query"]), str(pair["positive"])) for pair in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DistapError(f"{path}: not a list of pairs as `distap data convert` writes it: {error!r}") from error
    classes, first, count = np.unique(descriptors.classes, return_index=True, return_counts=True)
    rows = {name: int(row) for name, row, images in zip(classes.tolist(), first, count, strict=True) if images == 1}
    rows |= {key: row for row, key in enumerate(descriptors.keys.tolist())}
    unknown = sorted({name for pair in named for name in pair} - rows.keys())
    if unknown:
        raise DistapError(
            f"{path}: {len(unknown)} images that it names are not among the {len(descriptors)} of "
            f"{descriptors.data}, such as {unknown[0]!r}; describe the split that it lies beside"
        )
    return np.array([(rows[query], rows[positive]) for query, positive in named], np.int64).reshape(-1, 2)
