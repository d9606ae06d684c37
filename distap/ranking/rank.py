"""Rank a gathered batch on rank 0 alone, or sharded over all ranks."""

from collections.abc import Callable
from dataclasses import replace
from typing import cast, get_args

import torch
import torch.distributed as dist
from jaxtyping import Float64
from torch import Tensor

from distap.errors import DistapError
from distap.ranking.budget import Budget
from distap.ranking.central import rank_on_rank_zero
from distap.ranking.checks import check_arguments, check_gathered
from distap.ranking.gathered import Gathered, gather
from distap.ranking.gradient_rows import GradientRows
from distap.ranking.histogram.passes import Passes
from distap.ranking.losses.quantized import SoftBinnedAP
from distap.ranking.losses.registry import build_loss, suggestion
from distap.ranking.memory import CrossBatchMemory
from distap.ranking.precision import full_precision
from distap.ranking.protocol import Loss, Mode, Ranking
from distap.ranking.weights import number_of_queries, require_queries
from distap.world import World


def rank(
    descriptors: Tensor,
    labels: Tensor,
    loss: str | Loss = "ap_q",
    weights: str = "uniform",
    group: dist.ProcessGroup | None = None,
    mode: str = "sharded",
    memory: CrossBatchMemory | None = None,
    images: Tensor | None = None,
    memory_budget: int | None = None,
    **options: object,
) -> Ranking:
    """Loss of a batch, and the gradient of every descriptor, for descriptors from anywhere.

    With a process group the batch is that of all its ranks, in shares of any size, and every rank calls this alike.
    The loss is then a mean over the queries of all ranks: sum gradients over ranks, do not average them.

    Args:
        descriptors: (b, C) this rank's, of length 1; of 16-bit ones the gradient is float32.
        labels: (b,) their classes, integers from 0.
        loss: `ap_q`, `ap_t`, `fast_ap`, `smooth_ap`, `sup_ap`, `calibration`, `roadmap`, `blackbox_ap` or
            `metric_learning`; or a loss from `distap.ranking`.
        weights: of the queries: `uniform`, or `class` so that each class weighs the same.
        group: the ranks of one batch, `torch.distributed.group.WORLD` for all; None is this process alone.
        mode: `sharded`, each rank ranks its own queries; `central`, rank 0 of the group ranks all.
        memory: descriptors of earlier calls to rank against as well; this batch is added to it.
        images: (b,) numbers by which the memory knows images again; without them an image met again is ranked against
            what is remembered of itself.
        memory_budget: bytes to use beside the descriptors; None chooses by the device.
        options: of the loss, or `preset`, the name of one of its presets.
    Returns:
        A Ranking; its gradient and losses by query are those of this rank's descriptors.
    Raises:
        DistapError: on every rank, for an unknown loss or option, and for descriptors or labels that cannot be
            ranked; the message says which rows.
    """
    world = World(device=descriptors.device)
    if group is not None:
        world = World(dist.get_rank(group), dist.get_world_size(group), device=descriptors.device, group=group)
    built = build_loss(loss, weights, **options)
    if mode not in get_args(Mode):
        raise DistapError(f"mode is {mode!r}; {suggestion(mode, get_args(Mode))}")
    labels = check_arguments(descriptors, labels, world)
    share = int(world.maximum(len(labels)))
    dtype = torch.promote_types(descriptors.dtype, torch.float32)
    present = torch.arange(share, device=labels.device) < len(labels)
    numbers = labels.new_full(labels.shape, -1) if images is None else images.long()
    padded = [_padded(values, share) for values in (descriptors.detach().to(dtype), labels, numbers)]
    gathered = gather(padded[0], padded[1], present, world, share * world.size, padded[2])
    check_gathered(gathered)
    ranked = gathered if memory is None else memory.extend(gathered)
    ranking = rank_descriptors(built, ranked, cast(Mode, mode), memory_budget)
    if memory is not None:
        memory.remember(gathered)
    own = slice(len(labels))
    return replace(
        ranking,
        per_query=None if ranking.per_query is None else ranking.per_query[own],
        gradient_of=ranking.gradient[own].__getitem__,
    )


def _padded(rows: Tensor, share: int) -> Tensor:
    full = rows.new_zeros(share, *rows.shape[1:])
    full[: len(rows)] = rows
    return full


@torch.no_grad()
def rank_descriptors(
    loss: Loss, gathered: Gathered, mode: Mode = "sharded", memory_budget: int | None = None
) -> Ranking:
    """Loss and descriptor gradients of a global batch (Revaud et al. 2019, section 3.2, second stage).

    Args:
        loss: the listwise loss.
        gathered: the batch; its dtype is the precision of similarities and gradients.
        mode: `sharded`, each rank ranks its own queries; `central`, rank 0 ranks all and scatters the rows.
        memory_budget: bytes to use beside the descriptors; None chooses by the device.
    Returns:
        A Ranking with a row for each slot of this rank; where one takes no part its gradient is zero, its loss NaN.
    Raises:
        DistapError: no query has a positive, or all images are of one class; raised on every rank.
    """
    # On every rank alike: where rank 0 alone found out, the others would wait for it.
    require_queries(gathered)
    budget = Budget.of(gathered.gallery.device, memory_budget)
    world = gathered.world
    with full_precision(gathered.gallery.device):
        if mode == "sharded" or world.size == 1:
            value, per_query, gradient = loss.value_and_gradient(gathered, budget)
        else:
            value, per_query, gradient = rank_on_rank_zero(loss, gathered, budget)
    finite = bool(value.isfinite()) and bool(gradient.isfinite().all())
    return _ranking(gathered, value, per_query, gathered.spread(gradient).__getitem__, finite)


@torch.no_grad()
def rank_counted(loss: SoftBinnedAP, passes: Passes, gathered: Gathered) -> Ranking:
    """What `rank_descriptors` gives, where the pairs of the batch are counted; its gradient is made by rows, later.

    The gradient is finite where the slopes that it is made from are, and these are looked at.

    Args:
        loss: it made the passes.
        passes: all images of the batch were added; what a memory remembers was not.
        gathered: the batch.
    Raises:
        DistapError: no query has a positive, or all images are of one class; raised on every rank.
    """
    require_queries(gathered)
    with full_precision(gathered.gallery.device):
        remembered, labels = gathered.gallery[passes.seen :], gathered.gallery_labels[passes.seen :]
        if len(labels):
            passes.add(remembered, labels, torch.zeros_like(labels, dtype=torch.bool))
        value, per_query, slopes = loss.value_and_slopes(passes, gathered)
    finite = bool(value.isfinite()) and bool(slopes.isfinite().all())
    return _ranking(gathered, value, per_query, GradientRows(passes, slopes, gathered), finite)


def _ranking(
    gathered: Gathered,
    value: Float64[Tensor, ""],
    per_query: Float64[Tensor, " b"] | None,
    gradient_of: Callable[[slice | Tensor], Tensor],
    is_finite: bool,
) -> Ranking:
    queries = number_of_queries(gathered)
    return Ranking(
        value,
        None if per_query is None else gathered.spread(per_query, torch.nan),
        gradient_of,
        queries,
        len(gathered.labels) - queries,
        gathered.world.all_agree(is_finite),
    )
