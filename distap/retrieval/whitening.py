"""Apply, save and load a whitening: a mean and a linear projection of descriptors, then length 1."""

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import safetensors
import torch
from numpy.typing import NDArray
from safetensors.numpy import save
from torch import Tensor

from distap.errors import DistapError
from distap.retrieval.descriptor_files import DescribedBy, reading
from distap.storage.atomic import write_whole

WHITENING_FILE = "whitening.safetensors"  # in a run folder, or beside the descriptors it was learned from
VERSION = 1
WHITENED_ROWS = 8_192  # descriptors whitened at once

WhiteningKind = Literal["pca", "lw"]


@dataclass(frozen=True, eq=False)
class Whitening:
    """`normalise(projection (x - mean))`, in float64.

    Raises:
        DistapError: the shapes do not fit, or a number is not finite.
    """

    mean: NDArray[np.float64]  # (C,)
    projection: NDArray[np.float64]  # (D, C), directions of most variance first
    kind: WhiteningKind
    power: float  # of the variance: a setting of pca, always 0.5 for lw
    learned_from: str  # path or URL of the images
    described_by: DescribedBy  # how they were described; the whitening fits no other descriptors

    def __post_init__(self) -> None:
        if self.mean.ndim != 1 or self.projection.ndim != 2 or self.projection.shape[1:] != self.mean.shape:
            raise DistapError(
                f"whitening: mean {self.mean.shape} and projection {self.projection.shape}; expected (C,) and (D, C)"
            )
        if not (np.isfinite(self.mean).all() and np.isfinite(self.projection).all()):
            raise DistapError("whitening: a number is not finite; learn it again")

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Mean (C,) and projection (D, C) in float64, for the last layer of a network."""
        return torch.from_numpy(self.mean.copy()), torch.from_numpy(self.projection.copy())

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the arrays, as stored in `DescribedBy.whitening`."""
        digest = hashlib.sha256(json.dumps(self.projection.shape).encode())
        for values in (self.mean, self.projection):
            digest.update(np.ascontiguousarray(values, dtype="<f8").tobytes())
        return digest.hexdigest()

    def apply(self, descriptors: NDArray[Any]) -> NDArray[Any]:
        """Whitened descriptors (N, D) of length 1, in float32 or wider.

        Args:
            descriptors: (N, C), possibly a memory map, which is read in blocks.
        Raises:
            DistapError: they have other dimensions.
        """
        if descriptors.ndim != 2 or descriptors.shape[1] != len(self.mean):
            raise DistapError(
                f"whitening: learned from descriptors of {len(self.mean)} dimensions, not of {descriptors.shape}"
            )
        dtype = np.result_type(descriptors.dtype, np.float32)
        mean, projection = self.mean.astype(dtype), self.projection.astype(dtype)
        result = np.empty((len(descriptors), len(projection)), dtype)
        for start in range(0, len(descriptors), WHITENED_ROWS):
            rows = slice(start, start + WHITENED_ROWS)
            projected = (descriptors[rows].astype(dtype) - mean) @ projection.T
            length = np.linalg.norm(projected, axis=1, keepdims=True)
            result[rows] = projected / np.maximum(length, np.finfo(dtype).tiny)
        return result


def save_whitening(path: Path, whitening: Whitening) -> None:
    """Write the whitening as one safetensors file, atomically."""
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
    """Read what `save_whitening` wrote to this file, or to WHITENING_FILE in this folder.

    Raises:
        DistapError: it is missing, cut, damaged or something else.
    """
    if path.is_dir():
        path /= WHITENING_FILE
    with reading(path, "distap whiten"):
        try:
            with safetensors.safe_open(path, "numpy") as file:
                about = json.loads(file.metadata()["whitening"])
                mean, projection = file.get_tensor("mean"), file.get_tensor("projection")
        except safetensors.SafetensorError as error:
            raise ValueError(str(error)) from error
        if about["version"] != VERSION:
            raise DistapError(f"{path}: version {about['version']!r}, this distap reads {VERSION}; learn it again")
        if about["kind"] not in get_args(WhiteningKind) or mean.dtype != np.float64 or projection.dtype != np.float64:
            raise ValueError(f"kind {about['kind']!r} in {mean.dtype} and {projection.dtype}")
        described_by = DescribedBy.from_json(about["described_by"])
        power, learned_from = float(about["power"]), str(about["learned_from"])
        result = Whitening(mean, projection, about["kind"], power, learned_from, described_by)
        if result.fingerprint != about["fingerprint"]:
            raise ValueError("its numbers differ from those that were written")
    return result
