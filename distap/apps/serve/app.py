"""A search server: its routes, the JSON of its answers, and a bounded queue of work."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, TypeVar

import torch
from fastapi import Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import generate_latest
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

import distap
from distap.apps.search import Pictures, Searcher
from distap.apps.serve import uploads
from distap.apps.serve.guard import HEALTH_PATHS, Guard, ServingMetrics
from distap.apps.serve.limits import ServeSettings
from distap.apps.serve.uploads import RefusedError, busy
from distap.data.images.damage import DamagedImageError
from distap.data.images.formats import readable_formats
from distap.errors import FAILED, DistapError
from distap.evaluation.extraction.image_describer import TooLittleMemoryError
from distap.pages.page import page_asset, page_text
from distap.retrieval.searching import Hit, SearchIndex

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Served:
    """A generation of the index that is served, with its pictures."""

    searcher: Searcher
    pictures: Pictures

    def answer(self, hits: list[Hit]) -> "SearchAnswer":
        generation = self.searcher.index.generation
        answers = [HitAnswer(**hit._asdict(), rank=rank) for rank, hit in enumerate(hits, 1)]
        for answer, hit in zip(answers, hits, strict=True):
            if hit.row in self.pictures.rows:
                # A replaced image has a new address, so no browser shows the old one.
                answer.picture = f"/images/{hit.row}?generation={generation}"
        return SearchAnswer(hits=answers)


class Service:
    """Answer searches within limits; raise a RefusedError for a search that cannot run now."""

    def __init__(self, settings: ServeSettings, searcher: Searcher, pictures: Pictures) -> None:
        assert searcher.describer is not None
        self.settings = settings
        self.metrics = ServingMetrics()
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
        self.served = Served(replace(searcher, pixels_of=self._decoders), pictures)
        self._before = self.served
        self._count()

    def swap(self, index: SearchIndex, pictures: Pictures) -> None:
        """Serve another generation from now on. Requests under way end on the one before."""
        # No lock: a request reads `served` once, as the first thing, and both attributes are set at
        # once as far as it can see. A generation is closed when the last request has let go of it.
        self._before = self.served
        self.served = Served(replace(self.served.searcher, index=index), pictures)
        self._count()

    def _count(self) -> None:
        index = self.served.searcher.index
        self.metrics.images.set(len(index))
        self.metrics.generation.set(int(index.generation or 0))

    async def by_image(
        self, read: Callable[[], Awaitable[bytes]], k: int, where: list[str], group: str | None
    ) -> "SearchAnswer":
        """Return the k gallery images most similar to the image file that `read` returns."""
        served = self.served
        search = partial(served.searcher.by_image, where=where, group=group)
        return served.answer(await self._found(search, read, k))

    async def by_key(self, key: str, k: int, where: list[str], group: str | None) -> "SearchAnswer":
        """Return the k images most similar to the gallery's image of this key, without itself."""
        served = self.served
        if not served.searcher.index.has(key):
            raise RefusedError(404, "not_found", f"the index has no image with the key {key!r}")

        async def read() -> str:
            return key

        search = partial(served.searcher.by_key, where=where, group=group)
        return served.answer(await self._found(search, read, k))

    async def picture(self, row: int, generation: str | None) -> bytes:
        # A page of hits asks for pictures after a swap, so those of the generation before are kept.
        served = self._before
        if generation in (None, self.served.searcher.index.generation):
            served = self.served
        elif generation != served.searcher.index.generation:
            raise RefusedError(404, "not_found", f"generation {generation} is served no more")
        jpeg = await run_in_threadpool(served.pictures, row)
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
            if error.code.startswith("search."):  # a condition or a column
                raise RefusedError(422, "bad_request", str(error)) from error
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
    picture: str | None = Field(None, description="Path of a thumbnail, if there is one.")
    network: str = Field(
        "", description="Network that described the image, if the index is of several."
    )
    columns: dict[str, str | int | float] = Field(
        {}, description="Cells of the image in the columns of its list, without empty ones."
    )


class SearchAnswer(BaseModel):
    hits: list[HitAnswer] = Field(description="Best first.")


CONDITIONS = Annotated[
    list[str],
    Query(description="Conditions that must all hold, such as category=shoes or price<=50."),
]
NO_CONDITIONS: list[str] = []
GROUPED_BY = Annotated[
    str | None, Query(description="Column: find the best image of each of its values.")
]
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

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> HTMLResponse:
        # Written for each visit, since a new generation may have other columns to filter by.
        text = page_text(
            "serve.html",
            title="Search by image",
            formats=f"{', '.join(first)} or {last}",
            max_k=service.settings.max_k,
            columns=list(service.served.searcher.index.images.columns),
        )
        return HTMLResponse(text, headers={"Cache-Control": "no-cache"})

    add("/style.css", page_text("style.css"), "text/css")
    add("/search.js", page_asset("serve.js"), "text/javascript")
    add("/icon.svg", page_asset("serve.svg"), "image/svg+xml")
    return app


def _add_searches(app: FastAPI, service: Service) -> None:
    max_k = service.settings.max_k
    default_k = min(10, max_k)
    K = Annotated[int, Query(ge=1, le=max_k, description="Images to find.")]

    known = [Depends(_refuse_unknown_parameters)]

    @app.post(
        "/api/search",
        openapi_extra=UPLOAD,
        response_model_exclude_defaults=True,
        dependencies=known,
    )
    async def search_by_image(
        request: Request,
        k: K = default_k,
        where: CONDITIONS = NO_CONDITIONS,
        group: GROUPED_BY = None,
    ) -> SearchAnswer:
        """Find the images that are most similar to an upload."""
        try:
            read = partial(uploads.read_upload, request, service.settings, service.arrivals)
            return await service.by_image(read, k, where, group)
        except RefusedError as problem:
            service.metrics.refused.labels(problem.reason).inc()
            raise

    @app.get("/api/search", response_model_exclude_defaults=True, dependencies=known)
    async def search_by_key(
        key: Annotated[
            str,
            Query(
                description="Key of an image of the index, for which similar ones are searched.",
                max_length=4096,
            ),
        ],
        k: K = default_k,
        where: CONDITIONS = NO_CONDITIONS,
        group: GROUPED_BY = None,
    ) -> SearchAnswer:
        """Find the images that are most similar to one of the index, without itself."""
        return await service.by_key(key, k, where, group)

    @app.get("/images/{row}", response_class=Response, dependencies=known)
    async def thumbnail(row: int, generation: str | None = None) -> Response:
        """Return the thumbnail of an image of the index, by its row in a generation."""
        headers = {"Cache-Control": "private, max-age=300" if generation else "no-cache"}
        jpeg = await service.picture(row, generation)
        return Response(jpeg, media_type="image/jpeg", headers=headers)


def _refuse_unknown_parameters(request: Request) -> None:
    """Raise a RefusedError for a parameter that would be ignored, such as a misspelt filter."""
    known = [parameter.alias for parameter in request.scope["route"].dependant.query_params]
    unknown = [name for name in request.query_params if name not in known]
    if unknown:
        raise RefusedError(
            422, "bad_request", f"{unknown[0][:100]}: unknown; expected {', '.join(known)}"
        )


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
