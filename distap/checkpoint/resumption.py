"""Which checkpoint the ranks of a run go on from, where its checkpoints are in a store."""

import logging
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from distap.checkpoint.agreement import on_all
from distap.checkpoint.folder import UNFINISHED, Checkpoint, list_checkpoints
from distap.checkpoint.manifest import DamagedCheckpointError, read_manifest, verify_files
from distap.checkpoint.store import KEY
from distap.checkpoint.stored import StoredRun, step_of
from distap.errors import DistapError
from distap.storage.remotes import MissingFileError, UnreachableError
from distap.world import World

PROBES = ".probes"
logger = logging.getLogger("distap")


@dataclass(frozen=True)
class Found:
    """A checkpoint to go on from, on this host's disk, the same on every rank."""

    checkpoint: Checkpoint
    name: str | None  # in the store; None for one that is on the disks of all hosts and not in the store
    passed_over: list[str]  # of the store, newer but damaged


def probe(stored: StoredRun, world: World) -> None:
    """Have every rank write a small file to the store, see those of all the others, and remove its own.

    Raises:
        DistapError: a rank cannot, on all of them.
    """
    store = stored.store
    attempt = on_all(world, lambda: uuid.uuid4().hex[:8], mine=world.rank == 0)[0]
    names = [f"{PROBES}/{attempt}-{rank}" for rank in range(world.size)]

    def see() -> None:
        present = store.sizes(PROBES)
        missing = [str(rank) for rank, name in enumerate(names) if name not in present]
        if missing:
            raise DistapError(
                f"what rank {', '.join(missing)} wrote there is not seen: a store is the same to all hosts"
            )

    def tidy() -> None:
        others = store.sizes(PROBES).keys() - names if world.rank == 0 else ()
        store.remove([names[world.rank], *sorted(others)])

    for work in (lambda: store.write(names[world.rank], b"distap"), see, tidy):
        try:
            on_all(world, work)
        except MissingFileError as error:
            raise DistapError(f"{KEY}: {store.url}: its bucket is not there: {error.__cause__}") from error
        except DistapError as error:
            kind = UnreachableError if isinstance(error, UnreachableError) else DistapError
            raise kind(f"{KEY}: {store.url}: checkpoints cannot be kept there: {error}") from error


@contextmanager
def newest_of_store(stored: StoredRun, folder: Path, world: World) -> Iterator[Found | None]:
    """The newest checkpoint that all ranks find undamaged: in the store, or on the disks of all hosts.

    The first rank of each host downloads a checkpoint for its host; it is removed again when all ranks leave this.

    Args:
        stored: the run in the store.
        folder: of the run's checkpoints on this host, which need not be the others'.
        world: the ranks.
    Raises:
        DistapError: the store cannot be read, or there are checkpoints, but all of them are damaged.
    """
    names: list[str] = on_all(world, stored.names, mine=world.rank == 0)[0]
    local = _on_all_disks(folder, world)
    # At equal steps the store's, which everyone can have.
    candidates = sorted(
        [(step_of(name), True, name) for name in names] + [(_step(name), False, name) for name in local]
    )
    passed_over: list[str] = []
    damage = ""
    room = _room(folder, world)
    try:
        for _, is_stored, name in reversed(candidates):
            checkpoint, problem = (
                _fetched(stored, name, room, world) if is_stored else _whole_here(folder / name, world)
            )
            if checkpoint is not None:
                yield Found(checkpoint, name if is_stored else None, passed_over)
                world.barrier()  # the other ranks of this host may still read
                return
            damage = damage or problem
            passed_over += [name] if is_stored else []
        if candidates:
            raise DistapError(
                f"{KEY}: {stored.store.url}: none of the {len(candidates)} checkpoints there and in {folder} can be "
                f"used; the newest: {damage}. Remove them to start anew"
            )
        yield None
    finally:
        if world.local_rank == 0:
            shutil.rmtree(room, ignore_errors=True)


def _room(folder: Path, world: World) -> Path:
    """Where the ranks of this host find what their first one downloads."""
    name = f"{UNFINISHED}fetched-{uuid.uuid4().hex[:8]}"
    leaders = on_all(world, lambda: name, mine=world.local_rank == 0)
    # Ranks of a host are numbered in a row.
    return folder / str(leaders[world.rank - world.local_rank])


def _fetched(stored: StoredRun, name: str, room: Path, world: World) -> tuple[Checkpoint | None, str]:
    """A checkpoint of the store on this host, if no host found damage; and what was found."""

    def fetch() -> str:
        try:
            shutil.rmtree(room, ignore_errors=True)
            room.mkdir(parents=True)
            stored.fetch(name, room)
        except DamagedCheckpointError as error:
            return str(error)
        except OSError as error:
            raise DistapError(f"{room}: a checkpoint cannot be downloaded to there: {error}; see run") from error
        return ""

    found = on_all(world, fetch, mine=world.local_rank == 0)
    damage = next((problem for problem in found if problem), "")
    if damage:
        if world.rank == 0:
            logger.warning("%s; going on from the one before, if there is one", damage)
        return None, damage
    return Checkpoint(room, read_manifest(room), stored.where(name)), ""


def _on_all_disks(folder: Path, world: World) -> list[str]:
    """Names of the checkpoints that every rank sees on its host."""
    seen = on_all(world, lambda: [path.name for path in list_checkpoints(folder)])
    return sorted(set[str]().union(*seen).intersection(*seen))


def _whole_here(path: Path, world: World) -> tuple[Checkpoint | None, str]:
    """A checkpoint on disk, if every host has all of it and all have the same."""

    def verify() -> list[str]:
        try:
            manifest = read_manifest(path)
            verify_files(path, manifest, manifest.files)
        except DamagedCheckpointError as error:
            return ["", str(error)]
        return [manifest.text(), ""]

    found = [answer for answer in on_all(world, verify, mine=world.local_rank == 0) if answer is not None]
    if all(text == found[0][0] != "" for text, _ in found):
        return Checkpoint(path, read_manifest(path)), ""
    problem = next((problem for _, problem in found if problem), f"{path}: the hosts have different ones")
    if world.rank == 0:
        logger.warning("%s; it is not used, since not every host has all of it", problem)
    return None, problem


def _step(name: str) -> int:
    return int(name.removeprefix("step-")[:8])
