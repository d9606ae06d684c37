"""Losses that classify each image by similarity to proxies: one learned direction per class."""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Float, Float64, Int64
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor, nn
from torch.nn.functional import normalize

from distap.errors import DistapError
from distap.ranking.gathered import Gathered
from distap.ranking.loss import Budget, KnownClasses, LossValue, SizedLoss
from distap.ranking.losses.base import Mask, PerQuery, Rows, Scores, SimilarityLoss
from distap.ranking.losses.steps import softplus
from distap.ranking.rankable import refuse_crossing

PerRow = Float[Tensor, "r 1"]


@dataclass(frozen=True)
class ProxyLoss(SimilarityLoss, SizedLoss):
    """A mean over images of a function of similarities to K proxies, trained with the network.

    The proxies are the gallery, and an image's only positive is that of its class. A memory of
    earlier descriptors changes nothing.
    """

    self_pair: ClassVar[bool] = False  # type: ignore[misc] # an image is no proxy, so this is no key here
    needs_positives: ClassVar[bool] = False

    def spread(self, dimensions: int) -> float:
        """Return the standard deviation of initial proxies; longer ones turn more slowly."""
        return float((3 * dimensions) ** -0.5)

    @cached_property
    def learned(self) -> nn.ParameterDict:
        if self.classes is None or self.dimensions is None:
            raise DistapError(
                "loss.unknown_classes",
                f"{type(self).__name__} has a proxy for each class: it needs `classes`, the number"
                " of classes, and `dimensions`, that of a descriptor; a recipe needs `classes`"
                " where the training set has no index",
            )
        # A generator of its own, so that all ranks begin alike: proxies are not broadcast, and they
        # stay equal, since every rank moves them by the same sum.
        drawn = torch.randn(
            self.classes, self.dimensions, generator=torch.Generator().manual_seed(self.seed or 0)
        )
        return nn.ParameterDict({"proxies": nn.Parameter(drawn * self.spread(self.dimensions))})

    @property
    def used(self) -> list[nn.Parameter]:
        return []  # the proxies act through the similarities alone

    def check(self, gathered: Gathered) -> None:
        """Raise a DistapError if the proxies do not fit the batch."""
        dimensions = gathered.descriptors.shape[1]
        count = len(self.learned["proxies"])
        last = int(gathered.labels.max())
        if dimensions != self.dimensions or last >= count:
            raise DistapError(
                "loss.wrong_proxies",
                f"there are {count} proxies of {self.dimensions} dimensions, but labels go up to"
                f" {last} and descriptors have {dimensions} dimensions",
            )

    def value_and_gradient(self, gathered: Gathered, budget: Budget) -> LossValue:
        self.check(gathered)
        with torch.enable_grad():
            proxies = normalize(self.learned["proxies"].to(gathered.descriptors))
        value, of_proxies = self.over_blocks(gathered, proxies.detach(), len(proxies), budget)
        # All ranks hold all proxies, so each needs the whole sum. Autograd goes through their
        # normalisation once.
        whole = gathered.world.sum(of_proxies)
        parameters = self.parameters
        by_parameters = torch.autograd.grad(proxies, parameters, whole) if parameters else ()
        return value._replace(by_parameters=by_parameters)

    def columns(
        self, gathered: Gathered, queries: Int64[Tensor, " r"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        numbers = torch.arange(len(self.learned["proxies"]))
        labels = gathered.labels[queries, None]
        return numbers[:, None].to(labels.device), labels, torch.ones_like(labels, dtype=torch.bool)


@dataclass(frozen=True)
class ProxyNCA(ProxyLoss):
    """ProxyNCA++ (Teh et al. 2020): a softmax over squared distances to the proxies.

    In the paper the proxies learn faster than the network, by their own `optimizer.loss.factor`.
    """

    temperature: PositiveFloat = 1 / 9
    """Temperature of the squared distances."""

    def loss(self, similarities: Scores, positive: Mask, negative: Mask) -> PerQuery:
        # Descriptors and proxies have length 1, so 2 - 2 s is their squared distance.
        return _softmax_loss((2 * similarities - 2) / self.temperature, positive)

    def spread(self, dimensions: int) -> float:
        return 1 / 8  # as in the authors' code


@dataclass(frozen=True)
class NormalizedSoftmax(ProxyLoss):
    """Normalised softmax (Zhai and Wu 2019): a softmax over similarities to the proxies."""

    temperature: PositiveFloat = 0.05
    """Temperature of the similarities."""

    def loss(self, similarities: Scores, positive: Mask, negative: Mask) -> PerQuery:
        return _softmax_loss(similarities / self.temperature, positive)


@dataclass(frozen=True)
class ArcFace(ProxyLoss):
    """ArcFace (Deng et al. 2019): a softmax with a margin of the angle to an image's own proxy."""

    scale: PositiveFloat = 30.0
    """Factor of the similarities."""
    margin: Annotated[float, Field(ge=0, le=math.pi / 2)] = 0.5
    """Margin, in radians; Weyand et al. 2020 take 0.3 for landmarks."""

    def loss(self, similarities: Scores, positive: Mask, negative: Mask) -> PerQuery:
        of_class = (similarities * positive).sum(1, keepdim=True)  # one positive a row
        moved = torch.where(positive, self.with_margin(of_class), similarities)
        return _softmax_loss(self.scale * moved, positive)

    def with_margin(self, of_class: PerRow) -> PerRow:
        # The angle has no derivative at similarities of 1 and -1. Where the margin takes it beyond
        # the half circle, the cosine would rise again: there a line goes on falling, as in the
        # authors' code.
        inside = of_class.clamp(-1 + 1e-7, 1 - 1e-7)
        moved = torch.cos(torch.acos(inside) + self.margin)
        beyond = of_class - self.margin * math.sin(self.margin)
        return torch.where(of_class > -math.cos(self.margin), moved, beyond)


@dataclass(frozen=True)
class CosFace(ArcFace):
    """CosFace (Wang et al. 2018): a softmax with a margin of similarity to an image's own proxy."""

    margin: NonNegativeFloat = 0.35
    """Margin of similarity."""

    def with_margin(self, of_class: PerRow) -> PerRow:
        return of_class - self.margin


@dataclass(frozen=True)
class ProxyAnchor(ProxyLoss):
    """Proxy Anchor (Kim et al. 2020, eq. 4): each proxy pulls its class and pushes all others.

    With s an image's similarity to a proxy, the loss is the mean over proxies with images of ln(1 +
    sum of e^(-scale (s - margin)) over them), plus the mean over all proxies of ln(1 + sum of
    e^(scale (s + margin)) over other images). `per_query` is each image's share of the loss.
    """

    scale: Annotated[float, Field(gt=0, le=64)] = 32.0  # more overflows float32
    """Factor of the similarities."""
    margin: NonNegativeFloat = 0.1
    """Margin of similarity."""
    weights: Literal["uniform"] = "uniform"
    """Weigh all images alike."""

    def shape_of_totals(self, columns: int) -> tuple[int, ...]:
        return 2, columns

    def totals(self, rows: Rows) -> Float64[Tensor, "2 K"]:
        return torch.stack([term.sum(0) for term in self._exponentials(rows)]).double()

    def value_and_slopes(self, rows: Rows, totals: Float64[Tensor, "2 K"]) -> tuple[Tensor, Tensor]:
        terms = self._exponentials(rows)
        counts = ((totals[0] > 0).sum(), totals.shape[1])
        # In ln(1 + T), an image whose term of the sum is e has the share e / T, and the derivative
        # e' / (1 + T).
        values = torch.zeros_like(rows.weights)
        slopes = torch.zeros_like(rows.similarities)
        for term, total, count, sign in zip(terms, totals.to(slopes), counts, (-1, 1), strict=True):
            values += (term / total.clamp(min=torch.finfo().tiny) * total.log1p() / count).sum(1)
            slopes += sign * self.scale * term / (1 + total) / count
        return values / rows.weights, slopes

    def _exponentials(self, rows: Rows) -> tuple[Scores, Scores]:
        pull = (-self.scale * (rows.similarities - self.margin)).exp() * rows.positive_columns
        return pull, (self.scale * (rows.similarities + self.margin)).exp() * ~rows.positive_columns


@dataclass(frozen=True)
class CrossScaleLearning(ProxyLoss):
    """CSL (Sun et al. 2021): an image's own proxy above those of other classes, at each level.

    With s the similarities to the proxies of the finest classes and m the margin of a level, the
    loss is the sum over levels of ln(1 + sum of e^(scale (s + m - own s))) over the proxies of
    other classes of the level.
    """

    scale: PositiveFloat = 32.0
    """Factor of the similarities and margins."""
    margins: Annotated[tuple[float, ...], Field(min_length=1)] = (0.25, 0.35, 0.45)
    """Margin of similarity of each level, from the finest; fewer levels take the first ones."""
    # ranks compare the loss by its repr
    tree: tuple[tuple[int, ...], ...] | None = field(default=None, repr=False)
    """Numbers of the coarser classes that hold each class, finer first; null takes the training
    set's."""

    def sized(self, classes: KnownClasses, dimensions: int | None, seed: int) -> SizedLoss:
        above = self.tree
        if above is None and isinstance(classes, Tensor):
            above = tuple(map(tuple, classes.view(len(classes), -1)[:, 1:].tolist()))
        return SizedLoss.sized(replace(self, tree=above), classes, dimensions, seed)

    @cached_property
    def levels(self) -> Int64[Tensor, "K L"]:
        """Return the numbers of each proxy's classes, from the finest level to the coarsest."""
        count = len(self.learned["proxies"])
        rows = [(number, *above) for number, above in enumerate(self.tree or [()] * count)]
        depths = {*map(len, rows)}
        if len(rows) != count or len(depths) > 1 or max(depths) > len(self.margins):
            raise DistapError(
                "loss.wrong_tree",
                f"csl: tree has {len(rows)} rows of {max(depths) - 1} numbers for {count} classes,"
                f" and there are {len(self.margins)} margins; expected rows of one length, one a"
                " class, and a margin a level",
            )
        levels = torch.tensor(rows, device=self.learned["proxies"].device)
        refuse_crossing(levels)
        return levels

    def check(self, gathered: Gathered) -> None:
        super().check(gathered)
        levels = gathered.levels
        tree = self.levels.to(levels.device)
        if levels.shape[1] > 1 and not torch.equal(tree[levels[:, 0]], levels):
            raise DistapError(
                "loss.wrong_tree",
                f"csl: labels of {levels.shape[1]} levels are not those of its tree of"
                f" {tree.shape[1]}: give `tree`, for each class the numbers of the coarser classes"
                " that hold it",
            )

    def loss(self, similarities: Scores, positive: Mask, negative: Mask) -> PerQuery:
        logits = self.scale * similarities
        losses = torch.zeros_like(similarities[:, 0])
        of_class = (logits * positive).sum(1)
        label = positive.int().argmax(1)
        # The least number in place of -inf: without other classes, a softmax over -inf alone has no
        # derivative.
        lowest = torch.finfo(logits.dtype).min
        levels = self.levels.to(label.device).unbind(1)
        for classes, margin in zip(levels, self.margins, strict=False):
            same_class = classes == classes[label, None]
            of_others = logits.masked_fill(same_class, lowest).logsumexp(1)
            losses = losses + softplus(of_others - of_class + self.scale * margin)
        return losses


def _softmax_loss(logits: Scores, positive: Mask) -> PerQuery:
    """Return -ln of the share that the one positive of each row has in the sum of e^logit."""
    return logits.logsumexp(1) - (logits * positive).sum(1)
