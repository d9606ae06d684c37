"""Floating-point operations and memory of a network's passes, and how many operations a second a machine does."""

import time
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from distap.stages.sizes import SavedBytes

SIDES = {"cpu": 1024, "cuda": 8192}  # of the matrices multiplied: large enough to be bound by arithmetic


def forward_flops(network: nn.Module, images: Tensor) -> float:
    """Floating-point operations an image of a forward pass: those of matrix products and convolutions."""
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        network(images)
    return float(counted.get_total_flops()) / len(images)


def graph_bytes(network: nn.Module, images: Tensor) -> float:
    """Bytes an image that a forward pass keeps for the backward pass."""
    saved = SavedBytes(network)
    with saved:
        descriptors = network(images)
    assert descriptors.requires_grad
    return saved.bytes / len(images)


def matrix_rate(device: torch.device, dtype: torch.dtype, seconds: float = 1.0) -> float:
    """Floating-point operations a second of the best of many products of two square matrices.

    On a GPU, products of float32 may use what its convolutions use.
    """
    side = SIDES[device.type]
    left, right = (torch.rand(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else before)
    try:
        best = float("inf")
        ends = time.perf_counter() + seconds
        while time.perf_counter() < ends:
            best = min(best, _seconds_of_product(left, right, out))
    finally:
        torch.set_float32_matmul_precision(before)
    return 2 * side**3 / best


def _seconds_of_product(left: Tensor, right: Tensor, out: Tensor) -> float:
    with torch.cuda.device(left.device) if left.is_cuda else nullcontext():
        synchronise(left.device)
        started = time.perf_counter()
        torch.mm(left, right, out=out)
        synchronise(left.device)
        return time.perf_counter() - started


def synchronise(device: torch.device) -> None:
    """Wait for what is queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
