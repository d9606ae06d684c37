"""A checkpoint to read a network from, on disk or in a store."""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distap.checkpoint.folder import Checkpoint, find_checkpoint
from distap.checkpoint.manifest import DamagedCheckpointError
from distap.checkpoint.store import Store
from distap.checkpoint.stored import FOLDER, NAME, StoredRun, step_of
from distap.errors import DistapError
from distap.storage.remotes import RemoteSettings
from distap.storage.store_urls import is_url

logger = logging.getLogger("distap")


@contextmanager
def opened_checkpoint(where: str | Path, best: bool = False, beside: tuple[str, ...] = ()) -> Iterator[Checkpoint]:
    """The checkpoint that a path or URL means, verified; what was downloaded goes when this is left.

    How a store is reached is left to the environment, as its credentials are.

    Args:
        where: a run, of which the newest good checkpoint is taken, or one of its checkpoints.
        best: of a run the one with the highest validation mAP.
        beside: patterns of files of the run that are to be there as well.
    Raises:
        DistapError: there is none, the one that is named is damaged, or the store cannot be read.
    """
    if not is_url(where):
        yield find_checkpoint(Path(where), best)
        return
    url = str(where).rstrip("/")
    run, _, name = url.rpartition(f"/{FOLDER}/")
    is_named = NAME.fullmatch(name) is not None
    stored = StoredRun(Store(run if is_named else url, RemoteSettings(), key=None), beside=beside)
    with tempfile.TemporaryDirectory(prefix="distap-") as temporary:
        here = Path(temporary)
        for chosen in [name] if is_named else _candidates(stored, best):
            folder = here / FOLDER / f"step-{step_of(chosen):08d}"
            folder.mkdir(parents=True)
            try:
                checkpoint = stored.fetch(chosen, folder)
            except DamagedCheckpointError as error:
                if is_named or best:
                    raise
                logger.warning("%s; taking the one before, if there is one", error)
                continue
            stored.fetch_beside(here)
            yield checkpoint
            return
    raise DistapError(f"{url}: none of its checkpoints can be used")


def _candidates(stored: StoredRun, best: bool) -> list[str]:
    names = [stored.best()] if best else stored.names()[::-1]
    chosen = [name for name in names if name is not None]
    if not chosen:
        expected = "has been evaluated; evaluation.every does that" if best else "is there; expected the URL of a run"
        raise DistapError(f"{stored.store.url}: no checkpoint {expected}")
    return chosen
