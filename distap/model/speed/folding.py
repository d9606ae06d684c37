"""Frozen BatchNorm folded into the convolutions before it, for forward passes without a graph."""

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from timm.layers.conv2d_same import Conv2dSame
from timm.layers.norm_act import BatchNormAct2d
from torch import Tensor, nn

from distap.errors import DistapError
from distap.model.network import RetrievalNetwork

# Exactly these: a subclass may use its weight in another way, such as standardised.
CONVOLUTIONS: tuple[type[nn.Module], ...] = (nn.Conv2d, Conv2dSame)
NORMALISERS: tuple[type[nn.Module], ...] = (nn.BatchNorm2d, BatchNormAct2d)
TOLERANCE = 1e-6  # of features in float64, relative: a wrong pair is wrong in the first digits
EXAMPLE_SIZE = 64  # pixels, where a backbone says nothing of its own


class FoldedNetwork:
    """A network's twin without BatchNorm: convolutions carry its scale and shift.

    Every other tensor is the network's own, so the twin takes the memory of the folded convolutions. Descriptors
    are the network's to rounding, which is tried at the start on a copy with other statistics.

    Attributes:
        network: the twin.
        folds: convolutions with BatchNorm behind them that were folded.

    Args:
        network: BatchNorm frozen; no engine has wrapped it yet.
        dtype: of the folded convolutions, where forward passes run under an autocast to it; None keeps theirs.
    Raises:
        DistapError: BatchNorm is not frozen, none follows a convolution, or folding changes the descriptors.
    """

    def __init__(self, network: RetrievalNetwork, dtype: torch.dtype | None = None) -> None:
        if network.batchnorm != "frozen":
            raise DistapError(
                "describe.fold_batchnorm needs frozen BatchNorm (model.batchnorm: frozen): with `batch` its scale "
                "and shift depend on the micro-batch"
            )
        self._source = network
        pairs = _checked_pairs(network.backbone)
        self.network = cast(RetrievalNetwork, _twin(network))
        self.folds = _fold(network.backbone, self.network.backbone, pairs, dtype)
        folded = {id(fold.folded) for fold in self.folds}
        live = dict(network.named_modules())
        self._shared = [
            (module, live[name])
            for name, module in self.network.named_modules()
            if id(module) not in folded and name in live
        ]
        self.refresh()

    def refresh(self) -> None:
        """Fold the network's present weights; to be called once a step, where its parameters are whole."""
        if self.network.training != self._source.training:
            self.network.train(self._source.training)
        for module, source in self._shared:
            for own, its in ((module._parameters, source._parameters), (module._buffers, source._buffers)):
                own.update((name, its[name]) for name in own if own[name] is not its[name])
        with torch.no_grad():
            for fold in self.folds:
                fold.refresh()

    def __call__(self, images: Tensor) -> Tensor:
        """Descriptors (n, C) of images, without a graph."""
        with torch.no_grad():
            descriptors: Tensor = self.network(images)
        return descriptors


@dataclass(frozen=True)
class Fold:
    """A convolution, the BatchNorm behind it, and the convolution that does the work of both."""

    convolution: nn.Conv2d
    normaliser: nn.BatchNorm2d
    folded: nn.Conv2d

    def refresh(self) -> None:
        """With frozen statistics, BatchNorm is x times `scale` plus a shift, and so is each output channel."""
        normaliser, folded = self.normaliser, self.folded
        assert normaliser.running_mean is not None and normaliser.running_var is not None
        assert folded.bias is not None
        scale = (normaliser.running_var + normaliser.eps).rsqrt()
        if normaliser.weight is not None:
            scale = scale * normaliser.weight
        bias = -normaliser.running_mean
        if self.convolution.bias is not None:
            bias = bias + self.convolution.bias
        bias = bias * scale
        if normaliser.bias is not None:
            bias = bias + normaliser.bias
        torch.mul(self.convolution.weight, scale.view(-1, 1, 1, 1), out=folded.weight)
        folded.bias.copy_(bias)


def _checked_pairs(backbone: nn.Module) -> list[tuple[str, str]]:
    """Names of the convolutions and of the BatchNorm that alone consumes what each gives.

    Raises:
        DistapError: there are none, or folding them changes what the backbone gives.
    """
    name = type(backbone).__name__
    trial = copy.deepcopy(backbone).double().eval()
    example = _example(trial)
    # The statistics of an untrained network are 0 and 1, which would hide any mistake.
    _randomise(trial, torch.Generator().manual_seed(0))
    with torch.no_grad():
        with _observed(trial) as pairs:
            expected = trial(example)
        if not pairs:
            raise DistapError(
                f"describe.fold_batchnorm: {name} has no BatchNorm right behind a convolution; set it to false"
            )
        folded = _twin(trial)
        for fold in _fold(trial, folded, pairs, None):
            fold.refresh()
        error = float((folded(example) - expected).abs().max() / expected.abs().max())
    if not error <= TOLERANCE:
        raise DistapError(
            f"describe.fold_batchnorm: folding {len(pairs)} BatchNorm layers of {name} changes its features by "
            f"{error:.1g}, relative to the largest; set it to false"
        )
    return pairs


@contextmanager
def _observed(backbone: nn.Module) -> Iterator[list[tuple[str, str]]]:
    """While it is entered, one forward pass finds which BatchNorm is given what which convolution made."""
    found: list[tuple[str, str]] = []
    calls: Counter[str] = Counter()
    made: dict[int, tuple[str, Tensor, int]] = {}  # the tensors are held, so that no other takes their place
    handles = []

    def watch_convolution(name: str, module: nn.Module) -> None:
        def after(_: nn.Module, __: Any, output: Tensor) -> None:
            calls[name] += 1
            made[id(output)] = (name, output, output._version)

        handles.append(module.register_forward_hook(after))

    def watch_normaliser(name: str, module: nn.Module) -> None:
        def before(_: nn.Module, inputs: tuple[Tensor]) -> None:
            calls[name] += 1
            convolution, _tensor, version = made.get(id(inputs[0]), ("", None, 0))
            # What has been written to since is not what the convolution gave.
            if convolution and inputs[0]._version == version:
                found.append((convolution, name))

        handles.append(module.register_forward_pre_hook(before))

    for name, module in backbone.named_modules():
        if type(module) in CONVOLUTIONS:
            watch_convolution(name, module)
        elif type(module) in NORMALISERS and module.running_mean is not None:
            watch_normaliser(name, module)
    pairs: list[tuple[str, str]] = []
    try:
        yield pairs
    finally:
        for handle in handles:
            handle.remove()
    uses = Counter(chain.from_iterable(found))
    pairs += [pair for pair in found if all(calls[name] == uses[name] == 1 for name in pair)]


def _twin(module: nn.Module) -> nn.Module:
    """A copy of the modules with the same tensors in them."""
    return copy.deepcopy(module, {id(tensor): tensor for tensor in chain(module.parameters(), module.buffers())})


def _fold(source: nn.Module, twin: nn.Module, pairs: list[tuple[str, str]], dtype: torch.dtype | None) -> list[Fold]:
    """Replace the pairs in `twin`; their weights are still to be computed."""
    folds = []
    for convolution_name, normaliser_name in pairs:
        convolution, normaliser = source.get_submodule(convolution_name), source.get_submodule(normaliser_name)
        assert isinstance(convolution, nn.Conv2d) and isinstance(normaliser, nn.BatchNorm2d)
        folded = twin.get_submodule(convolution_name)
        assert isinstance(folded, nn.Conv2d)
        weight = torch.empty_like(convolution.weight, dtype=dtype)
        folded.weight = nn.Parameter(weight, requires_grad=False)
        folded.bias = nn.Parameter(weight.new_empty(len(weight)), requires_grad=False)
        twin.set_submodule(normaliser_name, _behind(twin.get_submodule(normaliser_name)))
        folds.append(Fold(convolution, normaliser, folded))
    return folds


def _behind(normaliser: nn.Module) -> nn.Module:
    """What is left of a BatchNorm layer once its arithmetic is done elsewhere."""
    if isinstance(normaliser, BatchNormAct2d):
        return nn.Sequential(normaliser.drop, normaliser.act)
    return nn.Identity()


def _randomise(backbone: nn.Module, generator: torch.Generator) -> None:
    with torch.no_grad():
        for module in backbone.modules():
            if type(module) in NORMALISERS and module.running_mean is not None:
                assert isinstance(module, nn.BatchNorm2d) and module.running_var is not None
                for tensor, low, high in (
                    (module.running_mean, -0.1, 0.1),
                    (module.running_var, 0.5, 2.0),
                    (module.weight, 0.5, 1.5),
                    (module.bias, -0.1, 0.1),
                ):
                    if tensor is not None:
                        tensor.copy_(torch.rand(tensor.shape, generator=generator) * (high - low) + low)


def _example(backbone: nn.Module) -> Tensor:
    """An image of noise (1, 3, height, width), of the size that the backbone was made for."""
    given = (getattr(backbone, "pretrained_cfg", None) or {}).get("input_size") or (3, EXAMPLE_SIZE, EXAMPLE_SIZE)
    first = next(backbone.parameters())
    return torch.randn(1, *given, generator=torch.Generator().manual_seed(0)).to(first)
