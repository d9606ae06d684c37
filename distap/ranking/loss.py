"""The interface of losses: from a gathered batch and a memory budget to a loss and its gradient."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from inspect import Parameter, signature
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int64
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor, nn

from distap.errors import DistapError
from distap.ranking.gathered import Gathered
from distap.world import World

Presets = Mapping[str, Mapping[str, Any]]
# Pairs of a tile: on a CPU, as many as stay in its cache while they are worked on; on a GPU, enough
# to keep it busy.
CPU_TILE_PAIRS = 2**19
GPU_TILE_PAIRS = 2**26
# The number K of classes of a training set, or their numbers, (K,), or with those of the coarser
# ones, (K, L).
KnownClasses = int | Int64[Tensor, "K *L"] | None
# Of n images, such as those that arrive together.
DescriptorRows = Float[Tensor, "n C"]
LabelRows = Int64[Tensor, " n"]
FlagRows = Bool[Tensor, " n"]
# values, in the dtype of the descriptors, that are alive at once for each pair of a tile
TENSORS_A_PAIR = 8


@dataclass(frozen=True)
class Budget:
    """Memory for ranking next to the descriptors: half for tiles, half to keep between passes."""

    device: torch.device  # of the descriptors
    # None takes 1 GiB on a CPU and a quarter of the free memory on a GPU
    memory_bytes: int | None = None

    @property
    def half(self) -> int:
        if self.memory_bytes is not None:
            return self.memory_bytes // 2
        return _free_at_first(self.device) // 8 if self.device.type == "cuda" else 2**29

    def pairs(self, itemsize: int, tiles: int = 1) -> int:
        """Return the number of pairs in a tile, for descriptors with `itemsize` bytes per value.

        On a CPU, multiply them by `tiles` if a block does not stay in the cache.
        """
        tile_pairs = GPU_TILE_PAIRS if self.device.type == "cuda" else CPU_TILE_PAIRS * tiles
        return max(1, min(tile_pairs, self.half // (TENSORS_A_PAIR * itemsize)))


@cache
def _free_at_first(device: torch.device) -> int:
    """Return the bytes free on a GPU at the first call, always, so that tiles keep their size."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


class LossValue(NamedTuple):
    """A loss of the global batch, and this rank's part of its gradient.

    The loss is a mean over the queries of all ranks, so gradients are summed over ranks, never
    averaged. The gradient may lack its part along the descriptor itself, which L2 normalisation
    removes anyway.
    """

    value: Float64[Tensor, ""]  # the same on every rank
    # The loss of each own query, NaN for a query without positives; None if the loss is no mean
    # over queries.
    per_query: Float64[Tensor, " b"] | None
    gradient: Float[Tensor, "b C"]  # by the descriptors of `Gathered.own`
    # by each of `Loss.parameters`, summed over the ranks already
    by_parameters: tuple[Tensor, ...] = ()


class Counter:
    """A loss's work while descriptors of the batch still arrive; here all is left to the end."""

    def __init__(self, loss: "Loss", budget: Budget) -> None:
        self.loss = loss
        self.budget = budget
        self.seen = 0  # images that were added

    def add(self, descriptors: DescriptorRows, labels: LabelRows, is_own: FlagRows) -> None:
        """Add the gallery's next descriptors; `labels` and `is_own` are on the CPU."""
        self.seen += len(labels)

    def value_and_gradient(self, gathered: Gathered) -> LossValue:
        """Finish the loss; the first `seen` images of the gallery were added, others not."""
        return self.loss.value_and_gradient(gathered, self.budget)


@dataclass(frozen=True)
class Loss(ABC):
    """A listwise loss: a frozen dataclass whose fields are its settings.

    `distap.ranking.losses.base` makes one from any differentiable function of similarities or of
    descriptors.
    """

    presets: ClassVar[Presets] = {}  # settings that give the numbers of published code
    is_ap: ClassVar[bool] = False  # 1 - loss is an Average Precision
    # a query counts only if another image of its class is ranked
    needs_positives: ClassVar[bool] = True
    query_level: ClassVar[int] = 0  # the level of that class: 0 is the finest, -1 the coarsest
    asymmetric: ClassVar[bool] = False  # queries and gallery may be of two networks
    # Whether descriptors of earlier batches are ranked too. None: they change nothing.
    takes_memory: ClassVar[bool | None] = True
    # a method, and how many parameters all have
    formula: ClassVar[tuple[str, int]] = ("value_and_gradient", 2)

    # pydantic reads this where a recipe holds the loss.
    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False}  # noqa: RUF012

    @abstractmethod
    def value_and_gradient(self, gathered: Gathered, budget: Budget) -> LossValue:
        """Return the loss of the whole batch, and its gradient by this rank's descriptors.

        Every rank calls this, without autograd and outside autocast. The dtype of the descriptors
        is the precision of similarities and gradients.
        """

    @property
    def learned(self) -> nn.Module | None:
        """The module with the parameters that this loss trains, such as proxies."""
        return None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters of the module `learned` that require gradients."""
        if self.learned is None:
            return []
        return [parameter for parameter in self.learned.parameters() if parameter.requires_grad]

    @cached_property
    def taken(self) -> tuple[str, ...]:
        """Names of further tensors of images, which the formula takes without a default."""
        method, common = self.formula
        function = getattr(self, method)
        try:
            # A module's `forward` is looked at, for `__call__` takes anything.
            parameters = signature(getattr(function, "forward", function)).parameters.values()
        except ValueError:  # of a function written in C
            return ()
        named = Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY
        return tuple(
            parameter.name
            for parameter in [*parameters][common:]
            if parameter.default is Parameter.empty and parameter.kind in named
        )

    @property
    def extras(self) -> tuple[str, ...]:
        """Names of the tensors of `Gathered.extra` that this loss needs."""
        return *self.taken, *(["weights"] if getattr(self, "weights", None) == "given" else [])

    def is_query(self, gathered: Gathered) -> Bool[Tensor, " B"]:
        """Return which images of the batch count as queries."""
        if not self.needs_positives:
            return torch.ones_like(gathered.samples, dtype=torch.bool)
        return gathered.class_sizes[: len(gathered.samples), self.query_level] > 1

    def has_negatives(self, gathered: Gathered) -> bool:
        """Return whether queries are ranked against other classes, if the loss needs that."""
        is_one_class = bool(gathered.class_sizes[0, 0] == len(gathered.gallery))
        return not (self.needs_positives and is_one_class)

    def sized(self, classes: KnownClasses, dimensions: int | None, seed: int) -> "Loss":
        """Return this loss with new parameters, for K classes, if known, and C dimensions."""
        return self

    def shard_classes(self, world: World, above: int = 0) -> bool:
        """Let each rank hold the parameters of its part of the classes alone, if these are many.

        Call it before `learned` is read. Such parameters are DTensors, and so are their gradients.

        Args:
            above: the number of classes of a loss up to which they stay whole on every rank.
        Returns:
            True if this loss, or one within it, has parameters for each class.
        """
        return False

    def counter(self, pairs: int, budget: Budget) -> Counter:
        """Return a counter for a batch of about `pairs` pairs of an own query and an image."""
        return Counter(self, budget)


@dataclass(frozen=True, kw_only=True)
class SizedLoss(Loss):
    """A loss with learned parameters per class."""

    classes: PositiveInt | None = None
    """Number K of classes, with labels 0 to K - 1; null takes the number in the training set."""
    dimensions: PositiveInt | None = None
    """Number C of dimensions of the descriptors; null takes the network's."""
    seed: NonNegativeInt | None = None
    """Seed of the initial parameters; null takes the recipe's."""

    def sized(self, classes: KnownClasses, dimensions: int | None, seed: int) -> "SizedLoss":
        if isinstance(classes, Tensor):
            classes = len(classes)
        _refuse_other("classes", self.classes, classes)
        _refuse_other("dimensions", self.dimensions, dimensions)
        seed = seed if self.seed is None else self.seed
        return replace(self, classes=self.classes or classes, dimensions=dimensions, seed=seed)


def _refuse_other(key: str, setting: int | None, number: int | None) -> None:
    if None not in (setting, number) and setting != number:
        raise DistapError(
            "loss.wrong_setting",
            f"loss: {key} is {setting}, but this training has {number}; leave {key} out",
        )


def rank_on_rank_zero(loss: Loss, gathered: Gathered, budget: Budget) -> LossValue:
    """Let rank 0 rank the whole batch like a single process, then give each rank its part.

    If the loss fails, rank 0 raises its error, and the others a DistapError.
    """
    world = gathered.world
    batch = len(gathered.samples)
    loss_value = torch.zeros((), dtype=torch.float64, device=gathered.gallery.device)
    per_query = loss_value.new_full((batch,), torch.nan)
    gradient = None
    failure = None
    by_parameters = tuple(map(torch.zeros_like, loss.parameters))
    if world.rank == 0:
        # To the loss it looks like a single process whose own rows are all rows.
        all_rows = torch.arange(batch, device=loss_value.device)
        whole = replace(
            gathered, own=all_rows, world=World(device=world.device), order=None, arrival=None
        )
        try:
            value = loss.value_and_gradient(whole, budget)
            gradient = whole.spread(value.gradient)
            loss_value = value.value
            by_parameters = value.by_parameters
            if value.per_query is not None:
                per_query = value.per_query
        except Exception as error:
            failure = error
    # Every rank raises: the others would wait for rank 0 in the next collective.
    if not world.all_agree(failure is None):
        raise failure or DistapError(
            "ranks.problem", "rank 0 could not rank the batch; its own message says why"
        )
    # The gradient of each slot goes to the rank that holds it; slots that take no part have zeros.
    received = world.scatter_rows(
        gradient, gathered.gallery, len(gathered.taking_part), gathered.order
    )
    loss_value = world.broadcast(loss_value)
    per_query = world.broadcast(per_query)
    slopes = [
        world.broadcast(slope.to(gathered.gallery)).to(parameter)
        for slope, parameter in zip(by_parameters, loss.parameters, strict=True)
    ]
    return LossValue(
        value=loss_value,
        # The loss may have none.
        per_query=None if per_query.isnan().all() else per_query[gathered.own],
        gradient=received[gathered.local],
        by_parameters=tuple(slopes),
    )


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute outside autocast and without TF32, whose rounding spoils bins and gradients."""
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def strips(start: int, stop: int, width: int) -> Iterator[slice]:
    """Cut a range into parts of similar size, none wider than `width`."""
    # Even strips: a narrow rest would be a tile of its own, and slower.
    length = stop - start
    count = -(-length // width)
    cuts = [start + number * length // max(count, 1) for number in range(count + 1)]
    yield from map(slice, cuts[:-1], cuts[1:])
