"""Losses against the descriptors of a teacher, `extra["teacher"]`, and KoLeo, which spreads them.

distil_features    an image's descriptor near the teacher's of the same image
distil_relations   its similarities to the other images like the teacher's
compatible         its ranking of the teacher's descriptors, and the teacher's of these
koleo              its nearest other descriptor far away; it has no teacher
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Float64, Int64
from pydantic import PositiveFloat
from torch import Tensor
from torch.nn.functional import normalize

from distap.errors import DistapError
from distap.ranking.gathered import Gathered, QueryWeights, tie_width
from distap.ranking.loss import Budget, KnownClasses, Loss, LossValue
from distap.ranking.losses.base import (
    TILES_OF_A_BLOCK,
    PerQuery,
    Rows,
    Scores,
    SimilarityLoss,
    Totals,
)
from distap.ranking.losses.smooth import SmoothAP
from distap.ranking.losses.sums import Inner, WrappedLoss
from distap.ranking.rankable import row_names

TEACHER = "teacher"  # the name of its descriptors among the `extra` tensors of images


def teacher_rows(
    loss: Loss, gathered: Gathered, has_our_space: bool = True
) -> Float[Tensor, "B T"]:
    """Return the teacher's descriptors of the batch, scaled to length 1.

    Raises:
        DistapError: they are no descriptors, or are of other dimensions than the network's although
            both have one space.
    """
    rows = gathered.extra[TEACHER]
    name = type(loss).__name__
    if rows.ndim != 2 or not rows.is_floating_point():
        raise DistapError(
            "data.wrong_extra",
            f"extra: teacher is {tuple(rows.shape)} of {rows.dtype}, but {name} takes (b, T) of a"
            " floating-point type",
        )
    dimensions = gathered.descriptors.shape[1]
    if has_our_space and rows.shape[1] != dimensions:
        raise DistapError(
            "loss.wrong_dimensions",
            f"{name} compares descriptors of {dimensions} dimensions with a teacher's of"
            f" {rows.shape[1]}: let the network have as many (model.projection: {rows.shape[1]}),"
            " outside matryoshka, or take distil_relations, which works with any",
        )
    rows = rows.to(gathered.gallery)
    # Divided by the largest number first: squares of numbers below 1e-19 or above 1e19 are 0 or
    # infinite in float32.
    largest = rows.abs().amax(1, keepdim=True)
    wrong = ~((largest > 0) & largest.isfinite()).flatten()
    if wrong.any():
        raise DistapError(
            "data.wrong_extra",
            f"extra: teacher: {row_names(wrong)} of the batch's images are all 0 or not finite, and"
            " so have no direction",
        )
    return normalize(rows / largest)


@dataclass(frozen=True)
class ImageLoss(Loss):
    """A mean over images of a value of each, which needs no labels."""

    weights: QueryWeights = "uniform"
    """Weigh all images alike (uniform), all classes (class), or as `extra` says (given)."""
    needs_positives: ClassVar[bool] = False
    takes_memory: ClassVar[bool | None] = None

    @abstractmethod
    def of_images(
        self,
        gathered: Gathered,
        weights: Float64[Tensor, " b"],
        budget: Budget,
    ) -> tuple[Float[Tensor, " b"], Float[Tensor, "b C"]]:
        """Return each own image's loss, and this rank's part of the weighted sum's gradient."""

    def value_and_gradient(self, gathered: Gathered, budget: Budget) -> LossValue:
        weights = gathered.query_weights(self.weights, 1)[gathered.own]
        values, gradient = self.of_images(gathered, weights, budget)
        values = values.double()
        return LossValue(
            value=gathered.world.sum((weights * values).sum()),
            per_query=torch.where(weights > 0, values, torch.nan),
            gradient=gradient,
        )


@dataclass(frozen=True)
class DistilFeatures(ImageLoss):
    """The mean distance of descriptors d to the teacher's t of the same images, both of length 1.

    That is 1 - d·t, or |d - t|², which for these lengths is twice as much (regression of Budnik
    and Avrithis 2021). Both have the same number of dimensions.
    """

    distance: Literal["cosine", "squared"] = "cosine"
    """Take 1 - cosine, or the squared distance."""

    @property
    def extras(self) -> tuple[str, ...]:
        return TEACHER, *super().extras

    def of_images(
        self,
        gathered: Gathered,
        weights: Float64[Tensor, " b"],
        budget: Budget,
    ) -> tuple[Float[Tensor, " b"], Float[Tensor, "b C"]]:
        teacher = teacher_rows(self, gathered)[gathered.own]
        descriptors = gathered.descriptors[gathered.own]
        # |d - t|² / 2 is 1 - d·t without its rounding: 0 where both are the same bits.
        factor = 1.0 if self.distance == "squared" else 0.5
        difference = descriptors - teacher
        gradient = (2 * factor * weights).to(difference)[:, None] * difference
        return factor * difference.square().sum(1), gradient


@dataclass(frozen=True)
class DistilRelations(SimilarityLoss):
    """How far an image's similarities to the others are from the teacher's, of any dimensions.

    With s_j and t_j the similarities of an image to the B - 1 others by network and teacher:

        kl        sum of p_j ln(p_j / q_j), p = softmax(t / teacher_temperature), q = softmax(s /
                  temperature) (CompRess, Koohpayegani et al. 2020)
        squared   mean of (s_j - t_j)² (UDON, Ypsilantis et al. 2024, whose code sums it over j)
    """

    form: Literal["kl", "squared"] = "kl"
    """Compare softmaxes over the other images, or the similarities themselves."""
    temperature: PositiveFloat = 0.1
    """Temperature of the network's similarities, in form kl."""
    teacher_temperature: PositiveFloat = 0.1
    """Temperature of the teacher's similarities, in form kl."""
    self_pair: Literal[False] = False
    needs_positives: ClassVar[bool] = False
    asymmetric: ClassVar[bool] = False
    takes_memory: ClassVar[bool | None] = False

    @property
    def extras(self) -> tuple[str, ...]:
        return TEACHER, *super().extras

    def is_query(self, gathered: Gathered) -> Bool[Tensor, " B"]:
        return has_others(gathered)

    def blocks(
        self,
        gathered: Gathered,
        weights: Float64[Tensor, " B"],
        budget: Budget,
    ) -> Iterator[tuple[Int64[Tensor, " r"], Rows]]:
        teacher = teacher_rows(self, gathered, has_our_space=False)
        for numbers, rows in super().blocks(gathered, weights, budget):
            relations = teacher[rows.queries] @ teacher.t()
            yield numbers, replace(rows, extra={TEACHER: relations})

    def value_and_slopes(self, rows: Rows, totals: Totals) -> tuple[PerQuery, Scores]:
        columns = rows.queries[:, None]
        ours, theirs = rows.similarities, rows.extra[TEACHER]
        weights = rows.weights[:, None]
        if self.form == "squared":
            other_images = ours.shape[1] - 1
            difference = (ours - theirs).scatter_(1, columns, 0)
            slopes = 2 * weights / other_images * difference
            return difference.square().sum(1) / other_images, slopes
        # The image's own column has the probability 0 in both.
        log_q = (ours / self.temperature).scatter_(1, columns, -torch.inf).log_softmax(1)
        log_p = (theirs / self.teacher_temperature).scatter_(1, columns, -torch.inf).log_softmax(1)
        p = log_p.exp()
        value = (p * (log_p - log_q).scatter_(1, columns, 0)).sum(1)
        return value, (weights / self.temperature) * (log_q.exp_() - p)


@dataclass(frozen=True)
class Compatible(WrappedLoss):
    """A loss of similarities between the network's descriptors and a teacher's of the same images.

    So a new network's queries rank well in an index of the old one's descriptors
    (backward-compatible training, Shen et al. 2020; asymmetric metric learning, Budnik and
    Avrithis 2021). `student` ranks the teacher's descriptors for queries of the network, `teacher`
    the network's for queries of the teacher, and `both` is the mean of the two. The image's own
    descriptor on the other side counts among its positives as `self_pair` of the inner loss says.
    The teacher gets no gradient. Both have the same number of dimensions.
    """

    inner: Inner = field(default_factory=SmoothAP)
    """Loss of similarities, such as smooth_ap or {name: ap_q, bins: 25}; or a sum of such losses.
    """
    queries: Literal["both", "student", "teacher"] = "both"
    """Whose descriptors are the queries; the other's are their gallery."""
    asymmetric: ClassVar[bool] = False
    takes_memory: ClassVar[bool | None] = False

    def __post_init__(self) -> None:
        if not self.inner.asymmetric:
            raise ValueError(
                f"inner is {type(self.inner).__name__}, whose queries cannot be of another network"
                " than its gallery; a loss of similarities by query is expected, such as smooth_ap"
            )

    @property
    def is_ap(self) -> bool:  # type: ignore[override]
        return bool(self.inner.is_ap)

    @property
    def extras(self) -> tuple[str, ...]:
        return TEACHER, *super().extras

    def sized(self, classes: KnownClasses, dimensions: int | None, seed: int) -> Loss:
        return replace(self, inner=self.inner.sized(classes, dimensions, seed))

    def value_and_gradient(self, gathered: Gathered, budget: Budget) -> LossValue:
        teacher = teacher_rows(self, gathered)
        student = gathered.descriptors
        sides: dict[str, dict[str, Any]] = {
            "student": {
                "gallery": teacher,
                "other_queries": student,
                "fixed": "gallery",
            },
            "teacher": {
                "gallery": student,
                "other_queries": teacher,
                "fixed": "queries",
            },
        }
        values = list[LossValue]()
        for name, side in sides.items():
            if self.queries in (name, "both"):
                # An image's similarity to its teacher's descriptor changes, unlike that to itself.
                across = replace(gathered, of_unit_length=False, **side)
                values.append(self.inner.value_and_gradient(across, budget))
        per_query = [value.per_query for value in values if value.per_query is not None]
        slopes = zip(*(value.by_parameters for value in values), strict=True)
        return LossValue(
            value=torch.stack([value.value for value in values]).mean(0),
            per_query=torch.stack(per_query).mean(0) if per_query else None,
            gradient=torch.stack([value.gradient for value in values]).mean(0),
            by_parameters=tuple(torch.stack(sides).mean(0) for sides in slopes),
        )


@dataclass(frozen=True)
class KoLeo(ImageLoss):
    """-ln(r + epsilon) of the distance r to the nearest other descriptor of the global batch.

    It spreads descriptors over the sphere (Sablayrolles et al. 2019; epsilon as in DINOv2).
    Of several nearest descriptors the first one counts. One at distance 0 gets no gradient, for it
    has no direction.
    """

    epsilon: PositiveFloat = 1e-8
    """Added to the distance."""

    def is_query(self, gathered: Gathered) -> Bool[Tensor, " B"]:
        return has_others(gathered)

    def of_images(
        self,
        gathered: Gathered,
        weights: Float64[Tensor, " b"],
        budget: Budget,
    ) -> tuple[Float[Tensor, " b"], Float[Tensor, "b C"]]:
        descriptors = gathered.descriptors
        nearest = self._nearest(descriptors, gathered.own, budget)
        difference = descriptors[gathered.own] - descriptors[nearest]
        distances = difference.norm(dim=1)
        # -dr/dd / (r + epsilon), whose negative goes to the nearest one, of whatever rank.
        directions = difference / distances.clamp(min=torch.finfo(distances.dtype).tiny)[:, None]
        pushes = (weights.to(distances) / (distances + self.epsilon))[:, None] * directions
        by_nearest = torch.zeros_like(descriptors).index_add_(0, nearest, pushes)
        gradient = gathered.sum_own(by_nearest) - pushes
        return -(distances + self.epsilon).log(), gradient

    def _nearest(
        self,
        descriptors: Float[Tensor, "B C"],
        images: Int64[Tensor, " b"],
        budget: Budget,
    ) -> Int64[Tensor, " b"]:
        # In float64, since in float32 the similarities of descriptors that are less than 1e-3 apart
        # are equal but for rounding, and it is these that weigh most. Their lengths are 1 but for
        # rounding as well, hence d_i·d_j - |d_j|² / 2, which is (|d_i|² - |d_i - d_j|²) / 2.
        exact = descriptors.double()
        halves = exact.square().sum(1) / 2
        width = tie_width(exact.dtype)
        height = max(
            1,
            budget.pairs(exact.element_size(), TILES_OF_A_BLOCK) // len(exact),
        )
        nearest = list[Tensor]()
        for queries in images.split(height):
            nearness = exact[queries] @ exact.t() - halves
            nearness.scatter_(1, queries[:, None], -torch.inf)
            is_nearest = nearness >= nearness.amax(1, keepdim=True) - width
            nearest.append(is_nearest.to(torch.uint8).argmax(1))
        return torch.cat(nearest)


def has_others(gathered: Gathered) -> Bool[Tensor, " B"]:
    """Return for each image of the batch whether there is another one."""
    return torch.full_like(gathered.samples, len(gathered.samples) > 1, dtype=torch.bool)
