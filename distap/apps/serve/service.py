"""Hold the state of a server: the searcher, and a bounded queue of work."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
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
from distap.retrieval.indexing import Hit

T = TypeVar("T")


class Service:
    """Answer searches within a server's limits; raise a RefusedError for a search that cannot run now."""

    def __init__(self, settings: ServeSettings, searcher: Searcher, thumbnails: Thumbnails) -> None:
        assert searcher.describer is not None
        self.settings = settings
        self.metrics = ServingMetrics()
        self.metrics.images.set(len(searcher.index))
        self.under_way = 0  # searches that wait, whose uploads arrive, or that run
        self._threads = ThreadPoolExecutor(settings.threads, "search")
        # Each search uses this many threads, so that all searches together have the cores.
        torch.set_num_threads(max(torch.get_num_threads() // settings.threads, 1))
        describer, limits = searcher.describer, (settings.decode_seconds, settings.decode_bytes)
        job = DecodingJob(describer.sizing, settings.pixels_of(searcher.index.described_by), *limits)
        self._decoders = Decoders(job, settings.threads)
        self._searcher, self._thumbnails = replace(searcher, pixels_of=self._decoders), thumbnails

    async def by_image(self, read: Callable[[], Awaitable[bytes]], k: int) -> list[Hit]:
        """Return the k gallery images most similar to the image file that `read` returns."""
        return await self._found(self._searcher.by_image, read, k)

    async def by_key(self, key: str, k: int) -> list[Hit]:
        """Return the k gallery images most similar to the gallery image with this key, without itself."""
        if key not in self._searcher.index.rows:
            raise RefusedError(404, "not_found", f"the index has no image with the key {key!r}")

        async def read() -> str:
            return key

        return await self._found(self._searcher.by_key, read, k)

    async def picture(self, row: int) -> bytes:
        jpeg = await run_in_threadpool(self._thumbnails.jpeg, row)
        if jpeg is None:
            raise RefusedError(404, "not_found", f"there is no picture of row {row}")
        return jpeg

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)  # waits for the calls that have begun
        self._decoders.close()

    async def _found(
        self, search: Callable[[T, int], list[Hit]], read: Callable[[], Awaitable[T]], k: int
    ) -> list[Hit]:
        """Search in a thread for the query that `read` returns; call `read` only when the queue has a place."""
        loop, seconds = asyncio.get_running_loop(), self.settings.timeout_seconds
        if self.under_way == (most := self.settings.threads + self.settings.queue):
            raise busy(f"{most} searches are under way already")
        self.under_way += 1
        try:
            future = self._threads.submit(search, await read(), k)
        except BaseException:
            self._leave()
            raise
        # A thread cannot be interrupted, so a search that takes too long keeps its place until it ends.
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._leave))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), seconds)
        except TimeoutError as error:
            raise busy(f"it took more than {seconds:g} s") from error
        except DamagedImageError as error:
            raise refused_image(error) from error
        except DistapError as error:
            if isinstance(error, TooLittleMemoryError) or error.status == FAILED:  # it may pass
                raise busy("there is not enough memory at the moment") from error
            raise

    def _leave(self) -> None:
        self.under_way -= 1
