"""Learn a whitening from descriptors, with covariances accumulated in float64 over blocks of a memory map.

PCA scales the principal components by a power of their variance. Discriminative whitening (Lw) shrinks the
directions in which matching images differ.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64
from numpy.typing import NDArray

from distap.errors import DistapError
from distap.retrieval.descriptor_files import DescriptorSet, reading
from distap.retrieval.whitening import Whitening, WhiteningKind

BLOCK_NUMBERS = 2**23  # numbers held in float64 at once: 64 MB
NO_VARIANCE = 1e-9  # share of the greatest variance that rounding to float16 leaves in a constant direction
HALF_POWER = 0.25  # Revaud et al. 2019: 'square-rooted' PCA; 0.5 is full whitening

Covariance = Float64[np.ndarray, "C C"]


def learn_pca(descriptors: DescriptorSet, power: float = HALF_POWER, dimensions: int | None = None) -> Whitening:
    """Principal components, each divided by its variance to the power (Revaud et al. 2019; 0.5: full whitening).

    Directions with less than 1e-9 of the greatest variance are dropped.

    Args:
        descriptors: N of C dimensions, possibly a memory map; classes are ignored.
        power: 0 only rotates, 0.5 whitens fully.
        dimensions: D, the directions of most variance to keep; None keeps all that have variance.
    Raises:
        DistapError: fewer than D directions have variance, or a number is not finite.
    """
    if not 0 <= power <= 1:
        raise DistapError(f"whitening: power {power:g}, expected 0 (none) to 1, such as 0.5 (full)")
    mean, covariance = _mean_and_covariance(descriptors)
    variances, directions = _principal_directions(covariance, descriptors.data)
    projection = directions / variances[:, None] ** power
    return _whitening(descriptors, mean, projection, "pca", power, dimensions)


def learn_discriminative(
    descriptors: DescriptorSet,
    dimensions: int | None = None,
    pairs: Int64[np.ndarray, "P 2"] | None = None,
) -> Whitening:
    """Discriminative whitening Lw (Radenović et al. 2018): matching images differ equally in every direction.

    The projection is the inverse square root of the covariance of the differences of matching images, followed by
    the principal components of the descriptors so whitened. Directions in which no matching images differ are
    dropped, since their scale is unknown.

    Args:
        descriptors: N of C dimensions, possibly a memory map.
        dimensions: D, the directions of most variance to keep; None keeps all.
        pairs: rows of matching images; None pairs each image with all others of its class. Each image then has the
            same weight, so that large classes do not drown the others.
    Raises:
        DistapError: nothing matches, fewer than D directions differ, or a number is not finite.
    """
    mean, covariance = _mean_and_covariance(descriptors)
    if pairs is None:
        differences = _covariance_within_classes(descriptors, mean)
    else:
        differences = _covariance_of_pairs(descriptors, pairs)
    variances, directions = _principal_directions(differences, f"matching images of {descriptors.data}")
    shrinking = directions / np.sqrt(variances)[:, None]
    _, rotation = _principal_directions(shrinking @ covariance @ shrinking.T, descriptors.data)
    return _whitening(descriptors, mean, rotation @ shrinking, "lw", 0.5, dimensions)


def read_pairs(path: Path, descriptors: DescriptorSet) -> Int64[np.ndarray, "P 2"]:
    """Rows of the pairs in a JSON list of {"query", "positive"}, which name images by key or by class.

    Converted sets without classes store each image's name as its class, so a class with one image names that image.

    Raises:
        DistapError: the file is no such list, or names an image that is missing from the descriptors.
    """
    with reading(path, "distap data convert"):
        named = [(str(pair["query"]), str(pair["positive"])) for pair in json.loads(path.read_text(encoding="utf-8"))]
    classes, first, count = np.unique(descriptors.classes, return_index=True, return_counts=True)
    rows = {name: int(row) for name, row, images in zip(classes.tolist(), first, count, strict=True) if images == 1}
    rows |= {key: row for row, key in enumerate(descriptors.keys.tolist())}
    unknown = sorted({name for pair in named for name in pair} - rows.keys())
    if unknown:
        raise DistapError(
            f"{path}: {len(unknown)} of its images are not among the {len(descriptors)} of {descriptors.data}, such "
            f"as {unknown[0]!r}; describe the split that it lies beside"
        )
    return np.array([(rows[query], rows[positive]) for query, positive in named], np.int64).reshape(-1, 2)


def _whitening(
    descriptors: DescriptorSet,
    mean: Float64[np.ndarray, " C"],
    projection: Float64[np.ndarray, "D C"],
    kind: WhiteningKind,
    power: float,
    dimensions: int | None,
) -> Whitening:
    if dimensions is not None and not 1 <= dimensions <= len(projection):
        raise DistapError(
            f"whitening: {dimensions} dimensions cannot be learned from the {len(descriptors)} descriptors of "
            f"{descriptors.data}, which vary in {len(projection)} directions of {len(mean)}; ask for fewer, or learn "
            "from more images"
        )
    return Whitening(mean, projection[:dimensions], kind, power, descriptors.data, descriptors.described_by)


def _mean_and_covariance(descriptors: DescriptorSet) -> tuple[Float64[np.ndarray, " C"], Covariance]:
    values, total = descriptors.descriptors, len(descriptors)
    if descriptors.described_by.whitening is not None:
        raise DistapError(
            f"{descriptors.data}: these descriptors are whitened already; learn from those extracted without"
        )
    if not total:
        raise DistapError("whitening: there is no descriptor to learn from")
    rows = np.arange(total)
    mean = sum((block.sum(axis=0) for _, block in _blocks(values, rows)), np.zeros(values.shape[1])) / total
    if not np.isfinite(mean).all():
        raise DistapError("whitening: a descriptor is not finite: the network is broken; extract again")
    covariance = np.zeros((values.shape[1],) * 2)
    for _, block in _blocks(values, rows):
        block -= mean
        covariance += block.T @ block
    return mean, covariance / total


def _covariance_within_classes(descriptors: DescriptorSet, mean: Float64[np.ndarray, " C"]) -> Covariance:
    """Mean over images i of the mean over the others j of its class of (x_i - x_j)(x_i - x_j)ᵀ.

    Over a class of n images, the sum over i is 2 n / (n - 1) times the scatter around the mean m of the class, and
    the scatter is Σ x xᵀ - n m mᵀ. So no pair needs to be formed. An image alone in its class matches none.
    """
    values, classes = descriptors.descriptors, descriptors.classes
    _, number, count = np.unique(classes, return_inverse=True, return_counts=True)
    matched = np.flatnonzero((count[number] > 1) & (classes != ""))
    if not len(matched):
        raise DistapError(
            f"{descriptors.data}: no class has two images, so nothing matches; learn --kind pca, or from a set with "
            "classes"
        )
    matched = matched[np.argsort(number[matched], kind="stable")]
    result = np.zeros((values.shape[1],) * 2)
    pending, done = np.zeros(values.shape[1]), 0  # sum of a class that continues in the next block; rows seen
    for rows, block in _blocks(values, matched):
        block -= mean
        of_row = number[rows]
        done += len(rows)
        begins = np.flatnonzero(np.diff(of_row, prepend=-1))
        sums, size = np.add.reduceat(block, begins, axis=0), count[of_row[begins]][:, None]
        sums[0] += pending
        pending = np.zeros(values.shape[1])
        if done < len(matched) and number[matched[done]] == of_row[-1]:
            pending, sums, size = sums[-1], sums[:-1], size[:-1]
        weight = (2 * count / np.maximum(count - 1, 1))[of_row][:, None]
        result += (block * weight).T @ block
        result -= (sums * 2 / (size - 1)).T @ sums
    return result / len(matched)


def _covariance_of_pairs(descriptors: DescriptorSet, pairs: Int64[np.ndarray, "P 2"]) -> Covariance:
    """Mean over pairs of rows (i, j) of (x_i - x_j)(x_i - x_j)ᵀ."""
    values = descriptors.descriptors
    if not len(pairs) or pairs.min() < 0 or pairs.max() >= len(values):
        raise DistapError(
            f"{descriptors.data}: {len(pairs)} matching pairs, expected one or more of rows below {len(values)}"
        )
    result = np.zeros((values.shape[1],) * 2)
    for (_, left), (_, right) in zip(_blocks(values, pairs[:, 0]), _blocks(values, pairs[:, 1]), strict=True):
        left -= right
        result += left.T @ left
    return result / len(pairs)


def _principal_directions(
    covariance: Covariance, what: str
) -> tuple[Float64[np.ndarray, " D"], Float64[np.ndarray, "D C"]]:
    """Variances, greatest first, and unit directions, without those whose variance is only rounding.

    The greatest component of each direction is positive, so that the result does not depend on the LAPACK version.
    """
    variances, columns = np.linalg.eigh(covariance)
    kept = variances > max(NO_VARIANCE * variances[-1], np.finfo(np.float64).tiny)
    if not kept.any():
        raise DistapError(f"{what}: the descriptors do not vary, so no whitening can be learned")
    directions = columns[:, kept].T[::-1]
    greatest = np.abs(directions).argmax(axis=1)
    signs = np.sign(directions[np.arange(len(directions)), greatest])
    return variances[kept][::-1], directions * signs[:, None]


def _blocks(values: NDArray[Any], rows: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float64]]]:
    """Yield some of the rows at a time, and their descriptors in float64."""
    height = max(BLOCK_NUMBERS // max(values.shape[1], 1), 1)
    for start in range(0, len(rows), height):
        some = rows[start : start + height]
        yield some, values[some].astype(np.float64)
