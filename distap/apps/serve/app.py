"""A search server: its routes, the JSON of its answers, and a bounded queue of work."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Annotated, TypeVar

import torch
from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import generate_latest
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

import distap
from distap.apps.search import Searcher
from distap.apps.serve import uploads
from distap.apps.serve.guard import HEALTH_PATHS, Guard, ServingMetrics
from distap.apps.serve.limits import ServeSettings
from distap.apps.serve.uploads import RefusedError, busy
from distap.data.images.damage import DamagedImageError
from distap.data.images.formats import readable_formats
from distap.data.images.whole_images import Thumbnails
from distap.errors import FAILED, DistapError
from distap.evaluation.extraction.image_describer import TooLittleMemoryError
from distap.pages.page import page_asset, page_text
from distap.retrieval.searching import Hit

T = TypeVar("T")


class Service:
    """Answer searches within limits; raise a RefusedError for a search that cannot run now."""

    def __init__(self, settings: ServeSettings, searcher: Searcher, thumbnails: Thumbnails) -> None:
        assert searcher.describer is not None
        self.settings = settings
        self.metrics = ServingMetrics()
        self.metrics.images.set(len(searcher.index))
        self.under_way = 0  # searches that wait or run
        self.arrivals = uploads.Arrivals(settings, self._require_place)
        self._threads = ThreadPoolExecutor(settings.threads, "search")
        # Each search uses this many threads, so that all searches together have the cores.
        torch.set_num_threads(max(torch.get_num_threads() // settings.threads, 1))
        describer = searcher.describer
        job = uploads.DecodingJob(
            describer.sizing,
            max_pixels=settings.pixels_of(describer.described_by),
            seconds=settings.decode_seconds,
            memory_bytes=settings.decode_bytes,
        )
        self._decoders = uploads.Decoders(job, settings.threads)
        self._searcher = replace(searcher, pixels_of=self._decoders)
        self._thumbnails = thumbnails

    async def by_image(self, read: Callable[[], Awaitable[bytes]], k: int) -> list[Hit]:
        """Return the k gallery images most similar to the image file that `read` returns."""
        return await self._found(self._searcher.by_image, read, k)

    async def by_key(self, key: str, k: int) -> list[Hit]:
        """Return the k images most similar to the gallery's image of this key, without itself."""
        if not self._searcher.index.has(key):
            raise RefusedError(404, "not_found", f"the index has no image with the key {key!r}")

        async def read() -> str:
            return key

        try:
            return await self._found(self._searcher.by_key, read, k)
        except DistapError as error:  # this kind of index has no descriptors
            raise RefusedError(422, "bad_request", str(error)) from error

    async def picture(self, row: int) -> bytes:
        jpeg = await run_in_threadpool(self._thumbnails, row)
        if jpeg is None:
            raise RefusedError(404, "not_found", f"there is no picture of row {row}")
        return jpeg

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)  # waits for the calls that have begun
        self._decoders.close()

    async def _found(
        self, search: Callable[[T, int], list[Hit]], read: Callable[[], Awaitable[T]], k: int
    ) -> list[Hit]:
        """Search in a thread for the query that `read` returns.

        It takes a place in the queue once it has arrived.
        """
        loop = asyncio.get_running_loop()
        seconds = self.settings.timeout_seconds
        self._require_place()  # before a body arrives in vain
        query = await read()
        self._require_place()
        future = self._threads.submit(search, query, k)
        self.under_way += 1
        # A thread cannot be interrupted: a search that takes too long keeps its place to its end.
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._leave))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), seconds)
        except TimeoutError as error:
            raise busy(f"it took more than {seconds:g} s") from error
        except DamagedImageError as error:
            raise uploads.refused_image(error) from error
        except DistapError as error:
            if isinstance(error, TooLittleMemoryError) or error.status == FAILED:  # it may pass
                raise busy("there is not enough memory at the moment") from error
            raise

    def _require_place(self) -> None:
        limit = self.settings.threads + self.settings.queue
        if self.under_way >= limit:
            raise busy(f"{limit} searches are under way already")

    def _leave(self) -> None:
        self.under_way -= 1


class HitAnswer(BaseModel):
    rank: int = Field(
        description="Place of the image in the order of similarity; 1 is the most similar."
    )
    key: str = Field(description="Name of the image in the data set.")
    class_name: str = Field(
        serialization_alias="class", description="Class of the image; empty if it has none."
    )
    similarity: float = Field(
        description="Cosine similarity to the query; approximate if the index keeps codes."
    )
    picture: str = Field(description="Path of a thumbnail.")
    network: str = Field(
        "", description="Network that described the image, if the index is of several."
    )


class SearchAnswer(BaseModel):
    hits: list[HitAnswer] = Field(description="Best first.")


UPLOAD_FIELDS = {"image": {"type": "string", "format": "binary", "description": "An image file."}}
UPLOAD_FORM = {"schema": {"type": "object", "required": ["image"], "properties": UPLOAD_FIELDS}}
UPLOAD = {"requestBody": {"required": True, "content": {"multipart/form-data": UPLOAD_FORM}}}


def build_app(service: Service) -> FastAPI:
    # The documentation pages of FastAPI load scripts from elsewhere.
    app = FastAPI(title="distap search", version=distap.__version__, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, metrics=service.metrics, settings=service.settings)
    _add_problems(app)
    _add_searches(app, service)

    async def ready() -> dict[str, str]:
        """Report that the index and the network are loaded."""
        return {"status": "ready"}

    for path in HEALTH_PATHS:
        app.add_api_route(path, ready)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Return metrics for Prometheus."""
        return Response(
            generate_latest(service.metrics.registry),
            media_type="text/plain; version=0.0.4; charset=utf-8",
        )

    def add(path: str, content: str | bytes, media_type: str) -> None:
        async def asset() -> Response:
            return Response(content, media_type=media_type, headers={"Cache-Control": "no-cache"})

        app.add_api_route(path, asset, include_in_schema=False)

    *first, last = readable_formats()
    page = page_text(
        "serve.html",
        title="Search by image",
        formats=f"{', '.join(first)} or {last}",
        max_k=service.settings.max_k,
    )
    add("/", page, "text/html")
    add("/style.css", page_text("style.css"), "text/css")
    add("/search.js", page_asset("serve.js"), "text/javascript")
    add("/icon.svg", page_asset("serve.svg"), "image/svg+xml")
    return app


def _add_searches(app: FastAPI, service: Service) -> None:
    max_k = service.settings.max_k
    default_k = min(10, max_k)
    K = Annotated[int, Query(ge=1, le=max_k, description="Images to find.")]

    def answer(hits: list[Hit]) -> SearchAnswer:
        return SearchAnswer(
            hits=[
                HitAnswer(**hit._asdict(), rank=rank, picture=f"/images/{hit.row}")
                for rank, hit in enumerate(hits, 1)
            ]
        )

    @app.post("/api/search", openapi_extra=UPLOAD, response_model_exclude_defaults=True)
    async def search_by_image(request: Request, k: K = default_k) -> SearchAnswer:
        """Find the images that are most similar to an upload."""
        try:
            read = partial(uploads.read_upload, request, service.settings, service.arrivals)
            return answer(await service.by_image(read, k))
        except RefusedError as problem:
            service.metrics.refused.labels(problem.reason).inc()
            raise

    @app.get("/api/search", response_model_exclude_defaults=True)
    async def search_by_key(
        key: Annotated[
            str,
            Query(
                description="Key of an image of the index, for which similar ones are searched.",
                max_length=4096,
            ),
        ],
        k: K = default_k,
    ) -> SearchAnswer:
        """Find the images that are most similar to one of the index, without itself."""
        return answer(await service.by_key(key, k))

    @app.get("/images/{row}", response_class=Response)
    async def thumbnail(row: int) -> Response:
        """Return the thumbnail of an image of the index, by its row."""
        headers = {"Cache-Control": "private, max-age=300"}
        return Response(await service.picture(row), media_type="image/jpeg", headers=headers)


def _add_problems(app: FastAPI) -> None:
    """Return all errors in one JSON form."""

    @app.exception_handler(RefusedError)
    async def refused(request: Request, error: RefusedError) -> JSONResponse:
        return error.answer()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        problems = [f"{problem['loc'][-1]}: {problem['msg']}" for problem in error.errors()]
        return RefusedError(422, "bad_request", "; ".join(problems)).answer()

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        message = str(error.detail)
        if error.status_code == 400:
            message += f": {uploads.UPLOAD_HELP}"
        reason = "not_found" if error.status_code == 404 else "bad_request"
        return RefusedError(error.status_code, reason, message, error.headers).answer()
