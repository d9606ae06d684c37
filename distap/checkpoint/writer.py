"""Write checkpoints in a thread while training goes on, to disk or to a store."""

import json
import logging
import shutil
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from distap.checkpoint.agreement import on_all
from distap.checkpoint.folder import UNFINISHED, put_in_place, remove_old, remove_unfinished
from distap.checkpoint.manifest import METADATA_FILE, STATE_FILE, Manifest, write_manifest
from distap.checkpoint.stored import StoredRun
from distap.checkpoint.tensors import write_tensors
from distap.errors import DistapError
from distap.processes.daemon import in_daemon
from distap.processes.watchdog import is_of_the_network
from distap.storage.atomic import make_folder, write_whole
from distap.storage.hashing import FileIdentity, file_identity
from distap.storage.remotes import UnreachableError
from distap.world import CPU, World

# Shares of timeout_seconds: to send a checkpoint to the store, to remove old ones there, and to wait for both, which
# ends before the watchdog ends the rank.
STORE_SHARE, TIDY_SHARE, WAIT_SHARE = 0.8, 0.1, 0.95
logger = logging.getLogger("distap")


@dataclass(frozen=True)
class Written:
    """The outcome of a checkpoint; `error` says why there is none."""

    step: int
    path: Path
    seconds: float  # of writing, beside the training
    blocked_seconds: float  # in which training waited for the copy and for the checkpoint before
    bytes: int = 0  # of all ranks
    error: str | None = None
    lost_rank: Exception | None = None  # set if it failed because the ranks can no longer talk
    may_pass: bool = False  # whether starting again may help against the error


@dataclass
class _Job:
    manifest: Manifest
    tensors: dict[str, Tensor]
    state: dict[str, Any]
    blocked_seconds: float
    is_on_disk: bool = False  # of every rank, so that only the store can fail


@dataclass(eq=False)
class CheckpointWriter:
    """Writes checkpoints in a thread while training goes on; every rank has one and makes the same calls."""

    folder: Path  # of the run's checkpoints; all hosts share it unless there is a store
    world: World
    keep: int  # number of newest checkpoints that stay
    keep_best: bool = True  # whether the one with the highest validation mAP stays as well
    timeout_seconds: float = 600  # for the ranks' talk about a checkpoint, its writing to a store, and a wait for it
    stored: StoredRun | None = None  # the run in a store, to which checkpoints go

    def __post_init__(self) -> None:
        # Collectives of two threads must not meet in one group, so the writers talk over their own, on the CPU.
        group: Any = None
        if self.world.size > 1:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_seconds))
        self._ranks = replace(self.world, device=CPU, group=group, watchdog=None)
        self._writing: Future[Written] | None = None
        self._kept_here: list[Path] = []  # checkpoints that the store could not take

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        state: dict[str, Any],
        about: dict[str, Any],
        score: float | None = None,
    ) -> Written | None:
        """Copy the state and start to write it; before, wait for the last checkpoint and return its outcome.

        Tensors of one name are written once. The `state`, which JSON can hold, and the parts of the `Manifest` are
        the same on every rank.
        """
        started = time.perf_counter()
        before = self.wait()
        # One copy for each name, even if two names share a tensor, so that training may change it.
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        blocked = time.perf_counter() - started
        job = _Job(Manifest(step, self.world.size, {}, about, score), copies, state, blocked)
        # A daemon, since a collective that hangs must not keep a failed rank from ending.
        self._writing = in_daemon(lambda: self._run(job), "distap-checkpoint")
        return before

    def poll(self) -> Written | None:
        """Return the outcome of the last checkpoint once, as soon as it is known."""
        if self._writing is None or not self._writing.done():
            return None
        written, self._writing = self._writing.result(), None
        return written

    def wait(self) -> Written | None:
        """Wait for the checkpoint that is being written and return its outcome, as `poll` does.

        Raises:
            UnreachableError: it is not written in time.
        """
        with self.world.collective("writing of the checkpoint"):
            limit = WAIT_SHARE * self.timeout_seconds
            if wait([self._writing] if self._writing else [], limit).not_done:
                hangs = f"training has waited {limit:g} s for a checkpoint (timeout_seconds {self.timeout_seconds:g})"
                raise UnreachableError(f"{self.folder}: {hangs}: the disk, the network or a rank hangs or is slow")
            written = self.poll()
            if written is not None and written.lost_rank is not None:
                raise written.lost_rank
        return written

    def _run(self, job: _Job) -> Written:
        started = time.perf_counter()
        path = self.folder / f"step-{job.manifest.step:08d}"
        outcome: dict[str, Any] = {}
        try:
            outcome["bytes"] = self._write(job, path)
        except Exception as error:  # training goes on after any error, and poll tells of it
            outcome = {"error": str(error) or type(error).__name__, "may_pass": isinstance(error, UnreachableError)}
            if self.world.size > 1 and is_of_the_network(error):
                outcome["lost_rank"] = error
            elif not job.is_on_disk:
                # torch's writer hides a full disk behind an error of its own.
                free = shutil.disk_usage(self.folder).free / 1e6 if self.folder.is_dir() else float("nan")
                needed = sum(tensor.nbytes for tensor in job.tensors.values()) / 1e6
                outcome["error"] += f" (it takes {needed:,.1f} MB; {free:,.1f} MB are free)"
        seconds = time.perf_counter() - started
        return Written(job.manifest.step, path, seconds, job.blocked_seconds, **outcome)

    def _write(self, job: _Job, path: Path) -> int:
        """Write aside, rename or upload, and return the bytes of all ranks. Fails on all ranks or on none."""
        is_first = self.world.rank == 0
        # The main thread may be waiting for this one with the same time-out, so leave it some.
        stored = self.stored and self.stored.by(time.monotonic() + STORE_SHARE * self.timeout_seconds)
        # A random name: a writer on another host that was thought dead must not write into the same files.
        attempt = on_all(self._ranks, lambda: uuid.uuid4().hex[:8], mine=is_first)[0]
        aside = self.folder / f"{UNFINISHED}{path.name[5:]}.tmp-{attempt}"
        is_ours = is_first if stored is None else self.world.local_rank == 0

        def make() -> None:
            make_folder(self.folder)
            remove_unfinished(self.folder, but=aside)
            aside.mkdir(exist_ok=True)

        try:
            on_all(self._ranks, make, mine=is_ours)
            write_tensors(aside, job.tensors, self._ranks.group)
            shares = on_all(self._ranks, lambda: self._finished_files(aside, job))
            files = {name: FileIdentity(**identity) for share in shares for name, identity in share.items()}
            manifest = replace(job.manifest, files=files)
            if stored is None:
                on_all(self._ranks, lambda: self._publish(aside, path, manifest), mine=is_first)
            else:
                job.is_on_disk = True
                self._upload(stored, f"{path.name}.{attempt}", aside, manifest, list(shares[self.world.rank]))
        finally:
            if is_ours:  # what failed, or is in the store: make room on this disk, and leave one place to go on from
                shutil.rmtree(aside, ignore_errors=True)
        if self.stored is not None and is_first:
            until = time.monotonic() + TIDY_SHARE * self.timeout_seconds
            self._tidy(self.stored.by(until), f"{path.name}.{attempt}")
        return sum(identity.bytes for identity in files.values())

    def _finished_files(self, aside: Path, job: _Job) -> dict[str, dict[str, Any]]:
        """Return the identities of this rank's files, which torch has brought to the disk already."""
        names = sorted(path.name for path in aside.glob(f"__{self.world.rank}_*.distcp"))
        if self.world.rank == 0:
            write_whole(aside / STATE_FILE, json.dumps(job.state, indent=2))
            names += [METADATA_FILE, STATE_FILE]
        return {name: asdict(file_identity(aside / name)) for name in names}

    def _publish(self, aside: Path, path: Path, manifest: Manifest) -> None:
        write_manifest(aside, manifest)  # which also brings the names of all files to the disk
        put_in_place(aside, path)
        try:
            remove_old(path, self.keep if self.stored is None else 1, self.keep_best)
        except (OSError, DistapError) as error:  # the new one is there all the same
            logger.warning("%s: an old checkpoint cannot be removed: %s", self.folder, error)

    def _upload(self, stored: StoredRun, name: str, aside: Path, manifest: Manifest, files: list[str]) -> None:
        """Send each rank's files, then the manifest; fails on all ranks or on none."""
        is_first = self.world.rank == 0

        def send() -> None:
            stored.upload(name, aside, files)
            if is_first:
                stored.send_beside(self.folder.parent)

        try:
            on_all(self._ranks, send)
            on_all(self._ranks, lambda: stored.publish(name, manifest), mine=is_first)
        except DistapError as error:
            path = self.folder / name.partition(".")[0]
            is_kept = on_all(self._ranks, lambda: self._keep_here(aside, path, manifest), mine=is_first)[0]
            kept = f"; it stays in {path} until the store has a newer one" if is_kept else ""
            raise type(error)(f"{error}{kept}") from error

    def _keep_here(self, aside: Path, path: Path, manifest: Manifest) -> bool:
        """Keep a checkpoint that the store could not take, if this host has all of it, in place of an earlier one."""
        if not all((aside / file).is_file() for file in manifest.files):
            return False
        try:
            self._publish(aside, path, manifest)
        except (OSError, DistapError) as error:
            logger.warning("%s: a checkpoint that the store could not take cannot stay here either: %s", path, error)
            return False
        self._kept_here.append(path)
        return True

    def _tidy(self, stored: StoredRun, name: str) -> None:
        """Remove the checkpoints, here and in the store, that the new one in the store replaces."""
        for path in self._kept_here:
            shutil.rmtree(path, ignore_errors=True)
        self._kept_here.clear()
        try:
            stored.remove_old(name, self.keep, self.keep_best)
        except DistapError as error:  # the new one is there all the same
            logger.warning("an old checkpoint cannot be removed: %s", error)
