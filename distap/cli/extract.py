"""`distap extract`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from distap.cli.options import (
    BEST,
    IMAGE_SIZE,
    MAX_SIDE,
    ORIGINAL,
    SCALE_POWER,
    SCALES,
    WHITENING,
    described_at,
    sizing_of,
)

LEAVE_SECONDS = 10.0  # that ranks have after a signal: what is described is in whole files already


def extract_command(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(help="Folder, pattern or URL of shards; or any folder with images in it.", show_default=False),
    ],
    output: Annotated[
        Path, typer.Argument(help="Folder to write, or that of an extraction to go on with.", show_default=False)
    ],
    checkpoint: Annotated[
        str, typer.Option(help="A run folder, or one of its checkpoints, or a URL of either.", show_default=False)
    ],
    best: BEST = False,
    index: Annotated[
        Path | None, typer.Option(help="File of the shards' index.", show_default="beside the shards")
    ] = None,
    image_size: IMAGE_SIZE = None,
    max_side: MAX_SIDE = None,
    original: ORIGINAL = False,
    scales: SCALES = "1",
    scale_power: SCALE_POWER = None,
    whitening: WHITENING = None,
    form: Annotated[Literal["npy", "parquet"], typer.Option(help="Arrays, or one Parquet file.")] = "npy",
    dtype: Annotated[Literal["float32", "float16"], typer.Option(help="Of the descriptors.")] = "float32",
    precision: Annotated[Literal["float32", "bf16"], typer.Option(help="What the network computes in.")] = "float32",
    batch_pixels: Annotated[
        int | None,
        typer.Option(
            help="Height times width of all images described at once.", min=1, show_default="evaluation.batch_size's"
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes a rank that read.", min=0, show_default="as in the recipe")
    ] = None,
    part_images: Annotated[
        int | None,
        typer.Option(help="Images that are written together.", min=1, show_default="a 64th of all, 128 to 4096"),
    ] = None,
    ranks: Annotated[int, typer.Option(help="Processes on this machine, by torchrun; one a GPU.", min=1)] = 1,
) -> None:
    """Describe all images of shards or of a folder, and write the descriptors with their keys.

    Stopped or killed, the same command goes on from the parts that are whole, on any number of ranks. Images that
    cannot be used are left out and named in OUTPUT/left_out.txt. On several machines start
    `torchrun [...] -m distap.cli extract [...]` on each, with an OUTPUT that all of them see.
    """
    if ranks > 1:
        from distap.launcher import launch

        options = ["--standalone", f"--nproc-per-node={ranks}"]
        raise typer.Exit(launch(options, "distap.cli", ["extract", *_arguments(context)], LEAVE_SECONDS, 600))
    from distap.data.images.image_sets import open_images
    from distap.evaluation.extraction import describer_of, extract_to_folder
    from distap.processes.stopping import leave_when_asked
    from distap.retrieval.whitening import load_whitening
    from distap.storage.locations import parse_source
    from distap.telemetry.terminal import console, set_up_logging
    from distap.training.build import trained_network
    from distap.world import joined_world

    leave_when_asked()
    with joined_world() as world, _saying_that_it_goes_on(output):
        set_up_logging(world.rank)
        recipe, network = trained_network(checkpoint, world, best)
        data = recipe.data
        describer = describer_of(
            network,
            sizing_of(image_size, max_side, original, data.image_size),
            described_at(scales),
            scale_power,
            None if whitening is None else load_whitening(whitening),
            max_pixels=data.max_pixels,
            precision=precision,
            scaled=data.scaled_decoding,
            batch_pixels=batch_pixels or recipe.evaluation.batch_size * data.image_size**2,
        )
        written = extract_to_folder(
            describer,
            open_images(parse_source(source, index), data.max_pixels, data.remote, data.cache),
            world,
            output,
            dtype=dtype,
            form=form,
            workers=data.workers if workers is None else workers,
            part_images=part_images,
            shown=world.rank == 0,
        )
        if written is not None:
            console.print(
                f"{output}: {written.images} descriptors of {written.dimensions} dimensions, {dtype}; "
                f"{written.images / max(written.batches, 1):.1f} images a batch"
                + (
                    f"; {written.left_out} images left out, see {output / 'left_out.txt'}" if written.left_out else ""
                ),
                markup=False,
            )


@contextmanager
def _saying_that_it_goes_on(output: Path) -> Iterator[None]:
    from distap.telemetry.terminal import console

    try:
        yield
    except SystemExit:
        console.print(f"stopped: the same command goes on from the parts in {output}", markup=False)
        raise


def _arguments(context: typer.Context) -> list[str]:
    """The command line of one rank: all that was given, but for --ranks."""
    options, arguments = [], []
    for parameter in context.command.params:
        value = context.params[str(parameter.name)]
        if parameter.param_type_name == "argument":
            arguments.append(str(value))
        elif isinstance(value, bool):
            options += [parameter.opts[0]] if value else []
        elif value is not None and parameter.name != "ranks":
            options += [parameter.opts[0], str(value)]
    return [*options, "--", *arguments]
