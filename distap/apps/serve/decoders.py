"""Decode uploads in processes of their own, which are ended if an image takes too much time or memory."""

import multiprocessing
import os
import re
import resource
import signal
import sys
import threading
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from distap.apps.serve.uploads import RefusedError, refused_image
from distap.data.images.decoding import DamagedImageError, EncodedImage, OutOfMemoryError, image_file
from distap.data.images.formats import readable_formats
from distap.data.images.whole_images import Sizing

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
    """Processes that decode, for as many threads; one that takes too long, or dies, is replaced."""

    def __init__(self, job: DecodingJob, count: int) -> None:
        self._job = job
        self._idle: SimpleQueue[_Decoder] = SimpleQueue()
        self._all = {_Decoder(job) for _ in range(count)}  # they import at the same time
        for decoder in self._all:
            decoder.answer(None)
            self._idle.put(decoder)

    def __call__(self, data: bytes) -> Tensor:
        """Return the pixels (3, height, width) uint8 of an image file.

        Raises:
            RefusedError: the image is damaged or too large, or takes too much time or memory.
        """
        decoder = self._idle.get()
        try:
            try:
                answer = decoder.decoded(data)
            except (EOFError, ConnectionError):  # it died of this image, or was killed before
                decoder = self._replaced(decoder)
                answer = decoder.decoded(data)
        except (TimeoutError, EOFError, ConnectionError) as error:
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

    def close(self) -> None:
        for decoder in self._all:
            decoder.process.kill()

    def _replaced(self, decoder: "_Decoder") -> "_Decoder":
        decoder.process.kill()
        new = _Decoder(self._job)
        self._all = {new, *self._all} - {decoder}
        new.answer(None)  # it imports before its time begins
        return new


class _Decoder:
    """A decoding process; EOFError or a ConnectionError says that it has ended."""

    def __init__(self, job: DecodingJob) -> None:
        self._seconds = job.seconds
        self._connection, other = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_decode_all, args=(job, other), daemon=True)
        self.process.start()
        other.close()  # so that its end is noticed here

    def decoded(self, data: bytes) -> Any:
        self._connection.send_bytes(data)
        return self.answer(self._seconds)

    def answer(self, seconds: float | None) -> Any:
        if not self._connection.poll(seconds):
            raise TimeoutError
        return self._connection.recv()


def _decode_all(job: DecodingJob, connection: Connection) -> None:
    """Answer each image file with an array or the arguments of a RefusedError, within the job's memory."""
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
    connection.send("ready")
    while True:
        try:
            connection.send(job(connection.recv_bytes()).numpy())
        except (MemoryError, OutOfMemoryError, EOFError):
            os._exit(1)  # some libraries keep the memory that they have then
        except DamagedImageError as error:
            if OUT_OF_MEMORY.search(str(error)):
                os._exit(1)
            refused = refused_image(error)
            connection.send((refused.status, refused.reason, str(refused)))
