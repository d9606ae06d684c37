"""Losses that classify each image by similarity to proxies: one learned direction per class."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Float, Int64
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from distap.errors import DistapError
from distap.ranking.gathered import Gathered, QueryWeights
from distap.ranking.loss import Budget, LossValue, SizedLoss, strips
from distap.ranking.losses.base import gradients


class ImageBlock(NamedTuple):
    """A block of r images against all K proxies."""

    similarities: Float[Tensor, "r K"]
    labels: Int64[Tensor, " r"]
    weights: Float[Tensor, " r"]  # of the images; they sum to 1 over all blocks and ranks


@dataclass(frozen=True)
class ProxyLoss(SizedLoss):
    """A mean over images of a function of similarities to K proxies, which are trained with the network.

    Each rank takes its own images, a block at a time. A memory of earlier descriptors changes nothing.
    """

    weights: QueryWeights = "uniform"
    """Weigh all images alike (uniform), or all classes of the batch (class)."""
    needs_positives: ClassVar[bool] = False
    number_of_totals: ClassVar[int] = 0  # sums over images, per proxy, that `value_and_slopes` needs over all images

    def spread(self, dimensions: int) -> float:
        """Standard deviation of initial proxies, as in a linear layer; longer proxies turn more slowly."""
        return float((3 * dimensions) ** -0.5)

    @cached_property
    def learned(self) -> nn.Module:
        if self.classes is None or self.dimensions is None:
            raise DistapError(
                f"{type(self).__name__} has a proxy for each class: it needs `classes`, the number of classes, and "
                "`dimensions`, that of a descriptor; a recipe needs `classes` where the training set has no index"
            )
        # A generator of its own, so that all ranks begin alike.
        drawn = torch.randn(self.classes, self.dimensions, generator=torch.Generator().manual_seed(self.seed or 0))
        return nn.ParameterDict({"proxies": nn.Parameter(drawn * self.spread(self.dimensions))})

    def totals(self, block: ImageBlock) -> Float[Tensor, "T K"]:
        """Return this block's part of the T sums per proxy."""
        return block.similarities.new_zeros(self.number_of_totals, block.similarities.shape[1])

    @abstractmethod
    def value_and_slopes(
        self, block: ImageBlock, totals: Float[Tensor, "T K"]
    ) -> tuple[Float[Tensor, " r"], Float[Tensor, "r K"]]:
        """Return each image's loss, and the derivative of the weighted sum by its similarities."""

    def value_and_gradient(self, gathered: Gathered, budget: Budget) -> LossValue:
        descriptors, labels, own = gathered.descriptors, gathered.labels, gathered.own
        parameter = next(self.learned.parameters())
        if descriptors.shape[1] != self.dimensions or int(labels.max()) >= len(parameter):
            raise DistapError(
                f"there are {len(parameter)} proxies of {self.dimensions} dimensions, but labels go up to "
                f"{int(labels.max())} and descriptors have {descriptors.shape[1]} dimensions"
            )
        with torch.inference_mode(False), torch.enable_grad():
            proxies = normalize(parameter.to(descriptors))
        mine, weights = descriptors[own], gathered.query_weights(self.weights, smallest=1)[own]
        # With Q a block's descriptors, P the proxies and G = dL/d(Q Pᵀ), (r, K): dL/dQ = G P, and dL/dP = Gᵀ Q summed
        # over blocks and ranks. Autograd differentiates the proxies' normalisation at the end.
        per_query, of_images = torch.zeros_like(weights), torch.zeros_like(mine)
        of_proxies, fixed = torch.zeros_like(proxies), proxies.detach()
        blocks = list(strips(0, len(own), max(1, budget.pairs(descriptors.element_size()) // len(proxies))))

        def block_of(rows: slice) -> ImageBlock:
            return ImageBlock(mine[rows] @ fixed.t(), labels[own[rows]], weights[rows].to(mine))

        totals = fixed.new_zeros(self.number_of_totals, len(fixed))
        if self.number_of_totals:
            for rows in blocks:
                totals += self.totals(block_of(rows))
            totals = gathered.world.sum(totals)
        for rows in blocks:
            values, slopes = self.value_and_slopes(block_of(rows), totals)
            per_query[rows], of_images[rows] = values.double(), slopes @ fixed
            of_proxies.addmm_(slopes.t(), mine[rows])
        of_proxies = gathered.world.sum(of_proxies)
        with torch.inference_mode(False):
            found = torch.autograd.grad(proxies, self.parameters, of_proxies.clone()) if self.parameters else ()
        return LossValue(gathered.world.sum((weights * per_query).sum()), per_query, of_images, found)


@dataclass(frozen=True)
class ClassifierLoss(ProxyLoss):
    """A mean over images of a function of each image's similarities to the proxies, which autograd differentiates."""

    @abstractmethod
    def loss(self, similarities: Float[Tensor, "r K"], labels: Int64[Tensor, " r"]) -> Float[Tensor, " r"]:
        """Return the loss of each of r images, differentiable by its similarities to the proxies."""

    def value_and_slopes(
        self, block: ImageBlock, totals: Float[Tensor, "T K"]
    ) -> tuple[Float[Tensor, " r"], Float[Tensor, "r K"]]:
        with torch.inference_mode(False), torch.enable_grad():
            similarities = block.similarities.clone().requires_grad_()
            values = self.loss(similarities, block.labels.clone())
            (slopes,) = gradients((values * block.weights.clone()).sum(), similarities)
        return values.detach(), slopes


@dataclass(frozen=True)
class ProxyNCA(ClassifierLoss):
    """ProxyNCA++ (Teh et al. 2020): a softmax over squared distances to the proxies.

    In the paper the proxies learn faster than the network, by their own `optimizer.loss.factor`.
    """

    temperature: PositiveFloat = 1 / 9
    """Temperature of the squared distances."""

    def loss(self, similarities: Float[Tensor, "r K"], labels: Int64[Tensor, " r"]) -> Float[Tensor, " r"]:
        return cross_entropy((2 * similarities - 2) / self.temperature, labels, reduction="none")

    def spread(self, dimensions: int) -> float:
        return 1 / 8  # as in the authors' code


@dataclass(frozen=True)
class NormalizedSoftmax(ClassifierLoss):
    """Normalised softmax (Zhai and Wu 2019): a softmax over similarities to the proxies."""

    temperature: PositiveFloat = 0.05
    """Temperature of the similarities."""

    def loss(self, similarities: Float[Tensor, "r K"], labels: Int64[Tensor, " r"]) -> Float[Tensor, " r"]:
        return cross_entropy(similarities / self.temperature, labels, reduction="none")


@dataclass(frozen=True)
class ArcFace(ClassifierLoss):
    """ArcFace (Deng et al. 2019): a softmax over similarities, with a margin of the angle to an image's own proxy."""

    scale: PositiveFloat = 30.0
    """Factor of the similarities."""
    margin: Annotated[float, Field(ge=0, le=math.pi / 2)] = 0.5
    """Margin, in radians; Weyand et al. 2020 take 0.3 for landmarks."""

    def loss(self, similarities: Float[Tensor, "r K"], labels: Int64[Tensor, " r"]) -> Float[Tensor, " r"]:
        own = similarities.gather(1, labels[:, None])
        logits = self.scale * similarities.scatter(1, labels[:, None], self.with_margin(own))
        return cross_entropy(logits, labels, reduction="none")

    def with_margin(self, own: Float[Tensor, "r 1"]) -> Float[Tensor, "r 1"]:
        # The angle has no derivative at similarities of 1 and -1. Where the margin takes it beyond the half circle,
        # the cosine would rise again: there a line goes on falling, as in the authors' code.
        inside = own.clamp(-1 + 1e-7, 1 - 1e-7)
        moved = torch.cos(torch.acos(inside) + self.margin)
        return torch.where(own > -math.cos(self.margin), moved, own - self.margin * math.sin(self.margin))


@dataclass(frozen=True)
class CosFace(ArcFace):
    """CosFace (Wang et al. 2018): a softmax over similarities, with a margin of that to an image's own proxy."""

    margin: NonNegativeFloat = 0.35
    """Margin of similarity."""

    def with_margin(self, own: Float[Tensor, "r 1"]) -> Float[Tensor, "r 1"]:
        return own - self.margin


@dataclass(frozen=True)
class ProxyAnchor(ProxyLoss):
    """Proxy Anchor (Kim et al. 2020, eq. 4): each proxy pulls the images of its class and pushes all others.

    With s an image's similarity to a proxy, the loss is the mean over proxies with images of
    ln(1 + sum of e^(-scale (s - margin)) over them), plus the mean over all proxies of
    ln(1 + sum of e^(scale (s + margin)) over other images). `per_query` is each image's share of the loss.
    """

    scale: Annotated[float, Field(gt=0, le=64)] = 32.0  # more overflows float32
    """Factor of the similarities."""
    margin: NonNegativeFloat = 0.1
    """Margin of similarity."""
    weights: Literal["uniform"] = "uniform"
    """Weigh all images alike."""

    number_of_totals: ClassVar[int] = 2

    def totals(self, block: ImageBlock) -> Float[Tensor, "T K"]:
        return torch.stack([term.sum(0) for term in self._exponentials(block)])

    def value_and_slopes(
        self, block: ImageBlock, totals: Float[Tensor, "T K"]
    ) -> tuple[Float[Tensor, " r"], Float[Tensor, "r K"]]:
        terms, counts = self._exponentials(block), ((totals[0] > 0).sum(), totals.shape[1])
        # In ln(1 + T), an image whose term of the sum is e has the share e / T, and the derivative e' / (1 + T).
        values, slopes = torch.zeros_like(block.weights), torch.zeros_like(block.similarities)
        for term, total, count, sign in zip(terms, totals, counts, (-1, 1), strict=True):
            values += (term / total.clamp(min=torch.finfo().tiny) * total.log1p() / count).sum(1)
            slopes += sign * self.scale * term / (1 + total) / count
        return values / block.weights, slopes

    def _exponentials(self, block: ImageBlock) -> tuple[Float[Tensor, "r K"], Float[Tensor, "r K"]]:
        similarities = block.similarities
        is_own = torch.zeros_like(similarities, dtype=torch.bool).scatter_(1, block.labels[:, None], True)
        pull = (-self.scale * (similarities - self.margin)).exp() * is_own
        return pull, (self.scale * (similarities + self.margin)).exp() * ~is_own
