"""SiMix: mix the descriptors of a class into virtual images, and rank these as well."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from jaxtyping import Int64
from torch import Tensor

from distap.ranking.gathered import Gathered
from distap.ranking.loss import Budget, LossValue
from distap.ranking.losses.base import SimilarityLoss
from distap.ranking.losses.pairs import DistanceLoss
from distap.ranking.losses.smooth import RecallAtK
from distap.ranking.losses.sums import Inner, WrappedLoss


@dataclass(frozen=True)
class SiMix(WrappedLoss):
    """A loss of similarities over a batch and virtual images of its classes (Patel et al. 2022).

    Every pair a, b of a class gives one virtual descriptor α a + (1 - α) b with α uniform in 0 to
    1, which is not normalised again, so that its similarities are mixed likewise. They are queries,
    positives of their class and negatives of others: a class of 4 becomes one of 10. α depends on
    seed, step and pair, and carries no gradient.
    """

    asymmetric: ClassVar[bool] = False
    inner: Inner = field(default_factory=RecallAtK)
    """Loss of similarities of images and virtual images, such as recall_at_k or {name: smooth_ap,
    tau: 0.05}."""

    def __post_init__(self) -> None:
        is_other = isinstance(self.inner, DistanceLoss) or getattr(self.inner, "form", "") == "oml"
        if is_other or not isinstance(self.inner, SimilarityLoss):
            raise ValueError(
                f"inner is {type(self.inner).__name__}; a loss of similarities by query is expected"
            )
        if self.inner.extras:
            raise ValueError(
                f"inner takes {', '.join(self.inner.extras)} of images, which virtual ones do not"
                " have"
            )

    def value_and_gradient(self, gathered: Gathered, budget: Budget) -> LossValue:
        # Every rank draws the same numbers for all pairs, so that virtual images need not travel.
        first, second = _pairs_of_classes(gathered.labels)
        generator = torch.Generator().manual_seed(gathered.seed)
        drawn = torch.rand(len(first), 1, generator=generator, dtype=torch.float64)
        alpha = drawn.to(gathered.gallery)
        batch = len(gathered.samples)
        world = gathered.world
        virtual = alpha * gathered.gallery[first] + (1 - alpha) * gathered.gallery[second]
        # Virtual images are dealt out to the ranks like slots: behind those of the batch, before a
        # memory's images.
        slots = len(gathered.taking_part)
        taking_part = torch.cat([gathered.taking_part, gathered.taking_part.new_ones(len(first))])
        order = gathered.order
        if order is not None:
            virtual_slots = torch.arange(slots, len(taking_part), device=order.device)
            order = torch.cat([order, virtual_slots])
        whole = replace(
            gathered,
            order=order,
            arrival=None,
            gallery=torch.cat([gathered.descriptors, virtual, gathered.gallery[batch:]]),
            gallery_levels=torch.cat(
                [gathered.levels, gathered.levels[first], gathered.gallery_levels[batch:]]
            ),
            samples=torch.cat([gathered.samples, torch.full_like(first, -1)]),
            taking_part=taking_part,
            # A virtual image is shorter, and its similarity to itself changes as its parents move.
            of_unit_length=False,
        )
        is_own = torch.zeros_like(taking_part)
        is_own[whole.slots_of(world.rank)] = True
        whole = replace(whole, own=is_own[taking_part].nonzero().flatten())
        value = self.inner.value_and_gradient(whole, budget)
        # The gradient of this rank's virtual images goes to their parents.
        real = len(gathered.own)
        pairs = whole.own[real:] - batch
        by_virtual = value.gradient[real:]
        of_parents = torch.zeros_like(gathered.descriptors)
        of_parents.index_add_(0, first[pairs], alpha[pairs] * by_virtual)
        of_parents.index_add_(0, second[pairs], (1 - alpha[pairs]) * by_virtual)
        return value._replace(
            per_query=None if value.per_query is None else value.per_query[:real],
            gradient=value.gradient[:real] + gathered.sum_own(of_parents),
        )


def _pairs_of_classes(
    labels: Int64[Tensor, " B"],
) -> tuple[Int64[Tensor, " V"], Int64[Tensor, " V"]]:
    """Return the rows of all pairs of images of one class."""
    # All classes of one size at once, since a batch may have thousands of classes, but few sizes.
    order = labels.argsort(stable=True)
    _, sizes = torch.unique_consecutive(labels[order], return_counts=True)
    starts = sizes.cumsum(0) - sizes
    pairs = list[Tensor]()
    for size in sizes.unique().tolist():
        within = torch.combinations(torch.arange(size, device=labels.device))
        pairs.append((starts[sizes == size, None, None] + within).view(-1, 2))
    return order[torch.cat(pairs)].unbind(1)  # type: ignore[return-value]
