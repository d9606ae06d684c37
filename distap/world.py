"""The ranks of one training, and the few collectives that distap needs.

A global batch has slots 0 .. B-1. Rank r of W holds the slots r, r+W, r+2W, ..., and whatever is gathered comes
back in slot order, so that nothing after it depends on the number of ranks.
"""

import ctypes
import gc
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from distap.errors import DistapError
from distap.processes.exit_statuses import end_with_launcher
from distap.processes.roll_call import join
from distap.processes.watchdog import Watchdog

# The process group waits longer than the watchdog, which can say who is missing.
LATER_SECONDS = 15.0
CPU = torch.device("cpu")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # of <malloc.h>
LENT_BYTES = 2**20  # from which what a server allocates goes back to the system as soon as it is freed


@dataclass(frozen=True)
class World:
    """This process among the ranks; `World()` is a world of one, which communicates nothing."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device: torch.device = CPU
    group: dist.ProcessGroup | None = None  # None: torch's default group
    watchdog: Watchdog | None = None

    def note(self, activity: str) -> None:
        """Say what this rank does from now on, such as `describe of step 12`: messages about a hang name it."""
        if self.watchdog is not None:
            self.watchdog.note(activity)

    def collective(self, name: str) -> AbstractContextManager[None]:
        """Encloses a collective of all ranks, so that its failure says which rank is missing.

        Raises:
            CollectiveError: a rank or the network failed.
        """
        if self.watchdog is None:
            return nullcontext()
        channel = "" if self.group is None else self.group.group_name
        return self.watchdog.collective(name, channel, self.device)

    def slots(self, total: int) -> range:
        """The slots of a global batch of `total` images that this rank holds."""
        return range(self.rank, total, self.size)

    def gather_rows(self, rows: Tensor, total: int) -> Tensor:
        """All ranks' rows in slot order.

        Args:
            rows: (b, ...) those of this rank's slots.
            total: B, the number of slots of all ranks.
        Returns:
            (B, ...), the same on every rank.
        """
        if self.size == 1:
            return rows
        share = -(-total // self.size)
        padded = rows.new_zeros(share, *rows.shape[1:])
        padded[: len(rows)] = rows
        gathered = rows.new_empty(self.size * share, *rows.shape[1:])
        with self.collective("all_gather of rows"):
            dist.all_gather_into_tensor(gathered, padded, group=self.group)
        # Row k of rank r is slot k * W + r, so the padding of shorter shares ends up behind the last slot.
        by_rank = gathered.view(self.size, share, *rows.shape[1:])
        return by_rank.transpose(0, 1).reshape(-1, *rows.shape[1:])[:total]

    def start_gather(self, rows: Tensor) -> "Arrival":
        """Begin to collect the ranks' rows, as many of each, while the caller goes on.

        Args:
            rows: (n, ...) this rank's next; not to be changed until all have arrived.
        """
        if self.size == 1:
            return Arrival(self, rows, rows)
        received = rows.new_empty(self.size * len(rows), *rows.shape[1:])
        with self.collective("start of an all_gather of rows"):
            work = dist.all_gather_into_tensor(received, rows, group=self.group, async_op=True)
        return Arrival(self, rows, received, work)

    def gather_texts(self, texts: Sequence[str], total: int) -> list[str]:
        """All ranks' texts in slot order, `total` of them: each rank gives one for each of its slots."""
        data = [text.encode(errors="backslashreplace") for text in texts]
        longest = int(self.maximum(max(map(len, data), default=1))) or 1
        rows = torch.tensor([list(row.ljust(longest, b"\0")) for row in data], dtype=torch.uint8, device=self.device)
        gathered = self.gather_rows(rows.view(len(data), longest), total)
        return [bytes(row).rstrip(b"\0").decode() for row in gathered.tolist()]

    def scatter_rows(self, rows: Tensor | None, like: Tensor, total: int) -> Tensor:
        """Give each rank the rows of its slots.

        Args:
            rows: (B, ...) in slot order on rank 0; not looked at elsewhere.
            like: a tensor with the dtype, device and trailing shape of `rows`.
            total: B.
        Returns:
            (b, ...) the rows of this rank's slots.
        """
        if self.size == 1:
            assert rows is not None
            return rows
        share = -(-total // self.size)
        received = like.new_empty(share, *like.shape[1:])
        shares = None
        if self.rank == 0:
            assert rows is not None
            padded = rows.new_zeros(self.size * share, *rows.shape[1:])
            padded[:total] = rows
            shares = [padded[r :: self.size].contiguous() for r in range(self.size)]
        with self.collective("scatter of rows"):
            dist.scatter(received, shares, group=self.group, group_src=0)
        return received[: len(self.slots(total))]

    def reduce_rows(self, rows: Tensor) -> Tensor:
        """Sum the ranks' tables; each rank gets the rows of its slots.

        Args:
            rows: (B, ...) in slot order, a part of the sum on every rank.
        Returns:
            (b, ...)
        """
        if self.size == 1:
            return rows
        share = -(-len(rows) // self.size)
        padded = rows.new_zeros(self.size * share, *rows.shape[1:])
        padded[: len(rows)] = rows
        by_rank = padded.view(share, self.size, *rows.shape[1:]).transpose(0, 1).contiguous()
        received = rows.new_empty(share, *rows.shape[1:])
        with self.collective("reduce_scatter of rows"):
            dist.reduce_scatter_tensor(received, by_rank.flatten(0, 1), group=self.group)
        return received[: len(self.slots(len(rows)))]

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrite `tensor` with rank 0's and return it."""
        if self.size > 1:
            with self.collective("broadcast"):
                dist.broadcast(tensor, group=self.group, group_src=0)
        return tensor

    def sum(self, tensor: Tensor) -> Tensor:
        """Overwrite `tensor` with its sum over the ranks and return it."""
        if self.size > 1:
            with self.collective("all_reduce of a sum"):
                dist.all_reduce(tensor, group=self.group)
        return tensor

    def maximum(self, value: float) -> float:
        """The greatest of the ranks' values; infinite where any of them is not a number."""
        worst = torch.tensor(value, dtype=torch.float64, device=self.device).nan_to_num(
            nan=float("inf"), posinf=float("inf")
        )
        if self.size > 1:
            with self.collective("all_reduce of a maximum"):
                dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self.group)
        return float(worst)

    def all_agree(self, holds: bool) -> bool:
        """Whether it holds on every rank; all ranks get the same answer."""
        return self.maximum(0.0 if holds else 1.0) == 0.0

    def all_same(self, value: int) -> bool:
        """Whether every rank has this value; all ranks get the same answer."""
        return self.all_agree(self.maximum(value) == value)

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            with self.collective("barrier"):
                dist.barrier(group=self.group)


@dataclass(frozen=True)
class Arrival:
    """Rows of all ranks that are on their way."""

    world: World
    sent: Tensor  # held until it is read
    received: Tensor
    work: dist.Work | None = None

    def is_here(self) -> bool:
        """Whether `rows` has nothing to wait for."""
        return self.work is None or self.work.is_completed()

    def rows(self) -> Tensor:
        """All ranks' rows in slot order, (W n, ...); waits for them."""
        if self.work is None:
            return self.received
        with self.world.collective("all_gather of rows"):
            self.work.wait()
        by_rank = self.received.view(self.world.size, len(self.sent), *self.sent.shape[1:])
        return by_rank.transpose(0, 1).reshape(self.received.shape)


def lone_world() -> World:
    """A world of one for what runs for long and handles large things now and then, such as a server."""
    world = World(device=_device(0))
    if world.device.type == "cpu":
        _mallopt({M_MMAP_THRESHOLD: LENT_BYTES})
    return world


@contextmanager
def joined_world(timeout_seconds: float = 600) -> Iterator[World]:
    """The world that torchrun's environment describes, or a world of one; left again at the end.

    Args:
        timeout_seconds: for all ranks to join, and for each collective.
    Raises:
        DistapError: the environment is incomplete.
        CollectiveError: a rank is missing or lost, or the network is broken; from inside as well. A rank whose main
            thread is held by a collective then ends with status 1, without it.
    """
    if "RANK" not in os.environ:
        device = _device(0)
        if device.type == "cpu":
            _keep_memory()
        yield World(device=device)
        return
    try:
        rank, size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    except (KeyError, ValueError) as error:
        raise DistapError(f"RANK is set, but the environment of torchrun is incomplete: {error}") from error
    device = _device(local_rank)
    if device.type == "cpu":
        _keep_memory()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_launcher()
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "nccl"
    party = join(rank, size, timeout_seconds)
    watchdog = Watchdog(party, timeout_seconds).start()
    farewell = "finished"
    try:
        with watchdog.collective("connecting of the ranks"):
            dist.init_process_group(
                backend,
                store=PrefixStore("group", party.store),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_seconds + LATER_SECONDS),
            )
        yield World(rank, size, local_rank, device, watchdog=watchdog)
    except BaseException as error:
        farewell = f"{type(error).__name__}: {error}"
        raise
    finally:
        # What still holds the group would keep its threads, and one that wakes while Python ends aborts the rank.
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
        watchdog.stop(farewell)


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        # Subnormal numbers, which an untrained network is full of, cost a CPU a hundred times the arithmetic.
        torch.set_flush_denormal(True)
        return CPU
    if local_rank >= torch.cuda.device_count():
        raise DistapError(
            f"local rank {local_rank} has no GPU of its own: this host has {torch.cuda.device_count()}; "
            "start that many ranks a host at most"
        )
    return torch.device("cuda", local_rank)


def _keep_memory() -> None:
    # glibc would give the memory of every large tensor back to the system, which fills it with zeros when the next
    # one asks for it: some four hundredths of a step that keeps its graphs.
    _mallopt({M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1})


def _mallopt(settings: Mapping[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for name, value in settings.items():
            mallopt(name, value)
