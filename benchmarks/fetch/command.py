"""`python -m benchmarks fetch`: draw a public data set into a folder of images."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from distap.telemetry.terminal import print_result, track

SIZES = {"emoji": 128, "glyphs": 64}  # pixels
DATA_SET = "Set to draw: emoji (1,591 classes, 11,290 images) or glyphs (22,634 classes, 122,575 images)."
OUTPUT = "Folder of train/ and test/."
SIZE = "Width and height of the images, pixels."


def fetch_command(
    data_set: Annotated[Literal["emoji", "glyphs"], typer.Argument(help=DATA_SET, show_default=False)],
    output: Annotated[Path | None, typer.Argument(help=OUTPUT, show_default="data/SET/images")] = None,
    size: Annotated[int | None, typer.Option(help=SIZE, min=16, show_default="128, 64 for glyphs")] = None,
) -> None:
    """Draw the emoji or the glyph retrieval set from packages of the npm registry. Needs npm.

    Writes OUTPUT/{train,test}/CLASS/NAME.png. `emoji`: each emoji drawn by five to nine vendors. `glyphs`: each
    character drawn by two to nine open fonts, as many images as Stanford Online Products has. Half of the classes
    train, the others test. An interrupted fetch continues when called again.
    """
    from benchmarks.fetch.emoji import fetch_emoji
    from benchmarks.fetch.glyphs import fetch_glyphs

    folder = output or Path("data") / data_set / "images"
    fetch = fetch_emoji if data_set == "emoji" else fetch_glyphs
    record = fetch(folder, size or SIZES[data_set], track)
    train, test = record["classes"].values()
    counts = f"{record['images']:,} images, {train:,} classes to train on, {test:,} to test"
    print_result(f"{folder}: {counts}")
