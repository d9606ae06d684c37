"""Memory: the peak of a part of a process, and what is free."""

import ctypes
import os
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


def free_bytes(device: torch.device) -> float:
    """Memory that this rank may take: what is free on its GPU, or its part of what is free on this host."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + unused)
    facts = Path("/proc/meminfo")
    for line in facts.read_text().splitlines() if facts.exists() else []:
        if line.startswith("MemAvailable"):
            return float(line.split()[1]) * 1024 / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return float("inf")


def _resident(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return float(line.split()[1]) * 1024
    return float("nan")
