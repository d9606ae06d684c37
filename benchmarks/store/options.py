"""Options of `benchmarks data --store`."""

from pathlib import Path
from typing import Annotated

from typer import Option

from benchmarks import harness

IMAGES_A_CLASS = 4  # that a batch takes


class StoreOptions(harness.Benchmark):
    """What and how the readers of a store read."""

    store: Annotated[
        bool, Option("--store", help="Measure reading from a store on this machine instead.")
    ] = False
    delay: Annotated[
        list[float],
        Option(help="Milliseconds before the store's answers; repeat for several.", min=0),
    ] = [0, 30, 80]
    bandwidth: Annotated[
        float, Option(help="Bytes a second of the store's connections together.", min=1)
    ] = 1.25e8
    store_images: Annotated[int, Option(help="Images in the store.", min=8)] = 4000
    store_side: Annotated[int, Option(help="Their width and height, pixels.", min=16)] = 640
    images_per_shard: Annotated[int, Option(help="Images of a shard in the store.", min=1)] = 100
    store_size: Annotated[
        int, Option(help="Side that crops of the store's images are scaled to.", min=8)
    ] = 224
    batch_classes: Annotated[
        int, Option(help=f"Classes of a batch, with {IMAGES_A_CLASS} images each.", min=1)
    ] = 32
    chunk: Annotated[int, Option(help="Images that a worker hands over at once.", min=1)] = 16
    seconds: Annotated[
        float, Option(help="Seconds of a turn at a reader, or until it has read a pass.", min=0)
    ] = 4.0
    window: Annotated[
        int, Option(help="Shards of a window, for readings that have windows.", min=1)
    ] = 8
    cache: Annotated[
        float,
        Option(help="Share of the data set's bytes that the caches of all hosts hold.", min=0),
    ] = 0.6
    streaming: Annotated[
        Path | None,
        Option(help="Folder in which MosaicML's streaming is installed, if not next to distap."),
    ] = None
    hosts: Annotated[
        int,
        Option(help="With 2 or more: bytes that the store sends so many hosts a pass.", min=1),
    ] = 1
