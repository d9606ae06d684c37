"""The ranks of a training and the few collectives that distap needs.

A global batch has slots 0 .. B-1. Of W ranks, rank r holds the slots r, r+W, r+2W, ... Gathered
rows come back in slot order, so that nothing computed from them depends on the number of ranks.
"""

import ctypes
import gc
import json
import math
import os
import re
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore

from distap.errors import DistapError
from distap.processes.forks import die_with_parent
from distap.processes.meeting import join, warn_of_loopback
from distap.processes.watchdog import Watchdog

# The process group waits this much longer than the watchdog, which can say which rank is missing.
LATER_SECONDS = 15.0
CPU = torch.device("cpu")
DRIVER = Path("/proc/driver/nvidia/version")
# of <malloc.h>
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4


@dataclass(frozen=True)
class World:
    """This process among the ranks; `World()` is one rank alone, which communicates nothing."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device: torch.device = CPU
    group: dist.ProcessGroup | None = None  # None is torch's default group
    watchdog: Watchdog | None = None
    hosts: tuple[str, ...] = ()  # of all ranks, where they met by `join`

    def note(self, activity: str) -> None:
        """Tell the watchdog what this rank does from now on, such as `describe of step 12`."""
        if self.watchdog is not None:
            self.watchdog.note(activity)

    def collective(self, name: str) -> AbstractContextManager[None]:
        """Enclose a collective of all ranks; a CollectiveError then names the missing rank."""
        if self.watchdog is None:
            return nullcontext()
        return self.watchdog.collective(name, self.device)

    def called(self, rank: int) -> str:
        """Return a rank's number, with its host if there are several."""
        return f"rank {rank} ({self.hosts[rank]})" if len({*self.hosts}) > 1 else f"rank {rank}"

    def slots(self, total: int) -> range:
        """Return this rank's slots of a global batch of `total` images."""
        return range(self.rank, total, self.size)

    def gather_rows(self, rows: Tensor, total: int) -> Tensor:
        """Return the (B, ...) rows of all ranks in slot order; each rank gives (b, ...) for its
        slots of `total`.
        """
        if self.size == 1:
            return rows
        # Only the last row of a rank can be padding, so all padding comes after the last slot.
        return self.start_gather(_padded(rows, self._share(total))).rows()[:total]

    def start_gather(self, rows: Tensor) -> "Arrival":
        """Start gathering rows, (n, ...) with the same n on every rank; do not change them until
        they arrive.
        """
        if self.size == 1:
            return Arrival(self, rows, rows)
        received = rows.new_empty(self.size * len(rows), *rows.shape[1:])
        with self.collective("start of an all_gather of rows"):
            work = dist.all_gather_into_tensor(received, rows, group=self.group, async_op=True)
        return Arrival(self, rows, received, work)

    def gather_values(self, value: Any) -> list[Any]:
        """Return every rank's value, which must be JSON."""
        text = json.dumps(value).encode()
        if self.size == 1:
            return [json.loads(text)]
        text = text.ljust(int(self.maximum(len(text))))
        row = torch.tensor([list(text)], dtype=torch.uint8, device=self.device)
        return [json.loads(bytes(each)) for each in self.gather_rows(row, self.size).tolist()]

    def scatter_rows(self, rows: Tensor | None, like: Tensor, total: int) -> Tensor:
        """Send each rank the (b, ...) rows of its slots, from rank 0's (B, ...) `rows` in slot
        order; `total` is B.

        `like` is a tensor with the dtype, device and trailing shape of `rows`.
        """
        if self.size == 1:
            assert rows is not None
            return rows
        received = like.new_empty(self._share(total), *like.shape[1:])
        shares = None
        if self.rank == 0 and rows is not None:
            padded = _padded(rows, self.size * len(received))
            shares = [padded[r :: self.size].contiguous() for r in range(self.size)]
        self._together(dist.scatter, received, shares, group_src=0)
        return received[: len(self.slots(total))]

    def reduce_rows(self, rows: Tensor) -> Tensor:
        """Sum the (B, ...) rows of all ranks, in slot order; return the (b, ...) rows of this
        rank's slots.
        """
        if self.size == 1:
            return rows
        share = self._share(len(rows))
        padded = _padded(rows, self.size * share)
        # reduce_scatter gives rank r the r-th block, so bring the slots of each rank together.
        by_rank = padded.view(share, self.size, *rows.shape[1:]).transpose(0, 1).contiguous()
        received = rows.new_empty(share, *rows.shape[1:])
        self._together(dist.reduce_scatter_tensor, received, by_rank.flatten(0, 1))
        return received[: len(self.slots(len(rows)))]

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrite `tensor` with the tensor of rank 0, and return it."""
        self._together(dist.broadcast, tensor, group_src=0)
        return tensor

    def sum(self, tensor: Tensor) -> Tensor:
        """Overwrite `tensor` with its sum over the ranks and return it."""
        self._together(dist.all_reduce, tensor)
        return tensor

    def maximum(self, value: float) -> float:
        """Return the greatest of the ranks' values, or infinity if any value is not a number."""
        # a device may have no numbers, as `meta` has none
        place = self.device if self.size > 1 else "cpu"
        worst = torch.tensor(value, dtype=torch.float64, device=place).nan_to_num(
            math.inf, math.inf
        )
        self._together(dist.all_reduce, worst, op=dist.ReduceOp.MAX)
        return float(worst)

    def all_agree(self, holds: bool) -> bool:
        """Return, on every rank, whether the condition holds on all ranks."""
        return self.maximum(0.0 if holds else 1.0) == 0.0

    def agreed(
        self, problem: str | Exception | None, kind: Sequence[str], own: Any, of: str = "inputs"
    ) -> list[Any]:
        """Return the value of each rank, `own` of this one.

        Raises a DistapError on all ranks if one has a problem, or if the `kind` of what they see
        differs.
        """
        text = (
            str(problem or "") if isinstance(problem, str | DistapError | None) else repr(problem)
        )
        texts, kinds, values = zip(*self.gather_values([text, kind, own]), strict=True)
        cause = problem if isinstance(problem, Exception) else None
        if any(texts):
            by_rank = [f"{self.called(rank)}: {each}" for rank, each in enumerate(texts) if each]
            raise DistapError(text if len(set(texts)) == 1 else "; ".join(by_rank)) from cause
        for each in (each for each in zip(*kinds, strict=True) if len(set(each)) > 1):
            by_rank = [f"{self.called(rank)} has {one}" for rank, one in enumerate(each)]
            raise DistapError(f"the ranks see different {of}: {'; '.join(by_rank)}")
        return list(values)

    def barrier(self) -> None:
        self._together(dist.barrier)

    def _together(self, operation: Callable[..., object], *given: Any, **named: Any) -> None:
        """Call a collective of torch with all ranks; do nothing on a single one."""
        if self.size > 1:
            with self.collective(operation.__name__):
                operation(*given, group=self.group, **named)

    def _share(self, total: int) -> int:
        """Return the greatest number of slots that any rank has."""
        return -(-total // self.size)


ALONE = World()


@dataclass(frozen=True)
class Arrival:
    """Rows of all ranks that are being gathered."""

    world: World
    sent: Tensor  # kept alive until the rows have arrived
    received: Tensor  # (W n, ...), those of rank 0 first
    work: dist.Work | None = None

    def is_here(self) -> bool:
        """Tell whether reading `rows` returns without waiting."""
        return self.work is None or self.work.is_completed()

    def rows(self) -> Tensor:
        """Wait for the rows and return them in slot order, (W n, ...)."""
        if self.work is None:
            return self.received
        with self.world.collective("all_gather of rows"):
            self.work.wait()
        # Row k of rank r is slot k * W + r.
        by_rank = self.received.view(self.world.size, len(self.sent), *self.sent.shape[1:])
        return by_rank.transpose(0, 1).reshape(self.received.shape)


@contextmanager
def joined_world(timeout_seconds: float = 600, wanted: str = "auto") -> Iterator[World]:
    """Join the ranks that torchrun's environment describes, inside this context; without torchrun,
    be one rank.

    All ranks have `timeout_seconds` to join, and for each collective. Each rank takes the device
    that is `wanted`.

    Raises:
        CollectiveError: a rank is missing or lost, or the network is broken, also while the caller
            uses the world. If a collective holds this rank's main thread, the process ends with
            status 1 instead.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    is_alone = names[0] not in os.environ
    try:
        rank, size, local_rank, _ = (
            (0, 1, 0, 0) if is_alone else [int(os.environ[name]) for name in names]
        )
        _ = is_alone or os.environ["MASTER_ADDR"]  # which the meeting reads, as it does the port
    except (KeyError, ValueError) as error:
        raise DistapError(
            f"RANK is set, but the environment of torchrun is incomplete: {error}"
        ) from error
    device = device_of(local_rank, wanted)
    if device.type == "cpu" and sys.platform == "linux":
        # glibc would return the memory of every large tensor to the system, which fills it with
        # zeros before the next tensor can have it: about 4% of a step that keeps its graphs.
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt:
            for name, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1)):
                mallopt(name, value)
    if is_alone:
        yield World(device=device)
        return
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Two process groups connect every rank to every other one, and rank 0 serves the store besides.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS has a limit below the hard one
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    party = join(rank, size, timeout_seconds)
    warn_of_loopback(party.members)
    watchdog = Watchdog(party, timeout_seconds)
    problem: BaseException | None = None
    try:
        with watchdog.collective("connecting of the ranks"):
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=PrefixStore("group", party.store),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_seconds + LATER_SECONDS),
            )
        yield World(
            rank, size, local_rank, device, None, watchdog, tuple(one.host for one in party.members)
        )
    except BaseException as error:
        problem = error
        raise
    finally:
        # A cycle that refers to the group keeps its threads, and one that wakes while Python ends
        # aborts the rank.
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
        watchdog.stop(problem)


def _padded(rows: Tensor, length: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(length - len(rows), *rows.shape[1:])])


def device_of(local_rank: int, wanted: str = "auto") -> torch.device:
    """Return the device of a rank by its local number; raise a DistapError if GPUs are too few.

    `auto` takes a GPU where torch sees one, and the CPU elsewhere; `cuda` raises a DistapError
    there.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise DistapError(f"device: cuda, but {without_gpu()}; mend that, or set device to cpu")
    if wanted == "cpu" or not torch.cuda.is_available():
        # An untrained network is full of subnormal numbers, which slow a CPU's arithmetic down a
        # hundredfold.
        torch.set_flush_denormal(True)
        return CPU
    if local_rank >= torch.cuda.device_count():
        problem = (
            f"local rank {local_rank} has no GPU of its own: this host has"
            f" {torch.cuda.device_count()}"
        )
        raise DistapError(f"{problem}; start that many ranks a host at most")
    return torch.device("cuda", local_rank)


def refuse_default_device() -> None:
    """Raise a DistapError if torch creates tensors elsewhere than on the CPU where a call names no
    device.
    """
    device = torch.get_default_device()
    if device.type != "cpu":
        raise DistapError(
            f"torch's default device is {device} here, but distap creates numbers of images and"
            " ranks on the CPU: enclose the call in `with torch.device('cpu')`, and move network"
            " and images to their device by `to`"
        )


def without_gpu() -> str:
    """Say with which CUDA torch was built and which driver is here, for a message that torch sees
    no GPU.
    """
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    found = re.search(r"\d+(\.\d+)+", DRIVER.read_text()) if DRIVER.is_file() else None
    driver = f"driver {found[0]}" if found else "no driver"
    return f"torch {torch.__version__}, built {built}, sees no GPU on this host, which has {driver}"
