"""Whitening that is learned from descriptors: a mean and a projection, then length 1.

Two kinds: principal components scaled by a power of their variance, and the discriminative one, which shrinks the
directions in which matching images differ. `covariances.py` has what both are learned from.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args, overload

import numpy as np
import safetensors
import torch
from jaxtyping import Float, Int64
from numpy.typing import NDArray
from safetensors.numpy import save
from torch import Tensor
from torch.nn.functional import normalize

from distap.errors import DistapError
from distap.retrieval.covariances import (
    covariance_of_matches,
    covariance_of_pairs,
    covariances_of_all,
    principal_directions,
)
from distap.retrieval.descriptor_files import DescribedBy, DescriptorSet
from distap.storage.atomic import write_whole

WHITENING_FILE = "whitening.safetensors"  # in a run folder, or beside the descriptors it was learned from
VERSION = 1
ROWS_AT_ONCE = 8_192
HALF_POWER = 0.25  # Revaud et al. 2019: 'square-rooted' PCA; 0.5 is full whitening

Kind = Literal["pca", "lw"]


@dataclass(frozen=True, eq=False)
class Whitening:
    """`normalise(projection (x - mean))`, in float64 as it was learned.

    Raises:
        DistapError: the shapes do not fit, or a number is not finite.
    """

    mean: NDArray[np.float64]  # (C,)
    projection: NDArray[np.float64]  # (D, C), the directions of most variance first
    kind: Kind
    power: float  # of the variance: 0.25 and the like for pca, 0.5 by definition for lw
    learned_from: str  # where the images are that it was learned from
    described_by: DescribedBy  # what described them: it fits no other descriptors

    def __post_init__(self) -> None:
        if self.mean.ndim != 1 or self.projection.ndim != 2 or self.projection.shape[1:] != self.mean.shape:
            raise DistapError(
                f"whitening: mean {self.mean.shape} and projection {self.projection.shape}; expected (C,) and (D, C)"
            )
        if not (np.isfinite(self.mean).all() and np.isfinite(self.projection).all()):
            raise DistapError("whitening: a number is not finite; learn it again")

    @property
    def network(self) -> str:
        """Hash of the network whose descriptors it was learned from."""
        return self.described_by.network

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Mean (C,) and projection (D, C) in float64, as a network takes them for its last layer."""
        return torch.from_numpy(self.mean.copy()), torch.from_numpy(self.projection.copy())

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the arrays, which stands for this whitening in `DescribedBy.whitening`."""
        digest = hashlib.sha256(json.dumps(self.projection.shape).encode())
        for values in (self.mean, self.projection):
            digest.update(np.ascontiguousarray(values, dtype="<f8").tobytes())
        return digest.hexdigest()

    @overload
    def apply(self, descriptors: Tensor) -> Tensor: ...
    @overload
    def apply(self, descriptors: NDArray[Any]) -> NDArray[Any]: ...
    def apply(self, descriptors: Tensor | NDArray[Any]) -> Tensor | NDArray[Any]:
        """Whitened descriptors (N, D) of length 1, computed in blocks, in float32 at least.

        Args:
            descriptors: (N, C), a tensor on any device, or an array, which may be a memory map.
        Raises:
            DistapError: they have other dimensions.
        """
        if descriptors.ndim != 2 or descriptors.shape[1] != len(self.mean):
            raise DistapError(
                f"whitening: learned from descriptors of {len(self.mean)} dimensions, not of shape "
                f"{tuple(descriptors.shape)}"
            )
        if isinstance(descriptors, Tensor):
            dtype = torch.promote_types(descriptors.dtype, torch.float32)
            mean, projection = (values.to(descriptors.device, dtype) for values in self.tensors)
            blocks = [
                normalize((block.to(dtype) - mean) @ projection.t()) for block in descriptors.split(ROWS_AT_ONCE)
            ]
            return torch.cat(blocks)
        result = np.empty((len(descriptors), len(self.projection)), np.result_type(descriptors.dtype, np.float32))
        for start in range(0, len(descriptors), ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            result[rows] = self.apply(torch.from_numpy(np.array(descriptors[rows]))).numpy()
        return result

    def applied_to(self, descriptors: DescriptorSet) -> DescriptorSet:
        """The set whitened, its maker saying so.

        Raises:
            DistapError: something else described it than what this was learned from.
        """
        descriptors.require_same_maker(self.described_by, f"a whitening learned from {self.learned_from}")
        return replace(
            descriptors,
            descriptors=self.apply(descriptors.descriptors),
            described_by=replace(descriptors.described_by, whitening=self.fingerprint),
        )


def learn_pca(descriptors: DescriptorSet, power: float = HALF_POWER, dimensions: int | None = None) -> Whitening:
    """Principal components, each divided by its variance to the power (Revaud et al. 2019; p = 0.5: full whitening).

    Directions without variance are left out: those with less than 1e-9 of the greatest.

    Args:
        descriptors: N of C dimensions, maybe a memory map; classes do not matter.
        power: 0 turns only, 0.5 whitens fully.
        dimensions: D to keep, those of most variance; None for all that have variance.
    Raises:
        DistapError: fewer than D directions have variance, or a number is not finite.
    """
    if not 0 <= power <= 1:
        raise DistapError(f"whitening: power {power:g}, expected 0 (none) to 1, such as 0.5 (full)")
    _require_unwhitened(descriptors)
    mean, covariance = covariances_of_all(descriptors.descriptors)
    variances, directions = principal_directions(covariance, descriptors.data)
    projection = directions / variances[:, None] ** power
    return _whitening(descriptors, mean, projection, "pca", power, dimensions)


def learn_discriminative(
    descriptors: DescriptorSet,
    dimensions: int | None = None,
    pairs: Int64[np.ndarray, "P 2"] | None = None,
) -> Whitening:
    """Discriminative whitening Lw (Radenović et al. 2018): matching images differ equally in every direction.

    The inverse square root of the covariance of their differences, then the principal components of what is so
    whitened. Directions in which no matching images differ are left out, since nothing says how much they may.

    Args:
        descriptors: N of C dimensions, maybe a memory map.
        dimensions: D to keep, those of most variance; None for all.
        pairs: rows of images that match; None takes each image with every other one of its class, each image
            weighing the same, so that large classes do not drown the others.
    Raises:
        DistapError: nothing matches, fewer than D directions differ, or a number is not finite.
    """
    _require_unwhitened(descriptors)
    values, data = descriptors.descriptors, descriptors.data
    mean, covariance = covariances_of_all(values)
    if pairs is None:
        differences = covariance_of_matches(values, mean, descriptors.classes, data)
    else:
        differences = covariance_of_pairs(values, pairs, data)
    variances, directions = principal_directions(differences, f"matching images of {data}")
    shrinking = directions / np.sqrt(variances)[:, None]
    _, rotation = principal_directions(shrinking @ covariance @ shrinking.T, data)
    return _whitening(descriptors, mean, rotation @ shrinking, "lw", 0.5, dimensions)


def save_whitening(path: Path, whitening: Whitening) -> None:
    """Write the arrays as one safetensors file, whole or not at all."""
    about = {
        "version": VERSION,
        "kind": whitening.kind,
        "power": whitening.power,
        "learned_from": whitening.learned_from,
        "described_by": asdict(whitening.described_by),
        "fingerprint": whitening.fingerprint,
    }
    arrays = {"mean": whitening.mean, "projection": np.ascontiguousarray(whitening.projection)}
    write_whole(path, save(arrays, {"whitening": json.dumps(about)}))


def load_whitening(path: Path) -> Whitening:
    """What `save_whitening` wrote, into that file or as WHITENING_FILE into that folder.

    Raises:
        DistapError: it is missing, cut, damaged or something else.
    """
    if path.is_dir():
        path /= WHITENING_FILE
    try:
        with safetensors.safe_open(path, "numpy") as file:
            about = json.loads(file.metadata()["whitening"])
            mean, projection = file.get_tensor("mean"), file.get_tensor("projection")
        if about["version"] != VERSION:
            raise DistapError(f"{path}: version {about['version']!r}, this distap reads {VERSION}; learn it again")
        if about["kind"] not in get_args(Kind) or mean.dtype != np.float64 or projection.dtype != np.float64:
            raise ValueError(f"kind {about['kind']!r} in {mean.dtype} and {projection.dtype}")
        described_by = DescribedBy.from_json(about["described_by"])
        result = Whitening(
            mean, projection, about["kind"], float(about["power"]), str(about["learned_from"]), described_by
        )
        if result.fingerprint != about["fingerprint"]:
            raise ValueError("its numbers are not those that were written")
    except FileNotFoundError as error:
        raise DistapError(f"{path}: no such file; `distap whiten` writes it") from error
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise DistapError(f"{path}: not readable as what `distap whiten` writes: {error!r}") from error
    return result


def _whitening(
    descriptors: DescriptorSet,
    mean: Float[np.ndarray, " C"],
    projection: Float[np.ndarray, "D C"],
    kind: Kind,
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


def _require_unwhitened(descriptors: DescriptorSet) -> None:
    if descriptors.described_by.whitening is not None:
        raise DistapError(
            f"{descriptors.data}: these descriptors are whitened already; learn from those extracted without"
        )
