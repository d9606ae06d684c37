"""Write checkpoints in a thread while training goes on, to disk or to a store."""

import gc
import json
import shutil
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from distap.checkpoint.agreement import on_all, on_rank_0
from distap.checkpoint.checkpoints import Checkpoints, FilesBeside
from distap.checkpoint.manifest import STATE_FILE, Manifest, write_tensors
from distap.errors import DistapError, logger, memory_ran_out
from distap.processes.forks import in_daemon
from distap.processes.watchdog import is_of_the_network
from distap.storage.atomic import FileIdentity, file_identity, write_whole
from distap.storage.remotes import UnreachableError
from distap.world import CPU, World

# Share of timeout_seconds after which a wait for a checkpoint ends, before the watchdog ends the
# rank.
WAIT_SHARE = 0.95


@dataclass
class Written:
    """The outcome of writing a checkpoint; `error` is the reason if it failed."""

    step: int
    where: str  # path or URL
    blocked_seconds: float  # in which training waited for the copy and for the checkpoint before
    seconds: float = 0  # of writing, while the training went on
    bytes: int = 0  # of all ranks
    error: str | None = None
    lost_rank: BaseException | None = None  # set if it failed because the ranks can no longer talk
    may_pass: bool = False  # whether starting again may help against the error


@dataclass(eq=False)
class CheckpointWriter:
    """Write checkpoints in a thread while training goes on.

    Every rank has a writer and makes the same calls.

    Args:
        checkpoints: those of the run; all hosts share the disk or store.
        keep: number of newest checkpoints that stay, next to the one with the highest score.
        timeout_seconds: for the ranks' collectives about a checkpoint, its writing, and a wait for
            it.
        spool: folder on this host's disk, through which files go to a store.
        beside: other files of the run, which go to the store with checkpoints.
    """

    checkpoints: Checkpoints
    world: World
    keep: int
    timeout_seconds: float = 600
    spool: Path = Path()
    beside: FilesBeside | None = None

    def __post_init__(self) -> None:
        # Collectives of two threads must not meet in one group, so the writers have their own, on
        # the CPU.
        group: Any = None
        if self.world.size > 1:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_seconds))
        self._ranks = replace(self.world, device=CPU, group=group, watchdog=None)
        self._writing: Future[Written] | None = None
        self.outcomes: deque[Written] = deque()  # for the caller to take and report
        self.best = float("-inf")  # highest score of a checkpoint that is there

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        state: dict[str, Any],
        about: dict[str, Any],
        score: float | None = None,
    ) -> None:
        """Wait for the last checkpoint, then copy the state and start to write it.

        Tensors of one name are written once. The `state`, which JSON can hold, and the manifest's
        `about` and `score` are the same on every rank.
        """
        started = time.perf_counter()
        self.wait()
        # One copy for each name, even if two names share a tensor, so that training may change it.
        # Safetensors takes contiguous ones only, and the weights of convolutions may be
        # channels-last.
        copies = {
            name: tensor.detach().to("cpu", copy=True).contiguous()
            for name, tensor in tensors.items()
        }
        blocked = time.perf_counter() - started
        manifest = Manifest(step, self.world.size, {}, about, score)
        # A daemon, since a collective that hangs must not keep a failed rank from ending.
        self._writing = in_daemon(
            lambda: self._run(manifest, copies, state, blocked), "distap-checkpoint"
        )

    def wait(self) -> Written | None:
        """Wait until the last checkpoint is written and return its outcome; None if there is none.

        Raises:
            UnreachableError: the checkpoint is not written in time.
        """
        with self.world.collective("writing of the checkpoint"):
            if self._writing is None:
                return None
            limit = WAIT_SHARE * self.timeout_seconds
            if wait([self._writing], limit).not_done:
                raise UnreachableError(
                    "checkpoint.late",
                    f"{self.checkpoints.storage.base}: training has waited {limit:g} s for a"
                    f" checkpoint (timeout_seconds {self.timeout_seconds:g}): the disk, the network"
                    " or a rank hangs or is slow",
                )
            written = self._writing.result()
            if written.lost_rank is not None:
                raise written.lost_rank
        return written

    def _run(
        self,
        manifest: Manifest,
        tensors: dict[str, Tensor],
        state: dict[str, Any],
        blocked_seconds: float,
    ) -> Written:
        started = time.perf_counter()
        where = self.checkpoints.where(f"step-{manifest.step:08d}")
        written = Written(manifest.step, where, blocked_seconds)
        try:
            written.bytes = self._write(manifest, tensors, state)
            if manifest.score is not None:
                self.best = max(self.best, manifest.score)
        # Training goes on after any error, a panic of Rust too.
        except BaseException as error:
            written.error = str(error) or type(error).__name__
            written.may_pass = isinstance(error, UnreachableError)
            if self.world.size > 1 and is_of_the_network(error):
                written.lost_rank = error
            elif self.checkpoints.is_on_disk and not memory_ran_out(error):
                written.error += self._room_for(tensors)
        if written.error is not None:
            gc.collect()  # the frames of the error hold the copies of the tensors
        written.seconds = time.perf_counter() - started
        self.outcomes.append(written)
        return written

    def _room_for(self, tensors: Mapping[str, Tensor]) -> str:
        # torch's writer hides a full disk behind an error of its own.
        folder = self.checkpoints.path("")
        while not folder.is_dir():
            folder = folder.parent
        free = shutil.disk_usage(folder).free / 1e6
        needed = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
        return f" (it takes {needed:,.1f} MB; the disk has room for {free:,.1f} MB)"

    def _write(self, manifest: Manifest, tensors: dict[str, Tensor], state: dict[str, Any]) -> int:
        """Write the files of all ranks, then the manifest; return the size in bytes.

        All ranks fail, or none.
        """
        ranks = self._ranks
        checkpoints = self.checkpoints
        name = str(on_rank_0(ranks, lambda: checkpoints.begin(manifest.step)))
        with checkpoints.place(name, self.spool) as folder:
            write_tensors(folder, tensors, ranks)
            shares = on_all(ranks, lambda: self._send(name, folder, state))
        # `on_all` is the barrier too: the manifest follows once all ranks' files are on the disk or
        # in the store.
        files = {
            file: FileIdentity(**identity) for share in shares for file, identity in share.items()
        }
        on_rank_0(ranks, lambda: checkpoints.publish(name, replace(manifest, files=files)))
        if ranks.rank == 0:
            try:
                checkpoints.remove_old(name, self.keep)
            except (OSError, DistapError) as error:  # the new one is there all the same
                logger.warning(
                    "%s: an old checkpoint cannot be removed: %s", checkpoints.storage.base, error
                )
        return sum(identity.bytes for identity in files.values())

    def _send(self, name: str, folder: Path, state: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Send this rank's files, which torch has brought to the disk; return their identities."""
        # Torch numbers the ranks from 1 in the names.
        files = [
            path.name for path in folder.glob(f"shard-{self.world.rank + 1:05d}-*.safetensors")
        ]
        if self.world.rank == 0:
            write_whole(folder / STATE_FILE, json.dumps(state, indent=2))
            files.append(STATE_FILE)
        identities = {file: asdict(file_identity(folder / file)) for file in sorted(files)}
        self.checkpoints.send(name, folder, files)
        if self.world.rank == 0 and self.beside is not None:
            self.beside.send()
        return identities
