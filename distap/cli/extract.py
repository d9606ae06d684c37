"""`distap extract`."""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from distap.cli.options import (
    BEST,
    CHECKPOINT,
    IMAGE_SIZE,
    MAX_SIDE,
    ORIGINAL,
    SCALE_POWER,
    SCALES,
    WHITENING,
    network_option,
    output_option,
    parse_scales,
    sizing_of,
)

SOURCE = "Folder, pattern or URL of shards, or any folder with images."
OUTPUT = "New folder, or that of a stopped extraction to continue."
BATCH_PIXELS = "Most pixels to describe at once: height times width, summed over the images."
PART = "Images of a part, the most that is lost when a rank is stopped."
GRACE_SECONDS = 10.0  # for ranks to leave after a signal: finished parts are on the disk already


def extract_command(
    source: Annotated[str, typer.Argument(help=SOURCE, show_default=False)],
    output: Annotated[Path, typer.Argument(help=OUTPUT, show_default=False)],
    checkpoint: Annotated[str, CHECKPOINT],
    best: BEST = False,
    index: Annotated[
        Path | None, typer.Option(help="Index file of the shards.", show_default="beside the shards")
    ] = None,
    image_size: IMAGE_SIZE = None,
    max_side: MAX_SIDE = None,
    original: ORIGINAL = False,
    scales: SCALES = "1",
    scale_power: SCALE_POWER = None,
    whitening: WHITENING = None,
    form: Annotated[Literal["npy", "parquet"], output_option(help="Write .npy arrays, or one Parquet file.")] = "npy",
    dtype: Annotated[
        Literal["float32", "float16"], output_option(help="Number format of the stored descriptors.")
    ] = "float32",
    precision: Annotated[
        Literal["float32", "bf16"], network_option(help="Number format in which the network computes.")
    ] = "float32",
    batch_pixels: Annotated[
        int | None,
        typer.Option(help=BATCH_PIXELS, min=1, show_default="as many as evaluation.batch_size images have"),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Loader processes of each rank.", min=0, show_default="as in the recipe")
    ] = None,
    part_images: Annotated[
        int | None, output_option(help=PART, min=1, show_default="a 64th of all, 128 to 4096")
    ] = None,
    ranks: Annotated[int, typer.Option(help="Number of processes on this machine, one for each GPU.", min=1)] = 1,
) -> None:
    """Describe all images of shards or of a folder, and write the descriptors with their keys.

    After a stop, the same command continues from the finished parts, on any number of ranks. Images that cannot be
    used are listed in OUTPUT/left_out.txt. On several machines start `torchrun [...] -m distap.cli extract [...]` on
    each, with an OUTPUT that all of them see.
    """
    if ranks > 1 and "TORCHELASTIC_RUN_ID" not in os.environ:  # which torchrun sets for the ranks that it starts
        from distap.launcher import launch

        options = ["--standalone", f"--nproc-per-node={ranks}"]
        raise typer.Exit(launch(options, "distap.cli", sys.argv[1:], GRACE_SECONDS, 600))
    from distap.data.images.image_sets import open_images
    from distap.evaluation.extraction.image_describer import ImageDescriber
    from distap.evaluation.extraction.parts import Extraction
    from distap.evaluation.extraction.to_folder import extract_to_folder, left_out_of
    from distap.processes.stopping import leave_when_asked
    from distap.retrieval.whitening import load_whitening
    from distap.storage.locations import parse_source
    from distap.telemetry.terminal import console, set_up_logging
    from distap.training.build import trained_network
    from distap.world import joined_world

    leave_when_asked()
    try:
        with joined_world() as world:
            set_up_logging(world.rank)
            recipe, network = trained_network(checkpoint, world, best)
            data = recipe.data
            describer = ImageDescriber(
                network,
                sizing_of(image_size, max_side, original, data.image_size),
                parse_scales(scales),
                scale_power,
                None if whitening is None else load_whitening(whitening),
                data.max_pixels,
                precision,
                data.scaled_decoding,
                batch_pixels or recipe.evaluation.batch_size * data.image_size**2,
            )
            images = open_images(parse_source(source, index), data.max_pixels, data.remote, data.cache)
            loaders = data.workers if workers is None else workers
            extraction = Extraction(describer, images, world, workers=loaders, shown=world.rank == 0)
            written = extract_to_folder(extraction, output, dtype=dtype, form=form, part_images=part_images)
    except SystemExit:
        console.print(f"stopped: the same command continues from the parts in {output}", markup=False)
        raise
    if written is not None:
        left_out = len(left_out_of(output))
        told = f"; {left_out} images left out, see {output / 'left_out.txt'}" if left_out else ""
        numbers = f"{len(written)} descriptors of {written.descriptors.shape[1]} dimensions, {dtype}"
        console.print(f"{output}: {numbers}{told}", markup=False)
