"""Covariances of descriptors, accumulated in float64 from a memory map in blocks."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Float, Float64, Int64
from numpy.typing import NDArray

from distap.errors import DistapError

BLOCK_NUMBERS = 2**23  # in float64 at once: 64 MB
NO_VARIANCE = 1e-9  # of the greatest variance: what rounding to float16 leaves in a direction that has none


def covariances_of_all(
    values: Float[np.ndarray, "N C"],
) -> tuple[Float64[np.ndarray, " C"], Float64[np.ndarray, "C C"]]:
    """Mean, and covariance around it, divided by N.

    Raises:
        DistapError: there are none, or a number is not finite.
    """
    if not len(values):
        raise DistapError("whitening: there is no descriptor to learn from")
    rows = np.arange(len(values))
    mean = sum((block.sum(axis=0) for _, block in _blocks(values, rows)), np.zeros(values.shape[1])) / len(values)
    if not np.isfinite(mean).all():
        raise DistapError("whitening: a descriptor is not finite: the network is broken; extract again")
    covariance = np.zeros((values.shape[1],) * 2)
    for _, block in _blocks(values, rows):
        block -= mean
        covariance += block.T @ block
    return mean, covariance / len(values)


def covariance_of_matches(
    values: Float[np.ndarray, "N C"], mean: Float64[np.ndarray, " C"], classes: NDArray[Any], data: str
) -> Float64[np.ndarray, "C C"]:
    """Mean over images and the others of their class of (x_i - x_j)(x_i - x_j)ᵀ, each image weighing the same.

    Over a class of n it is 2 n / (n - 1) times the scatter around the mean of the class, and that scatter is
    Σ x xᵀ - n m mᵀ, so the pairs need not be formed. An image without a class, or alone in it, matches none.

    Raises:
        DistapError: no class has two images.
    """
    _, number, count = np.unique(classes, return_inverse=True, return_counts=True)
    matched = np.flatnonzero((count[number] > 1) & (classes != ""))
    if not len(matched):
        raise DistapError(
            f"{data}: no class has two images, so nothing matches; learn --kind pca, or from a set with classes"
        )
    matched = matched[np.argsort(number[matched], kind="stable")]
    result = np.zeros((values.shape[1],) * 2)
    pending, done = np.zeros(values.shape[1]), 0  # sum of a class that goes on in the next block; rows seen
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


def covariance_of_pairs(
    values: Float[np.ndarray, "N C"], pairs: Int64[np.ndarray, "P 2"], data: str
) -> Float64[np.ndarray, "C C"]:
    """Mean over pairs of rows of (x_i - x_j)(x_i - x_j)ᵀ.

    Raises:
        DistapError: there is no pair, or one names a row that is not there.
    """
    if not len(pairs) or pairs.min() < 0 or pairs.max() >= len(values):
        raise DistapError(f"{data}: {len(pairs)} matching pairs, expected one or more of rows below {len(values)}")
    result = np.zeros((values.shape[1],) * 2)
    for (_, left), (_, right) in zip(_blocks(values, pairs[:, 0]), _blocks(values, pairs[:, 1]), strict=True):
        left -= right
        result += left.T @ left
    return result / len(pairs)


def principal_directions(
    covariance: Float64[np.ndarray, "C C"], what: str
) -> tuple[Float64[np.ndarray, " D"], Float64[np.ndarray, "D C"]]:
    """Variances, greatest first, and directions of length 1 of those that are more than rounding.

    A direction's greatest component is positive, so that the result does not hang on the linear algebra's whim.

    Raises:
        DistapError: there is no variance at all.
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
    """Some of the rows at a time, and their descriptors in float64."""
    height = max(BLOCK_NUMBERS // max(values.shape[1], 1), 1)
    for start in range(0, len(rows), height):
        some = rows[start : start + height]
        yield some, values[some].astype(np.float64)
