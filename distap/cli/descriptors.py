"""`distap extract` writes descriptors; `distap whiten` reads them."""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from distap.cli import options
from distap.telemetry.terminal import print_result, print_warning, set_up_logging

EXTRACTED_IMAGES = "Folder, pattern or URL of shards, or any folder with images."
EXTRACTED_FOLDER = "New folder to write, or the folder of a stopped extraction to continue."
GRACE_SECONDS = 10.0  # for ranks to leave after a signal: finished parts are on the disk already
DESCRIPTORS = Annotated[
    Path, typer.Argument(help="Folder that `distap extract` wrote.", show_default=False)
]
METHOD = (
    "Scale principal components (pca), or shrink directions in which images of one class differ"
    " (lw)."
)
WRITTEN = "File to write the whitening to, such as RUN/whitening.safetensors."
ONLY_MISSING = (
    "Folder of an earlier extraction, by a network whose descriptors are compatible with those of"
    " this one: take over its rows, and describe only the images that it lacks."
)


def extract_command(
    source: Annotated[str, typer.Argument(help=EXTRACTED_IMAGES, show_default=False)],
    output: Annotated[Path, typer.Argument(help=EXTRACTED_FOLDER, show_default=False)],
    checkpoint: Annotated[str, options.CHECKPOINT],
    overrides: options.OVERRIDES = None,
    best: options.BEST = False,
    trust: options.TRUST = False,
    ranks: options.RANKS = "1",
    whitening: options.WHITENING = None,
    only_missing: Annotated[
        Path | None, typer.Option(help=ONLY_MISSING, show_default="describe all")
    ] = None,
) -> None:
    """Describe all images of shards or of a folder, and write the descriptors with their keys.

    KEY=VALUE changes the recipe of the network: evaluation.scales=[1,0.7] describes each image at
    two scales. After a stop, the same command continues from the finished parts, on any number of
    ranks. Images that cannot be used are listed in OUTPUT/about.json. With --only-missing,
    OUTPUT also has the earlier rows, in front, and says which network described each row; queries
    may then come from either network. On several machines start
    `torchrun [...] -m distap.cli extract [...]` on each; all must see OUTPUT.
    """
    from distap.checkpoint.agreement import first_on_rank_0
    from distap.data.loading.reader import ImageSet, open_images
    from distap.evaluation.describing import describing_of
    from distap.evaluation.extraction.extracted_folder import extract_to_folder
    from distap.evaluation.extraction.extracting import Describing, Extraction
    from distap.evaluation.extraction.image_describer import ImageDescriber
    from distap.evaluation.row_folder import RowFolder, open_descriptors
    from distap.processes.stopping import leave_when_asked
    from distap.training.build import trained_network
    from distap.world import joined_world

    if "TORCHELASTIC_RUN_ID" not in os.environ:  # torchrun sets it for the ranks that it starts
        count = options.ranks_to_start(ranks)
        if count > 1:
            from distap.launcher import launch

            processes = [f"--nproc-per-node={count}"]
            raise typer.Exit(launch(processes, "distap.cli", sys.argv[1:], GRACE_SECONDS))
    leave_when_asked()
    try:
        with joined_world() as world:
            set_up_logging(world.rank)
            recipe, network = trained_network(
                checkpoint, world, best, overrides or [], trusted=trust
            )

            def opened() -> tuple[ImageDescriber, ImageSet, RowFolder | None]:
                describing = describing_of(recipe, network, world, whitening=whitening)
                earlier = None if only_missing is None else open_descriptors(only_missing)
                return describing.describer, open_images(source), earlier

            describer, images, earlier = first_on_rank_0(world, opened)
            data = recipe.data
            describing = Describing(
                describer, world, data.workers, shown=True, requests=data.requests
            )
            written = extract_to_folder(Extraction(describing, images), output, earlier)
    except SystemExit:
        print_warning(f"stopped: the same command continues from the parts in {output}")
        raise
    if world.rank == 0:
        text = f"{len(written)} descriptors of {written.descriptors.shape[1]} dimensions"
        if earlier is not None:
            text += f", {len(earlier.stored)} of them from {only_missing}, which are assumed to be"
            text += " compatible: `distap eval --gallery-rows` measures it"
        if written.left_out:
            text += f"; {len(written.left_out)} files left out, see {output / 'about.json'}"
        print_result(f"{output}: {text}")


def whiten_command(
    descriptors: DESCRIPTORS,
    kind: Annotated[Literal["pca", "lw"], typer.Option(help=METHOD)] = "pca",
    output: Annotated[
        Path | None, typer.Option(help=WRITTEN, show_default="next to the descriptors")
    ] = None,
) -> None:
    """Learn a whitening from the extracted descriptors of a training set.

    `distap extract --whitening FILE` applies it. It fits only the network, image size and scales it
    was learned from.
    """
    from distap.retrieval.descriptor_files import read_descriptors

    learned_from = read_descriptors(descriptors)
    from distap.retrieval.whitening import WHITENING_FILE, learned_whitening, save_whitening

    whitening = learned_whitening(learned_from, kind)
    path = output or descriptors
    if path.is_dir():
        path /= WHITENING_FILE
    save_whitening(path, whitening)
    after, before = whitening.projection.shape
    print_result(
        f"{path}: {before} to {after} dimensions, from {len(learned_from):,} descriptors; "
        f"apply it with distap extract --whitening {path}"
    )
