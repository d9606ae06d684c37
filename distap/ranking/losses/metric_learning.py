"""Any loss of pytorch-metric-learning on the gathered descriptors: triplet, contrastive and the other baselines."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from distap.errors import DistapError
from distap.ranking.losses.base import DescriptorLoss


@dataclass(frozen=True)
class MetricLearning(DescriptorLoss):
    """A loss of pytorch-metric-learning, computed on rank 0 for all; it takes B x B values of memory at least."""

    function: str  # class of the loss, such as `TripletMarginLoss`
    options: Mapping[str, Any] = field(default_factory=dict)  # of its constructor, such as {margin: 0.1}
    miner: str | None = None  # class that chooses pairs or triplets, such as `MultiSimilarityMiner`
    miner_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        function, _ = self._built()
        if any(True for _ in function.parameters()):
            raise ValueError(f"{self.function} has parameters of its own, which nothing here would train")

    def _built(self) -> tuple[nn.Module, nn.Module | None]:
        package = _package()
        function = _instance(package.losses, "loss", self.function, self.options)
        if self.miner is None:
            return function, None
        return function, _instance(package.miners, "miner", self.miner, self.miner_options)

    def loss(self, descriptors: Tensor, labels: Tensor, gallery: Tensor, gallery_labels: Tensor) -> Tensor:
        """The loss of the batch; what a memory remembers serves as references."""
        function, miner = self._built()
        if len(gallery) == len(descriptors):
            return function(descriptors, labels, None if miner is None else miner(descriptors, labels))
        package = _package()
        supported = package.losses.CrossBatchMemory.supported_losses()
        if self.function not in supported:
            raise DistapError(f"loss {self.function} cannot rank against a memory; {', '.join(supported)} can")
        if miner is None:
            pairs = package.utils.loss_and_miner_utils.get_all_pairs_indices(labels, gallery_labels)
        else:
            pairs = miner(descriptors, labels, gallery, gallery_labels)
        return function(descriptors, labels, _without_self(pairs), gallery, gallery_labels)


def _without_self(pairs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The pairs or triplets in which no image is its own positive; anchor and positive come first in both."""
    other = pairs[0] != pairs[1]
    kept = 2 if len(pairs) == 4 else 3
    return (*(part[other] for part in pairs[:kept]), *pairs[kept:])


def _package() -> ModuleType:
    try:
        for part in ("losses", "miners", "utils.loss_and_miner_utils"):
            import_module(f"pytorch_metric_learning.{part}")
        return import_module("pytorch_metric_learning")
    except ImportError as error:
        raise DistapError("pytorch-metric-learning is missing: pip install 'distap[metric-learning]'") from error


def _instance(module: ModuleType, kind: str, name: str, options: Mapping[str, Any]) -> nn.Module:
    made = getattr(module, name, None)
    if not (isinstance(made, type) and issubclass(made, nn.Module)):
        raise ValueError(f"pytorch-metric-learning has no {kind} {name!r}")
    try:
        return made(**options)
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from error
