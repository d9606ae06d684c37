"""Turn encoded images into descriptors, in the same way for a data set and for one image."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

import torch
import torchvision.transforms.v2  # noqa: F401 - once, and not in each process that reads images
from torch import Tensor

from distap.config.sections import PrecisionName
from distap.data.images.damage import DamagedImageError
from distap.data.images.whole_images import batches_of_one_shape
from distap.data.sizing import Sizing
from distap.errors import DistapError, logger, memory_ran_out
from distap.model.multiscale import MultiScaleNetwork, required_size
from distap.model.network import RetrievalNetwork, fingerprint
from distap.retrieval.descriptor_files import ABOUT_FILE, SHORT, DescribedBy
from distap.retrieval.whitening import Whitening
from distap.stages.exactness import evaluating
from distap.stages.replica import autocast

# A CPU describes few images at once: the activations of more leave its cache.
BATCH_PIXELS = 64 * 224 * 224
CPU_PIXELS = 8 * 224 * 224
SAFE_SIDE = 64  # pixels of a side that no backbone reduces to nothing


class TooLittleMemoryError(DistapError):
    """Raised if the device has too little memory to describe these images."""


@dataclass(frozen=True, eq=False)
class ImageDescriber:
    """Describe images on the network's device. Contradictory settings raise a DistapError."""

    retrieval_network: RetrievalNetwork
    sizing: Sizing
    scales: Sequence[float] = (1.0,)
    whitening: Whitening | None = None  # applied after the network
    precision: PrecisionName = "float32"  # of convolutions and matrix products
    antialias: bool = True  # smooth before shrinking to a scale below 1
    first: int | None = None  # dimensions of a descriptor to keep; None keeps all
    # most to describe at once: height times width, summed over the images
    batch_pixels: int = BATCH_PIXELS

    def __post_init__(self) -> None:
        required = required_size(self.retrieval_network)
        scales = self.network.scales
        fits = (
            self.sizing.kind == "crop" and self.sizing.shape(1, 1) == required and scales == (1.0,)
        )
        if required is not None and not fits:
            raise DistapError(
                "network.fixed_size",
                f"this network's backbone takes images of {required[1]} x {required[0]} pixels"
                f" only, so `{self.sizing}` at scales {list(scales)} is not for it; use `crop"
                f" {required[0]}` and the scale 1",
            )
        if self.whitening is not None:
            refuse_foreign_whitening(self.whitening, self.described_by)

    @cached_property
    def network(self) -> MultiScaleNetwork:
        """Network that maps pixels to descriptors over all scales, whitened."""
        return MultiScaleNetwork(
            self.retrieval_network,
            self.scales,
            None if self.whitening is None else self.whitening.tensors,
            self.antialias,
            self.first,
        )

    @cached_property
    def described_by(self) -> DescribedBy:
        """Return a record of how descriptors are made, to store with them.

        The first use hashes the network.
        """
        return DescribedBy(
            fingerprint(self.retrieval_network),
            str(self.sizing),
            self.network.scales,
            None if self.whitening is None else self.whitening.fingerprint,
            self.antialias,
            self.first,
        )

    @property
    def dimensions(self) -> int:
        return self.network.dimensions

    @property
    def device(self) -> torch.device:
        return self.retrieval_network.mean.device

    @property
    def most_pixels(self) -> int:
        return (
            min(self.batch_pixels, CPU_PIXELS) if self.device.type == "cpu" else self.batch_pixels
        )

    def describe_pixels(self, images: Iterable[Tensor], count: int) -> Tensor:
        """Describe `count` scaled images (3, height, width) uint8 as (n, D) float32 of length 1, on
        the CPU.

        Several threads may call this at once if the network is in evaluation mode.
        """
        descriptors = torch.empty(count, self.dimensions)
        with self.evaluating():
            for rows, batch in batches_of_one_shape(enumerate(images), self.most_pixels):
                descriptors[rows] = self(batch).to("cpu", torch.float32)
        return descriptors

    def __call__(self, pixels: Tensor) -> Tensor:
        """Describe (n, 3, height, width) uint8 as (n, D) on the network's device.

        Call it within `evaluating`.

        Raises:
            TooLittleMemoryError: memory does not suffice.
            DamagedImageError: the images are too small for the network.
        """
        try:
            with torch.inference_mode(), autocast(self.precision, self.device.type):
                descriptors: Tensor = self.network(pixels.to(self.device, non_blocking=True))
        except RuntimeError as error:
            count, _, height, width = pixels.shape
            if memory_ran_out(error):
                raise TooLittleMemoryError(
                    "memory.describing",
                    f"{count} images of {width} x {height} at scales {list(self.network.scales)}"
                    f" take more memory than {self.device} has: set evaluation.batch_size lower, or"
                    " evaluation.sizing to `side N`",
                ) from error
            if min(height, width) * min(1.0, *self.network.scales) < SAFE_SIDE:
                message = f"{width} x {height} pixels are too few for the network"
                raise DamagedImageError("decode_error", message) from error
            raise
        return descriptors

    def evaluating(self) -> AbstractContextManager[None]:
        """Put the network into evaluation mode, and restore its mode afterwards."""
        return evaluating(self.network)


def maker_of(
    makers: Sequence[DescribedBy], network: RetrievalNetwork, whitening: Whitening | None = None
) -> DescribedBy:
    """Return how this network has described images: the last of `makers` that is of it, and of this
    whitening if there is one.

    Raises:
        DistapError: there are several makers, and it is none of them.
    """
    if len(makers) == 1:
        return makers[0]
    actual = fingerprint(network)
    made = [maker for maker in makers if maker.network == actual]
    if not made:
        names = " and ".join(maker.network[:SHORT] for maker in makers)
        raise DistapError(
            "descriptors.other_network",
            f"the descriptors were extracted with the networks {names}, but this one is"
            f" {actual[:SHORT]}: name the checkpoint of one that they were extracted with",
        )
    actual_whitening = None if whitening is None else whitening.fingerprint
    alike = [maker for maker in made if maker.whitening == actual_whitening]
    return (alike or made)[-1]


def describer_like(
    described_by: DescribedBy, network: RetrievalNetwork, whitening: Whitening | None = None
) -> ImageDescriber:
    """Return a describer that repeats how stored descriptors were made.

    It puts the network into evaluation mode.

    Raises:
        DistapError: the network or the whitening is another one.
    """
    try:
        sizing = Sizing.parse(described_by.sizing)
    except DistapError as error:
        raise DistapError(error.code, f"{ABOUT_FILE} of the descriptors: {error}") from error
    describer = ImageDescriber(
        network,
        sizing,
        described_by.scales,
        whitening,
        antialias=described_by.antialias,
        first=described_by.dimensions,
    )
    for name in ("network", "whitening"):
        wanted = getattr(described_by, name) or "none"
        actual = getattr(describer.described_by, name) or "none"
        if wanted != actual:
            raise DistapError(
                "descriptors.other_network",
                f"the descriptors were extracted with the {name} {wanted[:12]}, but this one is"
                f" {actual[:12]}: name the checkpoint and the whitening that they were extracted"
                " with, or extract them again",
            )
    network.eval()
    return describer


def refuse_foreign_whitening(whitening: Whitening, described_by: DescribedBy) -> None:
    """Raise a DistapError if the whitening was learned from another network's descriptors."""
    learned = whitening.described_by
    if learned.network != described_by.network:
        raise DistapError(
            "descriptors.other_network",
            f"the whitening was learned from {whitening.learned_from} as the network"
            f" {learned.network[:12]}... describes it, this one is {described_by.network[:12]}...:"
            " learn it anew with `distap whiten`",
        )
    if (learned.sizing, learned.scales) != (described_by.sizing, described_by.scales):
        # Common with several scales: Radenović et al. learn their whitening from one.
        logger.warning(
            "the whitening was learned from images of `%s` at scales %s, and is applied to those of"
            " `%s` at scales %s",
            learned.sizing,
            list(learned.scales),
            described_by.sizing,
            list(described_by.scales),
        )
