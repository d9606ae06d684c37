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
    """Start the process that decoders are forked from; it imports what decoders need and holds no network."""
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
    """How an upload is decoded to pixels, with limits of time and memory."""

    sizing: Sizing
    scaled: bool  # whether JPEG may be decoded at reduced scale
    max_pixels: int  # width times height
    seconds: float
    memory_bytes: int  # beyond what the libraries take

    def __call__(self, data: bytes) -> Tensor:
        return self.sizing(EncodedImage(data, self.max_pixels), None, self.scaled)


class Decoders:
    """A pool of `count` decoding processes, for as many threads; one that does not answer in time is replaced."""

    def __init__(self, job: DecodingJob, count: int) -> None:
        self._job, self._stopping = job, False
        # An executor kills no process of its own, and breaks as a whole if one dies, so each has one.
        self._pids: dict[ProcessPoolExecutor, Future[int]] = {}
        self._idle: SimpleQueue[ProcessPoolExecutor] = SimpleQueue()
        started = [self._started() for _ in range(count)]  # they import at the same time
        for decoder in started:
            self._pids[decoder].result()
            self._idle.put(decoder)

    def __call__(self, data: bytes) -> Tensor:
        """Return the pixels (3, height, width) uint8 of an image file.

        Raises:
            RefusedError: the image is damaged or too large, takes too much time or memory, or the server stops.
        """
        decoder = self._idle.get()
        try:
            try:
                answer = self._decode(decoder, data)
            except BrokenProcessPool:  # the process died of this image, or was killed before
                decoder = self._replaced(decoder)
                answer = self._decode(decoder, data)
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
        """End running decodings soon, and start no further process."""
        self._stopping = True
        timer = threading.Timer(STOPPING_SECONDS, self.close)
        timer.daemon = True
        timer.start()

    def close(self) -> None:
        self._stopping = True
        for decoder in list(self._pids):
            self._end(decoder)

    def _started(self) -> ProcessPoolExecutor:
        decoder = ProcessPoolExecutor(1, CONTEXT, _set_up, (self._job,))
        self._pids[decoder] = decoder.submit(os.getpid)
        return decoder

    def _decode(self, decoder: ProcessPoolExecutor, data: bytes) -> Any:
        if (pid := self._pids.get(decoder)) is None:  # it was ended, since the server stops
            raise BrokenProcessPool
        pid.result()  # a new one imports before its time begins
        return decoder.submit(_decoded, self._job, data).result(self._job.seconds)

    def _replaced(self, decoder: ProcessPoolExecutor) -> ProcessPoolExecutor:
        if self._stopping:
            raise busy("the server is stopping")
        self._end(decoder)
        return self._started()

    def _end(self, decoder: ProcessPoolExecutor) -> None:
        with suppress(BrokenProcessPool, ProcessLookupError):  # it has ended already
            os.kill(self._pids.pop(decoder).result(), signal.SIGKILL)
        decoder.shutdown(wait=False)


def _set_up(job: DecodingJob) -> None:
    """Prepare a decoding process, and limit its memory to its present size plus what the job allows."""
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
    """Decode an image: return an array, or the arguments of a RefusedError.

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
