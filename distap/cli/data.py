"""`distap data`: convert, pack, index, check and count images."""

import csv
import io
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from distap.cli.options import JSON, App, print_json
from distap.data.shards.parallel import usable_cores
from distap.errors import DistapError
from distap.telemetry.terminal import print_result, print_warning, text_table, track

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from distap.data.shards.image_folders import Skipped
    from distap.data.shards.index import Index, Scaling

SHOWN = 5  # classes whose names are printed

data = App(help="Convert, pack, index, check and count images.")

SHARDS = Annotated[
    str,
    typer.Argument(help="Folder, glob or brace pattern of WebDataset shards, or a URL of them."),
]
WORKERS = Annotated[
    int, typer.Option(help="Number of worker processes.", min=1, show_default="one for each core")
]
CORES = usable_cores()
IMAGES_PER_SHARD = Annotated[int, typer.Option(help="Maximum number of images in a shard.", min=1)]
NESTED = (
    "Name classes in nested folders by the top folder, the leaf, equal leaves merged, the path, or"
    " a level each."
)
SPLIT = "Pack this share of the classes into OUTPUT/validation, and the others into OUTPUT/train."
COLUMNS_HELP = (
    "Names of the list's columns for path, label, level1 to level9 and split: label=sku,level1=kind"
)
KEYS = "Keys of samples' .json members that name the coarser classes of their class, finer first."
LEFT_OUT = Annotated[
    Path | None,
    typer.Option(
        help="CSV file to write of what is left out, and why.", show_default="only counted"
    ),
]
ORDER = Annotated[
    Literal["classes", "listed", "random"],
    typer.Option(
        help="Keep the images of a class together, in one shard if they fit, the classes in random"
        " order; or pack the images as listed, or in random order, which data.reading: streamed"
        " needs."
    ),
]
SHORTER_SIDE = Annotated[
    int | None,
    typer.Option(
        help="Scale images with a longer shorter side down to this many pixels, and pack them as"
        " JPEG. Others are packed byte for byte.",
        min=1,
        show_default="pack all byte for byte",
    ),
]
JPEG_QUALITY = Annotated[
    int | None,
    typer.Option(help="JPEG quality for --side.", min=1, max=100, show_default="90"),
]


@data.command("convert")
def convert_command(
    name: Annotated[str, typer.Argument(help="Name of the data set, such as sop or gldv2.")],
    source: Annotated[
        Path, typer.Argument(help="Folder with the downloaded files of the data set.")
    ],
    output: Annotated[
        Path, typer.Argument(help="Folder to write the shards to, with a sub-folder per split.")
    ],
    split: Annotated[
        list[str] | None,
        typer.Option(help="Split to convert. Repeat the option for several.", show_default="all"),
    ] = None,
    images_per_shard: IMAGES_PER_SHARD = 1000,
    order: ORDER = "classes",
    side: SHORTER_SIDE = None,
    quality: JPEG_QUALITY = None,
    left_out: LEFT_OUT = None,
    workers: WORKERS = CORES,
) -> None:
    """Convert a published data set, as downloaded from its authors, into shards in OUTPUT/SPLIT.

    docs/guides/data-sets.md lists the data sets; docs/guides/data-set-files.md names the files
    to download, where to put them, and their licences. Listed images that are missing are counted.
    """
    from distap.data.converters import convert

    converted = convert(
        name,
        source,
        output,
        only=split or (),
        track=track,
        images_per_shard=images_per_shard,
        order=order,
        scaling=_scaling(side, quality),
        workers=workers,
    )
    for name_of_split, (index, _) in converted.items():
        _print_indexed(output / name_of_split, index)
    _print_left_out([file for _, skipped in converted.values() for file in skipped], left_out)


@data.command("pack")
def pack_command(
    source: Annotated[
        Path,
        typer.Argument(help="Images to pack: a folder with a sub-folder per class, or a CSV file."),
    ],
    output: Annotated[Path, typer.Argument(help="Folder to write; it must be new or empty.")],
    images_per_shard: IMAGES_PER_SHARD = 1000,
    order: ORDER = "classes",
    side: SHORTER_SIDE = None,
    quality: JPEG_QUALITY = None,
    nested: Annotated[
        Literal["top", "leaf", "merge", "path", "levels"] | None,
        typer.Option(help=NESTED, show_default="refuse them"),
    ] = None,
    columns: Annotated[
        str | None, typer.Option(help=COLUMNS_HELP, show_default="by their usual names")
    ] = None,
    split: Annotated[
        float | None, typer.Option(help=SPLIT, min=0, max=1, show_default="no split")
    ] = None,
    left_out: LEFT_OUT = None,
    workers: WORKERS = CORES,
) -> None:
    """Pack images into WebDataset tar shards with an index next to them.

    A CSV (with commas, semicolons or tabs) has columns by these names: path or filename, relative
    to the file; label or class; and optionally level1 (or group) to level9, ever coarser classes
    that hold the class; split, each packed as OUTPUT/SPLIT, such as train and test, or train, query
    and gallery; and key, the name of the image. Images are packed byte for byte, unless --side
    scales them. Every file that is left out, such as an image that is cut short or missing, is
    counted by the reason. OUTPUT appears when it is complete.
    """
    from distap.data.shards.image_files import list_images
    from distap.data.shards.packing import pack_parts

    scaling = _scaling(side, quality)
    renamed = dict(_column(text) for text in columns.split(",")) if columns else {}
    if (columns and source.is_dir()) or (nested and source.is_file()):
        raise DistapError(
            "command.conflict", f"{source}: --columns is for lists, --nested for folders"
        )
    listing = list_images(source, nested, renamed)
    if split is not None:
        if any(image.split for image in listing.images):
            raise DistapError(
                "command.conflict",
                f"{source}: its columns say how it is split; leave --split out, or the column",
            )
        listing = listing.halves(split)

    listings = listing.by_part()
    packed = pack_parts(
        listings,
        output,
        images_per_shard,
        track,
        order=order,
        scaling=scaling,
        workers=workers,
    )
    for (name, images), (index, _) in zip(listings.items(), packed, strict=True):
        _print_indexed(output / name, index, {image.class_name for image in images.images})
    _print_left_out([file for _, skipped in packed for file in skipped], left_out)


def _scaling(side: int | None, quality: int | None) -> "Scaling | None":
    """Return how to scale images by --side and --quality, which is for scaled images alone."""
    from distap.data.shards.index import Scaling

    if side is None and quality is not None:
        raise DistapError(
            "command.conflict",
            f"--quality {quality}: it is for images that --side scales; without it, images are"
            " packed byte for byte",
        )
    return None if side is None else Scaling(side, 90 if quality is None else quality)


def _column(text: str) -> tuple[str, str]:
    """Return what a column means, and its name in the list, of MEANING=NAME."""
    meaning, _, name = text.partition("=")
    return meaning.strip(), name.strip()


@data.command("index")
def index_shards_command(
    source: SHARDS,
    levels: Annotated[
        str, typer.Option(help=KEYS, show_default="from classes.txt, if it names some")
    ] = "",
    workers: WORKERS = CORES,
) -> None:
    """Write the index of existing WebDataset shards, and list all damaged tars.

    Every byte is read once.
    Each sample needs one image and a .cls member with its class number. A file classes.txt next to
    shards may name the classes, one per line: the name and, after tabs, those of the coarser
    classes that hold it, finer first.
    """
    from distap.data.shards.indexing import index_shards

    keys = levels.split(",") if levels else ()
    index, skipped = index_shards(source, track, workers, levels=keys)
    _print_indexed(source, index)
    _print_left_out(skipped)


@data.command("check")
def check_command(source: SHARDS, workers: WORKERS = CORES) -> None:
    """Compare every shard and image with the index, and decode every image.

    The exit status is 1 if anything is damaged. The data set is not changed. The check lists
    damaged or missing shards and continues.
    """
    from distap.data.loading.checking import check

    index, damaged = check(source, workers, track)
    _print_left_out(index.left_out)
    for damage in damaged:
        print_result(f"{damage.name}: {damage.reason}")
    seen = f"{source}: {len(index)} images in {_shards(index)}"
    if index.scaling:
        seen = f"{seen}, {index.scaling}"
    if damaged:
        reasons = Counter(damage.reason.partition(":")[0] for damage in damaged).most_common()
        counts = ", ".join(f"{reason} {count}" for reason, count in reasons)
        print_result(f"{seen}, {len(damaged)} things damaged: {counts}")
        raise typer.Exit(1)
    print_result(f"{seen}, all sound")


@data.command("stats")
def stats_command(source: SHARDS, as_json: JSON = False) -> None:
    """Count the images, classes, images per class, bytes and left-out files of a data set."""
    from distap.data.shards.index import load_index
    from distap.data.shards.statistics import statistics

    index = load_index(source)
    _print_left_out(index.left_out)
    figures = statistics(index)
    if as_json:
        print_json(figures)
        return
    rows = [(name.replace("_", " "), f"{figure:,}") for name, figure in figures.items()]
    print_result(text_table("", "", ("", ""), rows))


def _shards(index: "Index") -> str:
    """Return the number of shards in words, such as "1 shard" or "1,200 shards"."""
    count = len(index.shard_name)
    return "1 shard" if count == 1 else f"{count:,} shards"


def _print_indexed(source: Path | str, index: "Index", expected: "Collection[str]" = ()) -> None:
    """Print what a data set holds; warn of missing expected classes and of repeated images."""
    from distap.data.loading.reader import same_bytes

    names = index.class_name.tolist()
    counts = f"{len(index):,} images of {len(names):,} classes in {_shards(index)}"
    further = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    if index.scaling:
        counts = f"{counts}, {index.scaling}"
    print_result(f"{source}: {counts}: {', '.join(names[:SHOWN])}{further}")
    lost = sorted(set(expected) - set(names))
    if lost:
        print_warning(
            f"{source}: no image is left of {len(lost):,} classes: {', '.join(lost[:SHOWN])}"
        )
    pairs = same_bytes(index)
    across = index.label[pairs[:, 0]] != index.label[pairs[:, 1]]
    for kind, repeated in (("in two classes", pairs[across]), ("twice in a class", pairs[~across])):
        if len(repeated):
            first, second = index.names[repeated[0]].tolist()
            print_warning(
                f"{source}: {len(repeated):,} images are {kind}, by size and CRC-32, such as"
                f" {first} and {second}"
            )


def _print_left_out(skipped: "Sequence[Skipped]", output: Path | None = None) -> None:
    """Print a line per reason for leaving files out; write a CSV of the files to an output."""
    from distap.data.shards.image_folders import counted
    from distap.storage.atomic import write_whole
    from distap.storage.texts import as_line

    for line in counted(skipped):
        print_warning(f"left out: {line}")
    if output is not None:
        text = io.StringIO(newline="")
        rows = csv.writer(text)
        rows.writerow(("path", "reason"))
        rows.writerows((as_line(name), reason) for name, reason in skipped)
        write_whole(output, text.getvalue())
