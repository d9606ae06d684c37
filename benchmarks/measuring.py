"""Measure a piece of code: peak memory, floating-point operations, collectives, gradients."""

import ctypes
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness import synchronise
from distap.stages.sizes import SavedBytes
from distap.world import World

MATRIX_SIDE = {"cpu": 1024, "cuda": 8192}  # large enough to be bound by arithmetic
BACKENDS = ("gloo:", "nccl:")
# The profiler names types as C++ does.
ELEMENT_BYTES = {
    "double": 8,
    "long": 8,
    "long int": 8,
    "float": 4,
    "int": 4,
    "c10::Half": 2,
    "c10::BFloat16": 2,
}
ELEMENT_BYTES |= {"unsigned char": 1, "signed char": 1, "bool": 1}


def peak_bytes(action: Callable[[], object], device: torch.device) -> float:
    """Bytes by which memory rises above its level at the start while `action` runs.

    Not a number if unknown.

    On a GPU this counts PyTorch's allocations, on Linux the resident memory, whose peak the kernel
    can reset.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        allocated = torch.cuda.memory_allocated(device)
        action()
        torch.cuda.synchronize(device)
        return float(torch.cuda.max_memory_allocated(device) - allocated)
    if sys.platform != "linux":
        return float("nan")
    ctypes.CDLL(None).malloc_trim(0)  # so that memory that was freed counts again
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    action()
    return resident("VmHWM") - before


def peaks_of(candidates: Mapping[str, Callable[[], object]], world: World) -> dict[str, float]:
    """Peaks of the rank that takes most, in bytes, as far as they are known."""
    peaks = {
        name: world.maximum(peak_bytes(candidate, world.device))
        for name, candidate in candidates.items()
    }
    return {name: peak for name, peak in peaks.items() if math.isfinite(peak)}


def resident(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(
        (float(line.split()[1]) * 1024 for line in lines if line.startswith(name)), float("nan")
    )


def private_bytes(process: int | str | None = "self") -> float:
    """Bytes that a process has written and shares with no other, on Linux."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return next(
        float(line.split()[1]) * 1024 for line in lines if line.startswith("Private_Dirty:")
    )


def flops_of(action: Callable[[], object]) -> float:
    """Floating-point operations of `action` in matrix products and convolutions."""
    # The counter does not know this form of a product, and gives the shapes.
    in_place = {torch.ops.aten.addmm_: lambda _, left, right, **__: 2 * math.prod(left) * right[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counted:
        action()
    return float(counted.get_total_flops())


def forward_flops(network: nn.Module, images: Tensor) -> float:
    """Floating-point operations per image of a forward pass, in matrix products and
    convolutions."""
    with torch.no_grad():
        return flops_of(lambda: network(images)) / len(images)


def graph_bytes(network: nn.Module, images: Tensor) -> float:
    """Bytes per image that a forward pass keeps for the backward pass."""
    saved = SavedBytes(network)
    with saved:
        descriptors = network(images)
    assert descriptors.requires_grad
    return saved.bytes / len(images)


def matrix_rate(
    device: torch.device, dtype: torch.dtype, seconds: float = 1.0, may_use_tf32: bool = True
) -> float:
    """Floating-point operations a second of the fastest of many products of two square matrices."""
    side = MATRIX_SIDE[device.type]
    left, right, out = (torch.rand(side, side, device=device).to(dtype) for _ in range(3))
    before = torch.get_float32_matmul_precision()
    # Convolutions of float32 use TF32 on a GPU, so products may as well.
    torch.set_float32_matmul_precision(
        "high" if device.type == "cuda" and may_use_tf32 else "highest"
    )
    best = _least_seconds(lambda: torch.mm(left, right, out=out), device, seconds)
    torch.set_float32_matmul_precision(before)
    return 2 * side**3 / best


def memory_rate(device: torch.device, seconds: float = 1.0) -> float:
    """Bytes a second that the fastest of many copies reads and writes, of tensors that no cache
    holds.
    """
    source = torch.zeros(
        2**30 if device.type == "cuda" else 2**28, dtype=torch.uint8, device=device
    )
    target = torch.empty_like(source)
    return 2 * source.numel() / _least_seconds(lambda: target.copy_(source), device, seconds)


def _least_seconds(action: Callable[[], object], device: torch.device, seconds: float) -> float:
    best = float("inf")
    ends = time.perf_counter() + seconds
    while (started := time.perf_counter()) < ends:
        action()
        synchronise(device)
        best = min(best, time.perf_counter() - started)
    return best


class CollectiveCalls(NamedTuple):
    """All calls of one collective, such as `gloo:all_reduce`, by this rank."""

    name: str
    calls: int
    bytes: int  # handed over in all calls; a gather brings back W times as many
    largest: int  # bytes of the largest call


def collectives_of(action: Callable[[], object]) -> list[CollectiveCalls]:
    """Collectives that this rank calls while `action` runs, as the profiler sees them.

    Most bytes first.
    """
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        action()
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    sizes: dict[str, list[int]] = {}
    for event in profiled.profiler.kineto_results.events():
        if event.name().startswith(BACKENDS):
            tensors = zip(event.shapes(), event.dtypes(), strict=True)
            size = sum(math.prod(shape) * ELEMENT_BYTES.get(dtype, 0) for shape, dtype in tensors)
            sizes.setdefault(event.name(), []).append(size)
    collectives = [
        CollectiveCalls(name, len(calls), sum(calls), max(calls)) for name, calls in sizes.items()
    ]
    return sorted(collectives, key=lambda collective: -collective.bytes)


def gradient_of(step: Callable[[], object], optimizer: Optimizer | None) -> Tensor | None:
    """Gradient of all parameters, one after another, with which a step's optimiser updates.

    None if it does not.
    """
    recorded: list[Tensor] = []

    def record(optimizer: Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        recorded.append(
            torch.cat(
                [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters]
            )
        )

    hook = optimizer.register_step_post_hook(record) if optimizer else None
    step()
    if hook is not None:
        hook.remove()
    return recorded[0] if recorded else None


def relative_difference(gradient: Tensor | None, exact: Tensor | None) -> float | None:
    """Length of the difference over the length of the exact gradient; None if one is not known."""
    if gradient is None or exact is None:
        return None
    return float((gradient.double() - exact).norm() / exact.double().norm())
