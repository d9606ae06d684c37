"""Routes of a search server, and the JSON of its answers."""

from functools import partial
from typing import Annotated

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import generate_latest
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

import distap
from distap.apps.serve.guard import HEALTH_PATHS, Guard
from distap.apps.serve.limits import ServeSettings
from distap.apps.serve.service import Service
from distap.apps.serve.uploads import UPLOAD_HELP, RefusedError, read_upload
from distap.data.images.formats import readable_formats
from distap.pages.page import page_asset, page_text
from distap.retrieval.indexing import Hit


class HitAnswer(BaseModel):
    rank: int = Field(description="From 1, the most similar.")
    key: str = Field(description="Its name in the data set.")
    class_name: str = Field(serialization_alias="class", description="Empty if it belongs to none.")
    similarity: float = Field(description="Cosine; approximate if the index keeps codes.")
    picture: str = Field(description="Path of a thumbnail.")


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
    _add_operations(app, service)
    _add_page(app, service.settings)
    return app


def _add_searches(app: FastAPI, service: Service) -> None:
    most = service.settings.max_k
    usual = min(10, most)
    wanted = Annotated[int, Query(ge=1, le=most, description="Images to find.")]

    def answer(hits: list[Hit]) -> SearchAnswer:
        ranked = enumerate(hits, 1)
        return SearchAnswer(hits=[HitAnswer(**h._asdict(), rank=n, picture=f"/images/{h.row}") for n, h in ranked])

    @app.post("/api/search", openapi_extra=UPLOAD)
    async def search_by_image(request: Request, k: wanted = usual) -> SearchAnswer:
        """Find the images that are most similar to an upload."""
        try:
            return answer(await service.by_image(partial(read_upload, request, service.settings), k))
        except RefusedError as problem:
            service.metrics.refused.labels(problem.reason).inc()
            raise

    @app.get("/api/search")
    async def search_by_key(
        key: Annotated[str, Query(description="Of an image of the index.", max_length=4096)], k: wanted = usual
    ) -> SearchAnswer:
        """Find the images that are most similar to one of the index, without itself."""
        return answer(await service.by_key(key, k))

    @app.get("/images/{row}", response_class=Response)
    async def thumbnail(row: int) -> Response:
        """Return the thumbnail of an image of the index, by its row."""
        headers = {"Cache-Control": "private, max-age=300"}
        return Response(await service.picture(row), media_type="image/jpeg", headers=headers)


def _add_operations(app: FastAPI, service: Service) -> None:
    async def ready() -> dict[str, str]:
        """Report that index and network are loaded, without which the server answers nothing."""
        return {"status": "ready"}

    for path in HEALTH_PATHS:
        app.add_api_route(path, ready)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Return metrics for Prometheus."""
        return Response(
            generate_latest(service.metrics.registry), media_type="text/plain; version=0.0.4; charset=utf-8"
        )


def _add_page(app: FastAPI, settings: ServeSettings) -> None:
    *others, last = readable_formats()
    formats = f"{', '.join(others)} or {last}"

    def add(path: str, content: str | bytes, media_type: str) -> None:
        async def asset() -> Response:
            return Response(content, media_type=media_type, headers={"Cache-Control": "no-cache"})

        app.add_api_route(path, asset, include_in_schema=False)

    values = {"title": "Search by image", "formats": formats, "max_k": settings.max_k}
    add("/", page_text("serve.html", **values), "text/html")
    add("/style.css", page_text("style.css"), "text/css")
    add("/search.js", page_asset("serve.js"), "text/javascript")
    add("/icon.svg", page_asset("serve.svg"), "image/svg+xml")


def _add_problems(app: FastAPI) -> None:
    """Return all errors in one JSON form."""

    @app.exception_handler(RefusedError)
    async def refused(request: Request, error: RefusedError) -> JSONResponse:
        return error.answer()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        wrong = [f"{each['loc'][-1]}: {each['msg']}" for each in error.errors()]
        return RefusedError(422, "bad_request", "; ".join(wrong)).answer()

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{error.detail}: {UPLOAD_HELP}" if error.status_code == 400 else str(error.detail)
        reason = "not_found" if error.status_code == 404 else "bad_request"
        return RefusedError(error.status_code, reason, message, error.headers).answer()
