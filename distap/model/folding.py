"""Compute frozen BatchNorm inside the convolution before it, in every stage.

With frozen statistics, BatchNorm multiplies each channel by a number and adds another. So does a
convolution with other weights:

    convolution(x, w, b) -> BatchNorm      is      convolution(x, scale * w, scale * (b - mean) +
    shift)

The right side goes through the large activations once instead of twice, and autograd sends its
gradient on to w, b, scale and shift. Parameters keep their names and places.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any

import torch
from timm.layers.conv2d_same import Conv2dSame
from timm.layers.norm_act import BatchNormAct2d
from timm.layers.padding import pad_same
from torch import Tensor, nn
from torch.nn.functional import conv2d

from distap.errors import DistapError
from distap.model.backbone import timm_config
from distap.model.network import RetrievalNetwork

# Exactly these classes: a subclass may use its weight in another way, for example standardise it.
CONVOLUTIONS: tuple[type[nn.Module], ...] = (nn.Conv2d, Conv2dSame)
NORMALISERS: tuple[type[nn.Module], ...] = (nn.BatchNorm2d, BatchNormAct2d)
TOLERANCE = 1e-6  # of features in float64, relative; a wrong pair changes the first digits
FAST_SIDE = 3  # of depthwise kernels whose gradient oneDNN computes fast


def fold_batchnorm(network: RetrievalNetwork) -> int:
    """Fold each frozen BatchNorm into the convolution before it; return the number of folded ones.

    An engine may wrap the network before or after, but must not take single modules' parameters
    away.

    Raises:
        DistapError: BatchNorm is not frozen, none stands right behind a convolution, or folding
            changes the features.
    """
    if network.batchnorm != "frozen":
        raise DistapError(
            "network.batchnorm_not_frozen",
            "step.fold_batchnorm needs frozen BatchNorm (model.batchnorm: frozen): `batch` scales"
            " and shifts by the micro-batch",
        )
    pairs = _checked_pairs(network.backbone)
    _fold(network.backbone, pairs)
    return len(pairs)


def _checked_pairs(backbone: nn.Module) -> list[tuple[str, str]]:
    """Return the names of convolutions, and of the BatchNorm that alone reads the output of each.

    Hooks cannot see what else reads a tensor, such as a sum, so a folded copy has to give the same
    features.
    """
    name = type(backbone).__name__
    trial = copy.deepcopy(backbone).double().eval()
    generator = torch.Generator().manual_seed(0)
    size = timm_config(trial).get("input_size") or (3, 64, 64)
    example = torch.randn(1, *size, generator=generator).to(next(trial.parameters()))
    with torch.no_grad():
        # An untrained network has means of 0 and variances of 1, which would hide any mistake.
        for module in trial.modules():
            if type(module) in NORMALISERS:
                for tensor in (module.running_mean, module.running_var, module.weight, module.bias):
                    if isinstance(tensor, Tensor):
                        factors = 0.5 + torch.rand(tensor.shape, generator=generator)
                        tensor.mul_(factors.to(tensor)).add_(0.1)
        expected, pairs = _observed(trial, example)
        if not pairs:
            raise DistapError(
                "network.nothing_to_fold",
                f"step.fold_batchnorm: {name} has no BatchNorm right behind a convolution; set it"
                " to false",
            )
        _fold(trial, pairs)
        error = float((trial(example) - expected).abs().max() / expected.abs().max())
    if not error <= TOLERANCE:
        raise DistapError(
            "network.folding_changes_features",
            f"step.fold_batchnorm: folding {len(pairs)} BatchNorm layers of {name} changes its"
            f" features by {error:.1g}, relative to the largest; set it to false",
        )
    return pairs


def _observed(backbone: nn.Module, example: Tensor) -> tuple[Tensor, list[tuple[str, str]]]:
    """Return the output for an example, and each BatchNorm alone behind a convolution, by name."""
    pairs: list[tuple[str, str]] = []
    calls: Counter[str] = Counter()
    # Name, output and version of each convolution. Holding the outputs keeps ids from being reused.
    made: dict[int, tuple[str, Tensor, int]] = {}

    def after_convolution(name: str, _: nn.Module, __: Any, output: Tensor) -> None:
        calls[name] += 1
        made[id(output)] = (name, output, output._version)

    def before_normaliser(name: str, _: nn.Module, inputs: tuple[Tensor]) -> None:
        calls[name] += 1
        convolution, _tensor, version = made.get(id(inputs[0]), ("", None, 0))
        if convolution and inputs[0]._version == version:  # not changed in place since
            pairs.append((convolution, name))

    with ExitStack() as hooks:
        for name, module in backbone.named_modules():
            if type(module) in CONVOLUTIONS and module.padding_mode == "zeros":
                hooks.enter_context(module.register_forward_hook(partial(after_convolution, name)))
            elif type(module) in NORMALISERS and module.running_mean is not None:
                hooks.enter_context(
                    module.register_forward_pre_hook(partial(before_normaliser, name))
                )
        output = backbone(example)
    uses = Counter(chain.from_iterable(pairs))
    return output, [pair for pair in pairs if all(calls[name] == uses[name] == 1 for name in pair)]


def _fold(backbone: nn.Module, pairs: list[tuple[str, str]]) -> None:
    for convolution_name, normaliser_name in pairs:
        convolution = backbone.get_submodule(convolution_name)
        normaliser = backbone.get_submodule(normaliser_name)
        assert isinstance(convolution, nn.Conv2d) and isinstance(normaliser, nn.BatchNorm2d)
        # Not a closure: a copy of the network must compute with its own parameters.
        vars(convolution)["forward"] = partial(_both, convolution, normaliser)
        vars(normaliser)["forward"] = partial(_rest, normaliser)


def _both(convolution: nn.Conv2d, norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
    assert norm.running_mean is not None and norm.running_var is not None
    scale = (norm.running_var + norm.eps).rsqrt()
    shift = -norm.running_mean
    if norm.affine:
        scale = norm.weight * scale
    shift = scale * (shift if convolution.bias is None else shift + convolution.bias)
    weight = scale.view(-1, 1, 1, 1) * convolution.weight
    bias = shift + norm.bias if norm.affine else shift
    stride = convolution.stride
    padding = convolution.padding
    dilation = convolution.dilation
    if isinstance(convolution, Conv2dSame):
        x = pad_same(x, list(convolution.kernel_size), list(stride), list(dilation))
        padding = (0, 0)
    return convolve(x, weight, bias, stride, padding, dilation, convolution.groups)


def _rest(norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
    return norm.act(norm.drop(x)) if isinstance(norm, BatchNormAct2d) else x


Pair = Sequence[int]  # along height and width


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair | str,
    dilation: Pair,
    groups: int,
) -> Tensor:
    """Return conv2d of these arguments; on a CPU, with a faster gradient where that is faster."""
    # In bf16, oneDNN has fast gradients for all but depthwise convolutions.
    is_narrow = torch.is_autocast_enabled("cpu")
    has_slow_gradient = groups == x.shape[1] > 1 if is_narrow else x.dtype == torch.float32
    is_usual = (
        x.device.type == "cpu"
        and x.ndim == 4
        and x.numel() > 0
        and not isinstance(padding, str)
        and weight.dtype == torch.float32
    )
    is_faster = has_slow_gradient and is_usual and torch.is_grad_enabled()
    function = _Convolution.apply if is_faster else conv2d
    convolved: Tensor = function(x, weight, bias, stride, padding, dilation, groups)
    return convolved


class _Convolution(torch.autograd.Function):
    """conv2d whose gradients are in the dtype of the weights, and fast for depthwise kernels."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: Pair,
        padding: Pair,
        dilation: Pair,
        groups: int,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry = stride, padding, dilation, groups
        return conv2d(x, weight, bias, stride, padding, dilation, groups)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dtype = x.dtype
        x = x.to(weight.dtype)
        gradient = gradients[0].to(weight.dtype)
        # oneDNN is slow at the weights of large depthwise kernels.
        is_depthwise = (
            groups == x.shape[1] == weight.shape[0] > 1 and max(weight.shape[2:]) > FAST_SIDE
        )
        by_x, by_weight, _ = torch.ops.aten.convolution_backward(
            gradient,
            x,
            weight,
            None,
            stride,
            padding,
            dilation,
            False,
            (0, 0),
            groups,
            (needs_x, needs_weight and not is_depthwise, False),
        )
        if needs_weight and is_depthwise:
            by_weight = depthwise_gradient(gradient, x, weight.shape[2:], stride, padding, dilation)
        by_x = None if by_x is None else by_x.to(dtype)
        by_bias = gradient.sum((0, 2, 3)) if needs_bias else None
        return by_x, by_weight, by_bias, None, None, None, None


def depthwise_gradient(
    gradient: Tensor, x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    """Return the gradient of the weights (C, 1, *kernel) of a depthwise convolution.

    Its input is x (n, C, height, width). The gradient of the weights correlates each channel of
    each image with the gradient of the output, (n, C, h, w). So it is itself a depthwise
    convolution, of n C channels, in which stride and dilation change places:

        dL/dw[c, i, j] = sum over n, y, x' of  gradient[n, c, y, x'] * x[n, c, y stride + i
        dilation, x' stride + ...]
    """
    n, channels, height, width = x.shape
    # Channels last: each image's channel becomes a channel of one image.
    planes = x.permute(2, 3, 0, 1).reshape(1, height, width, n * channels).permute(0, 3, 1, 2)
    kernels = gradient.contiguous().view(n * channels, 1, *gradient.shape[2:])
    products = conv2d(planes, kernels, None, dilation, padding, stride, n * channels)
    # A stride that leaves pixels over makes it larger than the kernel.
    products = products[:, :, : kernel[0], : kernel[1]].permute(2, 3, 0, 1)
    by_channel = products.reshape(*kernel, n, channels).sum(2)
    return by_channel.permute(2, 0, 1).unsqueeze(1)
