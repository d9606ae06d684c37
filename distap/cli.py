"""The `distap` command; each of its commands is a thin call."""

from pathlib import Path
from typing import Annotated

import typer

from distap.train import CONFIG, OVERRIDES, run, train

app = typer.Typer(
    help="Train image-retrieval descriptors by optimising Average Precision over huge batches.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data = typer.Typer(help="Fetch, pack and index images.", no_args_is_help=True)
fetch = typer.Typer(help="Fetch a public data set as a folder of images.", no_args_is_help=True)
bench = typer.Typer(help="Measure, on this machine.", no_args_is_help=True)
app.add_typer(data, name="data")
app.add_typer(bench, name="bench")
data.add_typer(fetch, name="fetch")

SHARDS = Annotated[Path, typer.Argument(help="Folder of WebDataset shards.", show_default=False)]


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
    from distap.data.emoji import fetch as fetch_images
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
    images_per_shard: Annotated[int, typer.Option(help="Images in a shard.", min=1)] = 1000,
) -> None:
    """Pack images into WebDataset tar shards with an index beside them.

    In a CSV, paths are relative to the file and labels are integers. Damaged images are left out and listed.
    """
    from distap.data.shards import pack as pack_images
    from distap.telemetry.terminal import track

    _say_indexed(output, *pack_images(source, output, images_per_shard, track))


@data.command("index")
def index(folder: SHARDS) -> None:
    """Index the WebDataset shards of a folder that others made: reads every byte once, refuses damaged tars.

    Each sample needs one image and a .cls member with its class number. A file classes.txt may name the classes.
    """
    from distap.data.shards import index_shards
    from distap.telemetry.terminal import track

    _say_indexed(folder, *index_shards(folder, track))


def _say_indexed(folder: Path, index: object, skipped: list[object]) -> None: ...


@app.command("train")
def train_command(
    config: CONFIG,
    overrides: OVERRIDES = None,
    ranks: Annotated[int, typer.Option(help="Processes on this machine, by torchrun; one a GPU.", min=1)] = 1,
) -> None:
    """Train a recipe with the three-stage step; an interrupted run goes on from its newest checkpoint.

    On several machines start `torchrun -m distap.train CONFIG` yourself.
    """
    if ranks == 1:
        train(config, overrides)
        return
    from torch.distributed.run import main as torchrun

    arguments = ["--standalone", "--nproc-per-node", str(ranks), "-m", "distap.train", str(config)]
    torchrun([*arguments, *(overrides or [])])


def main() -> None:
    """Run the command line."""
    run(app)
