"""Read the image of a request; decode it in another process, with limits of time and memory."""

import asyncio
import multiprocessing
import os
import re
import resource
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from queue import SimpleQueue
from tempfile import gettempdir
from typing import Any

import torch
from fastapi import Request
from numpy.typing import NDArray
from PIL import UnidentifiedImageError
from starlette.datastructures import UploadFile
from starlette.responses import JSONResponse
from starlette.types import Message
from torch import Tensor

from distap.apps.serve.limits import FIRST_SECONDS, LEAST_SPEED, ServeSettings, seconds_to_arrive
from distap.data.images.damage import DamagedImageError, NoReaderError
from distap.data.images.decoding import EncodedImage, image_file
from distap.data.images.formats import readable_formats
from distap.data.sizing import Sizing
from distap.errors import logger

FIELDS = 4  # of the form, next to the image
FIELD_BYTES = 1_000
UPLOAD_HELP = "send multipart/form-data with the image's file in the field `image`"

# The reasons of refused uploads.
UPLOAD_PROBLEMS = (
    "bad_request",
    "busy",
    "damaged",
    "disk_full",
    "empty",
    "failed",
    "missing_field",
    "not_multipart",
    "slow",
    "too_large",
    "too_many_pixels",
    "unknown_format",
)
# The words of libraries when memory ran out.
OUT_OF_MEMORY = re.compile("memory|could not create decoder", re.IGNORECASE)
CONTEXT = multiprocessing.get_context("forkserver")
# The modules of a decoder, without the network.
CONTEXT.set_forkserver_preload([__name__, "torchvision.transforms.v2"])


class RefusedError(Exception):
    """Refuses a request with an HTTP status, a reason for programs and a message for a person."""

    def __init__(
        self, status: int, reason: str, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.headers = dict(headers or {})

    def answer(self) -> JSONResponse:
        return JSONResponse(
            {"error": {"reason": self.reason, "message": str(self)}}, self.status, self.headers
        )


def busy(problem: str) -> RefusedError:
    return RefusedError(503, "busy", f"{problem}; try again in a second", {"Retry-After": "1"})


def refused_image(error: DamagedImageError) -> RefusedError:
    if error.reason == "too_large":
        return RefusedError(
            413, "too_many_pixels", f"the image is too large ({error}): scale it down"
        )
    is_unknown = isinstance(error.__cause__, UnidentifiedImageError) and error.reason != "truncated"
    if is_unknown or isinstance(error, NoReaderError):
        return RefusedError(
            415,
            "unknown_format",
            f"this is no image that can be read: send one of {', '.join(readable_formats())}",
        )
    return RefusedError(
        400, "damaged", f"the image is damaged ({error}): save it again and send it whole"
    )


class Arrivals:
    """The uploads that arrive: as many at a time as searches may run and wait, none for too long.

    When there are too many, the slowest is given up if it arrives at less than the least speed, so
    that a stranger cannot hold the places; otherwise the new one is refused as busy.
    """

    def __init__(self, settings: ServeSettings, require_place: Callable[[], None]) -> None:
        self._require_place = require_place  # raises a RefusedError if no search may wait
        self._longest = settings.timeout_seconds
        self._limit = settings.threads + settings.queue
        # Until when each upload has time by the least speed.
        self._latest: dict[asyncio.Timeout, float] = {}

    @asynccontextmanager
    async def arriving(self) -> AsyncIterator[Callable[[int, bool], None]]:
        """Yield a function to call with the number of bytes received, and whether these are all.

        Raises:
            RefusedError: too many arrive already.
            TimeoutError: it arrives too slowly.
        """
        started = asyncio.get_running_loop().time()
        self._make_room(started)

        async with asyncio.timeout_at(started + seconds_to_arrive(0, self._longest)) as deadline:
            self._latest[deadline] = started + FIRST_SECONDS

            def note(received: int, is_whole: bool) -> None:
                # Many may have arrived at once; parsing them in vain takes time from searches.
                if is_whole:
                    self._require_place()
                if deadline in self._latest:  # otherwise it is given up
                    self._latest[deadline] = started + FIRST_SECONDS + received / LEAST_SPEED
                    deadline.reschedule(started + seconds_to_arrive(received, self._longest))

            try:
                yield note
            finally:
                self._latest.pop(deadline, None)

    def _make_room(self, now: float) -> None:
        if len(self._latest) < self._limit:
            return
        slowest = min(self._latest, key=self._latest.__getitem__)
        if self._latest[slowest] > now + FIRST_SECONDS - 1.0:  # it is behind by less than a second
            raise busy(f"{self._limit} uploads arrive already")
        del self._latest[slowest]
        slowest.reschedule(now)


async def read_upload(request: Request, settings: ServeSettings, arrivals: Arrivals) -> bytes:
    """Return the image file that a request uploads in its form field `image`."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "multipart/form-data":
        raise RefusedError(
            415, "not_multipart", f"the body is {content_type or 'of no type'}: {UPLOAD_HELP}"
        )
    try:
        async with arrivals.arriving() as note:
            # The oldest FastAPI that we support has no such limits.
            limited = Request(request.scope, _limited(request, settings.max_upload_bytes, note))
            form = await limited.form(max_files=1, max_fields=FIELDS, max_part_size=FIELD_BYTES)
            try:
                image = form.get("image")
                if not isinstance(image, UploadFile):
                    raise RefusedError(
                        422,
                        "missing_field",
                        f"there is no file in the field `image`: {UPLOAD_HELP}",
                    )
                data = await image.read()
                if data:
                    return data
                raise RefusedError(400, "empty", "the file is empty: choose an image")
            finally:
                await form.close()
    except UnicodeError as error:
        raise RefusedError(
            400, "bad_request", f"the form is in no charset that can be read: {error}"
        ) from error
    except TimeoutError as error:
        raise RefusedError(
            408,
            "slow",
            f"the upload did not arrive within {settings.timeout_seconds:g} s, and"
            f" {LEAST_SPEED:,} bytes of it a second: send a smaller image",
        ) from error
    except OSError as error:
        logger.error(
            "an upload cannot be kept while it arrives: %s: %s",
            gettempdir(),
            error.strerror or error,
        )
        raise RefusedError(
            507, "disk_full", "the server's temporary disk cannot take the image"
        ) from error


def _limited(
    request: Request, limit: int, note: Callable[[int, bool], None]
) -> Callable[[], Awaitable[Message]]:
    """Return an ASGI receiver of the body that stops at the limit, whatever Content-Length says.

    It calls `note` with the number of bytes received so far, and whether these are all.
    """
    received = 0
    too_large = RefusedError(
        413, "too_large", f"the request has more than {limit:,} bytes: send a smaller file"
    )
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise too_large

    async def receive() -> Message:
        nonlocal received
        message = await request.receive()
        received += len(message.get("body", b""))
        if received > limit:
            raise too_large
        note(received, not message.get("more_body", False))
        return message

    return receive


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
            for _ in range(2):  # others may have killed a process before
                try:
                    answer = pool.submit(_decoded, self._job, data).result()
                except BrokenProcessPool:
                    # If starting fails, the next upload tries it again with the broken pool.
                    broken, pool = pool, self._started()
                    broken.shutdown()
                    continue
                if isinstance(answer, tuple):
                    raise RefusedError(*answer)
                return torch.from_numpy(answer)
        finally:
            self._idle.put(pool)
        problem = (
            f"decoding it takes more than {self._job.seconds:g} s or"
            f" {self._job.memory_bytes:,} bytes of memory"
        )
        raise refused_image(DamagedImageError("too_large", problem))

    def close(self) -> None:
        while not self._idle.empty():
            self._idle.get().shutdown()

    def _started(self) -> ProcessPoolExecutor:
        pool = ProcessPoolExecutor(1, CONTEXT, _prepare, (self._job,))
        pool.submit(int).result()  # it imports before an image's time begins
        return pool


def _prepare(job: DecodingJob) -> None:
    """Make this process a decoder, within the job's memory.

    It ends with the server, but not by a signal to the whole process group.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    server: Any = multiprocessing.parent_process()
    threading.Thread(target=lambda: (wait([server.sentinel]), os._exit(0)), daemon=True).start()
    torch.set_num_threads(1)
    readable_formats()
    job(image_file(torch.zeros(3, 9, 9, dtype=torch.uint8)))  # the first takes longer
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries write there about bad images
    if sys.platform == "linux":  # the only one that shows the memory of a process
        held = re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())
        assert held is not None
        limit = 1024 * int(held[1]) + job.memory_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _decoded(job: DecodingJob, data: bytes) -> NDArray[Any] | tuple[int, str, str]:
    """Return pixels, or the arguments of a RefusedError; end this process if a limit is reached."""
    # SIGALRM ends the process, also within a library.
    signal.setitimer(signal.ITIMER_REAL, job.seconds)
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
