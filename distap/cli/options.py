"""Options shared by several commands: which network describes images, and how."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distap.errors import DistapError

if TYPE_CHECKING:
    from distap.data.images.whole_images import Sizing

NETWORK, IMAGES, REFINEMENT, OUTPUT = "Network", "Image preparation", "Refinement of descriptors", "Output"

BEST = Annotated[
    bool,
    typer.Option("--best", help="Use a run folder's best checkpoint, not its newest.", rich_help_panel=NETWORK),
]
IMAGE_SIZE = Annotated[
    int | None,
    typer.Option(
        help="Crop the central square and resize it to this side, in pixels.",
        min=1,
        show_default="as in the recipe",
        rich_help_panel=IMAGES,
    ),
]
MAX_SIDE = Annotated[
    int | None,
    typer.Option(
        help="Keep whole images, with the longer side reduced to this many pixels.", min=1, rich_help_panel=IMAGES
    ),
]
ORIGINAL = Annotated[
    bool, typer.Option("--original", help="Keep whole images at their original size.", rich_help_panel=IMAGES)
]
SCALES = Annotated[
    str,
    typer.Option(help="Describe each image at these scale factors, such as 1,0.7071,0.5.", rich_help_panel=IMAGES),
]
SCALE_POWER = Annotated[
    float | None,
    typer.Option(
        help="Power of the generalised mean over the scales.",
        show_default="GeM's, or 1 where a projection follows it",
        rich_help_panel=IMAGES,
    ),
]
WHITENING = Annotated[
    Path | None,
    typer.Option(
        help="Apply this whitening, a file or folder that `distap whiten` wrote.", rich_help_panel=REFINEMENT
    ),
]


def sizing_of(image_size: int | None, max_side: int | None, original: bool, default: int) -> "Sizing":
    """The sizing that --image-size, --max-side or --original asks for, else a crop to `default` pixels."""
    from distap.data.images.whole_images import Sizing

    if sum((image_size is not None, max_side is not None, original)) > 1:
        raise DistapError("give one of --image-size, --max-side and --original")
    if original:
        return Sizing("original")
    return Sizing("crop", image_size or default) if max_side is None else Sizing("side", max_side)


def parse_scales(text: str) -> tuple[float, ...]:
    """The factors of --scales."""
    try:
        return tuple(float(factor) for factor in text.split(","))
    except ValueError as error:
        raise DistapError(f"--scales {text!r}: expected numbers with commas, such as 1,0.7071,0.5") from error
