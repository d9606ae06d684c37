"""The length of a training in steps and epochs, and the learning rate of each step."""

from bisect import bisect_right
from collections.abc import Sized
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import cos, pi
from typing import Literal

from pydantic import NonNegativeFloat

from distap.config.evaluation_sections import EvaluationSection
from distap.config.recipe import Recipe
from distap.config.sections import CheckpointSection, Unit
from distap.errors import DistapError


def as_written(number: float) -> Fraction:
    """Convert a float to the exact decimal number in the recipe: 0.1 is a tenth."""
    return Fraction(str(number))


@dataclass(frozen=True)
class RateSchedule:
    """A schedule of the learning rate: a rise during warm-up, then the curve that `name` chooses.

    `name` is `constant`; `linear` (to zero, as Revaud et al. train); `cosine` (half a wave to
    zero); or `multistep` (times `decay` after each milestone, counted from the end of the warm-up).
    """

    name: Literal["constant", "linear", "cosine", "multistep"] = "linear"
    unit: Unit = "steps"
    """Unit of the schedule's numbers, and of optimizer.head_only."""
    warmup: NonNegativeFloat = 0
    """Length of a linear rise at the start; its first step has 1/warmup of the rate."""
    milestones: tuple[NonNegativeFloat, ...] | None = None
    """Times after which the rate falls in the schedule `multistep`."""
    decay: NonNegativeFloat | None = None
    """Factor on the rate at each milestone, 0.1 by default."""

    __pydantic_config__ = {"allow_inf_nan": False}  # noqa: RUF012 - pydantic reads it

    def __post_init__(self) -> None:
        if self.name == "multistep" and self.milestones is None:
            raise ValueError("the schedule multistep needs milestones")
        for option in ("milestones", "decay"):
            if getattr(self, option) is not None and self.name != "multistep":
                raise ValueError(f"{option} is set, but the schedule {self.name} does not use it")
        if list(self.milestones or ()) != sorted(self.milestones or ()):
            raise ValueError(
                f"milestones are {list(self.milestones or ())}; expected them in ascending order"
            )

    def factor(self, step: int, steps: int, epoch: Fraction = Fraction(1)) -> float:
        """Return the factor on the learning rate in a step of a training of `steps` steps.

        Args:
            step: counted from 0.
            epoch: number of steps in an epoch; give it to a schedule in epochs only.
        """
        warmup = as_written(self.warmup)
        if step < warmup * epoch:
            return min(float((step + 1) / (warmup * epoch)), 1.0)
        # Exact fractions: as floats, a step at a milestone could fall on either side of it.
        done = step / epoch - warmup
        if self.milestones is not None:
            decay = 0.1 if self.decay is None else self.decay
            return float(decay ** bisect_right([*map(as_written, self.milestones)], done))
        if self.name == "constant":
            return 1.0
        share = min(float(done / max(steps / epoch - warmup, 1 / epoch)), 1.0)
        return 1 - share if self.name == "linear" else (1 + cos(pi * share)) / 2


@dataclass(frozen=True)
class Length:
    """The length of a training in steps, for global batches of `batch` of its images.

    An epoch is len(images) / `batch` steps, whatever the sampling, and need not be a whole number
    of them.
    """

    recipe: Recipe
    images: Sized | None  # the index of the data; None if it has none
    batch: int

    def __post_init__(self) -> None:
        recipe = self.recipe
        units = (self._unit, recipe.checkpoint.unit, recipe.evaluation.unit)
        if self.images is None and (recipe.epochs or "epochs" in units):
            raise DistapError(
                "data.no_epochs",
                f"{recipe.data.train_name} has no index, so epochs cannot be counted; count in"
                " steps",
            )

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

    @property
    def warmup(self) -> Fraction:
        """Number of first steps in which the learning rate rises."""
        return self.in_steps(getattr(self.recipe.schedule, "warmup", 0), self._unit)

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
        """Return whether a checkpoint or evaluation is due after `done` steps.

        One is due after the last step, unless `section.every` is 0.
        """
        if section.every == 0 or done == self.steps:
            return section.every != 0
        # Fractions, since an epoch need not be a whole number of steps: due is the first step at or
        # after each multiple.
        interval = self.in_steps(section.every or 0, section.unit)
        return interval > 0 and done // interval > (done - 1) // interval
