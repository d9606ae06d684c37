"""Losses that classify each image by similarity to proxies: one learned direction per class."""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from pydantic import PositiveFloat
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from distap.errors import DistapError
from distap.ranking.gathered import Gathered, QueryWeights
from distap.ranking.loss import Budget, LossValue, SizedLoss, strips
from distap.ranking.losses.base import gradients


@dataclass(frozen=True)
class ProxyLoss(SizedLoss):
    """A mean over images of a function of similarities to K proxies, which are trained with the network.

    Each rank takes its own images, a block at a time. A memory of earlier descriptors changes nothing.
    """

    weights: QueryWeights = "uniform"
    """Weigh all images alike (uniform), or all classes of the batch (class)."""
    needs_positives: ClassVar[bool] = False

    @abstractmethod
    def loss(self, similarities: Float[Tensor, "r K"], labels: Int64[Tensor, " r"]) -> Float[Tensor, " r"]:
        """Return the loss of each of r images, differentiable by its similarities to the proxies."""

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
        weights = gathered.query_weights(self.weights, smallest=1)[own]
        # With Q a block's descriptors, P the proxies and G = dL/d(Q Pᵀ), (r, K): dL/dQ = G P, and dL/dP = Gᵀ Q summed
        # over blocks and ranks. Autograd differentiates a block's loss, and at the end the proxies' normalisation.
        per_query, of_images = torch.zeros_like(weights), torch.zeros_like(descriptors[: len(own)])
        of_proxies, fixed = torch.zeros_like(proxies), proxies.detach()
        for rows in strips(0, len(own), max(1, budget.pairs(descriptors.element_size()) // len(proxies))):
            block = descriptors[own[rows]]
            with torch.inference_mode(False), torch.enable_grad():
                similarities = (block @ fixed.t()).clone().requires_grad_()
                values = self.loss(similarities, labels[own[rows]].clone())
                (slopes,) = gradients((values * weights[rows].to(values)).sum(), similarities)
            per_query[rows], of_images[rows] = values.detach().double(), slopes @ fixed
            of_proxies.addmm_(slopes.t(), block)
        of_proxies = gathered.world.sum(of_proxies)
        with torch.inference_mode(False):
            found = torch.autograd.grad(proxies, self.parameters, of_proxies.clone()) if self.parameters else ()
        return LossValue(gathered.world.sum((weights * per_query).sum()), per_query, of_images, found)


@dataclass(frozen=True)
class ProxyNCA(ProxyLoss):
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
class NormalizedSoftmax(ProxyLoss):
    """Normalised softmax (Zhai and Wu 2019): a softmax over similarities to the proxies."""

    temperature: PositiveFloat = 0.05
    """Temperature of the similarities."""

    def loss(self, similarities: Float[Tensor, "r K"], labels: Int64[Tensor, " r"]) -> Float[Tensor, " r"]:
        return cross_entropy(similarities / self.temperature, labels, reduction="none")
