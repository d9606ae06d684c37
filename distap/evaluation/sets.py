"""Open data sets for evaluation with their protocols, and evaluate several of them."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distap.data.converters.dataset import GROUND_TRUTH_FILE
from distap.data.loading.reader import ImageSet, open_images
from distap.errors import DistapError
from distap.evaluation.described_images import DescribedImages
from distap.evaluation.evaluation_set import EvaluationSet
from distap.evaluation.extraction.extracting import Describing
from distap.evaluation.ground_truth import read_truth
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
) -> EvaluationSet:
    """Open a data set to evaluate on: shards with classes, or a converted folder with a ground
    truth.

    Args:
        name: name of the set in results; None takes the last part of `where`. distractors: files
            and folders of descriptors to add to the gallery, see `open_parts`. gallery: shards with
            classes to search in; None searches all other images of the set itself. truth: file that
            says for each query what is right, see `distap.evaluation.ground_truth`. gallery_draws:
            draw a gallery of one image per class this many times, and query the others; 0 draws
            none. figures: names, see `distap.retrieval.figures`; none takes those of the ground
            truth, or LABELLED_FIGURES.
    """
    figures_named(figures)  # raises for an unknown one
    source = parse_source(where)
    name = name or Path(source.base).name or "data"
    open_parts(distractors, None)  # raises for what holds none
    more: dict[str, Any] = {"distractors": tuple(distractors)}

    def opened(part: Source | str) -> ImageSet:
        own = parse_source(part)
        return DescribedImages(own) if own.kind == "described" else open_images(own)

    folder = Path(source.base)
    known = None if truth is None else read_truth(Path(truth))
    asked: Sequence[Source | str] = [source]
    among: Sequence[Source | str] = [] if gallery is None else [gallery]
    is_whole = not source.scheme and source.pattern is None and not source.is_part
    truth_file = folder / GROUND_TRUTH_FILE
    if known is None and is_whole and source.kind == "shards" and truth_file.is_file():
        if among:
            raise DistapError(
                f"{source}: its gallery is that of its ground truth, so leave gallery out"
            )
        known = read_truth(truth_file)
        asked, among = (
            [str(folder / part) for part in parts] for parts in (known.query, known.gallery)
        )
    if gallery_draws and (known or among):
        raise DistapError(
            f"{source}: its gallery is known, so that none is drawn: leave gallery_draws out"
        )
    if known:
        of_part = {part: opened(part) for part in (*asked, *among)}
        queries, parts = ([of_part[part] for part in own] for own in (asked, among))
        if truth is not None and (
            not among or parts[0].index.fingerprint == queries[0].index.fingerprint
        ):
            parts = queries
        return EvaluationSet(
            name, tuple(queries), tuple(figures) or known.figures, tuple(parts), known, **more
        )
    # as `distap data pack` names them
    pair = folder.with_name(f"{folder.name.removesuffix('query')}gallery")
    if (
        folder.name.endswith("query")
        and is_whole
        and pair.is_dir()
        and not among
        and not gallery_draws
    ):
        raise DistapError(
            f"{source}: give its gallery, {pair}, by data.gallery or --gallery; if these are to"
            f" retrieve each other, write {source}/*.tar"
        )
    # results are sorted by mAP
    names = tuple(dict.fromkeys(("mAP", *figures))) if figures else LABELLED_FIGURES
    found = EvaluationSet(
        name, (opened(source),), names, tuple(map(opened, among)), draws=gallery_draws, **more
    )
    for images in found.image_sets:
        if images.classes[0] == "":
            raise DistapError(
                f"{images.name}: a plain folder of images says nothing of classes; `distap data"
                " pack` it"
            )
    for other in found.gallery:
        if other.index.fingerprint == found.queries[0].index.fingerprint:
            raise DistapError(
                f"{other.name}: these are the queries themselves, and each would retrieve itself;"
                " leave the gallery out, and each retrieves all others"
            )
    return found


def open_named_sets(
    texts: Sequence[str | Source], distractors: Sequence[str] = (), **settings: Any
) -> dict[str, EvaluationSet]:
    """Open data sets to evaluate on, each given as PATH, NAME=PATH or a Source; return them by
    name.
    """
    sets: dict[str, EvaluationSet] = {}
    for text in texts:
        named = None if isinstance(text, Source) else NAME_AND_PATH.fullmatch(text)
        opened = open_set(
            named[2] if named else text, named[1] if named else None, distractors, **settings
        )
        if opened.name in sets:
            raise DistapError(
                f"--data: two sets are called {opened.name}; write NAME=PATH for one of them"
            )
        sets[opened.name] = opened
    return sets


def evaluate_sets(
    sets: Mapping[str, EvaluationSet],
    describing: Describing,
    refinement: Refinement,
    *,
    output: Path | None = None,
    printed: bool = True,
    **about: Any,
) -> dict[str, Any]:
    """Describe and rank data sets on all ranks; on rank 0 print, write and return the figures.

    Args:
        output: folder for the evaluation, or for a folder of each of several; `about` is added to
            them.
    """
    described = {name: opened.describe(describing) for name, opened in sets.items()}
    describer = describing.describer
    about |= {
        "sizing": str(describer.sizing),
        "scales": describer.network.scales,
        "precision": describer.precision,
    }
    results: dict[str, Any] = {}
    for name, one in described.items():
        found = one.evaluate(refinement)
        if describing.world.rank > 0:
            continue
        # without NaN
        results[name] = {found.refinement: json.loads(found.model_dump_json())["figures"]}
        if output is not None:  # before anything is printed, which may fail
            found.save(output / name if len(sets) > 1 else output, **about)
        told = f"{found.queries} queries, {found.left_out} without a positive left out"
        if printed:
            print_result(f"{name}: {told}", figures_table({found.refinement: found.figures}))
    return about | {"sets": results}
