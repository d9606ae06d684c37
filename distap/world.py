"""The ranks of a training and the few collectives that distap needs.

A global batch has slots 0 .. B-1. Of W ranks, rank r holds the slots r, r+W, r+2W, ..., or those
that an `order` (B,) has at these places, such as slots of images that are stored together. Gathered
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

# The process group waits this much longer than the watchdog, which can name the missing rank.
LATER_SECONDS = 15.0
CPU = torch.device("cpu")
DRIVER = Path("/proc/driver/nvidia/version")
# Numbers of mallopt's parameters in <malloc.h>.
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

    @classmethod
    def of_group(cls, group: dist.ProcessGroup | None, device: torch.device) -> "World":
        """Return the ranks of a process group; None is this process alone."""
        if group is None:
            return cls(device=device)
        return cls(dist.get_rank(group), dist.get_world_size(group), device=device, group=group)

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
        """Return this rank's slots of a global batch of `total` images, in no other order."""
        return range(self.rank, total, self.size)

    def gather_rows(self, rows: Tensor, total: int, order: Tensor | None = None) -> Tensor:
        """Gather (b, ...) rows of each rank's slots; return (B, ...) in slot order, B = `total`."""
        if self.size == 1:
            return rows
        # Only the last row of a rank can be padding, so all padding comes after the last slot.
        by_place = self.start_gather(lengthened(rows, self._share(total))).rows()[:total]
        return by_place if order is None else by_place[order.argsort()]

    def start_gather(self, rows: Tensor) -> "Arrival":
        """Start gathering rows, (n, ...) with the same n on every rank.

        Do not change them until they arrive.
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
        return [json.loads(bytes(line)) for line in self.gather_rows(row, self.size).tolist()]

    def scatter_rows(
        self, rows: Tensor | None, like: Tensor, total: int, order: Tensor | None = None
    ) -> Tensor:
        """Send each rank the (b, ...) rows of its slots, from rank 0's `rows`.

        Args:
            rows: (B, ...) in slot order; None on other ranks.
            like: a tensor with the dtype, device and trailing shape of `rows`.
            total: B.
            order: (B,) slots by place; None: the places.
        """
        if self.size == 1:
            assert rows is not None
            return rows
        received = like.new_empty(self._share(total), *like.shape[1:])
        shares = None
        if self.rank == 0 and rows is not None:
            by_place = rows if order is None else rows[order]
            padded = lengthened(by_place, self.size * len(received))
            shares = [padded[r :: self.size].contiguous() for r in range(self.size)]
        self._together(dist.scatter, received, shares, group_src=0)
        return received[: len(self.slots(total))]

    def reduce_rows(self, rows: Tensor, order: Tensor | None = None) -> Tensor:
        """Sum (B, ...) rows over the ranks; return the (b, ...) sums of this rank's slots."""
        if self.size == 1:
            return rows
        share = self._share(len(rows))
        padded = lengthened(rows if order is None else rows[order], self.size * share)
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

    def greatest(self, tensor: Tensor) -> Tensor:
        """Overwrite `tensor` with the greatest of the ranks' values, and return it."""
        self._together(dist.all_reduce, tensor, op=dist.ReduceOp.MAX)
        return tensor

    def maximum(self, value: float) -> float:
        """Return the greatest of the ranks' values, or infinity if any value is not a number."""
        # Alone on the CPU, since a device may have no numbers, as `meta` has none.
        place = self.device if self.size > 1 else CPU
        number = torch.tensor(value, dtype=torch.float64, device=place)
        return float(self.greatest(number.nan_to_num(math.inf, math.inf)))

    def all_agree(self, holds: bool) -> bool:
        """Return, on every rank, whether the condition holds on all ranks."""
        return self.maximum(0.0 if holds else 1.0) == 0.0

    def agreed(
        self,
        problem: str | Exception | None,
        kind: Sequence[str],
        value: Any,
        subject: str = "inputs",
    ) -> list[Any]:
        """Return the `value` of each rank.

        Args:
            problem: why this rank cannot go on; None if it can.
            kind: texts about `subject` that must be the same on all ranks.
        Raises:
            DistapError: on all ranks, if one has a problem, or if their kinds differ.
        """
        is_text = isinstance(problem, str | DistapError | None)
        text = str(problem or "") if is_text else repr(problem)
        code = problem.code if isinstance(problem, DistapError) else "ranks.problem"
        failures, kinds, values = zip(
            *self.gather_values([text and [code, text], kind, value]), strict=True
        )
        if any(failures):
            code, text = next(filter(None, failures))
            if failures.count([code, text]) < self.size:
                text = "; ".join(
                    f"{self.called(rank)}: {failure[1]}"
                    for rank, failure in enumerate(failures)
                    if failure
                )
            raise DistapError(code, text) from (problem if isinstance(problem, Exception) else None)
        for by_rank in zip(*kinds, strict=True):
            if len(set(by_rank)) > 1:
                views = [f"{self.called(rank)} has {view}" for rank, view in enumerate(by_rank)]
                raise DistapError(
                    "ranks.differ", f"the ranks see different {subject}: {'; '.join(views)}"
                )
        return list(values)

    def barrier(self) -> None:
        self._together(dist.barrier)

    def _together(self, operation: Callable[..., object], *tensors: Any, **options: Any) -> None:
        """Call a collective of torch with all ranks; do nothing on a single one."""
        if self.size > 1:
            with self.collective(operation.__name__):
                operation(*tensors, group=self.group, **options)

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
        """Return whether reading `rows` returns without waiting."""
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
    """Join the ranks that torchrun's environment describes, inside this context.

    Without torchrun, be one rank alone.

    Args:
        timeout_seconds: time limit of joining, and of each collective.
        wanted: the device, `cuda`, `cpu` or `auto`; see `device_of`.
    Raises:
        CollectiveError: a rank is missing or lost, or the network is broken, also while the caller
            uses the world. If a collective holds this rank's main thread, the process ends with
            status 1 instead.
    """
    place = _place_of_torchrun()
    rank, size, local_rank = place or (0, 1, 0)
    device = device_of(local_rank, wanted)
    if device.type == "cpu" and sys.platform == "linux":
        _keep_freed_memory()
    if place is None:
        yield World(device=device)
        return

    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Two process groups connect every rank to every other one, and rank 0 serves the store besides.
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS has a limit below the hard one
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
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
            rank=rank,
            size=size,
            local_rank=local_rank,
            device=device,
            watchdog=watchdog,
            hosts=tuple(member.host for member in party.members),
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


def _place_of_torchrun() -> tuple[int, int, int] | None:
    """Return rank, number of ranks and local rank by the environment; None without torchrun."""
    if "RANK" not in os.environ:
        return None
    try:
        rank, size, local_rank, _ = (
            int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
        )
        # The meeting reads both the address and the port.
        if "MASTER_ADDR" not in os.environ:
            raise KeyError("MASTER_ADDR")
    except (KeyError, ValueError) as error:
        raise DistapError(
            "ranks.no_environment",
            f"RANK is set, but the environment of torchrun is incomplete: {error}",
        ) from error
    return rank, size, local_rank


def _keep_freed_memory() -> None:
    """Let glibc keep the memory of freed tensors.

    It would return that of every large tensor to the system, which fills it with zeros before the
    next tensor can have it: about 4% of a step that keeps its graphs.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, or the whole tensor if it is not sharded."""
    # Only a DTensor has this method; to import the class takes a second, and recipes do without.
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def lengthened(rows: Tensor, length: int) -> Tensor:
    """Append rows of zeros."""
    return torch.cat([rows, rows.new_zeros(length - len(rows), *rows.shape[1:])])


def device_of(local_rank: int, wanted: str = "auto") -> torch.device:
    """Return the device of a rank by its local number.

    `auto` takes a GPU if torch sees one, else the CPU.

    Raises:
        DistapError: there are too few GPUs; or none, and `cuda` is wanted.
    """
    sees_gpu = torch.cuda.is_available()
    if wanted == "cuda" and not sees_gpu:
        raise DistapError(
            "ranks.no_gpu", f"device: cuda, but {without_gpu()}; mend that, or set device to cpu"
        )
    if wanted == "cpu" or not sees_gpu:
        # An untrained network is full of subnormal numbers, which slow a CPU's arithmetic down a
        # hundredfold.
        torch.set_flush_denormal(True)
        return CPU
    gpus = torch.cuda.device_count()
    if local_rank >= gpus:
        raise DistapError(
            "ranks.too_few_gpus",
            f"local rank {local_rank} has no GPU of its own: this host has {gpus}; start that many"
            " ranks per host at most",
        )
    return torch.device("cuda", local_rank)


def refuse_default_device() -> None:
    """Raise a DistapError if torch's default device is not the CPU."""
    device = torch.get_default_device()
    if device.type != "cpu":
        raise DistapError(
            "ranks.default_device",
            f"torch's default device is {device} here, but distap creates numbers of images and"
            " ranks on the CPU: enclose the call in `with torch.device('cpu')`, and move network"
            " and images to their device by `to`",
        )


def without_gpu() -> str:
    """Return the clause of a message why torch sees no GPU: its CUDA, and the driver here."""
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    version = re.search(r"\d+(\.\d+)+", DRIVER.read_text()) if DRIVER.is_file() else None
    driver = f"driver {version[0]}" if version else "no driver"
    return f"torch {torch.__version__}, built {built}, sees no GPU on this host, which has {driver}"
