"""Hold the state of a server: the searcher once it is loaded, and bounded queues of work."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import TypeVar

import torch
from starlette.concurrency import run_in_threadpool

from distap.apps.search import Searcher
from distap.apps.serve.decoders import Decoders, DecodingJob
from distap.apps.serve.guard import ServingMetrics
from distap.apps.serve.limits import ServeSettings
from distap.apps.serve.uploads import RefusedError, busy, refused_image
from distap.data.images.decoding import DamagedImageError
from distap.data.images.whole_images import Thumbnails
from distap.errors import FAILED, DistapError
from distap.evaluation.extraction.image_describer import TooLittleMemoryError
from distap.retrieval.index_files import Hit

T = TypeVar("T")


class Places:
    """Limit the number of concurrent uses: `with` takes a place, or raises a RefusedError if none is free."""

    def __init__(self, total: int, calls: str) -> None:
        self._total, self._calls = total, calls
        self.taken = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            if self.taken == self._total:
                raise busy(f"{self._total} {self._calls} are under way already")
            self.taken += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self.taken -= 1


class Pool:
    """Run `threads` calls at a time and let `queue` more wait; refuse further calls at once."""

    def __init__(self, threads: int, queue: int, timeout_seconds: float) -> None:
        self._threads = ThreadPoolExecutor(threads, "search")
        self._timeout = timeout_seconds
        self.places = Places(threads + queue, "searches")

    async def run(self, call: Callable[..., T], *arguments: object) -> T:
        """Return the result of the call; raise a RefusedError if the queue is full or it takes too long."""
        # A thread cannot be interrupted, so a call that takes too long keeps its place until it ends.
        with ExitStack() as stack:
            stack.enter_context(self.places)
            future = self._threads.submit(call, *arguments)
            place = stack.pop_all()
        future.add_done_callback(lambda _: place.close())
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self._timeout)
        except TimeoutError as error:
            raise busy(f"it took more than {self._timeout:g} s") from error

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)  # waits for the calls that have begun


class Service:
    """Answer searches within a server's limits; raise a RefusedError for a search that cannot run now."""

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        self.metrics = ServingMetrics()
        self.uploads = Places(settings.uploads, "uploads")
        self.searches = Pool(settings.threads, settings.queue, settings.timeout_seconds)
        self.draining = False  # asked to stop
        self._decoders: Decoders | None = None
        self._loaded: tuple[Searcher, Thumbnails] | None = None

    def load(self, searcher: Searcher, thumbnails: Thumbnails) -> None:
        """Start to answer searches with this searcher."""
        # Each search uses this many threads, so that all searches together have the cores.
        torch.set_num_threads(max(torch.get_num_threads() // self.settings.threads, 1))
        if (describer := searcher.describer) is not None:
            limits = describer.max_pixels, self.settings.decode_seconds, self.settings.decode_bytes
            job = DecodingJob(describer.sizing, describer.scaled, *limits)
            self._decoders = Decoders(job, self.settings.threads)
        self._loaded = replace(searcher, pixels_of=self._decoders), thumbnails
        self.metrics.images.set(len(searcher.index))

    def require_ready(self) -> None:
        """Raise a RefusedError unless the server answers searches and is not about to stop."""
        if self.draining:
            raise RefusedError(503, "not_ready", "the server is stopping")
        self._require_loaded()

    async def by_image(self, image: bytes, k: int) -> list[Hit]:
        searcher, _ = self._require_loaded()
        return await self._search(searcher.by_image, image, k)

    async def by_key(self, key: str, k: int) -> list[Hit]:
        """Return the k images most similar to one of the gallery, without itself."""
        searcher, _ = self._require_loaded()
        try:
            await self._search(searcher.index.row_of, key)
        except DistapError as error:
            raise RefusedError(404, "not_found", f"the index has no image with the key {key!r}") from error
        return await self._search(searcher.by_key, key, k)

    async def picture(self, row: int) -> bytes:
        _, thumbnails = self._require_loaded()
        jpeg = await run_in_threadpool(thumbnails.jpeg, row)
        if jpeg is None:
            raise RefusedError(404, "not_found", f"there is no picture of row {row}")
        return jpeg

    def hurry(self) -> None:
        """End running decodings soon, because the server stops."""
        if self._decoders is not None:
            self._decoders.hurry()

    def close(self) -> None:
        self.searches.close()
        if self._decoders is not None:
            self._decoders.close()

    def _require_loaded(self) -> tuple[Searcher, Thumbnails]:
        if self._loaded is None:
            message = "the index is being loaded; try again in a while"
            raise RefusedError(503, "not_ready", message, {"Retry-After": "5"})
        return self._loaded

    async def _search(self, call: Callable[..., T], *arguments: object) -> T:
        try:
            return await self.searches.run(call, *arguments)
        except DamagedImageError as error:
            raise refused_image(error) from error
        except DistapError as error:
            if isinstance(error, TooLittleMemoryError) or error.status == FAILED:  # it may pass
                raise busy("there is not enough memory at the moment") from error
            raise
