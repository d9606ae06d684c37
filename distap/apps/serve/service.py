"""What a server holds: the searcher once it is loaded, its threads, and whether it takes requests."""

from collections.abc import Callable
from typing import TypeVar

import torch

from distap.apps.search import Pictures, Searcher
from distap.apps.serve.metrics import ServingMetrics
from distap.apps.serve.pool import Places, Pool
from distap.apps.serve.problems import RefusedError, busy, of_image
from distap.apps.serve.settings import ServeSettings
from distap.data.images.decoding import DamagedImageError
from distap.errors import FAILED, DistapError
from distap.evaluation.extraction import TooLittleMemoryError
from distap.retrieval.index_files import Hit

T = TypeVar("T")
PICTURE_THREADS, PICTURE_QUEUE = 2, 256


class Service:
    """State of a server.

    Args:
        settings: limits.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        self.metrics = ServingMetrics()
        self.uploads = Places(settings.uploads, f"{settings.uploads} uploads are under way already")
        self.draining = False  # asked to stop
        self._loaded: tuple[Searcher, Pictures] | None = None
        self._searches = Pool("search", settings.threads, settings.queue, settings.timeout_seconds)
        self._pictures = Pool("pictures", PICTURE_THREADS, PICTURE_QUEUE, settings.timeout_seconds)

    def load(self, searcher: Searcher, pictures: Pictures) -> None:
        """Take requests from now on."""
        # Each search computes on as many threads, so that all of them together have the cores.
        torch.set_num_threads(max(torch.get_num_threads() // self.settings.threads, 1))
        self._loaded = searcher, pictures
        self.metrics.images.set(len(searcher.index))

    @property
    def ready(self) -> bool:
        """Whether requests are answered, and will be for a while."""
        return self._loaded is not None and not self.draining

    async def by_image(self, image: bytes, k: int) -> list[Hit]:
        """The k most similar images.

        Raises:
            RefusedError: the image cannot be used, or there is too much to do.
        """
        searcher, _ = self._require_loaded()
        return await self._searched(searcher.by_image, image, k)

    async def by_key(self, key: str, k: int) -> list[Hit]:
        """The k images that are most similar to one of the gallery, without itself; raises what `by_image` does."""
        searcher, _ = self._require_loaded()
        try:
            await self._searched(searcher.index.row_of, key)
        except DistapError as error:
            raise RefusedError(404, "not_found", str(error)) from error
        return await self._searched(searcher.by_key, key, k)

    async def picture(self, row: int) -> bytes:
        """A thumbnail as JPEG.

        Raises:
            RefusedError: there is none, or there is too much to do.
        """
        _, pictures = self._require_loaded()
        found = await self._pictures.run(pictures.thumbnail, row)
        if found is None:
            raise RefusedError(404, "not_found", f"there is no picture of row {row}")
        return found

    def close(self) -> None:
        """Wait for what is under way."""
        self._searches.close()
        self._pictures.close()

    def _require_loaded(self) -> tuple[Searcher, Pictures]:
        if self._loaded is None:
            raise RefusedError(
                503, "not_ready", "the index is being loaded; try again in a while", {"Retry-After": "5"}
            )
        return self._loaded

    async def _searched(self, call: Callable[..., T], *arguments: object) -> T:
        try:
            return await self._searches.run(call, *arguments)
        except DamagedImageError as error:
            raise of_image(error) from error
        except DistapError as error:
            if isinstance(error, TooLittleMemoryError) or error.status == FAILED:  # it may pass
                raise busy("there is not enough memory at the moment") from error
            raise
