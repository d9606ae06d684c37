"""Options that several commands have: how images are described, and by which network."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distap.errors import DistapError

if TYPE_CHECKING:
    from distap.data.images.whole_images import Sizing

BEST = Annotated[bool, typer.Option("--best", help="With a run folder: its best checkpoint, not its newest.")]
IMAGE_SIZE = Annotated[
    int | None,
    typer.Option(help="Take the central square at this size, pixels.", min=1, show_default="as in the recipe"),
]
MAX_SIDE = Annotated[
    int | None, typer.Option(help="Take whole images, the longer side scaled down to this, pixels.", min=1)
]
ORIGINAL = Annotated[bool, typer.Option("--original", help="Take whole images as they are.")]
SCALES = Annotated[str, typer.Option(help="Factors at which each image is described, such as 1,0.7071,0.5.")]
SCALE_POWER = Annotated[
    float | None,
    typer.Option(help="Of the mean over scales.", show_default="GeM's, or 1 where a projection follows it"),
]
WHITENING = Annotated[Path | None, typer.Option(help="What `distap whiten` wrote, or its folder; applied last.")]


def sizing_of(image_size: int | None, max_side: int | None, original: bool, default: int) -> "Sizing":
    """How images are brought to size, from the options that say so."""
    from distap.data.images.whole_images import Sizing

    if sum((image_size is not None, max_side is not None, original)) > 1:
        raise DistapError("give one of --image-size, --max-side and --original")
    if original:
        return Sizing("original")
    return Sizing("crop", image_size or default) if max_side is None else Sizing("side", max_side)


def described_at(text: str) -> tuple[float, ...]:
    """The factors of --scales."""
    try:
        return tuple(float(factor) for factor in text.split(","))
    except ValueError as error:
        raise DistapError(f"--scales {text!r}: expected numbers with commas, such as 1,0.7071,0.5") from error
