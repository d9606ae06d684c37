"""Decode uploads in processes of their own, which are ended if an image takes too much time or memory."""

import multiprocessing
import os
import re
import resource
import signal
import sys
import threading
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from distap.apps.serve.uploads import RefusedError, busy, refused_image
from distap.data.images.decoding import DamagedImageError, EncodedImage, OutOfMemoryError, image_file
from distap.data.images.formats import readable_formats
from distap.data.images.whole_images import Sizing

STOPPING_SECONDS = 3.0  # for what is being decoded once the server stops
OUT_OF_MEMORY = re.compile("memory|could not create decoder", re.IGNORECASE)  # as libraries say it
STOPS = (signal.SIGINT, signal.SIGTERM)
CONTEXT = multiprocessing.get_context("forkserver")


def prepare_decoders() -> None:
    """Start the process that decoders are forked from, which imports what they need and holds no network."""
    CONTEXT.set_forkserver_preload([__name__])
    resource_tracker.ensure_running()  # which would unblock the signals
    # The server decides when decoders end, also if a signal goes to all its processes; they inherit this.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


@dataclass(frozen=True)
class DecodingJob:
    """How an upload becomes pixels, and what that may cost."""

    sizing: Sizing
    scaled: bool  # whether JPEG may be decoded at reduced scale
    max_pixels: int  # width times height
    seconds: float
    memory_bytes: int  # beyond what the libraries take

    def __call__(self, data: bytes) -> Tensor:
        return self.sizing(EncodedImage(data, self.max_pixels), None, self.scaled)


class Decoder:
    """One process, which is killed and replaced by another Decoder if it does not answer in time."""

    def __init__(self, job: DecodingJob) -> None:
        # A pool kills none of its processes, and breaks as a whole if one dies; so each decoder is a pool of one.
        self._job, self._pool = job, ProcessPoolExecutor(1, CONTEXT, _set_up, (job,))
        self._pid: Future[int] = self._pool.submit(os.getpid)

    def wait(self) -> None:
        """Wait until the process has imported everything."""
        self._pid.result()

    def decode(self, data: bytes) -> Any:
        """Return an array, or the arguments of a RefusedError."""
        self.wait()
        return self._pool.submit(_decoded, self._job, data).result(self._job.seconds)

    def end(self) -> None:
        with suppress(BrokenProcessPool, ProcessLookupError):  # it has ended already
            os.kill(self._pid.result(), signal.SIGKILL)
        self._pool.shutdown(wait=False)


class Decoders:
    """A pool of `count` decoders, for as many threads."""

    def __init__(self, job: DecodingJob, count: int) -> None:
        self._job, self._stopping = job, False
        self._all = [Decoder(job) for _ in range(count)]  # which import at the same time
        self._idle: SimpleQueue[Decoder] = SimpleQueue()
        for decoder in self._all:
            decoder.wait()
            self._idle.put(decoder)

    def __call__(self, data: bytes) -> Tensor:
        """Return the pixels (3, height, width) uint8 of an image file.

        Raises:
            RefusedError: the image is damaged or too large, takes too much time or memory, or the server stops.
        """
        decoder = self._idle.get()
        try:
            try:
                answer = decoder.decode(data)
            except BrokenProcessPool:  # the process died of this image, or was killed before
                decoder = self._replaced(decoder)
                answer = decoder.decode(data)
        except (TimeoutError, BrokenProcessPool, MemoryError, OutOfMemoryError) as error:
            decoder = self._replaced(decoder)
            is_late = isinstance(error, TimeoutError)
            what = f"{self._job.seconds:g} s" if is_late else f"{self._job.memory_bytes:,} bytes of memory"
            large = DamagedImageError("too_large", f"decoding it takes more than {what}")
            raise refused_image(large) from error
        finally:
            self._idle.put(decoder)
        if isinstance(answer, tuple):
            raise RefusedError(*answer)
        return torch.from_numpy(answer)

    def hurry(self) -> None:
        """Soon end whatever is being decoded, and start no process any more."""
        self._stopping = True
        timer = threading.Timer(STOPPING_SECONDS, self.close)
        timer.daemon = True
        timer.start()

    def close(self) -> None:
        """End the processes."""
        self._stopping = True
        for decoder in self._all:
            decoder.end()

    def _replaced(self, decoder: Decoder) -> Decoder:
        if self._stopping:
            raise busy("the server is stopping")
        decoder.end()
        self._all[self._all.index(decoder)] = new = Decoder(self._job)
        return new


def _set_up(job: DecodingJob) -> None:
    """Prepare a decoding process, and limit its memory to what it has by then and what the job allows."""
    for number in STOPS:  # also where the process that forks decoders was there before
        signal.signal(number, signal.SIG_IGN)
    server: Any = multiprocessing.parent_process()
    threading.Thread(target=lambda: (wait([server.sentinel]), os._exit(0)), daemon=True).start()
    torch.set_num_threads(1)
    readable_formats()
    job(image_file(torch.zeros(3, 9, 9, dtype=torch.uint8)))  # the first takes longer
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries write there about bad images
    if sys.platform == "linux":  # others do not tell what a process has
        held = re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())
        assert held is not None
        limit = 1024 * int(held[1]) + job.memory_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _decoded(job: DecodingJob, data: bytes) -> Any:
    """Return an array, or the arguments of a RefusedError.

    Raises:
        OutOfMemoryError: some libraries keep the memory that they have then, so that this process has to end.
    """
    try:
        return job(data).numpy()
    except DamagedImageError as error:
        if OUT_OF_MEMORY.search(str(error)):
            raise OutOfMemoryError from None
        refused = refused_image(error)
        return refused.status, refused.reason, str(refused)
