"""`distap data convert`: the papers' data sets, from the files as their authors distribute them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from distap.data.converters.converting import Converted

SHOWN = 5  # missing or damaged images that are named

NAME = Annotated[
    str,
    typer.Argument(
        help="sop, cub, inaturalist, vehicleid, inshop, landmarks-clean, sfm-120k, gldv2, roxford5k, rparis6k or "
        "revisitop1m.",
        show_default=False,
    ),
]


def convert_command(
    name: NAME,
    source: Annotated[Path, typer.Argument(help="Folder of the files that you downloaded.", show_default=False)],
    output: Annotated[Path, typer.Argument(help="Folder to write a folder a split into.", show_default=False)],
    split: Annotated[
        list[str] | None,
        typer.Option(help="A split to convert, several times for several.", show_default="those that are usual"),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Missing images are an error.")] = False,
    images_per_shard: Annotated[int, typer.Option(help="Images in a shard.", min=1)] = 1000,
    shuffle: Annotated[
        int | None,
        typer.Option(help="Seed of a random order, as for distap data pack.", min=0, show_default="as listed"),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes that pack.", min=1, show_default="one a core")
    ] = None,
) -> None:
    """Pack a data set of the papers into shards, OUTPUT/SPLIT, from the files as their authors distribute them.

    What to download, how it has to lie, and how each licence reads: distap/data/converters/README.md. Missing images
    are counted and listed in OUTPUT/missing.txt. An interrupted conversion goes on when it is called again.
    """
    import difflib

    from distap.data.converters import DATASETS
    from distap.data.converters.converting import MISSING_FILE, convert
    from distap.data.shards.parallel import usable_cores
    from distap.errors import DistapError
    from distap.telemetry.terminal import console, track

    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(DATASETS)}"
        raise DistapError(f"no data set is called {name!r}; {hint}")
    converted = convert(
        DATASETS[name],
        source,
        output,
        only=split or (),
        strict=strict,
        images_per_shard=images_per_shard,
        shuffle=shuffle,
        workers=workers or usable_cores(),
        track=track,
    )
    for part in converted:
        for text, style in _told(part, output):
            console.print(text, markup=False, style=style)
    if any(part.listed.missing for part in converted):
        console.print(f"{output / MISSING_FILE}: every missing image", markup=False)


def _told(part: "Converted", output: Path) -> list[tuple[str, str | None]]:
    """What there is to say of a split: lines and their styles."""
    listed, split = part.listed, part.listed.split
    kept = ", from an earlier call" if part.kept else ""
    lines: list[tuple[str, str | None]] = [
        (f"{output / split.name}: {part.images:,} images of {part.classes:,} classes{kept}", None)
    ]
    if listed.differs:
        published = ", or ".join(map(str, split.published))
        lines.append(
            (
                f"{split.name} differs from the published split: its list names {listed.images:,} images of "
                f"{listed.classes:,} classes, published are {published}",
                "yellow",
            )
        )
    if listed.repeated:
        lines.append((f"{split.name}: {listed.repeated:,} images are listed twice, and packed once", "yellow"))
    for what, names in (
        ("missing", listed.missing),
        ("damaged and left out", [f"{image.name} ({image.reason})" for image in part.damaged]),
    ):
        if names:
            more = f", and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
            text = f"{split.name}: {len(names):,} images are {what}: {', '.join(names[:SHOWN])}{more}"
            lines.append((text, "yellow"))
    return lines
