"""Decode uploads in processes of their own, which are ended if an image takes too much time or memory."""

import atexit
import multiprocessing
import os
import re
import resource
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from distap.apps.serve.uploads import RefusedError, busy, refused_image
from distap.data.images.decoding import DamagedImageError, EncodedImage, OutOfMemoryError, image_file
from distap.data.images.formats import readable_formats
from distap.data.images.whole_images import Sizing

LOOK_SECONDS = 0.1  # between looks at the clock while a decoder works
STOPPING_SECONDS = 2.0  # that an image may take once the server stops
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
    memory_bytes: int  # beside what the libraries take

    def __call__(self, data: bytes) -> Tensor:
        return self.sizing(EncodedImage(data, self.max_pixels), None, self.scaled)


class Decoders:
    """A pool of `count` decoding processes, for as many threads."""

    def __init__(self, job: DecodingJob, count: int) -> None:
        self._job, self._seconds, self._stopping = job, job.seconds, False
        self._idle: SimpleQueue[tuple[BaseProcess, Connection]] = SimpleQueue()
        atexit.register(self.close)  # multiprocessing would wait for them at the end
        for _ in range(count):
            self._idle.put(self._started())

    def __call__(self, data: bytes) -> Tensor:
        """Return the pixels (3, height, width) uint8 of an image file.

        Raises:
            RefusedError: the image is damaged or too large, takes too much time or memory, or the server stops.
        """
        process, connection = self._idle.get()
        try:
            if not process.is_alive() and not self._stopping:
                process, connection = self._started()
            answer = self._answer(connection, data)
        except (EOFError, OSError) as error:  # also if it had ended before
            connection.close()
            process.kill()
            process.join()
            if self._stopping:
                raise busy("the server is stopping") from error
            is_late = isinstance(error, TimeoutError)
            what = f"{self._seconds:g} s" if is_late else f"{self._job.memory_bytes:,} bytes of memory"
            large = DamagedImageError("too_large", f"decoding it takes more than {what}")
            raise refused_image(large) from error
        finally:
            self._idle.put((process, connection))
        if isinstance(answer, tuple):
            raise RefusedError(*answer)
        return torch.from_numpy(answer)

    def hurry(self) -> None:
        """Soon end whatever is being decoded, and start no process any more."""
        self._seconds, self._stopping = min(self._seconds, STOPPING_SECONDS), True

    def close(self) -> None:
        """End the processes, of which none may be at work."""
        while not self._idle.empty():
            process, connection = self._idle.get()
            connection.close()
            process.kill()
            process.join()

    def _started(self) -> tuple[BaseProcess, Connection]:
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=_serve_images, args=(theirs, self._job), daemon=True)
        process.start()
        theirs.close()
        ours.recv()  # it has imported everything
        return process, ours

    def _answer(self, connection: Connection, data: bytes) -> Any:
        started = time.monotonic()
        connection.send_bytes(data)
        while not connection.poll(LOOK_SECONDS):
            if time.monotonic() - started > self._seconds:
                raise TimeoutError
        return connection.recv()


def _serve_images(connection: Connection, job: DecodingJob) -> None:
    """Answer each image file with an array, or with the arguments of a RefusedError, until the server is gone.

    An image for which there is not enough memory ends the process, since some decoders keep what they have then.
    """
    for number in STOPS:  # also where the process that forks decoders was there before
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    readable_formats()
    job(image_file(torch.zeros(3, 9, 9, dtype=torch.uint8)))  # the first takes longer
    _limit_memory(job.memory_bytes)
    connection.send("ready")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries write there about bad images
    with suppress(EOFError):
        while True:
            connection.send(_decoded(connection.recv_bytes(), job))


def _decoded(data: bytes, job: DecodingJob) -> Any:
    try:
        return job(data).numpy()
    except DamagedImageError as error:
        if OUT_OF_MEMORY.search(str(error)):
            raise OutOfMemoryError from error
        refused = refused_image(error)
        return refused.status, refused.reason, str(refused)


def _limit_memory(more: int) -> None:
    """Let this process allocate `more` bytes than it has."""
    if sys.platform == "linux":  # others do not tell what a process has
        held = re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())
        assert held is not None
        limit = 1024 * int(held[1]) + more
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
