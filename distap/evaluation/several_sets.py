"""Figures of several data sets together: those of their merged gallery, and means over them."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from distap.config.evaluation_sections import MEAN, MERGED
from distap.data.joined import numbered_apart
from distap.errors import DistapError
from distap.evaluation.evaluation_set import DescribedSet, EvaluationSet
from distap.evaluation.saved import LABELLED, QUERIED, Evaluation
from distap.retrieval.evaluate import evaluate_descriptors, figure_names
from distap.retrieval.figures import GRADED
from distap.retrieval.refinement import PLAIN, Refinement
from distap.retrieval.row_blocks import Descriptors
from distap.retrieval.truth import NONE, Truth, class_truth

PROTOCOL = "merged gallery"


def with_mean(figures: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Add the mean over two sets or more of each figure that all have, under MEAN.

    MERGED is none of the sets.
    """
    sets = [values for name, values in figures.items() if name != MERGED]
    means = {
        figure: float(np.mean([values[figure] for values in sets]))
        for figure in sets[0]
        if all(figure in values for values in sets)
    }
    return figures | {MEAN: means} if len(sets) > 1 and means else figures


def merged_sets(sets: Mapping[str, EvaluationSet]) -> dict[str, EvaluationSet]:
    """Return the sets that a merged gallery takes: all in which classes say what is right.

    Those with a ground truth or a drawn gallery are left out.

    Raises:
        DistapError: there are fewer than two, or two hold the same images.
    """
    merged = {name: opened for name, opened in sets.items() if opened.kind in (LABELLED, QUERIED)}
    if len(merged) < 2 or MERGED in sets:
        raise DistapError(
            "evaluation.not_merged",
            "evaluation.merged: it takes two sets or more in which classes say what is right,"
            f" neither a ground truth nor a drawn gallery, and none called {MERGED}; there are"
            f" {', '.join(merged) or 'none'}, of {', '.join(sets)}",
        )
    owners = dict[str, str]()
    for name, opened in merged.items():
        for images in opened.images.sets:
            owner = owners.setdefault(images.index.fingerprint, name)
            if owner != name:
                raise DistapError(
                    "evaluation.not_merged",
                    f"evaluation.merged: {owner} and {name} both hold {images.name}, so each of its"
                    " images would be wrong for itself; leave one of the sets out",
                )
    return merged


def merged_figure_names(sets: Mapping[str, EvaluationSet]) -> list[str]:
    """Return the names of the figures of `evaluate_merged`."""
    merged = merged_sets(sets)
    return figure_names(_common_figures(merged), [""], merged)


def _common_figures(merged: Mapping[str, EvaluationSet]) -> list[str]:
    """Return the figures of all sets but graded ones, since sets may have other levels."""
    first, *further = merged.values()
    return [
        figure
        for figure in first.figures
        if figure not in GRADED and all(figure in opened.figures for opened in further)
    ]


def evaluate_merged(
    described: Mapping[str, DescribedSet], refinement: Refinement = PLAIN
) -> Evaluation:
    """Rank the galleries of several sets as one for the queries of each (UnED, Ypsilantis et al.
    2023).

    A class of one set is right for no query of another, whatever its name. Descriptors are those
    of the sets. There are figures of all queries (`R@1`), of the queries of each set (`cars R@1`),
    and means over the sets (`mean R@1`). All ranks call this.

    Raises:
        DistapError: see `merged_sets`; or query expansion or re-ranking is asked for, and some sets
            have a gallery apart, and others none.
    """
    sets = merged_sets({name: opened.evaluation_set for name, opened in described.items()})
    members = {name: described[name] for name in sets}
    queries, gallery, truth = _joined(members)
    is_partly_own = gallery is not queries and truth.own is not None
    if is_partly_own and (refinement.expand is not None or refinement.rerank is not None):
        raise DistapError(
            "evaluation.queries_in_gallery",
            f"{MERGED}: the queries of some sets are in its gallery, and query expansion and"
            " re-ranking would take each for its own first neighbour; merge sets that all have a"
            " gallery, or none",
        )
    first = next(iter(members.values()))
    describing = first.describing
    distractors = first.open_distractors()  # which are the same for all sets
    same = queries is gallery
    queries, gallery, head = refinement.apply(queries, gallery, distractors, same=same)
    evaluated = evaluate_descriptors(
        queries,
        gallery,
        truth,
        _common_figures(sets),
        head=None if head is None else head.to(describing.describer.device),
        distractors=distractors,
        world=describing.world,
    )
    return Evaluation(
        data=" and ".join(members),
        protocol=PROTOCOL,
        refinement=first.refined_by(refinement),
        fingerprint="+".join(opened.images.fingerprint for opened in sets.values()),
        images=sum(len(described_set.samples) for described_set in members.values()),
        queries=int((evaluated.first_positive > 0).sum()),
        left_out=evaluated.left_out,
        figures=evaluated.summary(),
    )


def _joined(members: Mapping[str, DescribedSet]) -> tuple[Descriptors, Descriptors, Truth]:
    """Return the queries of all sets, their gallery, and its truth.

    The gallery is the queries themselves if no set has another.
    """
    # Rows are the images of each set: its queries, then those of another gallery.
    #
    #     set        cars, with a gallery   birds, without
    #     is_query   1 1 0 0 0              1 1 1
    #     is_shown   0 0 1 1 1              1 1 1             to all queries, in the gallery
    #     own        - -                    3 4 5             row of a query in the gallery
    device = next(iter(members.values())).describing.describer.device
    rows = list[Descriptors]()
    labels = list[NDArray[np.int64]]()
    contents = list[torch.Tensor]()
    is_query = list[NDArray[np.bool_]]()
    is_shown = list[NDArray[np.bool_]]()
    for described in members.values():
        evaluation_set = described.evaluation_set
        samples = described.samples
        rows.append(described.queries[:])
        labels.append(evaluation_set.images.labels(samples, with_levels=False))
        is_query.append(np.arange(len(samples)) < len(described.queries))
        is_shown.append(is_query[-1])
        copies = None
        if evaluation_set.gallery:
            rows.append(described.gallery[:])
            is_shown[-1] = ~is_query[-1]
            copies = described.contents()
        unknown = torch.full((len(samples),), NONE, device=device)
        contents.append(unknown if copies is None else torch.cat(copies))

    sizes = [len(of_set) for of_set in labels]
    apart = numbered_apart(np.concatenate(labels), np.repeat(np.arange(len(sizes)), sizes))
    classes = torch.from_numpy(apart).to(device)
    asked = np.concatenate(is_query)
    shown = np.concatenate(is_shown)
    domains = np.repeat([*members], sizes)[asked].tolist()
    descriptors = np.concatenate(rows)
    if shown.all():
        return descriptors, descriptors, class_truth(classes, parts=domains)
    cameras = torch.cat(contents)
    truth = class_truth(
        classes[asked], classes[shown], (cameras[asked], cameras[shown]), parts=domains
    )
    if (asked & shown).any():
        own_rows = np.where(shown, np.cumsum(shown) - 1, NONE)[asked]
        truth = replace(truth, own=torch.from_numpy(own_rows).to(device))
    return descriptors[asked], descriptors[shown], truth
