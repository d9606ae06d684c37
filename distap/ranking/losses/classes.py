"""The classes of a loss with a proxy for each: the part of each rank, scored a block at a time.

Every rank has the descriptors of the whole batch. It scores all of them by its own part of the
classes, so that none holds B x K scores:

              rank 0      rank 1     rank 2
    images  |  block  |  ...      |          |      a row's softmax: sums over ranks, B numbers each
            |    v    |    v      |    v     |      gradient by descriptors: sum over ranks, B x C
    B rows  |  block  |  ...      |          |      gradient by proxies: complete on their rank

The proxies themselves are whole on every rank, or each rank holds its part alone.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distap.errors import DistapError
from distap.ranking.gathered import Gathered, QueryWeights
from distap.ranking.loss import Budget, LossValue, SizedLoss
from distap.ranking.losses.base import TILES_OF_A_BLOCK
from distap.ranking.row_shards import drawn_rows, part_of_rank, sharded, shards_like
from distap.world import ALONE, World, local

# A block has one tile of pairs, but with a large batch so many classes, if they fit in a block of
# other losses: the descriptors are read anew for each block.
LEAST_CLASSES = 256
# Of the B images of a batch.
PerImage = Float64[Tensor, " B"]


@dataclass(frozen=True)
class ClassBlock:
    """Some of this rank's classes, next to the whole batch."""

    numbers: Int64[Tensor, " n"]  # of the classes
    directions: Float[Tensor, "n C"]  # their proxies, scaled to length 1
    lengths: Float[Tensor, "n 1"]  # of the proxies
    scores: Float[Tensor, "B n"]  # a factor times the similarities; -inf for an image's own class
    # The m images whose own class is among these, their columns, and the scores by them.
    images: Int64[Tensor, " m"]
    columns: Int64[Tensor, " m"]
    own_scores: Float[Tensor, " m"]


class ClassesOfRank:
    """This rank's classes: their scores, and what a loss of these gives proxies and descriptors.

    Args:
        parameter: (K, C) the proxies of all classes; as a DTensor, each rank holds its part.
        numbers: (n,) ascending, the classes of this rank that are scored.
        factor: of the similarities.
    """

    def __init__(
        self,
        parameter: Tensor,
        numbers: Int64[Tensor, " n"],
        factor: float,
        gathered: Gathered,
        budget: Budget,
    ) -> None:
        self._parameter = parameter
        self._proxies = local(parameter.detach())
        self._factor = factor
        self._gathered = gathered
        self._scaled = factor * gathered.descriptors
        self._by_batch = torch.zeros_like(gathered.descriptors)
        self._by_proxies = torch.zeros_like(self._proxies)
        self._first = 0  # the class of the first row of `_proxies`
        if isinstance(parameter, DTensor):
            self._first = part_of_rank(len(parameter), gathered.world).start
        itemsize = self._scaled.element_size()
        width = max(budget.pairs(itemsize) // len(self._scaled), LEAST_CLASSES)
        most_pairs = budget.pairs(itemsize, TILES_OF_A_BLOCK)
        width = max(1, min(width, most_pairs // len(self._scaled)))
        self._splits = [*numbers.split(width)] if len(numbers) else []
        self._latest: ClassBlock | None = None

    def blocks(self) -> Iterator[ClassBlock]:
        """Yield the classes in blocks; each call goes the other way than the one before."""
        # So a second pass finds the last block of the first one still there: with few classes, all.
        for numbers in self._splits:
            if self._latest is None or self._latest.numbers is not numbers:
                self._latest = None  # before the next one takes memory
                self._latest = self._block(numbers)
            yield self._latest
        self._splits.reverse()

    def _block(self, numbers: Int64[Tensor, " n"]) -> ClassBlock:
        proxies = self._proxies[numbers - self._first].to(self._scaled)
        lengths = proxies.norm(dim=1, keepdim=True).clamp_(min=1e-12)
        directions = proxies.div_(lengths)
        scores = self._scaled @ directions.t()
        labels = self._gathered.labels.contiguous()
        columns = torch.searchsorted(numbers, labels).clamp_(max=len(numbers) - 1)
        images = (numbers[columns] == labels).nonzero().flatten()
        columns = columns[images]
        own_scores = scores[images, columns]
        scores[images, columns] = -torch.inf
        return ClassBlock(numbers, directions, lengths, scores, images, columns, own_scores)

    def add(self, block: ClassBlock, slopes: Float[Tensor, "B n"]) -> None:
        """Add the derivatives of the batch's loss by the scores of a block."""
        self._by_batch.addmm_(slopes, block.directions, alpha=self._factor)
        # With u = p / |p|, du/dp = (1 - u uᵀ) / |p|: the part of the gradient along u goes.
        gradient = slopes.t() @ self._scaled
        along = (gradient * block.directions).sum(1, keepdim=True)
        gradient.addcmul_(along, block.directions, value=-1).div_(block.lengths)
        self._by_proxies[block.numbers - self._first] = gradient.to(self._by_proxies.dtype)

    def gradients(self) -> tuple[Float[Tensor, "b C"], tuple[Tensor, ...]]:
        """Return the gradients by this rank's descriptors, and by the proxies if they are trained.

        Proxies that are whole on every rank get their whole gradient there.
        """
        by_descriptors = self._gathered.sum_own(self._by_batch)
        if not self._parameter.requires_grad:
            return by_descriptors, ()
        if isinstance(self._parameter, DTensor):
            return by_descriptors, (shards_like(self._parameter, self._by_proxies),)
        return by_descriptors, (self._gathered.world.sum(self._by_proxies),)


@dataclass(frozen=True)
class ProxyLoss(SizedLoss):
    """A mean over images of a function of similarities to K proxies, trained with the network.

    An image's only positive is the proxy of its class. A memory of earlier descriptors changes
    nothing. Each rank scores the whole batch by its part of the classes.
    """

    needs_positives: ClassVar[bool] = False
    takes_memory: ClassVar[bool | None] = None

    weights: QueryWeights = "uniform"
    """Weigh all images alike (uniform), all classes (class), or as `extra` says (given)."""

    @property
    @abstractmethod
    def factor(self) -> float:
        """Return the factor of similarities in the scores of classes."""

    @abstractmethod
    def rank_classes(
        self, classes: ClassesOfRank, gathered: Gathered, weights: PerImage
    ) -> PerImage:
        """Return the loss of each image of the batch, and give `classes` its slopes.

        The loss of the batch is the sum of weights times these.
        """

    def spread(self, dimensions: int) -> float:
        """Return the standard deviation of initial proxies; longer ones turn more slowly."""
        return float((3 * dimensions) ** -0.5)

    @cached_property
    def learned(self) -> nn.ParameterDict:
        return self._learned_on(ALONE)

    def shard_classes(self, world: World, above: int = 0) -> bool:
        if world.size > 1 and (self.classes is None or self.classes > above):
            if "learned" in self.__dict__:
                raise DistapError(
                    "loss.sharded_classes",
                    f"{type(self).__name__}: its proxies are there already: share its classes out"
                    " before anything reads them, or build another loss",
                )
            self.__dict__["learned"] = self._learned_on(world)
        return True

    def _learned_on(self, world: World) -> nn.ParameterDict:
        """Return the first proxies: all of them on a single rank, else this rank's part."""
        if self.classes is None or self.dimensions is None:
            raise DistapError(
                "loss.unknown_classes",
                f"{type(self).__name__} has a proxy for each class: it needs `classes`, the number"
                " of classes, and `dimensions`, that of a descriptor; a recipe needs `classes`"
                " where the training set has no index",
            )
        # A generator of their own, so that all ranks begin alike: proxies are not broadcast, and
        # whole ones stay equal, since every rank moves them by the same sum.
        rows = part_of_rank(self.classes, world)
        proxies = drawn_rows(self.classes, self.dimensions, self.seed or 0, rows)
        proxies *= self.spread(self.dimensions)
        if world.size > 1:
            proxies = sharded(proxies.to(world.device), self.classes, world)
        return nn.ParameterDict({"proxies": nn.Parameter(proxies)})

    def check(self, gathered: Gathered) -> None:
        """Raise a DistapError if the proxies do not fit the batch."""
        proxies = self.learned["proxies"]
        dimensions = gathered.descriptors.shape[1]
        last = int(gathered.labels.max())
        if dimensions != self.dimensions or last >= len(proxies):
            raise DistapError(
                "loss.wrong_proxies",
                f"there are {len(proxies)} proxies of {self.dimensions} dimensions, but labels go"
                f" up to {last} and descriptors have {dimensions} dimensions",
            )
        if isinstance(proxies, DTensor) and proxies.device_mesh.size() != gathered.world.size:
            raise DistapError(
                "loss.sharded_classes",
                f"{type(self).__name__}: its classes are shared out over"
                f" {proxies.device_mesh.size()} ranks, but {gathered.world.size} of them rank this"
                " batch: all of them have to, each its own classes, so mode central cannot",
            )

    def value_and_gradient(self, gathered: Gathered, budget: Budget) -> LossValue:
        self.check(gathered)
        weights = gathered.query_weights(self.weights, 1)
        proxies = self.learned["proxies"]
        rows = part_of_rank(len(proxies), gathered.world)
        numbers = torch.arange(rows.start, rows.stop, device=gathered.gallery.device)
        numbers = self.scored(numbers, gathered)
        classes = ClassesOfRank(proxies, numbers, self.factor, gathered, budget)
        per_query = self.rank_classes(classes, gathered, weights)
        gradient, by_parameters = classes.gradients()
        own_weights = weights[gathered.own]
        return LossValue(
            value=(weights * per_query).sum(),
            per_query=torch.where(own_weights > 0, per_query[gathered.own], torch.nan),
            gradient=gradient,
            by_parameters=by_parameters,
        )

    def scored(self, numbers: Int64[Tensor, " n"], gathered: Gathered) -> Int64[Tensor, " m"]:
        """Return those of this rank's classes that a step scores."""
        return numbers
