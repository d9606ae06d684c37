"""Schedules of the learning rate."""

from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from math import cos, pi

from pydantic import NonNegativeFloat, PositiveFloat

from distap.config.rates import Unit, as_written

# Name -> the options that it needs (True) or takes (False) next to `warmup` and `unit`.
_OPTIONS = {
    "constant": {},
    "linear": {"length": False},
    "cosine": {"length": False},
    "step": {"every": True, "decay": False},
    "multistep": {"milestones": True, "decay": False},
}


@dataclass(frozen=True)
class RateSchedule:
    """How the learning rate changes: it rises during warm-up, then follows the schedule `name`.

    That is `constant`; `linear` (to zero, as Revaud et al. train); `cosine` (half a wave to zero); `step` (times
    `decay` after every so many steps); or `multistep` (times `decay` after each milestone). `step` and `multistep`
    count from the end of the warm-up.
    """

    name: str = "linear"
    unit: Unit = "steps"
    """Unit of the schedule's numbers, and of optimizer.head_only."""
    warmup: NonNegativeFloat = 0
    """Length of a linear rise at the start; its first step has 1/warmup of the rate."""
    length: PositiveFloat | None = None
    """Length of the schedules `linear` and `cosine` with warm-up; null ends at the last step."""
    every: PositiveFloat | None = None
    """Interval between falls of the rate in the schedule `step`."""
    milestones: tuple[NonNegativeFloat, ...] | None = None
    """Times after which the rate falls in the schedule `multistep`."""
    decay: NonNegativeFloat | None = None
    """Factor on the rate at each fall in the schedules `step` and `multistep`, 0.1 by default."""

    __pydantic_config__ = {"allow_inf_nan": False}  # noqa: RUF012 - pydantic reads it

    def __post_init__(self) -> None:
        if self.name not in _OPTIONS:
            raise ValueError(f"schedule {self.name!r} is unknown; expected one of {', '.join(_OPTIONS)}")
        own = _OPTIONS[self.name]
        for option in ("length", "every", "milestones", "decay"):
            if getattr(self, option) is not None and option not in own:
                raise ValueError(f"{option} is set, but the schedule {self.name} does not use it")
            if getattr(self, option) is None and own.get(option):
                raise ValueError(f"the schedule {self.name} needs {option}")
        if list(self.milestones or ()) != sorted(self.milestones or ()):
            raise ValueError(f"milestones are {list(self.milestones or ())}; expected them in ascending order")
        if self.length is not None and self.length <= self.warmup:
            raise ValueError(f"length is {self.length:g}, which the warm-up ({self.warmup:g}) already fills")

    def factor(self, step: int, steps: int, epoch: Fraction = Fraction(1)) -> float:
        """Return the factor on the learning rate in a step, counted from 0, of a training of `steps`.

        An epoch is `epoch` steps; only a schedule in epochs needs it.
        """
        unit = epoch if self.unit == "epochs" else Fraction(1)
        warmup = as_written(self.warmup)
        if step < warmup * unit:
            return min(float((step + 1) / (warmup * unit)), 1.0)
        # Exact fractions: as floats, a step at a milestone could fall on either side of it.
        done = step / unit - warmup
        decay = 0.1 if self.decay is None else self.decay
        if self.every is not None:
            return float(decay ** (done // as_written(self.every)))
        if self.milestones is not None:
            return float(decay ** bisect_right([*map(as_written, self.milestones)], done))
        if self.name == "constant":
            return 1.0
        length = steps / unit if self.length is None else as_written(self.length)
        share = min(float(done / max(length - warmup, 1 / unit)), 1.0)
        return 1 - share if self.name == "linear" else (1 + cos(pi * share)) / 2
