"""Any loss of pytorch-metric-learning on the gathered descriptors, for baselines."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distap.errors import DistapError
from distap.ranking.loss import SizedLoss
from distap.ranking.losses.base import DescriptorLoss


@dataclass(frozen=True)
class MetricLearning(DescriptorLoss, SizedLoss):
    """A loss of pytorch-metric-learning, computed on rank 0 for all.

    Needs memory for at least B x B values.

    A loss with parameters of its own, such as `ProxyAnchorLoss`, is built for `classes` and
    `dimensions`.
    """

    function: str
    """Class of the loss in pytorch-metric-learning, such as `TripletMarginLoss`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the loss's constructor, such as {margin: 0.1}."""
    miner: str | None = None
    """Class that chooses pairs or triplets, such as `MultiSimilarityMiner`."""
    miner_options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the miner's constructor."""

    def __post_init__(self) -> None:
        # which raises for what is wrong
        self._built(classes=self.classes or 2, dimensions=self.dimensions or 2)

    def _built(
        self, classes: int | None, dimensions: int | None
    ) -> tuple[nn.Module, nn.Module | None]:
        package = _package()
        sizes = {"num_classes": classes, "embedding_size": dimensions}
        # Proxies are drawn in the constructor: the same on every rank, and without moving the
        # caller's random state.
        with torch.random.fork_rng([]):
            torch.manual_seed(self.seed or 0)
            function = _instance(package.losses, "loss", self.function, self.options, sizes)
        if self.miner is None:
            return function, None
        return function, _instance(package.miners, "miner", self.miner, self.miner_options, {})

    @cached_property
    def _parts(self) -> tuple[nn.Module, nn.Module | None]:
        try:
            return self._built(self.classes, self.dimensions)
        except ValueError as error:
            raise DistapError(
                "loss.value", f"{error}; give the loss `classes` and `dimensions`"
            ) from error

    @property
    def learned(self) -> nn.Module | None:
        return self._parts[0]

    def loss(self, descriptors: Tensor, labels: Tensor) -> Tensor:
        function, miner = self._parts
        return function(descriptors, labels, None if miner is None else miner(descriptors, labels))


def _package() -> ModuleType:
    try:
        for module_name in ("losses", "miners"):
            import_module(f"pytorch_metric_learning.{module_name}")
        return import_module("pytorch_metric_learning")
    except ImportError as error:
        raise DistapError(
            "package.missing",
            "pytorch-metric-learning is missing: pip install 'distap[metric-learning]'",
        ) from error


def _instance(
    module: ModuleType,
    kind: str,
    name: str,
    options: Mapping[str, Any],
    sizes: Mapping[str, int | None],
) -> nn.Module:
    made = getattr(module, name, None)
    if not (isinstance(made, type) and issubclass(made, nn.Module)):
        raise ValueError(f"pytorch-metric-learning has no {kind} {name!r}")
    try:
        parameters = signature(made).parameters
        return made(
            **{key: size for key, size in sizes.items() if key in parameters and size is not None}
            | {**options}
        )
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from error
