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
Describe = Callable[[Tensor], Tensor]
Case = tuple[Tensor, Tensor]  # images (n, 3, height, width) uint8, and the network's descriptors (n, D) of them


@dataclass(frozen=True)
class Agreement:
    """Differences between an exported file and the network."""

    largest_difference: float  # of a component
    smallest_cosine: float  # of an image's two descriptors


def cases_of(network: Describe, image_size: int, dynamic_size: bool = False) -> list[Case]:
    """Return batches of test images with their descriptors by a network in evaluation mode.

    With `dynamic_size`, add upright and wide images.
    """
    longer = image_size * 4 // 3
    others = [(longer, image_size), (image_size, longer)] if dynamic_size else []
    cases = []
    for size in [(image_size, image_size), *others]:
        for batch in BATCHES_TRIED:
            images = _example_images(batch, size)
            if batch % 2 == 0:  # the order of pixels in memory must not matter
                images = images.to(memory_format=torch.channels_last)
            with torch.inference_mode():
                expected = network(images).cpu()
            if not expected.isfinite().all():
                raise DistapError("the checkpoint's network gives numbers that are not finite; export an earlier one")
            cases.append((images, expected))
    return cases


def agreement(name: str, describe: Describe, cases: Sequence[Case]) -> Agreement:
    """Compare the descriptors of an exported file with those of the network; raise a DistapError if they differ."""
    largest, smallest = 0.0, 1.0
    for images, expected in cases:
        shape = tuple(images.shape)
        try:
            with torch.inference_mode():
                found = describe(images)
        except Exception as error:  # torch, ONNX Runtime: each has its own
            raise DistapError(f"{name}: what was exported fails on images {shape}: {error}") from error
        given, wanted = (found.dtype, *found.shape), (torch.float32, *expected.shape)
        if given != wanted:
            raise DistapError(f"{name}: what was exported gives {given} for images {shape}, expected {wanted}")
        difference = float((found - expected).abs().max())
        if not difference <= EXPORT_TOLERANCE:
            raise DistapError(
                f"{name}: for images {shape} its descriptors differ from the network's by {difference:.2g}, more "
                f"than {EXPORT_TOLERANCE:g}; nothing was written. Leave this format out, or report the network"
            )
        largest = max(largest, difference)
        smallest = min(smallest, float(cosine_similarity(found.double(), expected.double()).min()))
    return Agreement(largest, smallest)


def onnx_describer(path: Path) -> Describe:
    """Load an .onnx file into ONNX Runtime on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def describe(images: Tensor) -> Tensor:
        (descriptors,) = session.run(["descriptors"], {"images": images.contiguous().numpy()})
        return torch.from_numpy(descriptors)

    return describe


def _example_images(count: int, size: tuple[int, int]) -> Tensor:
    """Return (count, 3, height, width) uint8 of detail that differs, from single colours to noise."""
    generator = torch.Generator().manual_seed(count)
    sides = [4 ** (number % 4) for number in range(2, count + 2)]
    images = [interpolate(torch.rand(1, 3, side, side, generator=generator), size, mode="bilinear") for side in sides]
    return (255 * torch.cat(images)).to(torch.uint8)
