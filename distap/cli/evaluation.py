"""`distap eval`."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

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
from distap.errors import DistapError
from distap.train import OVERRIDES

if TYPE_CHECKING:
    from distap.config.recipe import Recipe
    from distap.evaluation import Describing, EvaluationSet
    from distap.retrieval.refinement import Refinement
    from distap.storage.locations import Source

NAMED = re.compile(r"([\w.-]+)=(.+)")  # a set's name before where it is


def eval_command(
    config: Annotated[
        Path | None, typer.Argument(help="A recipe: its network is evaluated as it is before training.")
    ] = None,
    overrides: OVERRIDES = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(help="A run folder, or one of its checkpoints, or a URL of either, to evaluate instead."),
    ] = None,
    best: BEST = False,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Shards, or a folder of `distap data convert` with a ground truth; several may be given, as PATH or "
            "NAME=PATH.",
            show_default="the recipe's validation set",
        ),
    ] = None,
    distractors: Annotated[
        list[str] | None, typer.Option(help="Shards that each gallery with a ground truth gets as well.")
    ] = None,
    image_size: IMAGE_SIZE = None,
    max_side: MAX_SIDE = None,
    original: ORIGINAL = False,
    scales: SCALES = "1",
    scale_power: SCALE_POWER = None,
    whitening: WHITENING = None,
    expand: Annotated[
        float | None,
        typer.Option(
            help="Expand queries by their neighbours weighted by similarity to this power; 0 is AQE.", min=0
        ),
    ] = None,
    augment: Annotated[
        float | None, typer.Option(help="The same for each image of the gallery (database-side augmentation).", min=0)
    ] = None,
    neighbours: Annotated[int, typer.Option(help="That --expand and --augment take.", min=1)] = 10,
    rerank: Annotated[
        Literal["k-reciprocal", "diffusion"] | None,
        typer.Option(help="Put each query's first images in a new order."),
    ] = None,
    head: Annotated[int, typer.Option(help="Images of each query that --rerank looks at.", min=1)] = 100,
    rerank_neighbours: Annotated[
        int | None,
        typer.Option(
            help="Neighbours of an image that --rerank takes: about as many as a class has.",
            min=1,
            show_default="k-reciprocal: 20, diffusion: 50",
        ),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Show each of these options on and off, in one table.")
    ] = False,
    gap: Annotated[
        int | None,
        typer.Option(help="Also print how much greater mAP is within random batches of this many images.", min=2),
    ] = None,
    descriptors: Annotated[
        Path | None, typer.Option(help="Folder to keep descriptors in, and to find them again.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write results.json and result.json to, and each image's figures and nearest neighbours; "
            "of several sets in a folder each."
        ),
    ] = None,
) -> None:
    """Print what a network retrieves, in percent: mAP, mAP@R, R@k, mP@k, by the protocol of each data set.

    Shards with classes: every image queries all others. A folder that `distap data convert` wrote for Revisited
    Oxford or Paris, or for Google Landmarks v2: by its ground truth. Give a recipe to evaluate the network that
    training starts from, or --checkpoint for a trained one. On several ranks: `torchrun [...] -m distap.cli eval`.
    """
    from distap.config.reading import load_recipe
    from distap.evaluation.extraction import refuse_foreign_whitening
    from distap.telemetry.terminal import set_up_logging
    from distap.training.build import describing_of, network_of, trained_network
    from distap.world import joined_world

    if (config is None) == (checkpoint is None):
        raise DistapError("give either a recipe or --checkpoint")
    with joined_world() as world:
        set_up_logging(world.rank)
        if checkpoint is not None:
            recipe, network = trained_network(checkpoint, world, best)
        else:
            assert config is not None
            recipe = load_recipe(config, overrides or [])
            network = network_of(recipe, world)
        describing = describing_of(
            recipe,
            network,
            world,
            sizing_of(image_size, max_side, original, recipe.data.image_size),
            described_at(scales),
            scale_power,
            kept_in=descriptors,
            shown=world.rank == 0,
        )
        refinement = _refinement(whitening, expand, augment, neighbours, rerank, head, rerank_neighbours)
        if refinement.whitening is not None:
            refuse_foreign_whitening(refinement.whitening, describing.describer.described_by)
        _evaluate(
            _open_sets(data or [], distractors or [], recipe),
            describing,
            refinement,
            compare,
            gap,
            output,
            str(checkpoint or config),
        )


def _open_sets(data: list[str], distractors: list[str], recipe: "Recipe") -> dict[str, "EvaluationSet"]:
    """The data sets of --data by name, or the recipe's."""
    from distap.evaluation import open_set

    wheres: list[tuple[str | None, Source | str | None]] = [_named(text) for text in data]
    sets = {}
    for name, where in wheres or [(None, recipe.data.validation_source)]:
        if where is None:
            raise DistapError("the recipe has no data.validation: name a data set with --data")
        settings = recipe.data
        opened = open_set(
            where,
            name,
            distractors,
            max_pixels=settings.max_pixels,
            remote=settings.remote,
            cache=settings.cache,
        )
        if opened.name in sets:
            raise DistapError(f"--data: two sets are called {opened.name}; write NAME=PATH for one of them")
        sets[opened.name] = opened
    return sets


def _evaluate(
    sets: dict[str, "EvaluationSet"],
    describing: "Describing",
    refinement: "Refinement",
    compare: bool,
    gap: int | None,
    output: Path | None,
    network: str,
) -> None:
    """Describe the sets on all ranks; rank them, print and write their figures on rank 0."""
    from distap.evaluation import compared
    from distap.evaluation.saved import as_json
    from distap.storage.atomic import write_whole
    from distap.telemetry.terminal import console, figures_table

    # All of them first: ranks that waited for rank 0 to rank would take it for lost.
    described = {name: opened.describe(describing) for name, opened in sets.items()}
    if describing.world.rank > 0:
        return
    describer = describing.describer
    about = {"network": network, "sizing": str(describer.sizing), "scales": describer.network.scales}
    results: dict[str, Any] = {}
    gaps: dict[str, Any] = {}
    for name, one in described.items():
        found = compared(one, refinement, compare)
        last = next(reversed(found.values()))
        console.print(f"{name}: {last.queries} queries, {last.left_out} without a positive left out", markup=False)
        console.print(figures_table({variant: evaluation.figures for variant, evaluation in found.items()}))
        results[name] = {variant: as_json(evaluation.figures) for variant, evaluation in found.items()}
        if gap is not None:
            measured = one.gap(gap)
            gaps[name] = {"batch": gap, "gap": measured.gap} | asdict(measured)
            console.print(
                f"decomposability gap, nothing refined: mAP is {100 * measured.within_batches:.1f} within "
                f"{measured.batches} random batches of {gap} images, {100 * measured.whole:.1f} over the whole set: "
                f"{100 * measured.gap:+.1f}"
            )
        if output is not None:
            last.save(output / name if len(sets) > 1 else output, **about)
    if output is not None:
        write_whole(output / "results.json", json.dumps({**about, "sets": results, "gaps": gaps}, indent=1) + "\n")


def _named(text: str) -> tuple[str | None, str]:
    named = NAMED.fullmatch(text)
    return (named[1], named[2]) if named else (None, text)


def _refinement(
    whitening: Path | None,
    expand: float | None,
    augment: float | None,
    neighbours: int,
    rerank: Literal["k-reciprocal", "diffusion"] | None,
    head: int,
    rerank_neighbours: int | None,
) -> "Refinement":
    from distap.retrieval.refinement import Expansion, Refinement
    from distap.retrieval.reranking import RERANKERS
    from distap.retrieval.whitening import load_whitening

    given = {} if rerank_neighbours is None else {"neighbours": rerank_neighbours}
    return Refinement(
        None if whitening is None else load_whitening(whitening),
        None if augment is None else Expansion(neighbours, augment),
        None if expand is None else Expansion(neighbours, expand),
        None if rerank is None else RERANKERS[rerank](**given),
        head,
    )
