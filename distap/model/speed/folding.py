"""A cheaper stage one: lower precision, and frozen BatchNorm folded into the convolutions before it.

With frozen statistics, BatchNorm multiplies each channel by a number and adds another. So does a convolution with
other weights, and stage one needs no graph, so a twin of the network can do both at once:

    convolution(x, w, b) -> BatchNorm      becomes      convolution(x, scale * w, scale * (b - mean) + shift)
"""

import copy
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from timm.layers.conv2d_same import Conv2dSame
from timm.layers.norm_act import BatchNormAct2d
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from distap.errors import DistapError
from distap.model.network import RetrievalNetwork
from distap.model.speed.compiling import compile_backbone

# Exactly these types: a subclass may use its weight in another way, for example standardise it.
CONVOLUTIONS: tuple[type[nn.Module], ...] = (nn.Conv2d, Conv2dSame)
NORMALISERS: tuple[type[nn.Module], ...] = (nn.BatchNorm2d, BatchNormAct2d)
TOLERANCE = 1e-6  # of features in float64, relative; a wrong pair changes the first digits


class Describer:
    """Describes images without a graph; the difference to replay is the replay drift.

    Folding leaves the network as it is. Its twin shares every tensor except the folded convolutions, `folds`.

    Args:
        network: the one that is trained; to fold BatchNorm, before an engine wraps it.
        dtype: of convolutions and matrix products; None keeps that of the parameters.
    """

    def __init__(
        self, network: RetrievalNetwork, dtype: torch.dtype | None = None, fold_batchnorm: bool = False
    ) -> None:
        self._dtype = dtype if dtype != torch.float32 else None
        self._source = self._network = network
        self.folds: list[Fold] = []
        if not fold_batchnorm:
            return
        network.require_frozen("describe.fold_batchnorm", "scales and shifts by the micro-batch")
        pairs = _checked_pairs(network.backbone)
        self._network = cast(RetrievalNetwork, _twin(network))
        self.folds = _fold(network.backbone, self._network.backbone, pairs, self._dtype)
        folded = {id(fold.folded) for fold in self.folds}
        live = dict(network.named_modules())
        named = self._network.named_modules()
        self._shared = [(m, live[name]) for name, m in named if id(m) not in folded and name in live]
        self.refresh()

    def refresh(self) -> None:
        """Take over the network's present weights; call it once a step, while the parameters are whole."""
        if not self.folds:
            return
        if self._network.training != self._source.training:
            self._network.train(self._source.training)
        for module, source in self._shared:
            for own, its in ((module._parameters, source._parameters), (module._buffers, source._buffers)):
                own.update((name, its[name]) for name in own if own[name] is not its[name])
        for fold in self.folds:
            fold.refresh()

    def compile(self, sizes: Sequence[int]) -> None:
        compile_backbone(self._network, sizes)

    def __call__(self, images: Tensor) -> Tensor:
        """Return descriptors (n, C) of a micro-batch, float32 or wider."""
        # A new region each time: it caches casts of weights, which are stale after the next update.
        with torch.no_grad(), torch.autocast(images.device.type, self._dtype, enabled=self._dtype is not None):
            return self._network(images)


@dataclass(frozen=True)
class Fold:
    """A convolution, the BatchNorm behind it, and the convolution that replaces both."""

    convolution: nn.Conv2d
    normaliser: nn.BatchNorm2d
    folded: nn.Conv2d

    @torch.no_grad()
    def refresh(self) -> None:
        own, norm = self.convolution, self.normaliser
        assert norm.running_mean is not None and norm.running_var is not None and self.folded.bias is not None
        statistics = norm.running_mean, norm.running_var, norm.eps
        weight, bias = fuse_conv_bn_weights(own.weight, own.bias, *statistics, norm.weight, norm.bias)
        self.folded.weight.copy_(weight)
        self.folded.bias.copy_(bias)


def _checked_pairs(backbone: nn.Module) -> list[tuple[str, str]]:
    """Return the names of convolutions and of the BatchNorm that alone reads the output of each.

    A DistapError tells if there are none, or if folding them changes the output of a copy with other statistics.
    """
    name = type(backbone).__name__
    trial = copy.deepcopy(backbone).double().eval()
    generator = torch.Generator().manual_seed(0)
    size = (getattr(trial, "pretrained_cfg", None) or {}).get("input_size") or (3, 64, 64)
    example = torch.randn(1, *size, generator=generator).to(next(trial.parameters()))
    with torch.no_grad():
        # An untrained network has means of 0 and variances of 1, which would hide any mistake.
        for module in trial.modules():
            if type(module) in NORMALISERS:
                for tensor in (module.running_mean, module.running_var, module.weight, module.bias):
                    if isinstance(tensor, Tensor):
                        tensor.mul_(0.5 + torch.rand(tensor.shape, generator=generator).to(tensor)).add_(0.1)
        expected, pairs = _observed(trial, example)
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


def _observed(backbone: nn.Module, example: Tensor) -> tuple[Tensor, list[tuple[str, str]]]:
    """Return the output for an example, and which BatchNorm alone reads the output of which convolution."""
    found: list[tuple[str, str]] = []
    calls: Counter[str] = Counter()
    made: dict[int, tuple[str, Tensor, int]] = {}  # holding the tensors keeps an id from being used twice

    def after_convolution(name: str, _: nn.Module, __: Any, output: Tensor) -> None:
        calls[name] += 1
        made[id(output)] = (name, output, output._version)

    def before_normaliser(name: str, _: nn.Module, inputs: tuple[Tensor]) -> None:
        calls[name] += 1
        convolution, _tensor, version = made.get(id(inputs[0]), ("", None, 0))
        if convolution and inputs[0]._version == version:  # not changed in place since
            found.append((convolution, name))

    with ExitStack() as hooks:
        for name, module in backbone.named_modules():
            if type(module) in CONVOLUTIONS:
                hooks.enter_context(module.register_forward_hook(partial(after_convolution, name)))
            elif type(module) in NORMALISERS and module.running_mean is not None:
                hooks.enter_context(module.register_forward_pre_hook(partial(before_normaliser, name)))
        output = backbone(example)
    uses = Counter(chain.from_iterable(found))
    return output, [pair for pair in found if all(calls[name] == uses[name] == 1 for name in pair)]


def _twin(module: nn.Module) -> nn.Module:
    """Copy the modules, but not their tensors."""
    return copy.deepcopy(module, {id(tensor): tensor for tensor in chain(module.parameters(), module.buffers())})


def _fold(source: nn.Module, twin: nn.Module, pairs: list[tuple[str, str]], dtype: torch.dtype | None) -> list[Fold]:
    """Replace the pairs in `twin` by convolutions whose weights are still to be computed."""
    folds = []
    for convolution_name, normaliser_name in pairs:
        convolution, normaliser = source.get_submodule(convolution_name), source.get_submodule(normaliser_name)
        assert isinstance(convolution, nn.Conv2d) and isinstance(normaliser, nn.BatchNorm2d)
        folded = twin.get_submodule(convolution_name)
        assert isinstance(folded, nn.Conv2d)
        weight = torch.empty_like(convolution.weight, dtype=dtype)
        folded.weight = nn.Parameter(weight, requires_grad=False)
        folded.bias = nn.Parameter(weight.new_empty(len(weight)), requires_grad=False)
        replaced = twin.get_submodule(normaliser_name)
        rest = nn.Sequential(replaced.drop, replaced.act) if isinstance(replaced, BatchNormAct2d) else nn.Identity()
        twin.set_submodule(normaliser_name, rest)
        folds.append(Fold(convolution, normaliser, folded))
    return folds
