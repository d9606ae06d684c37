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
from typing import Any, TypeVar

from distap.checkpoint.agreement import on_all
from distap.checkpoint.folder import FOLDER, NAME, STEP, UNFINISHED, Checkpoint, best_checkpoint, list_checkpoints
from distap.checkpoint.manifest import DamagedCheckpointError, damaged_files, read_manifest
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
    url, stored = str(where).rstrip("/"), None
    candidates: list[Any]
    if scheme_of(url):
        base, _, name = url.rpartition(f"/{FOLDER}/")
        is_named = "." in name and NAME.fullmatch(name) is not None
        stored = StoredRun(storage_of(parse_store(base if is_named else url), key=None), beside=beside)
        candidates = [name] if is_named else [stored.best()[1]] if best else stored.names()
    else:
        path, folder = Path(where), Path(where, FOLDER)
        is_named = NAME.fullmatch(path.name) is not None
        named = [path] if path.is_dir() else []
        candidates = named if is_named else [best_checkpoint(folder)[1]] if best else list_checkpoints(folder)
    if not any(candidates):
        lacking = " has been evaluated; data.validation asks for it" if best else "; expected a run or its checkpoint"
        raise DistapError(f"{url}: no checkpoint there{lacking}")
    with tempfile.TemporaryDirectory(prefix="distap-") as temporary:

        def check(candidate: Any) -> Checkpoint:
            if stored is None:
                return _verified(candidate, World(), True)
            download = Path(temporary, FOLDER, candidate)
            download.mkdir(parents=True)
            return stored.fetch(candidate, download)

        checkpoint = check(candidates[0]) if is_named or best else _newest(url, candidates, check)[0]
        if stored is not None:
            stored.fetch_beside(Path(temporary))
        yield checkpoint


@contextmanager
def newest_checkpoint(folder: Path, world: World, stored: StoredRun | None = None) -> Iterator[Found | None]:
    """Find the newest checkpoint of a run's `folder`, or of its store, that all ranks see undamaged.

    Without a store all hosts share the folder, and the ranks share the verification. With one, the first rank of each
    host downloads or verifies a checkpoint for its host, and downloads are removed when all ranks leave. That all
    checkpoints are damaged, or that the ranks see different ones, is an error.
    """
    if stored is None:
        shared = _seen_by_all(folder, world)
        newest = shared and _newest(folder, shared, lambda name: _verified(folder / name, world, True), world.rank)
        yield Found(newest[0], None, newest[2]) if newest else None
        return
    candidates = _candidates(folder, world, stored)
    attempt = on_all(world, lambda: uuid.uuid4().hex[:8], mine=world.rank == 0)[0]
    # The ranks of a host are numbered in a row, and all of them read what the first one downloads.
    download = folder / f"{UNFINISHED}fetched-{attempt}-{world.rank - world.local_rank}"

    def checked(candidate: tuple[str, bool, str]) -> Checkpoint:
        _, is_stored, name = candidate
        return _fetched(stored, name, download, world) if is_stored else _verified(folder / name, world, False)

    if not candidates:
        yield None
        return
    try:
        where = f"{KEY}: {stored.store.base} and {folder}"
        checkpoint, (_, is_stored, name), passed_over = _newest(where, candidates, checked, world.rank)
        yield Found(checkpoint, name if is_stored else None, [name for _, stored, name in passed_over if stored])
        world.barrier()  # the other ranks of this host may still read
    finally:
        if world.local_rank == 0:
            shutil.rmtree(download, ignore_errors=True)


def has_checkpoints(folder: Path, world: World, stored: StoredRun | None = None) -> bool:
    """Tell whether there is a checkpoint, good or damaged, that `newest_checkpoint` would look at."""
    return bool(_seen_by_all(folder, world) if stored is None else _candidates(folder, world, stored))


def probe(stored: StoredRun, world: World) -> None:
    """Check that every rank can write to the store, see the files of the others, and remove its own."""
    store = stored.store
    attempt = on_all(world, lambda: uuid.uuid4().hex[:8], mine=world.rank == 0)[0]
    names = [f"{PROBES}/{attempt}-{rank}" for rank in range(world.size)]

    def see() -> None:
        present = store.sizes(PROBES)
        missing = [str(rank) for rank, name in enumerate(names) if name not in present]
        if missing:
            raise DistapError(f"a file that rank {', '.join(missing)} wrote there is not seen: hosts need one store")

    def tidy() -> None:
        others = store.sizes(PROBES).keys() - names if world.rank == 0 else ()
        for name in (names[world.rank], *sorted(others)):
            store.remove(name)

    try:
        for work in (lambda: store.write(names[world.rank], b"distap"), see, tidy):
            on_all(world, work)
    except DistapError as error:
        is_missing = isinstance(error.__cause__, MissingFileError)
        problem = "its bucket does not exist" if is_missing else "checkpoints cannot be kept there"
        raise type(error)(f"{KEY}: {store.base}: {problem}: {error}") from error


def _newest(
    where: Path | str, candidates: list[C], check: Callable[[C], Checkpoint], rank: int = 0
) -> tuple[Checkpoint, C, list[C]]:
    """Return the last candidate that is undamaged: the checkpoint, its candidate, and the candidates after it."""
    problems: list[str] = []
    for candidate in reversed(candidates):
        try:
            return check(candidate), candidate, candidates[len(candidates) - len(problems) :]
        except DamagedCheckpointError as error:
            problems.append(str(error))
        if rank == 0:
            logger.warning("%s; trying the one before", problems[-1])
    reason = f"none of the {len(problems)} checkpoints can be used; the newest: {problems[0]}"
    raise DistapError(f"{where}: {reason}. To train anew, remove them")


def _candidates(folder: Path, world: World, stored: StoredRun) -> list[tuple[str, bool, str]]:
    """List step, whether it is in the store, and name of the checkpoints in the store and on all disks, in order."""
    names = on_all(world, stored.names, mine=world.rank == 0)[0]
    seen = on_all(world, lambda: [path.name for path in list_checkpoints(folder)])
    local = set[str]().union(*seen).intersection(*seen)
    # At equal steps the store's, which every host can have.
    return sorted([(name[:STEP], True, name) for name in names] + [(name[:STEP], False, name) for name in local])


def _seen_by_all(folder: Path, world: World) -> list[str]:
    """List the names of the checkpoints of a shared folder, which must be the same ones on all ranks."""
    deadline = time.monotonic() + LISTING_SECONDS
    while True:
        seen: list[list[str]] = on_all(world, lambda: [path.name for path in list_checkpoints(folder)])
        other = next((rank for rank, names in enumerate(seen) if names != seen[0]), None)
        if other is None:
            return seen[0]
        if world.maximum(time.monotonic() - deadline) >= 0:
            newest = ", ".join(f"rank {rank} has {max(seen[rank], default='none')}" for rank in (0, other))
            seen_by = f"the ranks see different checkpoints ({newest})"
            raise DistapError(f"{folder}: {seen_by}. All hosts have to share the run folder")
        time.sleep(1)


def _verified(path: Path, world: World, is_shared: bool) -> Checkpoint:
    """Verify a checkpoint on disk: all ranks share the work, or the first rank of each host verifies all files."""

    def verify() -> str:
        manifest = read_manifest(path)
        names = sorted(manifest.files)
        for _, damage in damaged_files(path, manifest, names[world.rank :: world.size] if is_shared else names):
            raise DamagedCheckpointError(path, damage)
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
