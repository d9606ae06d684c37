"""Find the checkpoint to resume from or to read a network from, on disk or in a store."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distap.checkpoint.agreement import on_all, on_rank_0
from distap.checkpoint.checkpoints import NAME, Checkpoint, Checkpoints
from distap.checkpoint.manifest import MANIFEST_FILE, DamagedCheckpointError, damaged
from distap.errors import DistapError, logger
from distap.storage.files import Storage
from distap.storage.locations import parse_store, scheme_of
from distap.world import World


@contextmanager
def opened_checkpoint(where: str | Path, best: bool = False) -> Iterator[Checkpoint]:
    """Open and verify the checkpoint that a path or URL names.

    A store is reached with the credentials and settings of the environment. Downloaded files are
    removed on leaving.

    Args:
        where: a run (its newest undamaged checkpoint is taken), or one of its checkpoints.
        best: of a run, take the checkpoint with the highest score instead of the newest.
    Raises:
        DistapError: there is no checkpoint, the named one is damaged, or the store cannot be read.
    """
    url = str(where).rstrip("/")
    run = parse_store(url) if scheme_of(url) else str(Path(url).absolute())
    parent, _, name = run.rpartition("/")
    is_one = best
    if NAME.fullmatch(name):
        is_one = True
        run, _, folder = parent.rpartition("/")
        checkpoints = Checkpoints(Storage(run or "/"), folder)
        is_listed = name in checkpoints.names()
        names = [name] if is_listed or not checkpoints.is_on_disk or Path(url).is_dir() else []
    else:
        checkpoints = Checkpoints(Storage(run))
        names = [*filter(None, checkpoints.best()[1:])] if best else checkpoints.names()
    if not names:
        expected = "; expected a run or its checkpoint (distap.load takes an export)"
        lacking = " has been evaluated; data.validation asks for it" if best else expected
        raise DistapError("checkpoint.none", f"{url}: no checkpoint there{lacking}")

    with tempfile.TemporaryDirectory(prefix="distap-") as temporary:
        download = Path(temporary, checkpoints.folder, names[-1])
        if is_one:
            yield _verified(checkpoints, names[0], download, World())
        else:
            yield _newest(checkpoints, names, download, World())


@contextmanager
def newest_checkpoint(
    checkpoints: Checkpoints, spool: Path, world: World
) -> Iterator[Checkpoint | None]:
    """Find the newest undamaged checkpoint of a run; None if the run has no checkpoint.

    All ranks share the verification of a checkpoint on disk. Of one in a store, the first rank of
    each host downloads the files into the folder `spool`; they are removed when all ranks leave.

    Raises:
        DistapError: all checkpoints are damaged.
    """
    # A network file system may show other hosts an old listing for a while.
    names = on_rank_0(world, checkpoints.names)
    if not names:
        yield None
        return
    # The ranks of a host are numbered in a row, and all of them read what the first one downloads.
    download = spool / f".fetched-{world.rank - world.local_rank}"
    try:
        yield _newest(checkpoints, names, download, world)
        world.barrier()  # the other ranks of this host may still read
    finally:
        if world.local_rank == 0:
            shutil.rmtree(download, ignore_errors=True)


def _newest(checkpoints: Checkpoints, names: list[str], download: Path, world: World) -> Checkpoint:
    problems: list[str] = []
    for name in reversed(names):
        try:
            return _verified(checkpoints, name, download, world)
        except DamagedCheckpointError as error:
            problems.append(str(error))
        if world.rank == 0:
            logger.warning("%s; trying the one before", problems[-1])
    raise DistapError(
        "checkpoint.all_damaged",
        f"{checkpoints.storage.base}: none of the {len(problems)} checkpoints can be used; the"
        f" newest: {problems[0]}. To train anew, remove them",
    )


def _verified(checkpoints: Checkpoints, name: str, download: Path, world: World) -> Checkpoint:
    is_on_disk = checkpoints.is_on_disk
    where = checkpoints.where(name)
    folder = checkpoints.path(name) if is_on_disk else download

    def verify() -> None:
        manifest = checkpoints.manifest(name)
        names = sorted(manifest.files)
        if is_on_disk:  # all ranks see the same files, so they share the work
            names = names[world.rank :: world.size]
        else:
            try:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                checkpoints.fetch(name, [*names, MANIFEST_FILE], folder)
            except OSError as error:
                raise DistapError(
                    "checkpoint.not_downloaded",
                    f"{folder}: no checkpoint can be downloaded to there: {error}; see run",
                ) from error
        for file in names:
            damage = manifest.files[file].difference(folder / file, MANIFEST_FILE)
            if damage:
                raise damaged(where, f"{file} is not the file that was written: {damage}")

    on_all(world, verify, takes_part=is_on_disk or world.local_rank == 0)
    return Checkpoint(folder, checkpoints.manifest(name), where)
