"""Find the checkpoint to go on from or to read a network from, on disk or in a store."""

import logging
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from distap.checkpoint.agreement import on_all
from distap.checkpoint.folder import (
    FOLDER,
    NAME,
    UNFINISHED,
    Checkpoint,
    best_checkpoint,
    list_checkpoints,
    step_in_name,
)
from distap.checkpoint.manifest import DamagedCheckpointError, read_manifest, verify_files
from distap.checkpoint.stored import StoredRun
from distap.errors import DistapError
from distap.storage.files import storage_of
from distap.storage.locations import parse_store, scheme_of
from distap.storage.remotes import MissingFileError
from distap.world import World

KEY = "checkpoint.store"  # of the recipe, for messages
PROBES = ".probes"
LISTING_SECONDS = 60.0  # during which a network file system may still show an old listing of a folder
C = TypeVar("C")
logger = logging.getLogger("distap")


@dataclass(frozen=True)
class Found:
    """A checkpoint to go on from, on this host's disk, the same on every rank."""

    checkpoint: Checkpoint
    name: str | None  # in the store; None if it is not there
    passed_over: list[str]  # names of newer ones that are damaged, in the store if there is one


@contextmanager
def opened_checkpoint(where: str | Path, best: bool = False, beside: tuple[str, ...] = ()) -> Iterator[Checkpoint]:
    """Open the checkpoint that a path or URL means, verified. Downloaded files are removed on leaving.

    A store is reached with the credentials and settings of the environment.

    Args:
        where: a run, of which the newest good checkpoint is taken, or one of its checkpoints.
        best: of a run, take the checkpoint with the highest validation mAP.
        beside: patterns of other files of the run to download as well.
    Raises:
        DistapError: there is none, the named one is damaged, or the store cannot be read.
    """
    if not scheme_of(str(where)):
        yield find_checkpoint(Path(where), best)
        return
    url = str(where).rstrip("/")
    base, _, name = url.rpartition(f"/{FOLDER}/")
    is_named = "." in name and NAME.fullmatch(name) is not None
    stored = StoredRun(storage_of(parse_store(base if is_named else url), key=None), beside=beside)
    names = [name] if is_named else stored.names() if not best else [stored.best()]
    if not any(names):
        expected = "has been evaluated; evaluation.every does that" if best else "is there; expected the URL of a run"
        raise DistapError(f"{stored.store.base}: no checkpoint {expected}")
    with tempfile.TemporaryDirectory(prefix="distap-") as temporary:
        run = Path(temporary)

        def fetched(name: str) -> Checkpoint:
            folder = run / FOLDER / f"step-{step_in_name(name):08d}"
            folder.mkdir(parents=True)
            return stored.fetch(name, folder)

        newest = _newest(url, [name for name in names if name], fetched)
        assert newest is not None
        stored.fetch_beside(run)
        yield newest[0]


def find_checkpoint(path: Path, best: bool = False) -> Checkpoint:
    """Return the checkpoint that a path means: itself, or the newest good one of a run folder, or its best.

    Raises:
        DistapError: there is none, or the named one is damaged.
    """
    if NAME.fullmatch(path.name):
        if not path.is_dir():
            raise DistapError(f"{path}: no such checkpoint")
        manifest = read_manifest(path)
        verify_files(path, manifest, manifest.files)
        return Checkpoint(path, manifest)
    if best:
        if (chosen := best_checkpoint(path / FOLDER)) is None:
            raise DistapError(f"{path}: no checkpoint there has been evaluated; evaluation.every does that")
        return find_checkpoint(chosen)
    with newest_checkpoint(path / FOLDER, World()) as found:
        if found is None:
            raise DistapError(
                f"{path}: no checkpoint there; expected a run's folder or one of its step-NNNNNNNN folders"
            )
        return found.checkpoint


@contextmanager
def newest_checkpoint(folder: Path, world: World, stored: StoredRun | None = None) -> Iterator[Found | None]:
    """Find the newest checkpoint that all ranks see undamaged.

    Without a store the ranks share the verification. With one, the first rank of each host downloads or verifies a
    checkpoint for its host; what was downloaded is removed when all ranks leave.

    Args:
        folder: of the run's checkpoints; all hosts share it unless there is a store.
        world: the ranks.
        stored: the run in a store, whose checkpoints count as well as those on the disks of all hosts.
    Raises:
        DistapError: the ranks see different checkpoints, the store cannot be read, or all checkpoints are damaged.
    """
    if stored is None:
        names = _seen_by_all(folder, world)
        newest = _newest(folder, names, lambda name: _verified(folder / name, world, True), world.rank)
        yield None if newest is None else Found(newest[0], None, newest[2])
        return
    names, attempt = on_all(world, lambda: [stored.names(), uuid.uuid4().hex[:8]], mine=world.rank == 0)[0]
    seen = on_all(world, lambda: [path.name for path in list_checkpoints(folder)])
    local = set[str]().union(*seen).intersection(*seen)
    # At equal steps the store's, which every host can have.
    candidates = sorted([(step_in_name(n), True, n) for n in names] + [(step_in_name(n), False, n) for n in local])
    # The ranks of a host are numbered in a row, and all of them read what the first one downloads.
    download = folder / f"{UNFINISHED}fetched-{attempt}-{world.rank - world.local_rank}"

    def checked(candidate: tuple[int, bool, str]) -> Checkpoint:
        _, is_stored, name = candidate
        return _fetched(stored, name, download, world) if is_stored else _verified(folder / name, world, False)

    try:
        chosen = _newest(f"{KEY}: {stored.store.base} and {folder}", candidates, checked, world.rank)
        if chosen is None:
            yield None
        else:
            checkpoint, (_, is_stored, name), passed_over = chosen
            yield Found(checkpoint, name if is_stored else None, [name for _, stored, name in passed_over if stored])
            world.barrier()  # the other ranks of this host may still read
    finally:
        if world.local_rank == 0:
            shutil.rmtree(download, ignore_errors=True)


def probe(stored: StoredRun, world: World) -> None:
    """Check that every rank can write to the store, see the files of the others, and remove its own.

    Raises:
        DistapError: a rank cannot; on all ranks.
    """
    store = stored.store
    attempt = on_all(world, lambda: uuid.uuid4().hex[:8], mine=world.rank == 0)[0]
    names = [f"{PROBES}/{attempt}-{rank}" for rank in range(world.size)]

    def see() -> None:
        present = store.sizes(PROBES)
        missing = [str(rank) for rank, name in enumerate(names) if name not in present]
        if missing:
            raise DistapError(
                f"a file that rank {', '.join(missing)} wrote there is not seen: all hosts need the same store"
            )

    def tidy() -> None:
        others = store.sizes(PROBES).keys() - names if world.rank == 0 else ()
        for name in (names[world.rank], *sorted(others)):
            store.remove(name)

    try:
        for work in (lambda: store.write(names[world.rank], b"distap"), see, tidy):
            on_all(world, work)
    except DistapError as error:
        problem = "checkpoints cannot be kept there"
        if isinstance(error.__cause__, MissingFileError):
            problem = "its bucket does not exist"
        raise type(error)(f"{KEY}: {store.base}: {problem}: {error}") from error


def _newest(
    where: Path | str, candidates: list[C], check: Callable[[C], Checkpoint], rank: int = 0
) -> tuple[Checkpoint, C, list[C]] | None:
    """Check candidates, of which the oldest is the first, from the last one on until one is undamaged.

    Returns:
        The checkpoint, its candidate, and the candidates after it; None if there are no candidates.
    """
    problems: list[str] = []
    for candidate in reversed(candidates):
        try:
            return check(candidate), candidate, candidates[len(candidates) - len(problems) :]
        except DamagedCheckpointError as error:
            problems.append(str(error))
        if rank == 0:
            logger.warning("%s; trying the one before", problems[-1])
    if problems:
        raise DistapError(
            f"{where}: none of the {len(problems)} checkpoints can be used; the newest: {problems[0]}. "
            "To train anew, remove them"
        )
    return None


def _seen_by_all(folder: Path, world: World) -> list[str]:
    """List the names of the checkpoints of a shared folder, which must be the same ones on all ranks."""
    deadline = time.monotonic() + LISTING_SECONDS
    while True:
        seen: list[list[str]] = on_all(world, lambda: [path.name for path in list_checkpoints(folder)])
        other = next((rank for rank, names in enumerate(seen) if names != seen[0]), None)
        if other is None:
            return seen[0]
        if world.maximum(time.monotonic() - deadline) >= 0:
            newest = [f"rank {rank} has {seen[rank][-1] if seen[rank] else 'none'}" for rank in (0, other)]
            raise DistapError(
                f"{folder}: the ranks see different checkpoints ({', '.join(newest)}). The run folder "
                "has to be one that all hosts share"
            )
        time.sleep(1)


def _verified(path: Path, world: World, is_shared: bool) -> Checkpoint:
    """Verify a checkpoint on disk on all ranks; a damaged one is an error on all of them.

    If all ranks see the same files (`is_shared`), they share the work. Otherwise the first rank of each host verifies
    all files, and the hosts must have the same ones.
    """

    def verify() -> str:
        manifest = read_manifest(path)
        names = sorted(manifest.files)
        verify_files(path, manifest, names[world.rank :: world.size] if is_shared else names)
        return manifest.text()

    texts = set(on_all(world, verify, mine=is_shared or world.local_rank == 0)) - {None}
    if len(texts) > 1:
        raise DamagedCheckpointError(path, "the hosts have different ones")
    return Checkpoint(path, read_manifest(path))


def _fetched(stored: StoredRun, name: str, folder: Path, world: World) -> Checkpoint:
    """Download a checkpoint on each host; a damaged one is an error on all ranks."""

    def fetch() -> None:
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            stored.fetch(name, folder)
        except OSError as error:
            raise DistapError(f"{folder}: a checkpoint cannot be downloaded to there: {error}; see run") from error

    on_all(world, fetch, mine=world.local_rank == 0)
    return Checkpoint(folder, read_manifest(folder), stored.where(name))
