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
from distap.model.network import RetrievalNetwork

# Exactly these types: a subclass may use its weight in another way, for example standardise it.
CONVOLUTIONS: tuple[type[nn.Module], ...] = (nn.Conv2d, Conv2dSame)
NORMALISERS: tuple[type[nn.Module], ...] = (nn.BatchNorm2d, BatchNormAct2d)
TOLERANCE = 1e-6  # of features in float64, relative; a wrong pair changes the first digits
FAST_SIDE = 3  # of depthwise kernels whose gradient oneDNN computes fast


def fold_batchnorm(network: RetrievalNetwork) -> int:
    """Fold each frozen BatchNorm into the convolution before it; return the number of folded
    layers.

    An engine may wrap the network before or after, but must not take single modules' parameters
    away. A DistapError tells if BatchNorm is not frozen, if none stands right behind a convolution,
    or if folding changes the features.
    """
    if network.batchnorm != "frozen":
        needed = "needs frozen BatchNorm (model.batchnorm: frozen)"
        raise DistapError(
            f"step.fold_batchnorm {needed}: `batch` scales and shifts by the micro-batch"
        )
    pairs = _checked_pairs(network.backbone)
    _fold(network.backbone, pairs)
    return len(pairs)


def _checked_pairs(backbone: nn.Module) -> list[tuple[str, str]]:
    # The names of convolutions and of the BatchNorm that alone reads the output of each. Hooks
    # cannot see what else reads a tensor, such as a sum, so a folded copy has to give the same
    # features.
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
                        tensor.mul_(
                            0.5 + torch.rand(tensor.shape, generator=generator).to(tensor)
                        ).add_(0.1)
        expected, pairs = _observed(trial, example)
        if not pairs:
            raise DistapError(
                f"step.fold_batchnorm: {name} has no BatchNorm right behind a convolution; set it"
                " to false"
            )
        _fold(trial, pairs)
        error = float((trial(example) - expected).abs().max() / expected.abs().max())
    if not error <= TOLERANCE:
        raise DistapError(
            f"step.fold_batchnorm: folding {len(pairs)} BatchNorm layers of {name} changes its"
            f" features by {error:.1g}, relative to the largest; set it to false"
        )
    return pairs


def _observed(backbone: nn.Module, example: Tensor) -> tuple[Tensor, list[tuple[str, str]]]:
    """Return the output for an example, and each BatchNorm that alone reads the output of a
    convolution.
    """
    found: list[tuple[str, str]] = []
    calls: Counter[str] = Counter()
    # holding the tensors keeps an id from being used twice
    made: dict[int, tuple[str, Tensor, int]] = {}

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
            if type(module) in CONVOLUTIONS and module.padding_mode == "zeros":
                hooks.enter_context(module.register_forward_hook(partial(after_convolution, name)))
            elif type(module) in NORMALISERS and module.running_mean is not None:
                hooks.enter_context(
                    module.register_forward_pre_hook(partial(before_normaliser, name))
                )
        output = backbone(example)
    uses = Counter(chain.from_iterable(found))
    return output, [pair for pair in found if all(calls[name] == uses[name] == 1 for name in pair)]


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
        x, padding = (
            pad_same(x, list(convolution.kernel_size), list(stride), list(dilation)),
            (0, 0),
        )
    return convolve(x, weight, bias, stride, padding, dilation, convolution.groups)


def _rest(norm: nn.BatchNorm2d, x: Tensor) -> Tensor:
    return norm.act(norm.drop(x)) if isinstance(norm, BatchNormAct2d) else x


Pair = Sequence[int]  # along height and width


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
    """Return `conv2d(x, weight, bias, stride, padding, dilation, groups)`."""
    is_narrow = torch.is_autocast_enabled("cpu")
    # In bf16, oneDNN has fast gradients for all but depthwise convolutions.
    of_dtype = how[-1] == x.shape[1] > 1 if is_narrow else x.dtype == torch.float32
    is_usual = (
        x.device.type == "cpu" and x.ndim == 4 and x.numel() > 0 and not isinstance(how[1], str)
    )
    faster = of_dtype and weight.dtype == torch.float32 and is_usual and torch.is_grad_enabled()
    convolved: Tensor = (_Convolution.apply if faster else conv2d)(x, weight, bias, *how)
    return convolved


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = how
        return conv2d(x, weight, bias, *how)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.how
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        gradient, given, x = gradient.to(weight.dtype), x.dtype, x.to(weight.dtype)
        is_depthwise = (
            groups == x.shape[1] == weight.shape[0] > 1 and max(weight.shape[2:]) > FAST_SIDE
        )
        wanted = of_x, of_weight and not is_depthwise, False
        by_x, by_weight, _ = torch.ops.aten.convolution_backward(
            gradient, x, weight, None, stride, padding, dilation, False, (0, 0), groups, wanted
        )
        if of_weight and is_depthwise:
            by_weight = depthwise_gradient(gradient, x, weight.shape[2:], stride, padding, dilation)
        by_x = None if by_x is None else by_x.to(given)
        return by_x, by_weight, gradient.sum((0, 2, 3)) if of_bias else None, None, None, None, None


def depthwise_gradient(
    gradient: Tensor, x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    """Return the gradient of the weights (C, 1, *kernel) of a depthwise convolution of x (n, C,
    height, width).

    It correlates each channel of each image with its gradient, (n, C, h, w), so it is itself a
    depthwise convolution, of n C channels, in which stride and dilation change places:

        dL/dw[c, i, j] = sum over n, y, x' of  gradient[n, c, y, x'] * x[n, c, y stride + i
        dilation, x' stride + ...]
    """
    n, channels, height, width = x.shape
    # channels last
    planes = x.permute(2, 3, 0, 1).reshape(1, height, width, n * channels).permute(0, 3, 1, 2)
    kernels = gradient.contiguous().view(n * channels, 1, *gradient.shape[2:])
    found = conv2d(planes, kernels, None, dilation, padding, stride, n * channels)
    # A stride that leaves pixels over makes it larger than the kernel.
    found = (
        found[:, :, : kernel[0], : kernel[1]]
        .permute(2, 3, 0, 1)
        .reshape(*kernel, n, channels)
        .sum(2)
    )
    return found.permute(2, 0, 1).unsqueeze(1)
