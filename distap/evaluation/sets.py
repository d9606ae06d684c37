"""Open data sets for evaluation with their protocols, and evaluate several of them."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from distap.config.evaluation_sections import MERGED
from distap.data.converters.dataset import GROUND_TRUTH_FILE
from distap.data.loading.reader import ImageSet, open_images
from distap.errors import DistapError, logger
from distap.evaluation.described_images import DescribedImages
from distap.evaluation.evaluation_set import EvaluationSet
from distap.evaluation.extraction.extracting import Describing
from distap.evaluation.ground_truth import read_truth
from distap.evaluation.row_folder import open_descriptors
from distap.evaluation.saved import Evaluation
from distap.evaluation.several_sets import evaluate_merged, merged_sets
from distap.evaluation.upgrade import NEW_TO_OLD, by_direction, upgrade_lines
from distap.retrieval.figures import LABELLED_FIGURES, figures_named
from distap.retrieval.refinement import Refinement
from distap.retrieval.row_blocks import open_parts
from distap.storage.locations import Source, parse_source
from distap.telemetry.terminal import figures_table, print_result

NAME_AND_PATH = re.compile(r"([\w.-]+)=(.+)")  # NAME=PATH


def open_set(
    where: Source | str,
    name: str | None = None,
    distractors: Sequence[str] = (),
    *,
    gallery: Source | str | None = None,
    truth: Path | str | None = None,
    gallery_draws: int = 0,
    figures: Sequence[str] = (),
    gallery_rows: Sequence[Path] | Path = (),
) -> EvaluationSet:
    """Open a data set to evaluate on: shards with classes, or a converted folder with a ground
    truth.

    Args:
        name: name of the set in results; None takes the last part of `where`.
        distractors: files and folders of descriptors to add to the gallery, see `open_parts`.
        gallery: images with classes to search in; None searches all other images of the set itself.
        truth: file that lists for each query what is right, see `distap.evaluation.ground_truth`.
        gallery_draws: draw a gallery of one image per class this many times, and query the others;
            0 draws none.
        figures: names, see `distap.retrieval.figures`; none takes those of the ground truth, or
            LABELLED_FIGURES.
        gallery_rows: folders of `distap extract` of the same images by another network, for figures
            of the queries of each network in the gallery of the other.
    """
    figures_named(figures)  # raises for an unknown one
    source = parse_source(where)
    open_parts(distractors, None)  # raises for a path without descriptors
    if truth is not None:
        opened = _listed_set(source, gallery, Path(truth))
    elif _is_converted(source):
        opened = _converted_set(source, gallery)
    else:
        opened = _labelled_set(source, gallery, gallery_draws)
        if figures:  # results are sorted by mAP
            figures = tuple(dict.fromkeys(("mAP", *figures)))
    if gallery_draws and opened.gallery:
        raise DistapError(
            "evaluation.gallery_known",
            f"{source}: its gallery is known, so that none is drawn: leave gallery_draws out",
        )
    folders = [gallery_rows] if isinstance(gallery_rows, Path) else gallery_rows
    if folders and distractors:
        raise DistapError(
            "evaluation.rows_and_distractors",
            f"{source}: distractors are in the gallery of one network, but gallery_rows gives the"
            " galleries of two: leave one of them out",
        )
    opened = replace(
        opened,
        name=name or Path(source.base).name or "data",
        figures=tuple(figures) or opened.figures,
        distractors=tuple(distractors),
        gallery_rows=tuple(map(open_descriptors, folders)),
    )
    if opened.joined_rows.directions == (NEW_TO_OLD,):
        logger.info(
            "%s: %s has no rows of the queries, or not within their boxes, so there are no figures"
            " of old-to-new and old-to-old: evaluate the old network for the latter",
            opened.name,
            " and ".join(map(str, folders)),
        )
    return opened


def _open_images(where: Source | str) -> ImageSet:
    source = parse_source(where)
    return DescribedImages(source) if source.kind == "described" else open_images(source)


def _is_whole_folder(source: Source) -> bool:
    return not source.scheme and source.pattern is None and not source.is_part


def _is_converted(source: Source) -> bool:
    """Return whether a source is a folder of `distap data convert`, which has a ground truth."""
    has_truth = Path(source.base, GROUND_TRUTH_FILE).is_file()
    return source.kind == "shards" and _is_whole_folder(source) and has_truth


def _converted_set(source: Source, gallery: Source | str | None) -> EvaluationSet:
    """Open a folder of `distap data convert`: its truth names the folders of queries and gallery.

    A folder that is named for both is opened once, so that its images are described once.
    """
    if gallery is not None:
        raise DistapError(
            "evaluation.gallery_known",
            f"{source}: its gallery is that of its ground truth, so leave gallery out",
        )
    folder = Path(source.base)
    truth = read_truth(folder / GROUND_TRUTH_FILE)
    images = {name: _open_images(str(folder / name)) for name in (*truth.query, *truth.gallery)}
    return EvaluationSet(
        folder.name,
        tuple(images[name] for name in truth.query),
        truth.figures,
        tuple(images[name] for name in truth.gallery),
        truth,
    )


def _listed_set(source: Source, gallery: Source | str | None, path: Path) -> EvaluationSet:
    """Open images of which a file lists the queries; without a gallery they are that as well."""
    truth = read_truth(path)
    queries = _open_images(source)
    searched = queries if gallery is None else _open_images(gallery)
    if searched.index.fingerprint == queries.index.fingerprint:
        searched = queries
    return EvaluationSet(source.base, (queries,), truth.figures, (searched,), truth)


def _labelled_set(source: Source, gallery: Source | str | None, draws: int) -> EvaluationSet:
    """Open images of which those of the query's class are right."""
    folder = Path(source.base)
    # As `distap data pack` names the two folders.
    neighbour = folder.with_name(f"{folder.name.removesuffix('query')}gallery")
    is_query = folder.name.endswith("query") and _is_whole_folder(source)
    if is_query and gallery is None and not draws and neighbour.is_dir():
        raise DistapError(
            "evaluation.no_gallery",
            f"{source}: give its gallery, {neighbour}, by data.gallery or --gallery; if these are"
            f" to retrieve each other, write {source}/*.tar",
        )
    queries = _open_images(source)
    searched = () if gallery is None else (_open_images(gallery),)
    for images in (queries, *searched):
        if images.classes[0] == "":
            raise DistapError(
                "data.no_classes",
                f"{images.name}: a plain folder of images says nothing of classes; `distap data"
                " pack` it",
            )
    for images in searched:
        if images.index.fingerprint == queries.index.fingerprint:
            raise DistapError(
                "evaluation.gallery_is_queries",
                f"{images.name}: these are the queries themselves, and each would retrieve itself;"
                " leave the gallery out, and each retrieves all others",
            )
    return EvaluationSet(source.base, (queries,), LABELLED_FIGURES, searched, draws=draws)


def open_named_sets(
    texts: Sequence[str | Source],
    distractors: Sequence[str] = (),
    *,
    merged: bool = False,
    **settings: Any,
) -> dict[str, EvaluationSet]:
    """Open data sets to evaluate on, each given as PATH, NAME=PATH or a Source.

    Return them by name. With `merged`, raise a DistapError if they cannot be merged.
    """
    sets: dict[str, EvaluationSet] = {}
    for text in texts:
        named = None if isinstance(text, Source) else NAME_AND_PATH.fullmatch(text)
        name, path = named.groups() if named else (None, text)
        opened = open_set(path, name, distractors, **settings)
        if opened.name in sets:
            raise DistapError(
                "evaluation.repeated_name",
                f"--data: two sets are called {opened.name}; write NAME=PATH for one of them",
            )
        sets[opened.name] = opened
    if merged:
        merged_sets(sets)
    return sets


def evaluate_sets(
    sets: Mapping[str, EvaluationSet],
    describing: Describing,
    refinement: Refinement,
    *,
    merged: bool = False,
    output: Path | None = None,
    printed: bool = True,
    **about: Any,
) -> dict[str, Any]:
    """Describe and rank data sets on all ranks; on rank 0 print, write and return the figures.

    Args:
        merged: evaluate all sets with classes as one too, see `evaluate_merged`.
        output: folder for the evaluation, or for a folder of each of several.
        about: further entries of what is written and returned.
    """
    # All are described first, so that a mistake in the last one costs no ranking.
    described = {name: opened.describe(describing) for name, opened in sets.items()}
    describer = describing.describer
    about |= {
        "sizing": str(describer.sizing),
        "scales": describer.network.scales,
        "precision": describer.precision,
    }
    evaluations: dict[str, Callable[[Refinement], Evaluation]] = {
        name: described_set.evaluate for name, described_set in described.items()
    }
    if merged:
        evaluations[MERGED] = partial(evaluate_merged, described)
    results: dict[str, Any] = {}
    for name, evaluate in evaluations.items():
        evaluation = evaluate(refinement)
        if describing.world.rank > 0:
            continue
        figures = json.loads(evaluation.model_dump_json())["figures"]  # without NaN
        results[name] = {evaluation.refinement: figures}
        if output is not None:  # before anything is printed, which may fail
            evaluation.save(output / name if len(evaluations) > 1 else output, **about)
        if printed:
            print_result(
                f"{name}: {evaluation.queries} queries, {evaluation.left_out} without a positive"
                " left out",
                figures_table(by_direction(evaluation.refinement, evaluation.figures)),
                *upgrade_lines(evaluation.figures),
            )
    return about | {"sets": results}
