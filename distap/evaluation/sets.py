"""Which data set is evaluated by which protocol."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from distap.data.converters.dataset import GROUND_TRUTH_FILE
from distap.data.images.decoding import MAX_PIXELS
from distap.data.images.image_sets import open_images
from distap.data.settings import CacheSettings
from distap.errors import DistapError
from distap.evaluation.describing import Describing
from distap.evaluation.ground_truth import JudgedSet, read_ground_truth
from distap.evaluation.labelled import LabelledSet
from distap.retrieval.decomposability import DecomposabilityGap
from distap.retrieval.refinement import Refinement
from distap.storage.locations import Source, parse_source
from distap.storage.remotes import RemoteSettings


class Evaluation(Protocol):
    """What a data set was found to retrieve."""

    @property
    def figures(self) -> dict[str, float]:
        """Means over the queries by name, from 0 to 1."""
        ...

    @property
    def queries(self) -> int:
        """How many there are."""
        ...

    @property
    def left_out(self) -> int:
        """Queries without a positive."""
        ...

    def save(self, output: Path, **about: Any) -> Path:
        """Write output/result.json and what belongs to it; returns its path."""
        ...


class DescribedSet(Protocol):
    """A data set whose images are described."""

    def evaluate(self, refinement: Refinement = ...) -> Evaluation:
        """Rank it with a refinement of the descriptors."""
        ...

    def gap(self, batch: int) -> DecomposabilityGap:
        """How much more mAP promises within batches of that size than over the whole set."""
        ...


class EvaluationSet(Protocol):
    """A data set to evaluate on."""

    @property
    def name(self) -> str:
        """What its results are called."""
        ...

    def describe(self, describing: Describing) -> DescribedSet:
        """Its descriptors, on every rank."""
        ...


def compared(described: DescribedSet, refinement: Refinement, each: bool) -> dict[str, Evaluation]:
    """Evaluations by the name of their refinement, the one asked for last.

    Args:
        described: to rank.
        refinement: of its descriptors.
        each: also without it, and with each of its parts by itself.
    Raises:
        DistapError: a descriptor is not finite, or the refinement is not for these descriptors.
    """
    refinements = refinement.variants() if each else [refinement]
    return {one.name: described.evaluate(one) for one in refinements}


def open_set(
    where: Source | str,
    name: str | None = None,
    distractors: Sequence[str] = (),
    *,
    max_pixels: int = MAX_PIXELS,
    remote: RemoteSettings | None = None,
    cache: CacheSettings | None = None,
) -> EvaluationSet:
    """A data set by where it is: a folder with a ground truth in it, or else shards with classes.

    Args:
        where: folder that `distap data convert` wrote, with `ground_truth.json` in it; or folder, pattern or URL of
            shards.
        name: of its results; None takes the last part of where it is.
        distractors: shards to add to a gallery that has a ground truth.
        max_pixels: larger images are left out.
        remote: how a remote source is reached.
        cache: where shards are kept on this host's disk.
    Raises:
        DistapError: there is no such data set, or distractors are given for one that has no ground truth.
    """
    source = parse_source(where)
    name = name or Path(source.base).name or "data"
    if name in (".", "..") or Path(name).name != name:
        raise DistapError(f"{name!r} is no name for a data set: folders are called by it")
    truth_file = Path(source.base) / GROUND_TRUTH_FILE
    if source.scheme or source.pattern is not None or not truth_file.is_file():
        if distractors:
            raise DistapError(f"{source}: distractors need a ground truth, but {truth_file} is not there")
        return LabelledSet(name, open_images(source, max_pixels, remote, cache))
    truth = read_ground_truth(truth_file)
    folder = truth_file.parent
    gallery = [*(str(folder / split) for split in truth.gallery), *distractors]
    return JudgedSet(
        name,
        truth,
        open_images(str(folder / truth.query), max_pixels, remote, cache),
        tuple(open_images(part, max_pixels, remote, cache) for part in gallery),
    )
