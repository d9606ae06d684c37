"""Read a study: recipes that differ in what it compares, and in nothing else."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, PositiveInt, ValidationError, field_validator

from distap.config.evaluation_sections import MEAN, MERGED
from distap.config.reading import changed_settings, load_recipe, parsed_yaml, recipe_file
from distap.config.recipe import Recipe
from distap.config.sections import Section
from distap.errors import DistapError, problems_of, suggestion
from distap.retrieval.figures import LABELLED_FIGURES

TRAININGS = "trainings"  # folder of the runs
HEADLINE = "validation"  # what a log calls data.validation
USUAL_CHOICE = "mAP@R"
Changes = Mapping[str, Any]  # to a recipe: values by dotted key, or nested
Condition = Literal["data", "model", "evaluation", "images", "updates", "seconds"]


class Study(Section):
    """The keys of a study's file."""

    model_config = ConfigDict(coerce_numbers_to_str=True)  # a name such as 0.1

    title: str
    about: str = Field("", description="What is asked, and under which conditions.")
    recipe: str = Field(
        description="Recipe of all trainings: a name of `distap recipes`, or a file."
    )
    changes: dict[str, Any] = Field({}, description="Changes to it for all trainings.")
    axes: dict[str, Annotated[dict[str, dict[str, Any]], Field(min_length=1)]] = Field(
        min_length=1,
        description=(
            "What is compared: changes by name. A list of values is an axis over the recipe key of"
            " its name."
        ),
    )
    leave_out: list[dict[str, str]] = Field(
        [], description="Combinations that are not trained, a name an axis."
    )
    search: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(
        {},
        description=(
            "Values by recipe key; each point takes those that are best on data.validation."
        ),
    )
    chosen_by: str | None = Field(
        None,
        description=(
            "Figure that chooses among them: FIGURE of data.validation, or SET/FIGURE. Without it,"
            " mAP@R, or the first of evaluation.figures if mAP@R is not among them."
        ),
    )
    seeds: PositiveInt = Field(
        3, description="Trainings of each point, from seed 0 on; seed 0 searches."
    )
    equal: tuple[Condition, ...] = Field(
        ("data", "model", "evaluation", "images"),
        description=(
            "What all trainings must share: sections of the recipe, images seen, updates, processor"
            " seconds."
        ),
    )
    figures: tuple[str, ...] = Field(
        ("validation/mAP@R", "validation/mAP", "validation/R@1"),
        min_length=1,
        description=(
            "What is compared: SET/FIGURE, with validation or a set of evaluation.also. The first"
            " is drawn."
        ),
    )
    against: str | None = Field(
        None, description="Name on the first axis that the others are compared with."
    )

    @field_validator("axes", mode="before")
    @classmethod
    def _axes_in_full(cls, axes: Any) -> Any:
        """`loss.tau: [0.01, 0.1]` stands for `loss.tau: {"0.01": {loss.tau: 0.01}, "0.1":
        {loss.tau: 0.1}}`.
        """
        if not isinstance(axes, Mapping):
            return axes
        listed = {
            key: {str(v): {key: v} for v in values}
            for key, values in axes.items()
            if isinstance(values, list)
        }
        return {str(key): listed.get(key, values) for key, values in axes.items()}


@dataclass(frozen=True)
class Point:
    """One combination of the axes' names."""

    names: Mapping[str, str]  # by axis
    changes: Sequence[Changes]

    def __str__(self) -> str:
        return ", ".join(self.names.values())


@dataclass(frozen=True)
class Job:
    """One training of a study."""

    point: Point
    searched: Mapping[str, Any]  # values of the keys that are searched
    settings: dict[str, Any]  # of its recipe, without defaults
    recipe: Recipe

    def __str__(self) -> str:
        searched = [f"{key.rpartition('.')[2]} {value}" for key, value in self.searched.items()]
        return ", ".join([str(self.point), *searched, f"seed {self.recipe.seed}"])

    @property
    def fingerprint(self) -> str:
        """Return a digest of its settings, so that a later version with further keys finds it
        again.
        """
        return sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def run(self) -> Path:
        """The folder of its run."""
        name = "".join(
            letter if letter.isalnum() or letter in "._" else "-" for letter in str(self)
        )
        return self.recipe.run / TRAININGS / f"{name}-{self.fingerprint[:6]}"


def read_study(file: Path) -> Study:
    """Read a study's YAML file; a DistapError names each wrong key."""
    try:
        settings = parsed_yaml(file.read_text(encoding="utf-8"), str(file))
        if not isinstance(settings, Mapping):
            raise DistapError(
                "recipe.not_a_mapping",
                f"{file}: expected keys with values: {', '.join(Study.model_fields)}",
            )
        return Study.model_validate(settings)
    except (OSError, UnicodeDecodeError) as error:
        raise DistapError(
            "recipe.unreadable", f"{file}: the study cannot be read: {error}"
        ) from error
    except ValidationError as error:
        wrong: list[dict[str, Any]] = list(map(dict, error.errors()))
        for item in wrong:
            if item["type"] == "extra_forbidden":
                hint = suggestion(str(item["loc"][0]), Study.model_fields)
                item |= {"type": "unknown_key", "msg": f"unknown key; {hint}"}
        raise DistapError(
            "recipe.value", f"{file}: " + f"\n{file}: ".join(problems_of(wrong))
        ) from error


class Grid:
    """The trainings of a study.

    Args:
        file: the study's file; a recipe beside it is found by its name. folder: of the study, where
            the runs are kept. only: names on the axes, or several with commas between them; an axis
            without one of them keeps all. overrides: changes to all recipes, such as `steps=10`; a
            key in them is not searched.
    """

    def __init__(
        self, file: Path, folder: Path, only: Sequence[str] = (), overrides: Sequence[str] = ()
    ) -> None:
        self.study = read_study(file)
        self.folder = folder
        self._overrides = overrides
        overridden = {override.partition("=")[0] for override in overrides}
        search = {key: values for key, values in self.study.search.items() if key not in overridden}
        self.study = self.study.model_copy(update={"search": search})
        beside = file.parent / self.study.recipe
        self._base = beside if beside.is_file() else recipe_file(Path(self.study.recipe))
        # read once: the file may change while others train
        self._settings = changed_settings(self._base, ())
        try:
            self.points = list(self._points(self._names(only)))
            if not self.points:
                raise DistapError("recipe.nothing_to_train", "leave_out leaves nothing to train")
            recipes = [(point, self.jobs(point, seed=0)[0].recipe) for point in self.points]
            # SET/FIGURE that chooses among the searched values
            self.chosen_by = _chosen_by(self.study, recipes[0][1])
            for point, recipe in recipes:
                self._require_evaluated(point, recipe)
            self._require_equal(recipes)
        except DistapError as error:
            raise DistapError(error.code, f"{file}: {error}") from error

    def _names(self, only: Sequence[str]) -> set[str]:
        """Return the names in `only`, which may have commas themselves.

        Check all names that the study refers to.
        """
        axes = self.study.axes
        against = self.study.against
        names_of_axes = [name for names in axes.values() for name in names]
        points = {
            name
            for text in only
            for name in ([text] if text in names_of_axes else map(str.strip, text.split(",")))
        }
        for name in points:
            _require_known("--only", name, names_of_axes)
        if against is not None:
            _require_known("against", against, next(iter(axes.values())))
        for axis, name in chain.from_iterable(
            excluded.items() for excluded in self.study.leave_out
        ):
            _require_known("leave_out", axis, axes)
            _require_known(f"leave_out: {axis}", name, axes[axis])
        return points

    def _points(self, only: Collection[str]) -> Iterator[Point]:
        axes = {
            axis: {name: names[name] for name in names if name in only} or names
            for axis, names in self.study.axes.items()
        }
        for names in product(*axes.values()):
            point = dict(zip(axes, names, strict=True))
            if not any(left_out.items() <= point.items() for left_out in self.study.leave_out):
                yield Point(point, [axes[axis][name] for axis, name in point.items()])

    def jobs(self, point: Point, seed: int, searched: Mapping[str, Any] | None = None) -> list[Job]:
        """Return the trainings of a point: one for each combination of the searched values, or for
        the given one.
        """
        search = self.study.search
        values = [
            dict(zip(search, combination, strict=True)) for combination in product(*search.values())
        ]
        return [
            self._job(point, seed, combination)
            for combination in ([searched] if searched is not None else values)
        ]

    def _job(self, point: Point, seed: int, searched: Mapping[str, Any]) -> Job:
        changes: list[str | Changes] = [
            self.study.changes,
            *point.changes,
            searched,
            *self._overrides,
        ]
        try:
            settings = changed_settings(self._settings, [*changes, {"seed": seed}])
            recipe = load_recipe({**settings, "run": str(self.folder)}, where=str(self._base))
        except DistapError as error:
            raise DistapError(error.code, f"{point}: {error}") from error
        return Job(
            point, searched, {key: settings[key] for key in settings if key != "run"}, recipe
        )

    def _require_evaluated(self, point: Point, recipe: Recipe) -> None:
        """Raise a DistapError if a training would not be evaluated on the sets that the study
        compares.
        """
        if recipe.data.validation is None or recipe.evaluation.every == 0:
            raise DistapError(
                "recipe.no_validation",
                f"{point}: a study needs data.validation, and evaluation.every other than 0",
            )
        sets = _sets_of(recipe)
        for figure in self.study.figures:
            if not _names_a_set(figure, sets):
                raise DistapError(
                    "evaluation.unknown_figure",
                    f"figures: {point} is not evaluated by {figure!r}: expected SET/FIGURE, where"
                    f" SET is one of {', '.join(sets)}",
                )

    def _require_equal(self, recipes: Sequence[tuple[Point, Recipe]]) -> None:
        """Raise a DistapError if two points differ in a condition that the study calls equal."""
        for condition in self.study.equal:
            values = [(str(point), condition_of(recipe, condition)) for point, recipe in recipes]
            for (first, expected), (name, value) in pairwise(values):
                if value != expected:
                    raise DistapError(
                        "recipe.unequal",
                        f"equal: {condition} differs: {json.dumps(expected)} of {first},"
                        f" {json.dumps(value)} of {name}; mend it, or leave {condition} out of"
                        " `equal`",
                    )


def _sets_of(recipe: Recipe) -> list[str]:
    """Return the names of the sets that a training is evaluated on, by which a log has figures."""
    sets = [HEADLINE, *recipe.evaluation.also]
    if isinstance(recipe.data.validation, dict):
        sets += recipe.data.validation_sets
    return sets + [MEAN] * (len(sets) > 1) + [MERGED] * recipe.evaluation.merged


def _names_a_set(figure: str, sets: Sequence[str]) -> bool:
    # Figures have slashes too, such as mAP/trapezoids.
    return any(figure.startswith(f"{name}/") for name in sets)


def _chosen_by(study: Study, recipe: Recipe) -> str:
    """Return SET/FIGURE that chooses among the searched values."""
    figure = study.chosen_by
    if figure is None:
        figures = recipe.evaluation.figures or LABELLED_FIGURES
        figure = USUAL_CHOICE if USUAL_CHOICE in figures else figures[0]
    return figure if _names_a_set(figure, _sets_of(recipe)) else f"{HEADLINE}/{figure}"


def _require_known(where: str, name: str, known_names: Collection[str]) -> None:
    if name not in known_names:
        raise DistapError(
            "recipe.unknown_name", f"{where}: there is no {name!r}; {suggestion(name, known_names)}"
        )


def condition_of(recipe: Recipe, condition: str) -> Any:
    """The value of a condition, as far as a recipe alone tells it."""
    length = (recipe.steps, "updates") if recipe.steps else (recipe.epochs, "epochs")
    if condition == "updates":
        return length
    if condition == "images":
        return (recipe.steps * recipe.sampling.size, "images") if recipe.steps else length
    return recipe.model_dump(mode="json").get(condition)
