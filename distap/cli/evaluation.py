"""`distap eval`: measure what a network retrieves."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from distap.cli import options
from distap.cli.options import JSON, OVERRIDES, data_option, print_json
from distap.errors import DistapError
from distap.storage.locations import parse_source
from distap.telemetry.terminal import set_up_logging

DATA = (
    "Data set, PATH or NAME=PATH: shards, or a folder that `distap data convert` wrote. Repeat for"
    " several."
)
DISTRACTORS = (
    "Descriptors to add to the gallery, right for no query: files, or folders of `distap extract`."
)
GALLERY_ROWS = (
    "Folder that `distap extract` wrote of the same images by another network: adds figures of the"
    " queries of each network in the gallery of the other. Repeat for the folders of several data"
    " sets."
)
MERGED_HELP = (
    "Evaluate the data sets as one too, in which data set and class must agree, as UnED does."
)
QUERY_EXPANSION = (
    "Move each query towards its neighbours, weighted by similarity to this power; 0 weighs all"
    " alike."
)
DATABASE_AUGMENTATION = (
    "Move each gallery image towards its neighbours, weighted by similarity to this power."
)
RERANK = (
    "Re-rank the first 100 results of a query by this many common neighbours: about the images of a"
    " class."
)
NEIGHBOURS_HELP = "Number of neighbours used by --query-expansion and --database-augmentation."
FIGURES_HELP = (
    "Figures to compute, such as mAP@R,R@1,R@20,mAP@1000,mP@5/min. Each has its definition in the"
    " guide."
)
RESULTS_FOLDER = (
    "Folder to write result.json, queries and neighbours to, or a folder of them for each data set."
)


def eval_command(
    checkpoint: Annotated[str, options.CHECKPOINT],
    overrides: OVERRIDES = None,
    best: options.BEST = False,
    trust: options.TRUST = False,
    data: Annotated[
        list[str] | None, data_option(help=DATA, show_default="the recipe's validation set")
    ] = None,
    distractors: Annotated[list[str] | None, data_option(help=DISTRACTORS)] = None,
    gallery: options.GALLERY_SET = None,
    gallery_rows: Annotated[list[Path] | None, data_option(help=GALLERY_ROWS)] = None,
    gallery_draws: options.GALLERY_DRAWS = 0,
    merged: Annotated[bool, data_option("--merged", help=MERGED_HELP)] = False,
    truth: options.TRUTH_FILE = None,
    figures: Annotated[
        str, data_option(help=FIGURES_HELP, show_default="the recipe's, or the protocol's")
    ] = "",
    query_expansion: Annotated[
        float | None, options.refinement(help=QUERY_EXPANSION, min=0)
    ] = None,
    database_augmentation: Annotated[
        float | None, options.refinement(help=DATABASE_AUGMENTATION, min=0)
    ] = None,
    neighbours: Annotated[int, options.refinement(help=NEIGHBOURS_HELP, min=1)] = 10,
    rerank: Annotated[int | None, options.refinement(help=RERANK, min=1)] = None,
    output: Annotated[
        Path | None, typer.Option(help=RESULTS_FOLDER, rich_help_panel="Output")
    ] = None,
    as_json: JSON = False,
    whitening: options.WHITENING = None,
) -> None:
    """Print how well a network retrieves, in percent: mAP, mAP@R, R@k and mP@k.

    Each data set is evaluated by its protocol.
    In shards with classes, every image is a query against all others, or against the images of
    --gallery. A folder that `distap data convert` wrote for Revisited Oxford or Paris, or for
    Google Landmarks v2, is evaluated by its ground truth. KEY=VALUE changes the recipe of the
    network: evaluation.sizing='side 1024' takes whole images. For several ranks run `torchrun [...]
    -m distap.cli eval`. With --json: `network`, `sizing` and `scales`, and in `sets`, by name, the
    figures from 0 to 1 of each refinement (`plain` is none). With --gallery-rows, figures such as
    `new-to-old mAP` are of queries of the network in the gallery of the other one.
    """
    from distap.checkpoint.agreement import first_on_rank_0
    from distap.evaluation.describing import describing_of
    from distap.evaluation.sets import evaluate_sets
    from distap.retrieval.refinement import Refinement
    from distap.training.build import trained_network
    from distap.world import joined_world

    with joined_world() as world:
        set_up_logging(world.rank)
        recipe, network = trained_network(checkpoint, world, best, overrides or [], trusted=trust)

        def opened() -> Any:
            describing = describing_of(recipe, network, world, whitening=whitening, shown=True)
            refinement = Refinement(database_augmentation, query_expansion, neighbours, rerank)
            names = figures.replace(",", " ").split()
            sets = _opened_sets(
                recipe,
                data or [],
                distractors or [],
                gallery,
                gallery_draws,
                truth,
                names,
                merged,
                gallery_rows or [],
            )
            return sets, describing, refinement

        sets, describing, refinement = first_on_rank_0(world, opened)
        results = evaluate_sets(
            sets,
            describing,
            refinement,
            merged=merged,
            output=output,
            printed=not as_json,
            network=checkpoint,
        )
        if as_json and world.rank == 0:
            print_json(results)


def _opened_sets(
    recipe: Any,
    sources: Sequence[Any],
    distractors: Sequence[str],
    gallery: Any,
    gallery_draws: int,
    truth: Path | None,
    figures: Sequence[str],
    merged: bool,
    gallery_rows: Sequence[Path],
) -> Any:
    """Open the data sets to evaluate on; without sources, the recipe's own with its settings."""
    from distap.evaluation.sets import open_named_sets

    data = recipe.data
    if not sources:
        if data.validation is None:
            raise DistapError(
                "evaluation.no_data",
                "the recipe has no data.validation: name a data set with --data",
            )
        if isinstance(data.validation, dict):
            sources = [f"{name}={source}" for name, source in data.validation_sets.items()]
        else:
            sources = [parse_source(data.validation)]
        figures = figures or recipe.evaluation.figures
        if gallery is None and not gallery_draws:
            gallery = data.gallery
            gallery_draws = data.gallery_draws
    return open_named_sets(
        sources,
        distractors,
        figures=figures,
        truth=truth,
        gallery=gallery,
        gallery_draws=gallery_draws,
        merged=merged,
        gallery_rows=gallery_rows,
    )
