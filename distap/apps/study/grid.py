"""Read a study: recipes that differ in what it compares, and in nothing else."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, PositiveInt, ValidationError, field_validator

from distap.config.reading import changed_settings, recipe_file, recipe_from
from distap.config.recipe import Recipe
from distap.config.validation import Section
from distap.errors import DistapError
from distap.registry import problem_of, suggestion

TRAININGS = "trainings"  # folder of the runs
Changes = Mapping[str, Any]  # to a recipe: values by dotted key, or nested
Condition = Literal["data", "model", "evaluation", "images", "updates", "seconds"]


class Study(Section):
    """The keys of a study's file."""

    title: str
    about: str = Field("", description="What is asked, and under which conditions.")
    recipe: str = Field(description="Recipe of all trainings: a name of `distap recipes`, or a file.")
    changes: dict[str, Any] = Field({}, description="Changes to it for all trainings.")
    axes: dict[str, dict[str, dict[str, Any]]] = Field(
        min_length=1,
        description="What is compared: changes by name. A list of values is an axis over the recipe key of its name.",
    )
    leave_out: list[dict[str, str]] = Field([], description="Combinations that are not trained, a name an axis.")
    search: dict[str, list[Any]] = Field(
        {}, description="Values by recipe key; each point takes those that are best on data.validation."
    )
    chosen_by: str = Field("mAP@R", description="Figure on data.validation that chooses among them.")
    seeds: PositiveInt = Field(3, description="Trainings of each point, from seed 0 on; seed 0 searches.")
    equal: tuple[Condition, ...] = Field(
        ("data", "model", "evaluation", "images"),
        description="What all trainings must share: sections of the recipe, images seen, updates, processor seconds.",
    )
    figures: tuple[str, ...] = Field(
        ("validation/mAP@R", "validation/mAP", "validation/R@1"),
        min_length=1,
        description="What is compared: SET/FIGURE, with validation or a set of evaluation.also. The first is drawn.",
    )
    against: str | None = Field(None, description="Name on the first axis that the others are compared with.")

    @field_validator("axes", mode="before")
    @classmethod
    def _axes_in_full(cls, axes: Any) -> Any:
        """`loss.tau: [0.01, 0.1]` stands for `loss.tau: {"0.01": {loss.tau: 0.01}, "0.1": {loss.tau: 0.1}}`."""
        if not isinstance(axes, Mapping):
            return axes
        listed = {key: {str(v): {key: v} for v in values} for key, values in axes.items() if isinstance(values, list)}
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
        """Of its settings, so that a later version with further keys finds it again."""
        return sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def run(self) -> Path:
        """The folder of its run."""
        name = "".join(letter if letter.isalnum() or letter in "._" else "-" for letter in str(self))
        return self.recipe.run / TRAININGS / f"{name}-{self.fingerprint[:6]}"


def read_study(file: Path) -> Study:
    """Read a study's YAML file; a DistapError names each wrong key."""
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
        return Study.model_validate(settings)
    except (OSError, UnicodeDecodeError) as error:
        raise DistapError(f"{file}: the study cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise DistapError(f"{file}: not valid YAML: {error}") from error
    except ValidationError as error:
        problems = [problem_of(dict(item), list(map(str, item["loc"]))) for item in error.errors()]
        raise DistapError(f"{file}: " + f"\n{file}: ".join(problems)) from error


class Grid:
    """The trainings of a study.

    Args:
        file: the study's file; a recipe beside it is found by its name.
        folder: of the study, where the runs are kept.
        only: names on the axes; an axis none of whose names is given keeps them all.
        overrides: changes to all recipes, such as `steps=10`.
    """

    def __init__(self, file: Path, folder: Path, only: Collection[str] = (), overrides: Sequence[str] = ()) -> None:
        self.study, self.folder, self._overrides = read_study(file), folder, overrides
        beside = file.parent / self.study.recipe
        self._base = beside if beside.is_file() else recipe_file(Path(self.study.recipe))
        known = {name for names in self.study.axes.values() for name in names}
        for name in [*only, *([self.study.against] if self.study.against else [])]:
            if name not in known:
                raise DistapError(f"{file}: no axis has the name {name!r}; {suggestion(name, sorted(known))}")
        self.points = list(self._points(only))
        try:
            self._require_equal([(point, self.jobs(point, seed=0)[0].recipe) for point in self.points])
        except DistapError as error:
            raise DistapError(f"{file}: {error}") from error

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
        """Return the trainings of a point: one for each combination of the searched values, or for the given one."""
        search = self.study.search
        values = [dict(zip(search, each, strict=True)) for each in product(*search.values())]
        return [self._job(point, seed, each) for each in ([searched] if searched is not None else values)]

    def _job(self, point: Point, seed: int, searched: Mapping[str, Any]) -> Job:
        changes: list[str | Changes] = [self.study.changes, *point.changes, searched, *self._overrides]
        try:
            settings = changed_settings(self._base, [*changes, {"seed": seed}])
            recipe = recipe_from({**settings, "run": str(self.folder)}, str(self._base))
        except DistapError as error:
            raise DistapError(f"{point}: {error}") from error
        return Job(point, searched, {key: settings[key] for key in settings if key != "run"}, recipe)

    def _require_equal(self, recipes: Sequence[tuple[Point, Recipe]]) -> None:
        """Raise a DistapError if two points differ in a condition that the study calls equal."""
        for condition in self.study.equal:
            values = [(str(point), condition_of(recipe, condition)) for point, recipe in recipes]
            (first, expected), *others = values
            for name, value in others:
                if value != expected:
                    raise DistapError(
                        f"equal: {condition} differs: {json.dumps(expected)} of {first}, {json.dumps(value)} of "
                        f"{name}; mend it, or leave {condition} out of `equal`"
                    )


def condition_of(recipe: Recipe, condition: str) -> Any:
    """The value of a condition, as far as a recipe alone tells it."""
    length = (recipe.steps, "updates") if recipe.steps else (recipe.epochs, "epochs")
    if condition == "updates":
        return length
    if condition == "images":
        return (recipe.steps * recipe.sampling.size, "images") if recipe.steps else length
    return recipe.model_dump(mode="json").get(condition)
