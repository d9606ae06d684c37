"""Losses that classify each image by similarity to proxies: one learned direction per class."""

import math
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Literal

import torch
from jaxtyping import Float64, Int64
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from distap.errors import DistapError
from distap.randomness import chosen_numbers
from distap.ranking.gathered import Gathered
from distap.ranking.loss import KnownClasses, SizedLoss
from distap.ranking.losses.classes import ClassBlock, ClassesOfRank, PerImage, ProxyLoss
from distap.ranking.losses.steps import softplus
from distap.ranking.rankable import refuse_crossing

SAMPLED = 5  # first word of the key that samples classes


@dataclass(frozen=True)
class SoftmaxLoss(ProxyLoss):
    """A softmax over the classes, or one for each of L levels of classes.

    With x the scores, the loss of an image sums over levels ln(1 + sum of e^(x - own x)) over the
    proxies of other classes of the level, with a margin in the own one.
    """

    sampled_negatives: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Approximate the loss: score this share of the other classes in each step, drawn by seed and
    step, next to those of the batch (partial FC; An et al. 2022). null scores all, exactly."""

    @abstractmethod
    def loss(self, other_sums: Float64[Tensor, "B L"], own_similarities: PerImage) -> PerImage:
        """Return the loss of each image.

        Args:
            other_sums: ln of the sum of e^score over the proxies of other classes, of each level.
            own_similarities: similarities to the own proxies.
        """

    @property
    def depth(self) -> int:
        """Number L of levels."""
        return 1

    def of_other_class(self, block: ClassBlock, gathered: Gathered, level: int) -> Tensor:
        """Return a block's scores (B, n) with -inf for proxies of an image's own class at a level.

        At level 0, the finest, that is the own proxy alone.
        """
        return block.scores

    def scored(self, numbers: Int64[Tensor, " n"], gathered: Gathered) -> Int64[Tensor, " m"]:
        if self.sampled_negatives is None:
            return numbers
        drawn = chosen_numbers(
            numbers.cpu().numpy(), self.sampled_negatives, SAMPLED, *gathered.key
        )
        is_drawn = torch.from_numpy(drawn).to(numbers.device)
        return numbers[is_drawn | torch.isin(numbers, gathered.labels)]

    def rank_classes(
        self, classes: ClassesOfRank, gathered: Gathered, weights: PerImage
    ) -> PerImage:
        world = gathered.world
        sums = weights.new_full((len(weights), self.depth), -torch.inf)
        own_scores = torch.zeros_like(sums[:, :1])
        for block in classes.blocks():
            own_scores[block.images, 0] = block.own_scores.double()
            for level in range(self.depth):
                of_block = self.of_other_class(block, gathered, level).logsumexp(1)
                sums[:, level] = torch.logaddexp(sums[:, level], of_block.double())

        # ln of the sum over ranks, by the greatest of them. The least number in place of -inf:
        # without other classes, as for a set of one class, -inf less -inf would be no number.
        lowest = torch.finfo(gathered.gallery.dtype).min
        greatest = world.greatest(sums.clamp(min=lowest))
        shares = world.sum(torch.cat([(sums - greatest).exp(), own_scores], dim=1))
        other_sums = (shares[:, :-1].log() + greatest).clamp(min=lowest)
        own_similarities = shares[:, -1] / self.factor

        with torch.enable_grad():
            leaves = other_sums.requires_grad_(), own_similarities.requires_grad_()
            per_query = self.loss(*leaves)
            slopes_of_sums, by_own = torch.autograd.grad((weights * per_query).sum(), leaves)
        slopes_of_sums = slopes_of_sums.to(gathered.gallery.dtype)
        by_own = (by_own / self.factor).to(gathered.gallery.dtype)
        other_sums = other_sums.detach().to(gathered.gallery.dtype)
        for block in classes.blocks():
            slopes = torch.zeros_like(block.scores)
            for level in range(self.depth):
                column = slice(level, level + 1)
                shares = self.of_other_class(block, gathered, level) - other_sums[:, column]
                slopes.addcmul_(shares.exp_(), slopes_of_sums[:, column])
            slopes[block.images, block.columns] = by_own[block.images]
            classes.add(block, slopes)
        return per_query.detach()


@dataclass(frozen=True)
class PlainSoftmax(SoftmaxLoss):
    """A softmax over all classes, of which the own one may have a margin."""

    def loss(self, other_sums: Float64[Tensor, "B L"], own_similarities: PerImage) -> PerImage:
        return softplus(other_sums[:, 0] - self.factor * self.with_margin(own_similarities))

    def with_margin(self, similarities: PerImage) -> PerImage:
        """Return what stands for the similarities to the own proxies."""
        return similarities


@dataclass(frozen=True)
class ProxyNCA(PlainSoftmax):
    """ProxyNCA++ (Teh et al. 2020): a softmax over squared distances to the proxies.

    In the paper the proxies learn faster than the network, by their own `optimizer.loss.factor`.
    """

    temperature: PositiveFloat = 1 / 9
    """Temperature of the squared distances."""

    @property
    def factor(self) -> float:
        # Descriptors and proxies have length 1, so 2 - 2 s is their squared distance, and the 2
        # is in all scores.
        return 2 / self.temperature

    def spread(self, dimensions: int) -> float:
        return 1 / 8  # as in the authors' code


@dataclass(frozen=True)
class NormalizedSoftmax(PlainSoftmax):
    """Normalised softmax (Zhai and Wu 2019): a softmax over similarities to the proxies."""

    temperature: PositiveFloat = 0.05
    """Temperature of the similarities."""

    @property
    def factor(self) -> float:
        return 1 / self.temperature


@dataclass(frozen=True)
class ArcFace(PlainSoftmax):
    """ArcFace (Deng et al. 2019): a softmax with a margin of the angle to an image's own proxy."""

    scale: PositiveFloat = 30.0
    """Factor of the similarities."""
    margin: Annotated[float, Field(ge=0, le=math.pi / 2)] = 0.5
    """Margin, in radians; Weyand et al. 2020 take 0.3 for landmarks."""

    @property
    def factor(self) -> float:
        return self.scale

    def with_margin(self, similarities: PerImage) -> PerImage:
        # The angle has no derivative at similarities of 1 and -1. Where the margin takes it beyond
        # the half circle, the cosine would rise again: there a line goes on falling, as in the
        # authors' code.
        inside = similarities.clamp(-1 + 1e-7, 1 - 1e-7)
        moved = torch.cos(torch.acos(inside) + self.margin)
        beyond = similarities - self.margin * math.sin(self.margin)
        return torch.where(similarities > -math.cos(self.margin), moved, beyond)


@dataclass(frozen=True)
class CosFace(ArcFace):
    """CosFace (Wang et al. 2018): a softmax with a margin of similarity to an image's own proxy."""

    margin: NonNegativeFloat = 0.35
    """Margin of similarity."""

    def with_margin(self, similarities: PerImage) -> PerImage:
        return similarities - self.margin


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

    @property
    def factor(self) -> float:
        return self.scale

    def rank_classes(
        self, classes: ClassesOfRank, gathered: Gathered, weights: PerImage
    ) -> PerImage:
        # The sums over images are complete on the rank of a proxy. In ln(1 + T), an image whose
        # term of the sum is e has the share e / T, and the derivative e' / (1 + T).
        count = len(self.learned["proxies"])
        with_images = len(gathered.labels.unique())
        margin = self.scale * self.margin
        values = torch.zeros_like(weights)
        for block in classes.blocks():
            push = (block.scores + margin).exp_()
            totals = push.sum(0)
            tiny = torch.finfo(totals.dtype).tiny
            values += push @ (totals.log1p() / totals.clamp(min=tiny)) / count
            slopes = push.div_((1 + totals) * count)

            pull = (margin - block.own_scores).exp_()
            totals = torch.zeros_like(totals).index_add_(0, block.columns, pull)[block.columns]
            values[block.images] += (pull * totals.log1p() / totals / with_images).double()
            slopes[block.images, block.columns] = -pull / (1 + totals) / with_images
            classes.add(block, slopes)
        return gathered.world.sum(values) / weights


@dataclass(frozen=True)
class CrossScaleLearning(SoftmaxLoss):
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

    @property
    def factor(self) -> float:
        return self.scale

    @property
    def depth(self) -> int:
        return self.levels.shape[1]

    def loss(self, other_sums: Float64[Tensor, "B L"], own_similarities: PerImage) -> PerImage:
        margins = other_sums.new_tensor(self.margins[: self.depth])
        return softplus(other_sums - self.scale * (own_similarities[:, None] - margins)).sum(1)

    def of_other_class(self, block: ClassBlock, gathered: Gathered, level: int) -> Tensor:
        if level == 0:
            return block.scores
        classes = self.levels[:, level].to(block.numbers.device)
        same_class = classes[gathered.labels, None] == classes[block.numbers]
        return block.scores.masked_fill(same_class, -torch.inf)
