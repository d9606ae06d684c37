"""`python -m benchmarks`: measurements, side by side, on this machine."""

import math
import os
from pathlib import Path
from typing import Annotated

import typer

from distap.train import CONFIG, OVERRIDES, run

bench = typer.Typer(help="Measure, on this machine.", no_args_is_help=True)


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
    from benchmarks.memory import measure
    from distap.telemetry.terminal import console

    console.print(measure(batch or [256, 1024, 4096], image_size, micro_batch, backbone))


@bench.command("step")
def bench_step(
    backbone: Annotated[str, typer.Option(help="Any timm network.")] = "tf_efficientnet_lite0",
    weights: Annotated[
        str, typer.Option(help="random, timm, a file, or the name of a package that carries them.")
    ] = "random",
    image_size: Annotated[int, typer.Option(help="Width and height of the images, pixels.", min=32)] = 96,
    batch: Annotated[int, typer.Option(help="Images of a global batch, B.", min=1)] = 256,
    micro_batch: Annotated[int, typer.Option(help="Images of a micro-batch.", min=1)] = 16,
    ranks: Annotated[
        int | None, typer.Option(help="Ranks on this machine; by default one a GPU, or two without any.")
    ] = None,
    threads: Annotated[int, typer.Option(help="CPU threads of each rank.", min=1)] = 1,
    rounds: Annotated[int, typer.Option(help="Turns that each has; the median counts.", min=1)] = 9,
    bf16: Annotated[bool, typer.Option("--bf16", help="Compute in bfloat16 instead of float32.")] = False,
    memory_batch: Annotated[
        list[int] | None, typer.Option(help="A further B whose peak memory is measured; repeat for several.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="File to write all figures to.")] = None,
) -> None:
    """Print what a training step takes: distap's, full-batch autograd's, cached gradients', and the floor.

    The floor is the network's forward and backward passes alone. All take turns on the same images; images a second,
    peak memory, and the calls and bytes of collectives are printed, and how far the gradients are from autograd's.
    Started by torchrun, it measures on torchrun's ranks.
    """
    import torch

    from benchmarks.step import measure
    from benchmarks.step_results import Setting, as_json, table
    from distap.engine.settings import PrecisionName
    from distap.telemetry.terminal import console

    if "RANK" in os.environ:
        ranks = int(os.environ["WORLD_SIZE"])
    ranks = ranks or torch.cuda.device_count() or 2
    precision: PrecisionName = "bf16" if bf16 else "float32"
    sizes = (image_size, batch, micro_batch)
    setting = Setting(backbone, weights, *sizes, ranks, threads, rounds, precision, tuple(memory_batch or []))
    results = measure(setting)
    if results is None:
        return
    console.print(table(results))
    if json_file is not None:
        json_file.write_text(as_json(results) + "\n")
        console.print(f"{json_file}", markup=False)


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
    from benchmarks.ranking import Figures, measure, table, write_results
    from distap.registry import REGISTRY
    from distap.telemetry.terminal import console, track

    losses = loss or [name for name in REGISTRY["loss"] if name not in ("metric_learning", "sum")]
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


@bench.command("data")
def bench_data(
    image: Annotated[int, typer.Option(help="Width and height of the JPEG images, pixels.", min=32)] = 1024,
    output_size: Annotated[
        list[int] | None, typer.Option(help="Width and height that crops are scaled to; repeat for several.")
    ] = None,
    crop: Annotated[float, typer.Option(help="Smallest share of an image that a crop keeps.", min=0.01, max=1)] = 0.5,
    quality: Annotated[int, typer.Option(help="Of the JPEG images.", min=1, max=100)] = 90,
    count: Annotated[int, typer.Option(help="Images.", min=32)] = 64,
    workers: Annotated[int, typer.Option(help="Of the loaders; 0 leaves the loaders out.", min=0)] = 2,
    rounds: Annotated[int, typer.Option(help="Times that each is done; the median counts.", min=1)] = 5,
    output: Annotated[Path | None, typer.Option(help="Folder to write data.json and data.html to.")] = None,
) -> None:
    """Print images a second of decoding and loading, beside Pillow's full decoding and a plain WebDataset loader.

    By default 1-megapixel images for crops of 224, 384 and 800 pixels.
    """
    from benchmarks.data import Setting, measure, table, write_results
    from distap.telemetry.terminal import console, track

    setting = Setting(image, tuple(output_size or [224, 384, 800]), crop, quality, count, workers, rounds)
    figures = list(measure(setting, track))
    console.print(table(figures))
    if output is not None:
        facts = f"{count} images of quality {quality}, {workers} loader workers, the median of {rounds} rounds"
        console.print(f"{write_results(output, figures, facts)}", markup=False)


@bench.command("eval")
def bench_eval(
    images: Annotated[int, typer.Option(help="Images of the labelled set.", min=20)] = 60_000,
    dimensions: Annotated[int, typer.Option(help="Of the descriptors.", min=2)] = 512,
    gallery: Annotated[
        int | None, typer.Option(help="Rank this many descriptors for 70 queries of three protocols instead.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Turns that each has; the median counts.", min=1)] = 3,
    threads: Annotated[int | None, typer.Option(help="CPU threads; all cores by default.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="File to write all figures to.")] = None,
) -> None:
    """Print time and memory of evaluating a labelled set, beside pytorch-metric-learning's AccuracyCalculator.

    The full ranking. With --gallery: Easy, Medium and Hard against a gallery in a
    file of the temporary folder, of 2 bytes a number.
    """
    from benchmarks import evaluation
    from distap.telemetry.terminal import console, track

    threads = threads or os.cpu_count() or 1
    if gallery is None:
        setting = evaluation.Setting(images, dimensions, rounds, threads)
        figures = evaluation.measure(setting, track)
        console.print(evaluation.table(figures, setting))
        console.print(evaluation.agreement(figures), highlight=False)
        text = evaluation.as_json(figures)
    else:
        of_gallery = evaluation.measure_gallery(gallery, dimensions, threads)
        console.print(evaluation.gallery_table(of_gallery))
        text = evaluation.as_json(of_gallery)
    if json_file is not None:
        json_file.write_text(text + "\n")
        console.print(f"{json_file}", markup=False)


@bench.command("savings")
def bench_savings(
    backbone: Annotated[str, typer.Option(help="Any timm network.")] = "tf_efficientnet_lite0",
    weights: Annotated[
        str | None, typer.Option(help="random, timm, a file, or a package; by default a package that is installed.")
    ] = None,
    image_size: Annotated[int, typer.Option(help="Width and height of the images, pixels.", min=32)] = 96,
    batch: Annotated[int, typer.Option(help="Images of a batch.", min=16)] = 128,
    micro_batch: Annotated[int, typer.Option(help="Images of a micro-batch.", min=1)] = 16,
    rounds: Annotated[int, typer.Option(help="Steps of each; the median counts.", min=1)] = 5,
    threads: Annotated[int | None, typer.Option(help="CPU threads; all cores by default.")] = None,
    compiled: Annotated[bool, typer.Option(help="Measure compiled backbones; compiling takes minutes.")] = True,
) -> None:
    """Print what each saving inside the network brings, its replay drift and its effect on the gradient.

    Describe with folded BatchNorm and in bfloat16, activation checkpointing, a compiled backbone.
    """
    from benchmarks.savings import Setting, default_weights, measure, table
    from distap.telemetry.terminal import console

    setting = Setting(
        backbone,
        weights or default_weights(backbone),
        image_size,
        batch,
        micro_batch,
        rounds,
        threads or os.cpu_count() or 1,
        compiled,
    )
    console.print(table(setting, *measure(setting)))


@bench.command("network")
def bench_network(
    config: CONFIG,
    overrides: OVERRIDES = None,
    rate: Annotated[
        list[str] | None, typer.Option(help="Of the cable, each way, such as 100Mb; repeat for several.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Images of a global batch.", min=4)] = 128,
    keep: Annotated[int, typer.Option(help="Micro-batches of a rank that keep their graph.", min=0)] = 0,
    steps: Annotated[int, typer.Option(help="Steps whose median counts.", min=1)] = 5,
    rounds: Annotated[int, typer.Option(help="Rounds of what the prediction rests on.", min=1)] = 5,
) -> None:
    """Print the share of a step that two ranks on two hosts wait for each other, measured and as predicted.

    The hosts are network namespaces of this machine, the cable between them is limited to each rate in turn; by
    default 50 Mb, 200 Mb and 1 Gb a second. Needs root, and the tools ip and tc. Trains on random pixels.
    """
    from benchmarks.network import measure, table
    from distap.telemetry.terminal import console, track

    rates = rate or ["50Mb", "200Mb", "1Gb"]
    measured = measure(config, overrides or [], rates, batch, keep, steps, rounds)
    console.print(table(list(track(measured, "rates", len(rates)))))


@bench.command("trace")
def bench_trace(loss: Annotated[str, typer.Option(help="Loss to rank with, by name.")] = "ap_q") -> None:
    """Print how many files and lines of distap one training step of one rank runs."""
    from benchmarks.trace import table, traced_step
    from distap.telemetry.terminal import console

    console.print(table(loss, traced_step(loss)))


if __name__ == "__main__":
    run(bench, "benchmarks")
