"""`distap data fetch`: public sets that are drawn here."""

from pathlib import Path
from typing import Annotated, Any

import typer

from distap.cli.commands import App
from distap.telemetry.terminal import print_result, track

fetch = App(help="Fetch a public data set as a folder of images.")
OUTPUT = Annotated[Path, typer.Argument(help="Folder of train/ and test/.")]
SIZE = Annotated[int, typer.Option(help="Width and height of the images, pixels.", min=16)]


@fetch.command("emoji")
def fetch_emoji_command(output: OUTPUT = Path("data/emoji/images"), size: SIZE = 128) -> None:
    """Fetch the emoji retrieval set: 1,591 emoji, each drawn by five to nine vendors, from the npm registry.

    Needs npm. Writes OUTPUT/{train,test}/CLASS/VENDOR.png: 795 classes to train on and 796 unseen ones to test.
    """
    from distap.data.converters.emoji import fetch_emoji

    _print_fetched(output, fetch_emoji(output, size, track))


@fetch.command("glyphs")
def fetch_glyphs_command(output: OUTPUT = Path("data/glyphs/images"), size: SIZE = 64) -> None:
    """Fetch the glyph retrieval set: 22,634 characters, each drawn by two to nine open fonts, from the npm registry.

    Needs npm. Writes OUTPUT/{train,test}/CHARACTER/FONT.png: 11,317 classes to train on and as many unseen ones to
    test, about 61,000 images each, as Stanford Online Products has. An interrupted fetch continues when called again.
    """
    from distap.data.converters.glyphs import fetch_glyphs

    _print_fetched(output, fetch_glyphs(output, size, track))


def _print_fetched(output: Path, record: dict[str, Any]) -> None:
    train, test = record["classes"].values()
    counts = f"{record['images']:,} images, {train:,} classes to train on, {test:,} to test"
    print_result(f"{output}: {counts}")
