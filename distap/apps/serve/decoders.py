"""Decode uploads in processes of their own, which end if an image takes too much time or memory."""

import multiprocessing
import os
import re
import resource
import signal
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from distap.apps.serve.uploads import RefusedError, refused_image
from distap.data.images.decoding import DamagedImageError, EncodedImage, image_file
from distap.data.images.formats import readable_formats
from distap.data.sizing import Sizing

OUT_OF_MEMORY = re.compile("memory|could not create decoder", re.IGNORECASE)  # as libraries say it
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__, "torchvision.transforms.v2"])  # what decoders need, and no network


@dataclass(frozen=True)
class DecodingJob:
    """Settings for decoding an upload to pixels, with limits of time and memory."""

    sizing: Sizing
    max_pixels: int  # width times height
    seconds: float
    memory_bytes: int  # beyond what the libraries take

    def __call__(self, data: bytes) -> Tensor:
        return self.sizing(EncodedImage(data, self.max_pixels))


class Decoders:
    """Decode uploads in one process per thread; replace a process that takes too long or dies."""

    def __init__(self, job: DecodingJob, count: int) -> None:
        self._job = job
        self._idle: SimpleQueue[ProcessPoolExecutor] = SimpleQueue()
        for _ in range(count):
            self._idle.put(self._started())

    def __call__(self, data: bytes) -> Tensor:
        """Return the pixels (3, height, width) uint8 of an image file.

        Raises:
            RefusedError: the image is damaged or too large, or takes too much time or memory.
        """
        pool = self._idle.get()
        try:
            for _ in range(2):  # a process may have been killed before, by others
                try:
                    answer = pool.submit(_decoded, self._job, data).result()
                except BrokenProcessPool:
                    pool.shutdown()
                    pool = self._started()
                    continue
                if isinstance(answer, tuple):
                    raise RefusedError(*answer)
                return torch.from_numpy(answer)
        finally:
            self._idle.put(pool)
        most = f"{self._job.seconds:g} s or {self._job.memory_bytes:,} bytes of memory"
        raise refused_image(DamagedImageError("too_large", f"decoding it takes more than {most}"))

    def close(self) -> None:
        while not self._idle.empty():
            self._idle.get().shutdown()

    def _started(self) -> ProcessPoolExecutor:
        pool = ProcessPoolExecutor(1, CONTEXT, _prepare, (self._job,))
        pool.submit(int).result()  # it imports before an image's time begins
        return pool


def _prepare(job: DecodingJob) -> None:
    """Make this process a decoder, within the job's memory, that ends with the server and by no signal to all."""
    for number in (signal.SIGINT, signal.SIGTERM):
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


def _decoded(job: DecodingJob, data: bytes) -> NDArray[Any] | tuple[int, str, str]:
    """Return pixels, or the arguments of a RefusedError; end this process if a limit is reached."""
    signal.setitimer(signal.ITIMER_REAL, job.seconds)  # the system ends the process, also within a library
    try:
        return job(data).numpy()
    except MemoryError:
        os._exit(1)  # some libraries keep the memory that they have then
    except DamagedImageError as error:
        if OUT_OF_MEMORY.search(str(error)):
            os._exit(1)
        refused = refused_image(error)
        return refused.status, refused.reason, str(refused)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
