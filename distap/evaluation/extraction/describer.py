"""What turns the bytes of images into descriptors, the same way for a data set and for a single image."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from distap.data.images.decoding import MAX_PIXELS, Box, DamagedImageError, EncodedImage
from distap.data.images.whole_images import Sizing, batches_of_one_shape
from distap.engine.precision import Precision, PrecisionName
from distap.errors import DistapError
from distap.model.fingerprint import fingerprint
from distap.model.multiscale import MultiScaleNetwork, required_size
from distap.model.network import RetrievalNetwork
from distap.retrieval.descriptor_files import DescribedBy
from distap.retrieval.whitening import Whitening
from distap.stages.micro_batches import is_out_of_memory

BATCH_PIXELS = 64 * 224 * 224
TAKEN_BY_ALL = 64  # pixels of a side, of which every backbone's map has some left
logger = logging.getLogger("distap")


class TooLittleMemoryError(DistapError):
    """Images could not be described for lack of memory."""


@dataclass(frozen=True)
class ImageDescriber:
    """Describes images one way; `describer_of` and `describer_from` make one.

    Args:
        network: pixels to descriptors.
        sizing: how an image is brought to size.
        whitening: the hash of what the network applies last; None for nothing.
        max_pixels: width times height of an image that is refused without decoding when exceeded.
        precision: what convolutions and matrix products are computed in.
        scaled: whether JPEG may be decoded at reduced scale.
        batch_pixels: of images that are described at once, height times width of each summed up.
    """

    network: MultiScaleNetwork
    sizing: Sizing
    whitening: str | None = None
    max_pixels: int = MAX_PIXELS
    precision: PrecisionName = "float32"
    scaled: bool = True
    batch_pixels: int = BATCH_PIXELS

    @cached_property
    def described_by(self) -> DescribedBy:
        """What stands beside its descriptors; the network is hashed when this is first asked for."""
        network = self.network
        return DescribedBy(
            fingerprint(network.network), str(self.sizing), network.scales, network.power, self.whitening
        )

    @property
    def dimensions(self) -> int:
        """D of the descriptors."""
        return self.network.dimensions

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.network.network.mean.device

    def describe(self, images: Sequence[bytes], boxes: Sequence[Box | None] | None = None) -> Tensor:
        """(n, D) float32 on the CPU: descriptors of length 1 of encoded images, in their order.

        Several threads may ask at once where the network is in evaluation mode.

        Args:
            images: files of FORMATS.
            boxes: of each the part that counts, None for the whole.
        Raises:
            DamagedImageError: one cannot be decoded or is too large.
        """
        parts = boxes or [None] * len(images)
        pixels = (
            self.sizing(EncodedImage(data, self.max_pixels), box, self.scaled)
            for data, box in zip(images, parts, strict=True)
        )
        descriptors = torch.empty(len(images), self.dimensions)
        with self.evaluating():
            for rows, batch in batches_of_one_shape(enumerate(pixels), self.batch_pixels):
                descriptors[rows] = self(batch).to("cpu", torch.float32)
        return descriptors

    def __call__(self, pixels: Tensor) -> Tensor:
        """Descriptors (n, D) of images (n, 3, height, width) uint8, on its device; within `evaluating`.

        Raises:
            TooLittleMemoryError: memory does not suffice.
            DamagedImageError: the images are too small for the network.
        """
        try:
            with torch.inference_mode(), Precision(self.precision, self.device.type).autocast():
                descriptors: Tensor = self.network(pixels.to(self.device, non_blocking=True))
        except RuntimeError as error:
            count, _, height, width = pixels.shape
            if is_out_of_memory(error):
                raise TooLittleMemoryError(
                    f"{count} images of {width} x {height} at scales {list(self.network.scales)} take more memory "
                    f"than {self.device} has: set --batch-pixels below {self.batch_pixels}, or --max-side lower"
                ) from error
            if min(height, width) * min(1.0, *self.network.scales) < TAKEN_BY_ALL:
                raise DamagedImageError(
                    "decode_error", f"{width} x {height} pixels are too few for the network"
                ) from error
            raise
        return descriptors

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """While it is entered the network is in evaluation mode; its mode is put back afterwards."""
        training = self.network.network.training
        if training or self.network.training:
            self.network.eval()
        try:
            yield
        finally:
            if training:
                self.network.network.train()


def describer_of(
    network: RetrievalNetwork,
    sizing: Sizing,
    scales: Sequence[float] = (1.0,),
    power: float | None = None,
    whitening: Whitening | None = None,
    *,
    max_pixels: int = MAX_PIXELS,
    precision: PrecisionName = "float32",
    scaled: bool = True,
    batch_pixels: int = BATCH_PIXELS,
) -> ImageDescriber:
    """Describes images by a network, on the network's device.

    Args:
        network: pixels to descriptors.
        sizing: how an image is brought to size.
        scales, power: of the generalised mean over scales, see `MultiScaleNetwork`.
        whitening: what is applied behind it.
        max_pixels, precision, scaled, batch_pixels: see `ImageDescriber`.
    Raises:
        DistapError: a setting is no use, or does not fit the network.
    """
    several = MultiScaleNetwork(network, scales, power, None if whitening is None else whitening.tensors)
    required = required_size(network)
    fits = sizing.kind == "crop" and sizing.shape(1, 1) == required and several.scales == (1.0,)
    if required is not None and not fits:
        raise DistapError(
            f"this network's backbone takes images of {required[1]} x {required[0]} pixels only, so `{sizing}` at "
            f"scales {list(several.scales)} is not for it; use `crop {required[0]}` and the scale 1"
        )
    if batch_pixels < 1:
        raise DistapError(f"--batch-pixels {batch_pixels}: expected 1 or more")
    hashed = None if whitening is None else whitening.fingerprint
    describer = ImageDescriber(several, sizing, hashed, max_pixels, precision, scaled, batch_pixels)
    if whitening is not None:
        refuse_foreign_whitening(whitening, describer.described_by)
    return describer


def describer_from(
    network: RetrievalNetwork,
    described_by: DescribedBy,
    whitening: Whitening | None = None,
    *,
    max_pixels: int = MAX_PIXELS,
    precision: PrecisionName = "float32",
    scaled: bool = True,
    batch_pixels: int = BATCH_PIXELS,
) -> ImageDescriber:
    """What describes images as those of a stored set were described; its network is set to evaluation mode.

    Args:
        network: the one that described them.
        described_by: what stands beside the set.
        whitening: what was applied behind the network, where anything was.
        max_pixels, precision, scaled, batch_pixels: see `ImageDescriber`.
    Raises:
        DistapError: the network or the whitening is another one.
    """
    describer = describer_of(
        network,
        Sizing.parse(described_by.sizing),
        described_by.scales,
        described_by.scale_power,
        whitening,
        max_pixels=max_pixels,
        precision=precision,
        scaled=scaled,
        batch_pixels=batch_pixels,
    )
    found = describer.described_by
    if found.network != described_by.network:
        raise DistapError(
            f"the descriptors were made by the network {described_by.network[:12]}..., this one is "
            f"{found.network[:12]}...: name the checkpoint that they were extracted with, or extract them again"
        )
    if found.whitening != described_by.whitening:
        wanted, given = (
            "no whitening" if text is None else f"the whitening {text[:12]}..."
            for text in (described_by.whitening, found.whitening)
        )
        raise DistapError(f"the descriptors were made with {wanted}, but {given} is given: name the one they had")
    network.eval()
    return describer


def refuse_foreign_whitening(whitening: Whitening, maker: DescribedBy) -> None:
    """Raise a DistapError where a whitening was learned from another network's descriptors."""
    learned = whitening.described_by
    if learned.network != maker.network:
        raise DistapError(
            f"the whitening was learned from {whitening.learned_from} as the network {learned.network[:12]}... "
            f"describes it, this one is {maker.network[:12]}...: learn it anew with `distap whiten`"
        )
    ways = [f"`{one.sizing}` at scales {list(one.scales)}" for one in (learned, maker)]
    if ways[0] != ways[1]:
        # Usual with several scales, and no mistake: Radenović et al. learn theirs from one.
        logger.warning("the whitening was learned from images of %s, and is applied to those of %s", *ways)
