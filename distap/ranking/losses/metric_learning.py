"""Any loss of pytorch-metric-learning on the gathered descriptors: triplet, contrastive and the other baselines."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from distap.errors import DistapError
from distap.ranking.budget import Budget
from distap.ranking.central import rank_on_rank_zero
from distap.ranking.gathered import Gathered
from distap.ranking.protocol import LossValue


@dataclass(frozen=True)
class MetricLearning:
    """A loss of pytorch-metric-learning, by autograd, on one rank for all.

    It materialises whatever that loss materialises, B x B values at least. Query weights do not apply.

    Args:
        function: its class, such as `TripletMarginLoss`.
        options: what its constructor takes, such as {margin: 0.1}.
        miner: class of a miner that chooses pairs or triplets for it, such as `MultiSimilarityMiner`.
        miner_options: what the miner's constructor takes.
    Raises:
        DistapError: the package is not installed, there is no such loss or miner, it does not take these options,
            or it has parameters of its own, which nothing here would train.
    """

    function: str
    options: Mapping[str, Any] = field(default_factory=dict)
    miner: str | None = None
    miner_options: Mapping[str, Any] = field(default_factory=dict)
    weights: Literal["uniform"] = "uniform"
    name: Literal["metric_learning"] = "metric_learning"

    # Read by pydantic where this is a configuration section.
    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False}  # noqa: RUF012

    def __post_init__(self) -> None:
        if self.weights != "uniform":
            raise ValueError(f"weights is {self.weights!r}; a loss of pytorch-metric-learning has only 'uniform'")
        package = _package()
        function = _built(package.losses, "loss", self.function, self.options)
        if any(True for _ in function.parameters()):
            raise ValueError(f"{self.function} has parameters of its own, which nothing here would train")
        if self.miner is not None:
            _built(package.miners, "miner", self.miner, self.miner_options)

    def value_and_gradient(self, gathered: Gathered, budget: Budget) -> LossValue:
        """Loss of the whole batch, and the gradient of this rank's descriptors."""
        if gathered.world.size > 1:
            return rank_on_rank_zero(self, gathered, budget)
        # What is drawn depends on the batch alone, so that a run that was interrupted draws the same again.
        devices = [gathered.gallery.device] if gathered.gallery.device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.enable_grad():
            torch.manual_seed(int(gathered.labels.sum()))
            descriptors = gathered.descriptors.detach().clone().requires_grad_()
            loss = self._value(descriptors, gathered)
            # A loss without any pair or triplet left is a constant.
            gradient = torch.zeros_like(descriptors)
            if loss.requires_grad:
                (gradient,) = torch.autograd.grad(loss, descriptors)
        return LossValue(loss.detach().double(), None, gradient)

    def _value(self, descriptors: Tensor, gathered: Gathered) -> Tensor:
        package = _package()
        function = _built(package.losses, "loss", self.function, self.options)
        miner = None if self.miner is None else _built(package.miners, "miner", self.miner, self.miner_options)
        labels = gathered.labels
        remembered = gathered.gallery[len(labels) :]
        if not len(remembered):
            pairs = None if miner is None else miner(descriptors, labels)
            value: Tensor = function(descriptors, labels, pairs)
            return value
        supported = package.losses.CrossBatchMemory.supported_losses()
        if self.function not in supported:
            raise DistapError(f"loss {self.function} cannot rank against a memory; {', '.join(supported)} can")
        gallery = torch.cat([descriptors, remembered])
        if miner is None:
            pairs = package.utils.loss_and_miner_utils.get_all_pairs_indices(labels, gathered.gallery_labels)
        else:
            pairs = miner(descriptors, labels, gallery, gathered.gallery_labels)
        value = function(descriptors, labels, _without_self(pairs), gallery, gathered.gallery_labels)
        return value


def _without_self(pairs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Pairs or triplets in which no image is its own positive; anchor and positive come first in both."""
    other = pairs[0] != pairs[1]
    kept = 2 if len(pairs) == 4 else 3
    return (*(part[other] for part in pairs[:kept]), *pairs[kept:])


def _package() -> ModuleType:
    try:
        for part in ("losses", "miners", "utils.loss_and_miner_utils"):
            import_module(f"pytorch_metric_learning.{part}")
        return import_module("pytorch_metric_learning")
    except ImportError as error:
        raise DistapError(
            "losses of pytorch-metric-learning need that package: pip install 'distap[metric-learning]'"
        ) from error


def _built(module: ModuleType, kind: str, name: str, options: Mapping[str, Any]) -> nn.Module:
    made = getattr(module, name, None)
    if not (isinstance(made, type) and issubclass(made, nn.Module)):
        raise ValueError(f"pytorch-metric-learning has no {kind} {name!r}")
    try:
        built: nn.Module = made(**options)
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from error
    return built
