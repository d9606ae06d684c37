"""Schedules of the learning rate, from timm."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from pydantic import NonNegativeInt, PositiveInt
from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler, PolyLRScheduler, StepLRScheduler
from timm.scheduler.scheduler import Scheduler
from torch import nn

# Name -> the option that it needs beside `warmup`; with one it takes `decay` as well.
_NEEDS = {"constant": None, "linear": None, "cosine": None, "step": "every", "multistep": "milestones"}


@dataclass(frozen=True)
class TimmSchedule:
    """How the learning rate changes over a training: it rises over the warm-up, then follows the schedule `name`.

    That is `constant`; `linear` (to zero at the end, as Revaud et al. train); `cosine` (half a wave to zero); `step`
    (times `decay` after every so many steps); or `multistep` (times `decay` at each milestone).
    """

    name: str = "linear"
    warmup: NonNegativeInt = 0  # steps of a linear rise, from 1/warmup of the rate; the rest counts from its end
    every: PositiveInt | None = None  # of `step`, the number of steps at one rate
    milestones: tuple[int, ...] | None = None  # of `multistep`, the first steps with a lower rate, counted from 1
    decay: float | None = None  # of `step` and `multistep`, the factor each time; 0.1 by default

    def __post_init__(self) -> None:
        if self.name not in _NEEDS:
            raise ValueError(f"schedule {self.name!r} is unknown; expected one of {', '.join(_NEEDS)}")
        needed = _NEEDS[self.name]
        for option in ("every", "milestones", "decay"):
            if getattr(self, option) is not None and (needed is None or option not in (needed, "decay")):
                raise ValueError(f"{option} is set, but the schedule {self.name} does not use it")
        if needed is not None and getattr(self, needed) is None:
            raise ValueError(f"the schedule {self.name} needs {needed}")
        if list(self.milestones or ()) != sorted(self.milestones or ()):
            raise ValueError(f"milestones are {list(self.milestones or ())}; expected them in ascending order")

    def factor(self, step: int, steps: int) -> float:
        """Return what the learning rate is multiplied with in a step, counted from 0, of a training of `steps`."""
        if step < self.warmup:  # timm's warm-up is one step behind: its first rate is 0
            return (step + 1) / self.warmup
        scheduler = _scheduler(self, steps)
        scheduler.step(step - self.warmup)
        return float(scheduler.optimizer.param_groups[0]["lr"])


@lru_cache
def _scheduler(schedule: TimmSchedule, steps: int) -> Scheduler:
    """Build timm's scheduler over an optimiser without use, whose rate it writes."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0)
    length = max(steps - schedule.warmup, 2)  # one step has factor 1 whatever the length; timm warns about length 1
    decay = 0.1 if schedule.decay is None else schedule.decay
    if schedule.name == "linear":
        return PolyLRScheduler(optimizer, t_initial=length, power=1.0)
    if schedule.name == "cosine":
        return CosineLRScheduler(optimizer, t_initial=length)
    if schedule.every is not None:
        return StepLRScheduler(optimizer, decay_t=schedule.every, decay_rate=decay)
    return MultiStepLRScheduler(optimizer, decay_t=list(schedule.milestones or ()), decay_rate=decay)  # or constant
