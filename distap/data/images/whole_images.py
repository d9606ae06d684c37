"""Bring images to size in their own shapes, and put them into batches of one shape that stay large."""

from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from distap.data.images.augmentation import central_box
from distap.data.images.decoding import Box, DamagedImageError, EncodedImage
from distap.data.loading.workers import handed_over
from distap.errors import DistapError

PREFETCH = 2  # chunks that each worker reads ahead
HELD = 4  # batches whose pixels may wait for others of their shape, all shapes together
EXPECTED = "expected `crop N`, `side N` or `original`, N pixels"
Shape = tuple[int, int]  # height and width, pixels


@dataclass(frozen=True)
class Sizing:
    """How an image is brought to size; `str` and `parse` write it as text and back.

    Args:
        kind: `crop` takes the central square at `pixels` by `pixels`; `side` the whole image, scaled down so that
            its longer side is `pixels` at most; `original` the whole image as it is.
        pixels: of `crop` and `side`; `original` has none.
    Raises:
        DistapError: a number of pixels is missing, below 1 or given for `original`.
    """

    kind: Literal["crop", "side", "original"]
    pixels: int | None = None

    def __post_init__(self) -> None:
        wanted = self.kind != "original"
        if wanted != (self.pixels is not None) or (self.pixels is not None and self.pixels < 1):
            raise DistapError(f"sizing {self}: {EXPECTED}")

    def __str__(self) -> str:
        return self.kind if self.pixels is None else f"{self.kind} {self.pixels}"

    @classmethod
    def parse(cls, text: str) -> "Sizing":
        """The opposite of `str`."""
        kind, _, pixels = text.partition(" ")
        if kind in ("crop", "side") and pixels.isascii() and pixels.isdigit():
            return cls("crop" if kind == "crop" else "side", int(pixels))
        if text == "original":
            return cls("original")
        raise DistapError(f"sizing {text!r}: {EXPECTED}")

    def shape(self, width: int, height: int) -> Shape:
        """Height and width of the result for an image, or a box of one."""
        if self.kind == "original":
            return height, width
        assert self.pixels is not None
        if self.kind == "crop":
            return self.pixels, self.pixels
        scale = min(self.pixels / max(width, height), 1.0)
        return max(round(height * scale), 1), max(round(width * scale), 1)

    def __call__(self, image: EncodedImage, box: Box | None = None, scaled: bool = True) -> Tensor:
        """(3, height, width) uint8.

        Args:
            image: to bring to size.
            box: the part of it that counts; cut to the image.
            scaled: whether JPEG may be decoded at reduced scale.
        Raises:
            DamagedImageError: it cannot be decoded, or nothing of it is in the box.
        """
        box = (0, 0, *image.size) if box is None else _within(box, image.size)
        left, top, right, bottom = box
        shape = self.shape(right - left, bottom - top)
        if self.kind == "crop":
            inner = central_box(right - left, bottom - top)
            box = (left + inner[0], top + inner[1], left + inner[2], top + inner[3])
        return image.crop(box, shape, scaled)


class EncodedImages(Protocol):
    """Images by number, of shards (`Reader`) or of a folder (`ImageFolder`)."""

    def encoded(self, sample: int) -> EncodedImage:
        """The image before it is decoded; raises DamagedImageError if it cannot be read."""
        ...


Sized = tuple[int, Tensor | None, str]  # number and pixels (3, height, width) uint8; or None, and why


class SizedChunk(NamedTuple):
    """Some images as a worker hands them over: in one tensor, since each tensor on its way takes an open file."""

    samples: list[int]
    shapes: list[Shape]
    pixels: Tensor  # of all images one after the other, uint8
    damaged: dict[int, str]  # the samples that could not be read, and why

    def images(self) -> Iterator[tuple[int, Tensor]]:
        """Each image's number and its pixels (3, height, width), a view."""
        parts = self.pixels.split([3 * height * width for height, width in self.shapes])
        for sample, shape, part in zip(self.samples, self.shapes, parts, strict=True):
            yield sample, part.view(3, *shape)


@dataclass(frozen=True)
class SizedImages(Dataset[Sized]):
    """Images by number, each brought to size."""

    reader: EncodedImages
    sizing: Sizing
    boxes: Mapping[int, Box] = field(default_factory=dict)  # the part of an image that counts; the whole of others
    scaled: bool = True  # whether JPEG may be decoded at reduced scale

    def __getitem__(self, sample: int) -> Sized:
        try:
            pixels = self.sizing(self.reader.encoded(sample), self.boxes.get(sample), self.scaled)
        except DamagedImageError as error:
            return sample, None, str(error)
        return sample, pixels, ""


def sized_chunks(images: SizedImages, requests: Iterable[list[int]], workers: int) -> Generator[SizedChunk]:
    """The images of each request, in order.

    Args:
        images: to read.
        requests: numbers of images that one worker reads and hands over at once.
        workers: processes that read; 0 reads in this one.
    """
    return handed_over(images, workers, PREFETCH, batch_sampler=requests, collate_fn=_chunk)


def batches_of_one_shape(
    images: Iterable[tuple[int, Tensor]], most_pixels: int
) -> Iterator[tuple[list[int], Tensor]]:
    """Images in batches of one shape: their numbers and pixels (n, 3, height, width).

    A batch is given when no other image of its shape fits into it, and all are given at the end. When the images that
    wait for others of their shape have more than HELD times `most_pixels`, the fullest batches are given early. The
    batches depend on the images alone.

    Args:
        images: numbers and pixels (3, height, width); a view is copied if it has to wait.
        most_pixels: of a batch, height times width of each summed up; a larger image is a batch alone.
    """
    waiting: dict[Shape, list[tuple[int, Tensor]]] = defaultdict(list)

    def area(shape: Shape, more: int = 0) -> int:
        return (len(waiting[shape]) + more) * shape[0] * shape[1]

    def take(shape: Shape) -> tuple[list[int], Tensor]:
        samples, pixels = zip(*waiting.pop(shape), strict=True)
        return list(samples), torch.stack(pixels)

    for sample, pixels in images:
        shape = (pixels.shape[1], pixels.shape[2])
        waiting[shape].append((sample, pixels.clone()))
        if area(shape, more=1) > most_pixels:
            yield take(shape)
        while sum(map(area, waiting)) > HELD * most_pixels:
            yield take(max(waiting, key=area))
    for shape in list(waiting):
        yield take(shape)


def _within(box: Box, size: tuple[int, int]) -> Box:
    width, height = size
    left, top, right, bottom = max(box[0], 0), max(box[1], 0), min(box[2], width), min(box[3], height)
    if left >= right or top >= bottom:
        raise DamagedImageError("missing_field", f"nothing of its {width} x {height} pixels is in the box {box}")
    return left, top, right, bottom


def _chunk(sized: list[Sized]) -> SizedChunk:
    present = [(sample, pixels) for sample, pixels, _ in sized if pixels is not None]
    return SizedChunk(
        [sample for sample, _ in present],
        [(pixels.shape[1], pixels.shape[2]) for _, pixels in present],
        torch.cat([pixels.flatten() for _, pixels in present]) if present else torch.empty(0, dtype=torch.uint8),
        {sample: damage for sample, pixels, damage in sized if pixels is None},
    )
