"""Compare exported files with the network, on images of several kinds, batches and sizes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, interpolate

from distap.errors import DistapError

EXPORT_TOLERANCE = 1e-4  # of a component of a descriptor of length 1, computed in float32
BATCHES_TRIED = (1, 2, 7)
Size = tuple[int, int]  # height and width, pixels
Describe = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """Images (n, 3, height, width) uint8 and the descriptors (n, D) that the network gives for them."""

    images: Tensor
    expected: Tensor


@dataclass(frozen=True)
class Agreement:
    """Differences between an exported file and the network."""

    batches: tuple[int, ...]
    sizes: tuple[Size, ...]
    largest_difference: float  # of a component
    smallest_cosine: float  # of an image's two descriptors


def sizes_to_try(image_size: int, dynamic_size: bool) -> list[Size]:
    """Return the usual image size and, if the program takes any size, one upright and one wide size."""
    longer = image_size * 4 // 3
    others = [(longer, image_size), (image_size, longer)] if dynamic_size else []
    return [(image_size, image_size), *others]


def cases_of(network: Describe, sizes: Sequence[Size], batches: Sequence[int] = BATCHES_TRIED) -> list[Case]:
    """Return batches of images of every size, described by a network in evaluation mode."""
    cases = []
    for size in sizes:
        for batch in batches:
            images = example_images(batch, size)
            if batch % 2 == 0:  # the order of pixels in memory must not matter
                images = images.to(memory_format=torch.channels_last)
            with torch.inference_mode():
                expected = network(images).cpu()
            if not expected.isfinite().all():
                raise DistapError("the checkpoint's network gives numbers that are not finite; export an earlier one")
            cases.append(Case(images, expected))
    return cases


def example_images(count: int, size: Size) -> Tensor:
    """Return (count, 3, height, width) uint8: smooth images like photographs, noise, and single colours."""
    generator = torch.Generator().manual_seed(count)
    return torch.stack([_image(number % 4, size, generator) for number in range(count)])


def agreement(name: str, describe: Describe, cases: Sequence[Case]) -> Agreement:
    """Compare the descriptors of an exported file with those of the network; raise a DistapError if they differ."""
    largest, smallest = 0.0, 1.0
    for case in cases:
        shape = tuple(case.images.shape)
        try:
            with torch.inference_mode():
                found = describe(case.images)
        except Exception as error:  # torch, ONNX Runtime: each has its own
            raise DistapError(f"{name}: what was exported fails on images {shape}: {error}") from error
        given, wanted = (found.dtype, *found.shape), (torch.float32, *case.expected.shape)
        if given != wanted:
            raise DistapError(f"{name}: what was exported gives {given} for images {shape}, expected {wanted}")
        difference = float((found - case.expected).abs().max())
        if not difference <= EXPORT_TOLERANCE:
            raise DistapError(
                f"{name}: for images {shape} its descriptors differ from the network's by {difference:.2g}, more "
                f"than {EXPORT_TOLERANCE:g}; nothing was written. Leave this format out, or report the network"
            )
        largest = max(largest, difference)
        smallest = min(smallest, float(cosine_similarity(found.double(), case.expected.double()).min()))
    batches = dict.fromkeys(len(case.images) for case in cases)
    sizes = dict.fromkeys((case.images.shape[2], case.images.shape[3]) for case in cases)
    return Agreement(tuple(batches), tuple(sizes), largest, smallest)


def onnx_describer(path: Path) -> Describe:
    """Load an .onnx file into ONNX Runtime on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def describe(images: Tensor) -> Tensor:
        (descriptors,) = session.run(["descriptors"], {"images": images.contiguous().numpy()})
        return torch.from_numpy(descriptors)

    return describe


def _image(kind: int, size: Size, generator: torch.Generator) -> Tensor:
    """Return (3, height, width) uint8: noise for kind 1, one colour for kind 3, else smooth like a photograph."""
    if kind == 1:
        return torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=generator)
    octaves = range(1 if kind == 3 else 6)
    image = torch.zeros(1, 3, *size)
    for octave in octaves:  # amplitudes fall with frequency, as in photographs
        coarse = torch.rand(1, 3, 2**octave, 2**octave, generator=generator)
        image += interpolate(coarse, size, mode="bilinear") / 2**octave
    return (255 * image[0] / sum(2.0**-octave for octave in octaves)).to(torch.uint8)
