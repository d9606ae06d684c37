"""The peak of memory in a part of a process."""

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

import torch


def peak_bytes(action: Callable[[], object], device: torch.device) -> float:
    """How far memory rises above where it stood while `action` runs, in bytes; not a number where unknown.

    On a GPU what PyTorch allocates there, on Linux the resident memory, whose peak the kernel lets a process reset.
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
    ctypes.CDLL(None).malloc_trim(0)  # what was freed is to count again
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    action()
    return _resident("VmHWM") - before


def _resident(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return float(line.split()[1]) * 1024
    return float("nan")
