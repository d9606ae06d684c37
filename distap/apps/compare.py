"""Compare networks by query: open runs, exports, evaluations and descriptors of any kind."""

from __future__ import annotations  # `help` shows the types as they are written here

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distap.apps.runs import figures_of_recipes
from distap.apps.side_names import names_of_sides
from distap.checkpoint.checkpoints import CHECKPOINTS_FOLDER
from distap.errors import DistapError, checked, suggestion
from distap.evaluation.compared_queries import Compared, Side, compared
from distap.evaluation.comparing import RESAMPLES
from distap.evaluation.comparison_tables import comparison_record, comparison_table
from distap.evaluation.described_images import StoredDescribing, stored_describing
from distap.evaluation.describing import describing_of
from distap.evaluation.evaluation_set import EvaluationSet
from distap.evaluation.extraction.extracting import Describing
from distap.evaluation.given_descriptors import evaluate_by_query
from distap.evaluation.row_folder import RowFolder, open_descriptors
from distap.evaluation.saved import (
    RESULT_FILE,
    Evaluation,
    folder_of_step,
    read_evaluation,
    read_evaluations,
    saved_steps,
)
from distap.evaluation.sets import open_set
from distap.model.trained import HUB, is_saved
from distap.retrieval.descriptor_files import (
    ABOUT_FILE,
    EXTRACTION_FILE,
    DescribedBy,
    DescriptorSet,
    reading,
)
from distap.retrieval.row_blocks import PART_SUFFIXES, open_parts
from distap.storage.locations import scheme_of
from distap.storage.texts import read_text
from distap.training.build import trained_network
from distap.training.descriptor_network import DescriptorNetwork
from distap.world import World


@dataclass(frozen=True)
class Comparison:
    """A baseline, and each other side next to it."""

    compared: tuple[Compared, ...]
    evaluations: dict[str, list[Evaluation]]  # of each side's runs, the baseline first

    @property
    def verdicts(self) -> list[str]:
        """Return for each other side, in words, whether it is better."""
        return [pair.verdict for pair in self.compared]

    @property
    def notes(self) -> list[str]:
        """Return what was left out, and what limits the results."""
        return list(dict.fromkeys(note for pair in self.compared for note in pair.notes))

    def table(self, form: str = "markdown") -> str:
        """Return the figures as a table: latex, markdown or csv."""
        return comparison_table(self.compared, form)

    def record(self) -> dict[str, Any]:
        """Return everything as JSON can hold it, figures from 0 to 1."""
        return comparison_record(self.compared)

    def __str__(self) -> str:
        return "\n".join([*self.verdicts, "", self.table(), *self.notes])


@dataclass
class Opening:
    """How sources are evaluated: all on one data set, which is opened once."""

    world: World
    data: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)  # of `open_set`
    labels: Any = None  # of arrays and files of descriptors, as `distap.evaluate` takes them
    names: Sequence[str] | None = None
    figures: tuple[str, ...] = ()
    best: bool = False
    trust: bool = False
    set_name: str | None = None  # of kept evaluations
    opened: EvaluationSet | None = None

    def __post_init__(self) -> None:
        if self.set_name is not None and self.names_images:
            raise DistapError(
                "comparison.set_of_data",
                f"set {self.set_name!r} is of the evaluations that runs keep: leave out either it,"
                " or data, truth and labels",
            )

    @property
    def names_images(self) -> bool:
        """Return whether images or labels are given, beside those of the first run's recipe."""
        return any(value is not None for value in (self.data, self.labels, *self.settings.values()))

    def choose_figures(self, sources: Sequence[Any]) -> None:
        """Take the figures of the runs' recipes for data.validation, if these agree."""
        if not self.figures and self.set_name is None and not self.names_images:
            self.figures = figures_of_recipes(sources)

    def evaluation(self, source: Any) -> Evaluation:
        """Evaluate a run, a checkpoint, an export, or descriptors; or read an evaluation."""
        if not isinstance(source, str | Path):
            return self._given("descriptors", source)
        path = Path(source)
        kept = self._kept(path)
        if kept is not None:
            return kept
        if (path / ABOUT_FILE).exists() or (path / EXTRACTION_FILE).exists():
            return self._of_folder(open_descriptors(path))
        if path.suffix in PART_SUFFIXES:
            return self._of_file(path)
        return self._of_network(str(source))

    def _kept(self, path: Path) -> Evaluation | None:
        """Read the evaluation in a folder, or the newest that a run without checkpoints keeps.

        With `set_name`, read that set's, of a run with checkpoints too. Return None if there is a
        network or a folder of descriptors to evaluate.
        """
        folder = path
        if not (path / RESULT_FILE).is_file():
            steps = saved_steps(path)
            has_network = self.best or any((path / CHECKPOINTS_FOLDER).glob("step-*"))
            if self.set_name is None and (not steps or has_network or self.names_images):
                return None
            folder = folder_of_step(path, steps[-1] if steps else 0)
        if self.set_name is None:
            return read_evaluation(folder)
        evaluations = read_evaluations(folder)
        if self.set_name not in evaluations:
            raise DistapError(
                "comparison.no_set",
                f"{folder}: no set {self.set_name!r} was evaluated;"
                f" {suggestion(self.set_name, evaluations)}",
            )
        return evaluations[self.set_name]

    def _of_folder(self, rows: RowFolder) -> Evaluation:
        # Without a data set the folder itself says which images are of a class. Images that one
        # folder lacks are then missing in its gallery too, which the comparison tells.
        if self.data is None and self.opened is None:
            stored = rows.stored
            keys = stored.keys.tolist()
            return self._given(rows.where, stored.descriptors, stored.classes, keys)
        return self._described(rows.where, stored_describing(rows, self.world))

    def _of_file(self, path: Path) -> Evaluation:
        values = open_parts([path], None)
        assert values is not None  # it raises without a file
        if self.labels is not None:
            return self._given(str(path), values[:])
        return self._described(str(path), self._in_order(str(path), values[:]))

    def _of_network(self, where: str) -> Evaluation:
        if is_saved(where):
            name = where.removeprefix(HUB)
            device = self.world.device
            loaded = DescriptorNetwork.from_pretrained(name, device=device, trust=self.trust)
            return self._described(where, Describing(loaded.describer, self.world, shown=True))
        recipe, network = trained_network(where, self.world, self.best, trusted=self.trust)
        describing = describing_of(recipe, network, self.world, shown=True)
        return self._described(where, describing, recipe.data)

    def evaluation_set(self, where: str, section: Any = None) -> EvaluationSet:
        """Open the data set, once; without one, the validation set of the first run's recipe.

        Args:
            section: `data` of a run's recipe.
        """
        # All sides are evaluated on the set that the first one opened, so that queries, gallery and
        # truth are the same.
        if self.opened is not None:
            return self.opened
        data = self.data
        settings = self.settings
        if data is None and isinstance(getattr(section, "validation", None), str):
            data = section.validation
            settings = {
                "gallery": section.gallery,
                "gallery_draws": section.gallery_draws,
                **settings,
            }
        if data is None:
            raise DistapError(
                "evaluation.no_data",
                f"{where}: name one data set to compare on by --data, or the labels of"
                " descriptors by --labels",
            )
        self.opened = open_set(data, figures=self.figures, **settings)
        return self.opened

    def _described(self, where: str, describing: Describing, section: Any = None) -> Evaluation:
        return self.evaluation_set(where, section).describe(describing).evaluate()

    def _in_order(self, where: str, values: Any) -> StoredDescribing:
        """Take the rows of a file for the images of the data set, in the order of its index."""
        sets = self.evaluation_set(where).images.sets
        count = sum(map(len, sets))
        if len(sets) > 1 or count != len(values):
            raise DistapError(
                "descriptors.wrong_shape",
                f"{where}: {len(values):,} rows, and {count:,} images in {len(sets)} data sets;"
                " expected a row for each image of one data set, in its order: give labels and"
                " names of the rows by --labels and --names otherwise",
            )
        [images] = sets
        stored = DescriptorSet(
            values, images.keys, images.classes, DescribedBy(where, "unknown"), where
        )
        return stored_describing(RowFolder(Path(where), where, stored), self.world)

    def _given(
        self, where: str, values: Any, labels: Any = None, names: Sequence[str] | None = None
    ) -> Evaluation:
        """Evaluate descriptors by their labels."""
        if labels is None:
            labels = self.labels
            names = self.names
        if labels is None:
            raise DistapError(
                "comparison.no_labels", f"{where}: give the labels of these descriptors (labels=)"
            )
        evaluated, by_query = evaluate_by_query(values, labels, names, self.figures)
        return Evaluation(
            data=where,
            fingerprint="",
            images=len(by_query.key),
            queries=int((by_query.positives > 0).sum()),
            figures=evaluated.summary(),
            by_query=by_query,
        )


@checked
def compare(
    *sides: Any,
    data: str | Path | None = None,
    gallery: str | Path | None = None,
    gallery_draws: int = 0,
    truth: str | Path | None = None,
    labels: Any = None,
    names: Sequence[str] | None = None,
    figures: Sequence[str] = (),
    best: bool = False,
    trust: bool = False,
    set_name: str | None = None,
    side_names: Sequence[str] = (),
    resamples: int = RESAMPLES,
    seed: int = 0,
    world: World | None = None,
) -> Comparison:
    """Compare networks by query with a baseline, the first: is the difference more than chance?

    Each difference has a 95% interval and a p-value, of a test that takes the queries of a class
    together; p-values are corrected for the number of figures by Holm. See
    `distap.evaluation.comparing` for the method.

    Args:
        sides: two or more. Each is a run, a checkpoint, an export, a folder of `distap eval
            --output`, a folder of `distap extract`, a file of descriptors (.npy, HDF5), or an array
            (N, C); or a list of these, which are runs of one training from several seeds. Of a run
            without checkpoints, the newest evaluation that it keeps is read.
        data: data set to compare on, as `distap eval --data` takes it; None takes the validation
            set of the first run's recipe. Rows of a file of descriptors are in its order.
        gallery: shards to search in, as in `distap eval`.
        gallery_draws: times that a gallery is drawn, as in `distap eval`.
        truth: file that says for each query what is right.
        labels: (N,) of arrays and files of descriptors, in place of a data set.
        names: (N,) of the same rows, by which queries are joined; None takes row numbers.
        figures: names, see `distap.retrieval.figures`; by default evaluation.figures of the runs'
            recipes if these agree and `data` is None, else those of the data set. The verdict is
            about the first.
        best: take a run's best checkpoint instead of its newest.
        trust: import classes that are not distap's, as `distap.load` does.
        set_name: read the evaluations of this set (of evaluation.also, say) that the runs keep.
        side_names: name of each side in verdicts and tables; by default what their paths do not
            share.
        resamples: random flips of the signs of classes.
        seed: of these flips.
        world: ranks that share the work; None is this process alone.
    Raises:
        DistapError: there are fewer than two sides, one cannot be read, or they share no query or
            no figure; or a side has no name of its own, or no evaluation of the set.
    """
    runs_of = _runs_of(sides)
    names_of_runs = names_of_sides(runs_of, side_names)
    if world is None:
        world = World(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    options = {"gallery": gallery, "gallery_draws": gallery_draws, "truth": truth}
    opening = Opening(
        world,
        None if data is None else str(data),
        {key: value for key, value in options.items() if value},
        labels,
        names,
        tuple(figures),
        best,
        trust,
        set_name,
    )
    for source in chain(*runs_of):
        _refuse_missing(source)  # before another network has described its images
    opening.choose_figures([*chain(*runs_of)])
    evaluations = {
        name: [opening.evaluation(source) for source in runs]
        for name, runs in zip(names_of_runs, runs_of, strict=True)
    }
    # A side of several runs is one training from several seeds: they share a name.
    named = [
        Side(name, tuple(evaluation.query_values() for evaluation in of_runs))
        for name, of_runs in evaluations.items()
    ]
    test = partial(compared, named[0], asked=opening.figures, resamples=resamples, seed=seed)
    pairs = tuple(
        replace(pair, notes=[*_other_images(evaluations, pair), *pair.notes])
        for pair in map(test, named[1:])
    )
    return Comparison(pairs, evaluations)


def _refuse_missing(source: Any) -> None:
    if not isinstance(source, str | Path):
        return
    is_local = not scheme_of(str(source)) and not str(source).startswith(HUB)
    if is_local and not Path(source).exists():
        raise DistapError("comparison.missing", f"{source}: there is no such file or folder")


def _other_images(evaluations: Mapping[str, list[Evaluation]], pair: Compared) -> Iterator[str]:
    """Yield a note if the runs of two sides were not evaluated in the same gallery."""
    runs = [*evaluations[pair.baseline.name], *evaluations[pair.other.name]]
    fingerprints = {run.fingerprint for run in runs} - {""}
    if len(fingerprints) < 2 and len({(run.images, run.protocol) for run in runs}) < 2:
        return
    galleries = dict.fromkeys(
        f"{run.gallery or run.data} ({run.images:,} images, {run.protocol})" for run in runs
    )
    yield (
        f"the sides were evaluated on different images, {' and '.join(galleries)}, which is part of"
        " the difference: evaluate both on one data set"
    )


def _runs_of(sides: Sequence[Any]) -> list[Sequence[Any]]:
    """Return the runs of each side; raise a DistapError without two sides, or for an empty one."""
    runs_of: list[Sequence[Any]] = [
        side if isinstance(side, list | tuple) else [side] for side in sides
    ]
    if len(runs_of) < 2 or not all(runs_of):
        raise DistapError(
            "comparison.too_few_sides",
            f"{len(sides)} of at least 2 networks to compare, of one run or more each: the first"
            " is the baseline",
        )
    return runs_of


def column(path: Path) -> list[Any]:
    """Read labels or names of rows: a .npy file, or a line each.

    Raises:
        DistapError: the file is missing, or holds something else.
    """
    if path.suffix != ".npy":
        return read_text(path).splitlines()
    with reading(path, "numpy.save"):
        values: list[Any] = np.load(path, allow_pickle=False).tolist()
        return values
