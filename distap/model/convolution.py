"""A convolution with gradients that are faster on a CPU than torch's, and equal up to rounding.

oneDNN has no fast kernel for the gradient of depthwise weights above 3 x 3: it takes up to 40 times as long as the
forward pass. And it adds the gradient of a bias up far slower than `sum` does.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d

FAST_SIDE = 3  # of depthwise kernels whose gradient oneDNN computes fast
Pair = Sequence[int]  # along height and width


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
    """Return `conv2d(x, weight, bias, stride, padding, dilation, groups)`."""
    in_float32 = x.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    is_usual = x.device.type == "cpu" and x.ndim == 4 and x.numel() > 0 and not isinstance(how[1], str)
    faster = in_float32 and is_usual and torch.is_grad_enabled()
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
        (gradient,), (x, weight), (stride, padding, dilation, groups) = gradients, ctx.saved_tensors, ctx.how
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        is_depthwise = groups == x.shape[1] == weight.shape[0] > 1 and max(weight.shape[2:]) > FAST_SIDE
        wanted = of_x, of_weight and not is_depthwise, False
        by_x, by_weight, _ = torch.ops.aten.convolution_backward(
            gradient, x, weight, None, stride, padding, dilation, False, (0, 0), groups, wanted
        )
        if of_weight and is_depthwise:
            by_weight = depthwise_gradient(gradient, x, weight.shape[2:], stride, padding, dilation)
        return by_x, by_weight, gradient.sum((0, 2, 3)) if of_bias else None, None, None, None, None


def depthwise_gradient(
    gradient: Tensor, x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    """Return the gradient of the weights (C, 1, *kernel) of a depthwise convolution of x (n, C, height, width).

    It correlates each channel of each image with its gradient, (n, C, h, w), so it is itself a depthwise convolution,
    of n C channels, in which stride and dilation change places:

        dL/dw[c, i, j] = sum over n, y, x' of  gradient[n, c, y, x'] * x[n, c, y stride + i dilation, x' stride + ...]
    """
    n, channels, height, width = x.shape
    planes = x.permute(2, 3, 0, 1).reshape(1, height, width, n * channels).permute(0, 3, 1, 2)  # channels last
    kernels = gradient.contiguous().view(n * channels, 1, *gradient.shape[2:])
    found = conv2d(planes, kernels, None, dilation, padding, stride, n * channels)
    # A stride that leaves pixels over makes it larger than the kernel.
    found = found[:, :, : kernel[0], : kernel[1]].permute(2, 3, 0, 1).reshape(*kernel, n, channels).sum(2)
    return found.permute(2, 0, 1).unsqueeze(1)
