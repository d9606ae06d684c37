"""A rank's share of a global batch, cut into micro-batches that are halved when memory runs out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from distap.errors import DistapError, logger, memory_ran_out
from distap.world import World

Rows = slice | Tensor  # of a rank's share: from start to stop, or (n,) int64, ascending


@runtime_checkable
class Batch(Protocol):
    """This rank's share of a global batch of `total` images."""

    step: int
    total: int
    # (total,) slot at each place of an exchange, as `Gathered.order` has it; None: the places.
    order: Int64[Tensor, " total"] | None

    @property
    def labels(self) -> Int64[Tensor, " b"]:
        """Labels of the images; complete, like `samples`, after every image was read."""
        ...

    @property
    def samples(self) -> Int64[Tensor, " b"]:
        """Numbers of the images in the data set."""
        ...

    @property
    def present(self) -> Bool[Tensor, " b"]:
        """Return for each image whether it could be read."""
        ...

    @property
    def extra(self) -> Mapping[str, Shaped[Tensor, "b *K"]]:
        """Further tensors of the images, by the names under which the loss takes them."""
        ...

    def images(self, rows: Rows) -> Any:
        """Return the network's input for these rows, such as pixels (n, ...), once it is read."""
        ...

    def blank(self, rows: Tensor) -> None:
        """Set the pixels of these images to zero, because the network could not describe them."""
        ...


@dataclass
class MicroBatchSizes:
    """Number of images per pass through the network; one that is too large is halved for good.

    Args:
        images: images in a micro-batch with a graph: of replay, and of describe where it is kept.
        keep: micro-batches of this rank that keep their graph from describe, so that they need no
            second forward.
        describe: images in a micro-batch without a graph, which holds no activations for a backward
            pass; 0 takes `images`.
    """

    images: int
    keep: int = 0
    describe: int = 0

    def __post_init__(self) -> None:
        for name, size, smallest in (
            ("images", self.images, 1),
            ("keep", self.keep, 0),
            ("describe", self.describe, 0),
        ):
            if not isinstance(size, int) or isinstance(size, bool) or size < smallest:
                raise DistapError(
                    "memory.wrong_micro_batch",
                    f"micro_batch: {size!r} for {name}; a whole number from {smallest} on is"
                    " expected",
                )
        self.describe = self.describe or self.images

    def first_kept(self, share: int) -> int:
        """Return the first row that keeps its graph: the last micro-batches hold it shortest."""
        if not self.keep:
            return share
        micro_batches = -(-share // self.images)  # rounded up
        return max(micro_batches - self.keep, 0) * self.images

    def halve(self, stage: str, keeps: bool, error: RuntimeError, obstacle: str | None) -> None:
        """Halve what a stage holds in memory, after `error` in a micro-batch.

        If that was to keep its graph, fewer are kept. `error` is raised again if it has another
        cause than memory, and a DistapError if no smaller size is possible, such as for the reason
        `obstacle`.
        """
        if not memory_ran_out(error):
            raise error
        # In the order of what it costs: fewer kept graphs cost a second forward pass of some
        # images, smaller micro-batches slow every pass down.
        if keeps:
            self.keep //= 2
            logger.warning(
                "out of memory while graphs are kept: %d micro-batches keep theirs now", self.keep
            )
            return
        size = self.describe if stage == "describe" else self.images
        if size == 1:
            raise DistapError(
                "memory.too_small",
                f"out of memory in {stage} with micro-batches of one image; take smaller images or"
                " a smaller network",
            ) from error
        if obstacle:
            raise DistapError(
                "memory.too_small",
                f"out of memory in {stage} with micro-batches of {size} images, which cannot be"
                f" halved now: {obstacle}; take smaller micro-batches from the start, or smaller"
                " images",
            ) from error
        logger.warning(
            "out of memory in %s: micro-batches of %d images from now on, not of %d",
            stage,
            size // 2,
            size,
        )
        # What is too large without a graph is too large with one. The other way round, only sizes
        # that are the same stay the same.
        if size == self.describe:
            self.describe = size // 2
        self.images = min(self.images, size // 2)


@dataclass(frozen=True)
class BackwardPass:
    """A micro-batch to replay."""

    rows: Rows
    gradient: Float[Tensor, "n C"]  # dL/d descriptors
    descriptors: Float[Tensor, "n C"] | None = None  # with their graph, if it was kept
    is_padding: bool = False  # it only keeps a rank in step with the others


def cut(start: int, stop: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, stop)) for first in range(start, stop, size)]


def backward_passes(
    gradient: Float[Tensor, "b C"],
    graphs: Mapping[int, Tensor],
    size: int,
    limit: float = 0.0,
    regroup: bool = True,
    lockstep: World | None = None,
) -> list[BackwardPass]:
    """Cut the replay into one or more micro-batches.

    Omit images whose gradient is at most `limit` long.

    Args:
        gradient: dL/d descriptors of the rank's share.
        graphs: descriptors of the micro-batches that kept their graph, by their first row.
        regroup: fill gaps that left-out images leave with images of the next micro-batch. Otherwise
            a micro-batch stays as describe cut it, and is left out only if none of its images has a
            gradient.
        lockstep: the ranks, if they communicate in every pass and so need the same number of them.
    """
    # A gradient that is not finite is longer than any limit: the update finds it, and all ranks
    # skip the step.
    longer = torch.logical_not(gradient.norm(dim=1) <= limit).cpu()
    # Kept graphs come first, to give their memory back. What they do not cover is described again:
    #
    #     stage one     | 0 1 2 | 3 4 5 | 6 7 8 |     6 7 8 with a graph, 1 and 3 without gradient
    #     regrouped     | 6 7 8 | 0 2 4 | 5 |
    #     as cut        | 6 7 8 | 0 1 2 | 3 4 5 |     where a descriptor depends on its micro-batch
    passes = []
    without_graph = longer.clone()
    for first, descriptors in graphs.items():
        rows = slice(first, first + len(descriptors))
        without_graph[rows] = False
        if longer[rows].any():
            passes.append(BackwardPass(rows, gradient[rows], descriptors))
    again: list[Rows]
    if regroup:
        numbers = without_graph.nonzero().flatten()
        again = [as_rows(chunk) for chunk in numbers.split(size) if len(chunk)]
    else:
        again = [rows for rows in cut(0, len(gradient), size) if without_graph[rows].any()]
    passes += [BackwardPass(rows, gradient[rows]) for rows in again]
    # Even a rank without any gradient makes a pass, or it would miss the reduction and the others
    # wait.
    count = max(len(passes), 1)
    if lockstep is not None:
        count = int(lockstep.maximum(count))
    # A pass that changes nothing: the first image with a gradient of 0.
    nothing = BackwardPass(slice(0, 1), torch.zeros_like(gradient[:1]), is_padding=True)
    return passes + [nothing] * (count - len(passes))


def as_rows(numbers: Tensor) -> Rows:
    """Turn consecutive row numbers into a slice, so that indexing makes no copy."""
    first = int(numbers[0])
    last = int(numbers[-1])
    return slice(first, last + 1) if last - first + 1 == len(numbers) else numbers
