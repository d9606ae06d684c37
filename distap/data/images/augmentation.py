"""Augmentation: crop and vary encoded images at random, to uint8 pixels of the network's input."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from distap.data.images.boxes import Box, Shape, central_square
from distap.data.images.colour import VaryColours
from distap.data.images.decoding import EncodedImage, image_file
from distap.errors import DistapError, suggestion

if TYPE_CHECKING:
    # Recipes are read without it, since it takes a second to load.
    from torchvision.transforms import v2


Transform = Callable[[EncodedImage], Tensor]
Step = Callable[[Tensor], Tensor]  # of (3, height, width) uint8
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class CropFlipColour:
    """Crop, flip and colour images at random."""

    crop: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Smallest share of the image's area that a random crop keeps; 1 crops the centre only."""
    flip: Share = 0.5
    """Probability of a horizontal flip."""
    colour: Share = 0.0
    """Strength of random changes of brightness, contrast and saturation, all made in one pass. Hue
    does not fit into it, and would take longer than all others."""
    grey: Share = 0.0
    """Probability of turning an image grey."""

    def transform(self, image_size: int) -> "CropAndVary":
        """Draw a crop for the image's size, decode it (JPEG at reduced scale), and vary it."""
        from torchvision.transforms import v2

        crop: v2.Transform = v2.CenterCrop(image_size)
        if self.crop < 1:
            crop = v2.RandomResizedCrop((image_size, image_size), scale=(self.crop, 1.0))
        steps: list[Step] = []
        if self.flip:
            steps.append(v2.RandomHorizontalFlip(self.flip))
        if self.colour or self.grey:
            strengths = (self.colour,) * 3
            steps.append(
                VaryColours(v2.ColorJitter(*strengths) if self.colour else None, self.grey)
            )
        return CropAndVary(image_size, crop, tuple(steps))


@dataclass(frozen=True)
class TorchvisionSteps:
    """Vary images by transforms of torchvision.transforms.v2, one after the other."""

    steps: Annotated[tuple[str | dict[str, Any], ...], Field(min_length=1)]
    """Transforms, each a name or a name with its arguments: `Resize: 256` (the first argument), or
    `RandomResizedCrop: {scale: [0.2, 1]}`. A `size` that is needed and not given is
    data.image_size. Pixels are uint8 throughout, since the network normalises them."""

    def __post_init__(self) -> None:
        for step in self.steps:
            _step(step, 224)

    def transform(self, image_size: int) -> "CropAndVary":
        """Build the transforms to images of image_size x image_size pixels.

        The pixels are torchvision's own, bit for bit; but a first step that is a bilinear Resize or
        RandomResizedCrop to half the size or less decodes JPEG at reduced scale.

        Raises:
            DistapError: the steps give images of another size or type.
        """
        from torchvision.transforms import InterpolationMode, v2

        steps = tuple(_step(step, image_size) for step in self.steps)
        first = steps[0]
        scales = isinstance(first, v2.Resize | v2.RandomResizedCrop) and first.antialias
        if scales and InterpolationMode(first.interpolation) is InterpolationMode.BILINEAR:
            vary = CropAndVary(image_size, first, steps[1:])
        else:
            vary = CropAndVary(image_size, None, steps)
        # Upright and wide: `Resize: N`, of the shorter side, gives a square only of a square.
        for width, height in ((3, 2), (2, 3)):
            blank = torch.zeros(3, height * image_size, width * image_size, dtype=torch.uint8)
            image = EncodedImage(image_file(blank))
            require_pixels(seeded(vary, image, 0), image_size, image)
        return vary


def _step(step: Any, image_size: int) -> "v2.Transform":
    """Build a transform from its name, or from a mapping of its name to its arguments."""
    from torchvision.transforms import v2

    name, options = step, None
    if isinstance(step, Mapping) and len(step) == 1:
        [(name, options)] = step.items()
    transforms = [
        transform
        for transform, kind in vars(v2).items()
        if isinstance(kind, type) and issubclass(kind, v2.Transform)
    ]
    if name not in transforms:
        raise ValueError(
            f"steps: {str(name)!r:.80} is no transform of torchvision.transforms.v2;"
            f" {suggestion(str(name), transforms)}"
        )
    kind = getattr(v2, name)
    try:
        return kind(**_arguments(kind, options, image_size))
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"steps: {name}: {error}") from error


def _arguments(kind: type, options: Any, image_size: int) -> dict[str, Any]:
    """Return the arguments of a transform: those in a recipe, as the objects of torchvision."""
    from torchvision.transforms import AutoAugmentPolicy, InterpolationMode

    parameters = inspect.signature(kind).parameters
    if options is None:
        options = {}
    elif not isinstance(options, Mapping):
        options = {next(iter(parameters), kind.__name__): options}
    arguments = dict(options)
    if "size" in parameters and parameters["size"].default is inspect.Parameter.empty:
        arguments.setdefault("size", image_size)
    if isinstance(arguments.get("transforms"), list):
        arguments["transforms"] = [_step(inner, image_size) for inner in arguments["transforms"]]
    if "interpolation" in arguments:
        arguments["interpolation"] = InterpolationMode(arguments["interpolation"])
    if "policy" in arguments:
        arguments["policy"] = AutoAugmentPolicy(arguments["policy"])
    if arguments.get("value") == "random":
        raise ValueError(
            "value: random is for pixels around 0, and these are uint8; give a number or three"
        )
    return arguments


@dataclass(frozen=True)
class CropAndVary:
    """Decode the part of an image that the first transform crops, and vary it by the others.

    JPEG is decoded near the size to which the first transform scales that part.
    """

    size: int  # of the result, pixels
    # None takes the whole image at its own size; CenterCrop the largest square, scaled
    first: "v2.Transform | None"
    steps: tuple[Step, ...]

    def part(self, width: int, height: int) -> tuple[Box, Shape]:
        """Return the box to decode of an image of this size, and the shape to scale it to."""
        from torchvision.transforms import v2

        empty = torch.empty(3, height, width, dtype=torch.uint8, device="meta")
        # A box as torchvision draws it, with torch's global state.
        if isinstance(self.first, v2.RandomResizedCrop):
            drawn = self.first.make_params([empty])
            left = drawn["left"]
            top = drawn["top"]
            box = left, top, left + drawn["width"], top + drawn["height"]
            return box, tuple(self.first.size)
        if isinstance(self.first, v2.CenterCrop):
            return central_square((0, 0, width, height)), (self.size, self.size)
        shape = (empty if self.first is None else self.first(empty)).shape
        return (0, 0, width, height), (shape[1], shape[2])

    def __call__(self, image: EncodedImage) -> Tensor:
        pixels = image.crop(*self.part(*image.size))
        try:
            for step in self.steps:
                pixels = step(pixels)
        except Exception as error:  # each transform raises its own
            raise DistapError(
                "data.augmentation_failed", f"{_place(image)}: {type(step).__name__}: {error}"
            ) from error
        return pixels


def require_pixels(pixels: Any, size: int, image: EncodedImage) -> None:
    """Raise a DistapError unless an augmentation made (3, size, size) uint8 of an image."""
    result = type(pixels).__name__
    if isinstance(pixels, Tensor):
        result = f"{tuple(pixels.shape)} {pixels.dtype}"
    expected = f"(3, {size}, {size})"
    if result != f"{expected} {torch.uint8}":
        raise DistapError(
            "data.augmentation_failed",
            f"{_place(image)}: it gives {result}; expected {expected} uint8, as data.image_size or"
            " image_sizes says: leave `size` out of the last crop, and normalising to the network",
        )


def _place(image: EncodedImage) -> str:
    return f"data.augmentation: an image of {image.size[0]} x {image.size[1]} pixels"


def seeded(transform: Transform, image: EncodedImage, seed: int) -> Tensor:
    """Transform an image with the randomness of `seed`; keep torch's global random state."""
    # Without GPUs' states: reading them would initialise CUDA, which fails in a forked worker.
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would seed GPUs as well, and take longer than a crop.
        torch.default_generator.manual_seed(seed)
        return transform(image)
