"""Learn, save and load a whitening: subtract a mean, project, scale to length 1.

PCA scales the principal components by a power of their variance. Discriminative whitening (Lw)
shrinks the directions in which images of a class differ. Covariances are accumulated in float64
over blocks of a memory map.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import safetensors
import torch
from jaxtyping import Float64
from numpy.typing import NDArray
from safetensors.numpy import save
from torch import Tensor

from distap.errors import DistapError, logger
from distap.retrieval.descriptor_files import DescribedBy, DescriptorSet, reading
from distap.retrieval.row_blocks import row_blocks
from distap.storage.atomic import write_whole
from distap.storage.texts import parsed_json

# in a run folder, or next to the descriptors it was learned from
WHITENING_FILE = "whitening.safetensors"
# share of the greatest variance that rounding to float16 leaves in a constant direction
NO_VARIANCE = 1e-9
HALF_POWER = 0.25  # Revaud et al. 2019: 'square-rooted' PCA; 0.5 is full whitening


Covariance = Float64[np.ndarray, "C C"]


@dataclass(frozen=True, eq=False)
class Whitening:
    """A whitening: `normalise(projection (x - mean))`, in float64."""

    mean: NDArray[np.float64]  # (C,)
    projection: NDArray[np.float64]  # (D, C), directions of most variance first
    learned_from: str  # path or URL of the images
    described_by: DescribedBy  # how they were described; the whitening fits no other descriptors

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return mean (C,) and projection (D, C) in float64, for the last layer of a network."""
        return torch.from_numpy(self.mean.copy()), torch.from_numpy(self.projection.copy())

    @cached_property
    def fingerprint(self) -> str:
        """Return the SHA-256 of the arrays, which `DescribedBy.whitening` stores."""
        digest = hashlib.sha256(json.dumps(self.projection.shape).encode())
        for values in (self.mean, self.projection):
            digest.update(np.ascontiguousarray(values, dtype="<f8").tobytes())
        return digest.hexdigest()


def save_whitening(path: Path, whitening: Whitening) -> None:
    """Write the whitening as one safetensors file, atomically."""
    about = {
        "learned_from": whitening.learned_from,
        "described_by": asdict(whitening.described_by),
        "fingerprint": whitening.fingerprint,
    }
    arrays = {"mean": whitening.mean, "projection": np.ascontiguousarray(whitening.projection)}
    write_whole(path, save(arrays, {"whitening": json.dumps(about)}))


def load_whitening(path: Path) -> Whitening:
    """Read a whitening from a file, or from WHITENING_FILE in a folder."""
    if path.is_dir():
        path /= WHITENING_FILE
    with reading(path, "distap whiten"):
        with safetensors.safe_open(path, "numpy") as file:
            about = parsed_json(file.metadata()["whitening"])
            mean = file.get_tensor("mean")
            projection = file.get_tensor("projection")
        result = Whitening(
            mean, projection, str(about["learned_from"]), DescribedBy(**about["described_by"])
        )
        if result.fingerprint != about["fingerprint"]:
            raise ValueError("its numbers differ from those that were written")
    return result


def learned_whitening(
    descriptors: DescriptorSet, kind: Literal["pca", "lw"] = "pca", dimensions: int | None = None
) -> Whitening:
    """Learn a whitening from unwhitened descriptors.

    Args:
        kind: `pca` for principal components, each divided by its variance to the power of 0.25
            (Revaud et al. 2019). `lw` for discriminative whitening Lw (Radenović et al. 2018), so
            that matching images differ equally in all directions: the inverse square root of the
            covariance of the differences of matching images, followed by the principal components
            of the descriptors so whitened. An image matches all others of its class, with the same
            weight in all, so that large classes do not drown the others.
        dimensions: D, the directions of most variance to keep; None keeps all with 1e-9 of the
            greatest variance.
    """
    descriptors.require_one_network("a whitening fits those of one alone")
    if descriptors.described_by.whitening is not None:
        raise DistapError(
            "descriptors.whitened",
            f"{descriptors.data}: the descriptors are whitened already; learn from unwhitened ones",
        )
    values = descriptors.descriptors
    total = len(descriptors)
    if not total:
        raise DistapError("descriptors.too_few", "whitening: there is no descriptor to learn from")
    sums = (block.sum(axis=0) for _, block in row_blocks(values, np.float64))
    mean = sum(sums, np.zeros(values.shape[1])) / total
    # A second pass, once the mean is known: E[x²] - E[x]² may subtract numbers that are nearly
    # equal.
    covariance = np.zeros((values.shape[1],) * 2)
    for _, block in row_blocks(values, np.float64):
        block -= mean
        covariance += block.T @ block
    covariance /= total
    if kind == "pca":
        variances, directions = _principal_directions(covariance, descriptors.data)
        projection = directions / variances[:, None] ** HALF_POWER
    else:
        within = _covariance_within(descriptors)
        variances, directions = _principal_directions(
            within, f"images of a class of {descriptors.data}"
        )
        shrinking = directions / np.sqrt(variances)[:, None]
        _, rotation = _principal_directions(shrinking @ covariance @ shrinking.T, descriptors.data)
        projection = rotation @ shrinking
    varying, all_dimensions = projection.shape
    if dimensions is not None and not 1 <= dimensions <= varying:
        raise DistapError(
            "descriptors.too_few",
            f"whitening: {dimensions} dimensions cannot be learned from the {total} descriptors of"
            f" {descriptors.data}, which vary in {varying} directions of {all_dimensions}; ask for"
            " fewer, or use more images",
        )
    if dimensions is None and varying < all_dimensions:
        logger.warning(
            "whitening keeps %d of %d dimensions, since the %d descriptors of %s vary in no more;"
            " use more images",
            varying,
            all_dimensions,
            total,
            descriptors.data,
        )
    return Whitening(mean, projection[:dimensions], descriptors.data, descriptors.described_by)


def _covariance_within(descriptors: DescriptorSet) -> Covariance:
    """Return the mean of (x_i - x_j)(x_i - x_j)ᵀ over images i, and over others j of i's class.

    Over a class of n images, the sum over i is 2 n / (n - 1) times the scatter around the mean of
    the class.
    """
    values = descriptors.descriptors
    names = descriptors.classes
    _, classes, count = np.unique(names, return_inverse=True, return_counts=True)
    matches = (count[classes] > 1) & (names != "")
    if not matches.any():
        raise DistapError(
            "descriptors.too_few",
            f"{descriptors.data}: no class has two images to learn from; use --kind pca",
        )
    means = np.zeros((len(count), values.shape[1]))
    covariance = np.zeros((values.shape[1],) * 2)
    for places, block in row_blocks(values, np.float64):
        labels = classes[places]
        np.add.at(means, labels, block / count[labels, None])
    for places, block in row_blocks(values, np.float64):
        labels = classes[places]
        block -= means[labels]
        weight = np.where(matches[places], 2 * count[labels] / np.maximum(count[labels] - 1, 1), 0)
        covariance += (block * weight[:, None]).T @ block
    return covariance / matches.sum()


def _principal_directions(
    covariance: Covariance, name: str
) -> tuple[Float64[np.ndarray, " D"], Float64[np.ndarray, "D C"]]:
    """Return variances, greatest first, and unit directions, without those of rounding noise.

    The greatest component of each direction is positive, so that the result does not depend on the
    LAPACK version.
    """
    variances, columns = np.linalg.eigh(covariance)
    varies = variances > max(NO_VARIANCE * variances[-1], np.finfo(np.float64).tiny)
    if not varies.any():
        raise DistapError(
            "descriptors.too_few",
            f"{name}: the descriptors do not vary, so no whitening can be learned",
        )
    directions = columns[:, varies].T[::-1]
    greatest = np.abs(directions).argmax(axis=1)
    signs = np.sign(directions[np.arange(len(directions)), greatest])
    return variances[varies][::-1], directions * signs[:, None]
