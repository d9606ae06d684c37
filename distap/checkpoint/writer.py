"""Writing checkpoints beside the training."""

import json
import logging
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from distap.checkpoint.folder import UNFINISHED, put_in_place, remove_old, remove_unfinished
from distap.checkpoint.manifest import (
    METADATA_FILE,
    STATE_FILE,
    FileIdentity,
    Manifest,
    file_identity,
    write_manifest,
)
from distap.checkpoint.stored import StoredRun
from distap.checkpoint.tensors import files_of_rank, write_tensors
from distap.errors import DistapError
from distap.processes.network_errors import is_of_the_network
from distap.storage.atomic import make_folder, write_whole
from distap.storage.remotes import UnreachableError
from distap.world import World

STORE_SHARE, TIDY_SHARE = 0.8, 0.1  # of the time-out, for a checkpoint to be in the store, and for what is old there
T = TypeVar("T")
logger = logging.getLogger("distap")


@dataclass(frozen=True)
class Written:
    """What became of a checkpoint; `error` says why there is none."""

    step: int
    path: Path
    seconds: float  # of writing, beside the training
    blocked_seconds: float  # in which training waited, for the copy and the checkpoint before
    bytes: int = 0  # of all ranks
    error: str | None = None
    lost_rank: Exception | None = None  # where it failed since the ranks can no longer talk
    may_pass: bool = False  # whether starting again may help against the error


@dataclass
class _Job:
    """A checkpoint that is being written."""

    manifest: Manifest
    tensors: dict[str, Tensor]
    state: dict[str, Any]
    blocked_seconds: float
    thread: threading.Thread | None = None
    written: Written | None = None


class CheckpointWriter:
    """Writes checkpoints in a thread, while training goes on; every rank has one and calls it alike.

    Args:
        folder: of the run's checkpoints, which all hosts see where there is no store.
        world: the ranks; they talk over a process group of their own here.
        keep: checkpoints that stay, the newest.
        keep_best: the one with the highest validation mAP stays as well.
        timeout_seconds: for the ranks' talk about a checkpoint, and for all of its writing to a store.
        stored: the run in a store, where checkpoints go; the folder may then be each host's own.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        keep: int,
        keep_best: bool = True,
        timeout_seconds: float = 600,
        stored: StoredRun | None = None,
    ) -> None:
        self.folder, self.world = folder, world
        self.keep, self.keep_best = keep, keep_best
        self.timeout_seconds, self.stored = timeout_seconds, stored
        # Collectives of two threads must not meet in one group; on the CPU, whatever trains.
        self._group: dist.ProcessGroup | None = None
        if world.size > 1:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
            assert isinstance(group, dist.ProcessGroup)
            self._group = group
        self._job: _Job | None = None
        self._kept_here: list[Path] = []  # what the store could not take

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        state: dict[str, Any],
        about: dict[str, Any],
        score: float | None = None,
    ) -> Written | None:
        """Copy the state and start to write it; waits for the checkpoint before this one.

        Args:
            step: steps behind the state.
            tensors: by name; those that ranks hold alike are written once.
            state: what JSON can hold, the same on every rank.
            about: hashes that tell of which training it is.
            score: validation mAP of this state, where it has been evaluated.
        Returns:
            What became of the checkpoint before this one, unless `poll` has told.
        """
        started = time.perf_counter()
        before = self.wait()
        # One tensor is one object: a copy for each name, so that training may move on.
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        blocked = time.perf_counter() - started
        job = _Job(Manifest(step, self.world.size, {}, about, score), copies, state, blocked)
        # A daemon, since a collective that hangs must not keep a failed rank from ending.
        job.thread = threading.Thread(target=self._run, args=(job,), name="distap-checkpoint", daemon=True)
        job.thread.start()
        self._job = job
        return before

    def poll(self) -> Written | None:
        """What became of the last checkpoint, once, when it is known."""
        if self._job is None or self._job.written is None:
            return None
        written = self._job.written
        self._job = None
        return written

    def wait(self) -> Written | None:
        """Wait for the checkpoint that is being written; what became of it.

        Raises:
            CollectiveError: a rank was lost meanwhile.
        """
        with self.world.collective("writing of the checkpoint"):
            if self._job is not None and self._job.thread is not None:
                self._job.thread.join()
            written = self.poll()
            if written is not None and written.lost_rank is not None:
                raise written.lost_rank
        return written

    def _run(self, job: _Job) -> None:
        started = time.perf_counter()
        path = self.folder / f"step-{job.manifest.step:08d}"
        size, problem, lost_rank, may_pass = 0, None, None, False
        try:
            size = self._write(job, path)
        except _StoreError as error:
            problem, may_pass = str(error), error.may_pass
        except Exception as error:  # whatever it was, training goes on, and poll tells of it
            problem = str(error) or type(error).__name__
            if self._group is not None and is_of_the_network(error):
                lost_rank = error
            else:
                # torch's writer hides a full disk behind an error of its own.
                free = shutil.disk_usage(self.folder).free / 1e6 if self.folder.is_dir() else float("nan")
                needed = sum(tensor.nbytes for tensor in job.tensors.values()) / 1e6
                problem += f" (it takes {needed:,.1f} MB; {free:,.1f} MB are free)"
        seconds = time.perf_counter() - started
        job.written = Written(
            job.manifest.step, path, seconds, job.blocked_seconds, size, problem, lost_rank, may_pass
        )

    def _write(self, job: _Job, path: Path) -> int:
        """Write aside, describe the files, rename; returns the bytes of all ranks. Fails on all ranks or on none."""
        # So many seconds of those that the main thread may wait for this one.
        until = time.monotonic() + STORE_SHARE * self.timeout_seconds
        stored = None if self.stored is None else self.stored.by(until)
        # Not a fixed name: a writer that was thought dead, on another host, would write into the same files.
        attempt = self._agreed(lambda: uuid.uuid4().hex[:8], mine=self.world.rank == 0)[0]
        aside = self.folder / f"{UNFINISHED}{path.name[5:]}.tmp-{attempt}"
        is_ours = self.world.local_rank == 0 if self.stored is not None else self.world.rank == 0
        try:
            self._agreed(lambda: self._make(aside), mine=is_ours)
            write_tensors(aside, job.tensors, self._group)
            shares = self._agreed(lambda: self._finished_files(aside, job))
            files: dict[str, FileIdentity] = {}
            for share in shares:
                files |= share
            manifest = replace(job.manifest, files=files)
            if stored is None:
                self._agreed(lambda: self._publish(aside, path, manifest, self.keep), mine=self.world.rank == 0)
            else:
                self._upload(stored, f"{path.name}.{attempt}", aside, manifest, list(shares[self.world.rank]))
        except Exception:
            if is_ours:
                shutil.rmtree(aside, ignore_errors=True)
            raise
        if self.stored is not None and is_ours:
            # Only the store has it now: there is room on this disk for the next, and one place to go on from.
            shutil.rmtree(aside, ignore_errors=True)
        if self.stored is not None and self.world.rank == 0:
            self._tidy(self.stored.by(time.monotonic() + TIDY_SHARE * self.timeout_seconds), f"{path.name}.{attempt}")
        return sum(identity.bytes for identity in files.values())

    def _make(self, aside: Path) -> None:
        make_folder(self.folder)
        remove_unfinished(self.folder, but=aside)
        aside.mkdir(exist_ok=True)

    def _finished_files(self, aside: Path, job: _Job) -> dict[str, FileIdentity]:
        """This rank's files, with what they are; they are on the disk already."""
        names = files_of_rank(aside, self.world.rank)
        if self.world.rank == 0:
            write_whole(aside / STATE_FILE, json.dumps(job.state, indent=2))
            names += [METADATA_FILE, STATE_FILE]
        return {name: file_identity(aside / name) for name in names}

    def _publish(self, aside: Path, path: Path, manifest: Manifest, keep: int) -> None:
        write_manifest(aside, manifest)  # with it the names of all files are on the disk
        put_in_place(aside, path)
        try:
            remove_old(self.folder, keep, self.keep_best)
        except OSError as error:  # the new one is there all the same
            logger.warning("%s: an old checkpoint cannot be removed: %s", self.folder, error)

    def _upload(self, stored: StoredRun, name: str, aside: Path, manifest: Manifest, files: list[str]) -> None:
        """Send each rank's files, then the manifest; fails on all ranks or on none."""
        is_first = self.world.rank == 0

        def send() -> None:
            stored.upload(name, aside, files)
            if is_first:
                send_beside(stored, self.folder.parent)

        try:
            self._agreed(send)
            self._agreed(lambda: stored.publish(name, manifest), mine=is_first)
        except _RankError as error:
            path = self.folder / name.partition(".")[0]
            is_kept = self._agreed(lambda: self._keep_here(aside, path, manifest), mine=is_first)[0]
            kept = f"; it stays in {path} until the store has a newer one" if is_kept else ""
            raise _StoreError(f"{error}{kept}", error.may_pass) from error

    def _keep_here(self, aside: Path, path: Path, manifest: Manifest) -> bool:
        """Keep what the store could not take, if this host has all of it; it takes the place of an earlier one."""
        if not all((aside / file).is_file() for file in manifest.files):
            return False
        try:
            self._publish(aside, path, manifest, keep=1)
        except (OSError, DistapError) as error:
            logger.warning("%s: what the store could not take cannot stay here either: %s", path, error)
            return False
        self._kept_here.append(path)
        return True

    def _tidy(self, stored: StoredRun, name: str) -> None:
        """Remove what the new checkpoint in the store makes superfluous, there and here."""
        for path in self._kept_here:
            shutil.rmtree(path, ignore_errors=True)
        self._kept_here.clear()
        try:
            stored.remove_old(name)
        except DistapError as error:  # the new one is there all the same
            logger.warning("an old checkpoint cannot be removed: %s", error)

    def _agreed(self, work: Callable[[], T], mine: bool = True) -> list[T]:
        """Do the work on the ranks whose own it is; all ranks get the results, or the same error.

        Raises:
            OSError: it failed on a rank.
        """
        result, error, may_pass = None, "", True
        if mine:
            try:
                result = work()
            except Exception as failure:
                error, may_pass = f"rank {self.world.rank}: {failure}", isinstance(failure, UnreachableError)
        answers: list[Any] = [(result, error, may_pass)]
        if self._group is not None:
            answers = [None] * self.world.size
            dist.all_gather_object(answers, (result, error, may_pass), group=self._group)
        errors = [error for _, error, _ in answers if error]
        if errors:
            raise _RankError("; ".join(errors), all(may_pass for _, _, may_pass in answers))
        return [result for result, _, _ in answers]


def send_beside(stored: StoredRun, run: Path) -> None:
    """Bring what is beside checkpoints to the store; curves with a gap are no reason to lose a checkpoint."""
    try:
        stored.save_beside(run)
    except (OSError, DistapError) as error:
        logger.warning("not in the store, but in %s: %s", run, error)


class _RankError(OSError):
    """Work failed on one or more ranks."""

    def __init__(self, text: str, may_pass: bool) -> None:
        super().__init__(text)
        self.may_pass = may_pass


class _StoreError(_RankError):
    """A checkpoint was written, and did not get into the store."""
