"""Read images in worker processes, and explain why a worker was lost."""

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any, Protocol

from distap.data.shards.parallel import LostWorkerError, in_processes
from distap.errors import DistapError

SHARED_MEMORY = "/dev/shm"  # through which workers hand images over
LONGEST_FOLDER = 107 - len("/pymp-12345678/listener-12345678")  # of a socket in it
LONGEST_WAIT = 600.0  # seconds for the next chunk
logger = logging.getLogger("distap")


class Requested(Protocol):
    """Anything that returns images for a request: `images[request]`."""

    def __getitem__(self, request: Any, /) -> Any: ...


def handed_over(
    images: Requested,
    requests: Iterable[Any],
    workers: int,
    prefetch: int,
    longest_wait: float = LONGEST_WAIT,
    bytes_ahead: int = 0,
    where: Callable[[Any], str] = str,
) -> Generator[Any]:
    """Yield `images[request]` of each request, read by processes that end with this generator; see `in_processes`.

    Args:
        workers: number of processes; 0 reads in this one.
        prefetch: requests that each worker reads ahead.
        longest_wait: seconds after which workers that hand nothing over count as lost.
        bytes_ahead: bytes that workers prepare before use, which shared memory must hold.
        where: names the images of a request in messages.

    Raises:
        DistapError: a worker raised it, or shared memory is too small.
        LostWorkerError: a worker was lost.
    """
    if workers and Path(SHARED_MEMORY).is_dir() and os.statvfs(SHARED_MEMORY).f_flag & os.ST_RDONLY:
        logger.warning("%s is read-only: images are read without data.workers, one after the other", SHARED_MEMORY)
        workers = 0
    if not workers:
        yield from map(images.__getitem__, requests)
        return
    _require_shared_memory(bytes_ahead)
    try:
        yield from in_processes(images.__getitem__, requests, workers, prefetch, longest_wait, where)
    except LostWorkerError as error:
        raise LostWorkerError(
            f"a process that reads images was lost: {error}. Usual causes: the storage hangs; the host's memory was "
            "used up (see its kernel log): set data.workers or data.prefetch lower, or data.pixels.hold to spool; or "
            "/dev/shm is too small: a container has 64 MB there unless its --shm-size, or a volume of medium Memory, "
            "says more"
        ) from error


def _require_shared_memory(size: int) -> None:
    """Raise a DistapError if workers cannot hand images over: through shared memory, named by sockets."""
    if not Path(SHARED_MEMORY).is_dir():
        return  # another system than Linux
    if len(folder := tempfile.gettempdir()) > LONGEST_FOLDER:
        raise DistapError(
            f"{folder}: the folder for temporary files has a path of {len(folder)} characters, and the sockets that "
            f"hand images over take {LONGEST_FOLDER}: set TMPDIR to a shorter one, or data.workers to 0"
        )
    if (free := shutil.disk_usage(SHARED_MEMORY).free) < size:
        raise DistapError(
            f"{SHARED_MEMORY} has {free / 1e6:,.1f} MB free, but the processes that read images hand over "
            f"{size / 1e6:,.1f} MB ahead: give the container more (--shm-size, or a volume of medium Memory), or set "
            "data.prefetch or data.workers lower"
        )
