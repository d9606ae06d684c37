"""The length of a training in steps, and other lengths that a recipe counts in epochs."""

from collections.abc import Sized
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from distap.config.images import EvaluationSection
from distap.config.rates import Unit, as_written
from distap.config.recipe import Recipe
from distap.config.sections import CheckpointSection
from distap.data.shards.load_index import load_index
from distap.errors import DistapError


@dataclass(frozen=True)
class Length:
    """The length of a training in steps, for global batches of `batch` of its images.

    An epoch is len(images) / `batch` steps, whatever the sampling, and need not be a whole number of them.
    """

    recipe: Recipe
    images: Sized | None  # the index of the data; None if it has none
    batch: int

    def __post_init__(self) -> None:
        recipe = self.recipe
        units = (self._unit, recipe.checkpoint.unit, recipe.evaluation.unit)
        if self.images is None and (recipe.epochs or "epochs" in units):
            raise DistapError(f"{recipe.data.train} has no index, so epochs cannot be counted; count in steps")

    @property
    def epoch(self) -> Fraction:
        """Number of steps in an epoch; 0 if unknown."""
        return Fraction(len(self.images or ()), self.batch)

    @cached_property
    def steps(self) -> int:
        """Number of steps in the whole training."""
        return self.recipe.steps or max(1, round(self.in_steps(self.recipe.epochs or 0, "epochs")))

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        of_epochs = {"epoch": self.epoch} if self._unit == "epochs" else {}
        factor: float = self.recipe.schedule.factor(step, self.steps, **of_epochs)
        return self.recipe.optimizer.learning_rate * factor

    @cached_property
    def head_only(self) -> Fraction:
        """Number of first steps during which the backbone does not change."""
        return self.in_steps(self.recipe.optimizer.head_only, self._unit)

    @property
    def _unit(self) -> Unit:  # a schedule from elsewhere counts steps
        return getattr(self.recipe.schedule, "unit", "steps")

    def in_steps(self, number: float, unit: Unit) -> Fraction:
        return as_written(number) * (self.epoch if unit == "epochs" else 1)

    def is_due(self, section: CheckpointSection | EvaluationSection, done: int) -> bool:
        """Tell whether a checkpoint or evaluation is due after `done` steps; one is due at the end, unless never."""
        if section.every == 0 or done == self.steps:
            return section.every != 0
        # Fractions, since an epoch need not be a whole number of steps: due is the first step at or after each
        # multiple.
        every = self.in_steps(section.every or 0, section.unit)
        return every > 0 and done // every > (done - 1) // every


def planned_steps(recipe: Recipe, batch: int) -> int:
    """Return the steps of a training before its start; raise a DistapError for epochs of missing images."""
    if recipe.steps is not None:
        return recipe.steps
    try:
        return Length(recipe, load_index(recipe.data.train_source, recipe.data.remote, compare=False), batch).steps
    except DistapError as error:
        raise DistapError(f"epochs: the images cannot be counted, so set steps=N: {error}") from error
