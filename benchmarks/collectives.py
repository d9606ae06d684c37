"""Which collectives a piece of code calls, and how many bytes a rank hands to them, as the profiler sees them."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile

BACKENDS = ("gloo:", "nccl:")
# The profiler names types as C++ does.
ELEMENT_BYTES = {
    "double": 8,
    "long": 8,
    "long int": 8,
    "float": 4,
    "int": 4,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "unsigned char": 1,
    "signed char": 1,
    "bool": 1,
}


@dataclass(frozen=True)
class Collective:
    """All calls of one collective.

    Args:
        name: as the backend has it, such as `gloo:all_reduce`.
        calls: how many.
        bytes: that this rank handed over in all of them; a gather brings back W times as many.
        largest: bytes of the largest one.
    """

    name: str
    calls: int
    bytes: int
    largest: int

    @property
    def reduces(self) -> bool:
        """Whether it is an all-reduce."""
        return "all_reduce" in self.name


def collectives_of(action: Callable[[], object]) -> list[Collective]:
    """The collectives that this rank calls while `action` runs, those with most bytes first."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        action()
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    sizes: dict[str, list[int]] = {}
    for event in profiled.profiler.kineto_results.events():
        if event.name().startswith(BACKENDS):
            tensors = zip(event.shapes(), event.dtypes(), strict=True)
            size = sum(math.prod(shape) * ELEMENT_BYTES.get(dtype, 0) for shape, dtype in tensors)
            sizes.setdefault(event.name(), []).append(size)
    found = [Collective(name, len(calls), sum(calls), max(calls)) for name, calls in sizes.items()]
    return sorted(found, key=lambda collective: -collective.bytes)
