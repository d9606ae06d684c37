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

from distap.checkpoint.agreement import on_all
from distap.checkpoint.checkpoints import Checkpoints, FilesBeside
from distap.checkpoint.manifest import STATE_FILE, Manifest, write_tensors
from distap.errors import DistapError, logger, memory_ran_out
from distap.processes.forks import in_daemon
from distap.processes.watchdog import is_of_the_network
from distap.storage.atomic import FileIdentity, file_identity, write_whole
from distap.storage.remotes import UnreachableError
from distap.world import CPU, World

# of timeout_seconds: a wait for a checkpoint ends before the watchdog ends the rank
WAIT_SHARE = 0.95


@dataclass(frozen=True)
class Written:
    """The outcome of writing a checkpoint; `error` is the reason if it failed."""

    step: int
    where: str  # path or URL
    seconds: float  # of writing, while the training went on
    blocked_seconds: float  # in which training waited for the copy and for the checkpoint before
    bytes: int = 0  # of all ranks
    error: str | None = None
    lost_rank: Exception | None = None  # set if it failed because the ranks can no longer talk
    may_pass: bool = False  # whether starting again may help against the error


@dataclass(eq=False)
class CheckpointWriter:
    """Write checkpoints in a thread while training goes on; every rank has a writer and makes the
    same calls.
    """

    checkpoints: Checkpoints  # of the run; all hosts share the disk or store
    world: World
    # number of newest checkpoints that stay, next to the one with the highest validation mAP
    keep: int
    # for the ranks' talk about a checkpoint, its writing, and a wait for it
    timeout_seconds: float = 600
    spool: Path = Path()  # folder on this host's disk, through which files go to a store
    # other files of the run, which go to the store with checkpoints
    beside: FilesBeside | None = None

    def __post_init__(self) -> None:
        # Collectives of two threads must not meet in one group, so the writers talk over their own,
        # on the CPU.
        group: Any = None
        if self.world.size > 1:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_seconds))
        self._ranks = replace(self.world, device=CPU, group=group, watchdog=None)
        self._writing: Future[Written] | None = None
        self.outcomes: deque[Written] = deque()  # for the caller to take and report
        self.best = float("-inf")  # highest validation mAP of a checkpoint that is there

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        state: dict[str, Any],
        about: dict[str, Any],
        score: float | None = None,
    ) -> None:
        """Wait for the last checkpoint, then copy the state and start to write it.

        Tensors of one name are written once. The `state`, which JSON can hold, and the parts of the
        `Manifest` are the same on every rank.
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
                hangs = (
                    f"training has waited {limit:g} s for a checkpoint (timeout_seconds"
                    f" {self.timeout_seconds:g})"
                )
                base = self.checkpoints.storage.base
                raise UnreachableError(
                    f"{base}: {hangs}: the disk, the network or a rank hangs or is slow"
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
        outcome: dict[str, Any] = {}
        try:
            outcome["bytes"] = self._write(manifest, tensors, state)
            if manifest.score is not None:
                self.best = max(self.best, manifest.score)
        except (
            BaseException
        ) as error:  # training goes on after any error, a panic of Rust too; the outcome tells it
            outcome = {
                "error": str(error) or type(error).__name__,
                "may_pass": isinstance(error, UnreachableError),
            }
            if self.world.size > 1 and is_of_the_network(error):
                outcome["lost_rank"] = error
            elif self.checkpoints.is_on_disk and not memory_ran_out(error):
                # torch's writer hides a full disk behind an error of its own.
                folder = self.checkpoints.path("")
                free = (
                    shutil.disk_usage(
                        next(each for each in (folder, *folder.parents) if each.is_dir())
                    ).free
                    / 1e6
                )
                needed = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
                outcome["error"] += (
                    f" (it takes {needed:,.1f} MB; the disk has room for {free:,.1f} MB)"
                )
        if "error" in outcome:
            gc.collect()  # the frames of the error hold the copies of the tensors
        seconds = time.perf_counter() - started
        where = self.checkpoints.where(f"step-{manifest.step:08d}")
        written = Written(manifest.step, where, seconds, blocked_seconds, **outcome)
        self.outcomes.append(written)
        return written

    def _write(self, manifest: Manifest, tensors: dict[str, Tensor], state: dict[str, Any]) -> int:
        """Write the files of all ranks, then the manifest; return the size in bytes. All ranks
        fail, or none.
        """
        is_first = self.world.rank == 0
        ranks = self._ranks
        checkpoints = self.checkpoints
        name = str(on_all(ranks, lambda: checkpoints.begin(manifest.step), mine=is_first)[0])
        with checkpoints.place(name, self.spool) as folder:
            write_tensors(folder, tensors, ranks)
            shares = on_all(ranks, lambda: self._send(checkpoints, name, folder, state))
        # `on_all` is the barrier too: the manifest follows once all ranks' files are on the disk or
        # in the store.
        files = {
            file: FileIdentity(**identity) for share in shares for file, identity in share.items()
        }
        on_all(
            ranks, lambda: checkpoints.publish(name, replace(manifest, files=files)), mine=is_first
        )
        if is_first:
            try:
                checkpoints.remove_old(name, self.keep)
            except (OSError, DistapError) as error:  # the new one is there all the same
                logger.warning(
                    "%s: an old checkpoint cannot be removed: %s", checkpoints.storage.base, error
                )
        return sum(identity.bytes for identity in files.values())

    def _send(
        self, checkpoints: Checkpoints, name: str, folder: Path, state: dict[str, Any]
    ) -> dict[str, dict[str, Any]]:
        # Return the identities of this rank's files, which torch has brought to the disk already.
        # Torch numbers the ranks from 1 in the names.
        files = [
            path.name for path in folder.glob(f"shard-{self.world.rank + 1:05d}-*.safetensors")
        ]
        if self.world.rank == 0:
            write_whole(folder / STATE_FILE, json.dumps(state, indent=2))
            files.append(STATE_FILE)
        identities = {file: asdict(file_identity(folder / file)) for file in sorted(files)}
        checkpoints.send(name, folder, files)
        if self.world.rank == 0 and self.beside is not None:
            self.beside.send()
        return identities
