"""Compute the loss of a batch and every descriptor's gradient, on all ranks or on rank 0."""

from __future__ import annotations  # `help` shows the types as they are written here

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

import torch
import torch.distributed as dist
from jaxtyping import Float, Float64
from numpy.typing import ArrayLike
from torch import Tensor

from distap.errors import DistapError, suggestion, tensor_given
from distap.ranking.compiling import uncompiled
from distap.ranking.gather import Gathering, gather
from distap.ranking.gathered import Gathered
from distap.ranking.inputs import Inputs, agreement
from distap.ranking.loss import Budget, Counter, Loss, full_precision, rank_on_rank_zero
from distap.ranking.losses.building import AnyLoss, build_loss
from distap.ranking.memory import CrossBatchMemory
from distap.ranking.rankable import refuse_crossing, refuse_lengths, row_names
from distap.world import World, lengthened, local, refuse_default_device

Mode = Literal["sharded", "central"]


class NothingToRankError(DistapError):
    """Raised if no image of a batch has another image of its class."""


@dataclass(frozen=True)
class Ranking:
    """The result of stage two; this rank has b images."""

    loss: Float64[Tensor, ""]  # of the whole global batch, the same on every rank
    # loss of each own query, NaN without positive; None: not by query
    per_query: Float64[Tensor, " b"] | None
    # of this rank's descriptors, up to a multiple of each descriptor
    gradient: Float[Tensor, "b C"]
    queries: int  # of all ranks, with a positive
    skipped_queries: int  # of all ranks, without
    is_finite: bool  # on all ranks
    # gradient by the loss's own parameters, of all ranks together
    by_parameters: tuple[Tensor, ...] = ()
    # mean squared distance of the batch's descriptors to their mean; 0 if all are alike
    spread: float = math.nan


@uncompiled
def rank(
    descriptors: Tensor | ArrayLike,
    labels: Tensor | ArrayLike,
    loss: AnyLoss = "ap_q",
    group: dist.ProcessGroup | None = None,
    mode: str = "sharded",
    memory: CrossBatchMemory | None = None,
    samples: Tensor | ArrayLike | None = None,
    memory_bytes: int | None = None,
    step: int = 0,
    extra: Mapping[str, Tensor | ArrayLike] | None = None,
    images: Tensor | ArrayLike | None = None,
    **options: object,
) -> Ranking:
    """Return the loss of a batch and the gradient of every descriptor.

    With a process group the batch is that of all its ranks, in shares of any size, and every rank
    calls this alike. The loss is then a mean over the queries of all ranks: sum gradients over
    ranks, do not average them.

    Args:
        descriptors: (b, C) of this rank, of length 1, as a tensor or an array. For 16-bit
            descriptors the gradient is float32.
        labels: (b,) integers from 0; or (b, L) from the finest level to the coarsest, each class
            within one of the next level, for losses of graded relevance. Other losses rank by the
            first column.
        loss: a name of docs/guides/losses.md such as `ap_q`, "package.module:Class", a Loss, or a
            function (descriptors, labels) -> scalar. Losses with parameters of their own are for
            `ListwiseLoss` and `Multistage`.
        group: the ranks of one batch, `torch.distributed.group.WORLD` for all; None is this process
            alone.
        mode: `sharded`, each rank ranks its own queries; `central`, rank 0 of the group ranks all.
        memory: descriptors of earlier calls to rank against as well; this batch is added to it.
        samples: (b,) numbers by which the memory knows images again; without them an image that
            comes again is ranked against its own remembered descriptor.
        memory_bytes: bytes to use next to the descriptors; None takes 1 GiB, or a quarter of a
            GPU's free memory.
        step: number of the step, for losses that draw numbers, such as `simix`.
        extra: further tensors of the images, (b, ...), by the names of the parameters by which the
            loss takes them; `weights`, (b,), are those of queries for a loss with weights="given".
        images: the old name of `samples`.
        options: of the loss, such as `weights` of the queries, or `preset`, the name of one of its
            presets.
    Returns:
        A Ranking; its gradient and losses by query are those of this rank's descriptors.
    Raises:
        DistapError: on every rank, for an unknown loss or option, and for descriptors or labels
            that cannot be ranked; the message says which rows.
    """
    refuse_default_device()
    if images is not None:
        warnings.warn("`images` of `rank` is called `samples` now", FutureWarning, stacklevel=3)
        samples = images
    descriptors = tensor_given(descriptors, "descriptors")
    world = World.of_group(group, descriptors.device)
    built = build_loss(loss, **options)
    checked_mode = check_mode(mode)
    if memory is not None:
        memory.refuse_unfit(built, may_ignore=True)
    with agreement(world) as view:
        if descriptors.ndim != 2 or not descriptors.is_floating_point():
            raise DistapError(
                "descriptors.wrong_shape",
                f"descriptors are {tuple(descriptors.shape)} of {descriptors.dtype}; (b, C) of a"
                " floating-point type is expected",
            )
        inputs = Inputs(labels, samples, extra)
        inputs.check(len(descriptors), built)
        wrong = ~descriptors.isfinite().all(dim=1)
        if wrong.any():
            raise DistapError(
                "descriptors.not_finite",
                f"{row_names(wrong)}: descriptors hold values that are not finite (NaN or"
                " infinite)",
            )
        view.kind = inputs.kind(built, descriptors=descriptors)
        view.value = len(descriptors)
    # `gather` knows where rows belong by the number of slots alone, so all ranks must have the same
    # number of rows. Shares of one size are slots rank, rank + W, ...
    share = max(view.values)
    wide = descriptors.detach().to(torch.promote_types(descriptors.dtype, torch.float32))
    slots = share * world.size
    labels, is_image, samples = inputs.padded(share)
    gathered = gather(lengthened(wide, share), labels, is_image, world, slots, samples)
    refuse_lengths(gathered)
    gathered = replace(gathered, key=(0, step)).with_extra(inputs.extra)
    ranked = gathered if memory is None else memory.extend(gathered)
    ranking = rank_descriptors(built, ranked, checked_mode, memory_bytes)
    # Only now: an image is not ranked against itself, and a batch that cannot be ranked is not
    # remembered.
    if memory is not None:
        memory.remember(gathered)
    b = len(descriptors)
    per_query = None if ranking.per_query is None else ranking.per_query[:b]
    return replace(ranking, per_query=per_query, gradient=ranking.gradient[:b])


def check_mode(mode: str) -> Mode:
    if mode not in get_args(Mode):
        raise DistapError(
            "loss.unknown_mode", f"mode is {mode!r}; {suggestion(mode, get_args(Mode))}"
        )
    return cast(Mode, mode)


def shard_classes(loss: Loss, world: World, mode: str) -> None:
    """Let each rank hold the parameters of its part of the classes alone; see `Loss.shard_classes`.

    Raises:
        DistapError: the loss has no parameters for each class, or rank 0 alone would need them all.
    """
    if mode == "central":
        raise DistapError(
            "loss.sharded_classes",
            "shard_classes: with mode central rank 0 ranks alone, but each rank holds the classes"
            " of its own: set mode to sharded, or leave shard_classes out",
        )
    if not loss.shard_classes(world):
        raise DistapError(
            "loss.no_classes",
            f"shard_classes: {type(loss).__name__} has no parameters for each class: leave it out",
        )


def start_gathering(
    loss: Loss,
    world: World,
    slots: int,
    mode: Mode = "sharded",
    memory_bytes: int | None = None,
    order: Tensor | None = None,
) -> Gathering:
    """Begin to gather a batch for `rank_descriptors`; pairs are counted as they arrive.

    `order` is that of a `Gathering`.
    """
    # In mode central rank 0 counts the pairs of all queries, once all are there.
    pairs = len(world.slots(slots)) * slots
    counts = mode == "sharded" or world.size == 1
    counter = loss.counter(pairs, Budget(world.device, memory_bytes)) if counts else None
    return Gathering(world, slots, counter, order)


# Autograd differentiates the formulas of losses, also where the caller wants no gradient; tensors
# that are made in inference mode cannot take part in that.
@torch.inference_mode(False)
@torch.no_grad()
def rank_descriptors(
    loss: Loss,
    gathered: Gathered,
    mode: Mode = "sharded",
    memory_bytes: int | None = None,
    counter: Counter | None = None,
) -> Ranking:
    """Return the loss and gradients of a global batch (Revaud et al. 2019, 3.2, stage two).

    Mode and memory are those of `rank`; `counter` is that of the batch's gathering. The Ranking has
    a row for each slot of this rank; a slot that takes no part has gradient zero and loss NaN. If
    no query has a positive, or all images are of one class, every rank raises a DistapError.
    """
    queries = _count_queries(loss, gathered)
    world = gathered.world
    budget = Budget(gathered.gallery.device, memory_bytes)
    with full_precision(budget.device):
        if counter is not None:  # it has seen the pairs already
            value = counter.value_and_gradient(gathered)
        elif mode == "sharded" or world.size == 1:
            value = loss.value_and_gradient(gathered, budget)
        else:
            value = rank_on_rank_zero(loss, gathered, budget)
    # All ranks have to skip the step, or none: one that went on alone would wait in the next
    # collective. Numbers are finite if their sum is, which one pass finds.
    by_parameters = map(local, value.by_parameters)
    sums = [table.sum() for table in (value.value, value.gradient, *by_parameters)]
    is_finite = world.all_agree(all(bool(total.isfinite()) for total in sums))
    per_query = None if value.per_query is None else gathered.spread(value.per_query, torch.nan)
    return Ranking(
        loss=value.value,
        per_query=per_query,
        gradient=gathered.spread(value.gradient),
        queries=queries,
        skipped_queries=len(gathered.samples) - queries,
        is_finite=is_finite,
        by_parameters=value.by_parameters,
        spread=float(gathered.descriptors.var(dim=0, correction=0).sum()),
    )


def _count_queries(loss: Loss, gathered: Gathered) -> int:
    """Return the number of queries; raise a DistapError if the batch teaches nothing."""
    # Every rank finds this out for itself: the others would wait if rank 0 alone did.
    batch = len(gathered.samples)
    images = f"{batch} images of this batch (rows 0 to {batch - 1})"
    refuse_crossing(gathered.gallery_levels)
    if not batch:
        raise NothingToRankError(
            "sampling.no_images",
            "no image of this batch can be ranked: none was read, or no descriptor is finite",
        )
    queries = int(loss.is_query(gathered).sum())
    if not queries:
        raise NothingToRankError(
            "sampling.no_positives",
            f"none of the {images} has another image of its class in the batch, so nothing can be"
            " ranked: draw several images of each class, or a larger batch",
        )
    if not loss.has_negatives(gathered):
        raise DistapError(
            "sampling.one_class",
            f"all {images} are of one class, {int(gathered.labels[0])}, or of one in each data set:"
            " every ranking of them is right, so there is nothing to learn; a batch needs two"
            " classes at least",
        )
    return queries
