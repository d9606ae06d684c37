"""The routes of a server."""

from functools import cache
from importlib.resources import files
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from distap import __version__
from distap.apps.serve.answers import ProblemAnswer, SearchAnswer, answer_of
from distap.apps.serve.guard import Guard
from distap.apps.serve.problems import Reason, RefusedError
from distap.apps.serve.service import Service
from distap.apps.serve.uploads import EXPECTED, hits_wanted, read_upload

UPLOAD = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["image"],
                    "properties": {
                        "image": {"type": "string", "format": "binary", "description": "An image file."},
                        "k": {"type": "integer", "minimum": 1, "default": 10, "description": "Images to find."},
                    },
                }
            }
        },
    }
}
PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": ProblemAnswer, "description": description}
    for status, description in {
        400: "The image is damaged or empty.",
        404: "There is no such image.",
        408: "The upload was too slow.",
        413: "Too many bytes or pixels.",
        415: "No multipart form, or no image of a known format.",
        422: "A field is missing or out of bounds.",
        503: "Too much to do, or not loaded yet: try again after `Retry-After` seconds.",
    }.items()
}
ASSETS = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    "/page.js": ("page.js", "text/javascript"),
}


def build_app(service: Service) -> FastAPI:
    """The application that answers for a service."""
    # The pages of the documentation take their scripts from elsewhere.
    app = FastAPI(title="distap search", version=__version__, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, metrics=service.metrics)
    _add_problems(app)
    _add_searches(app, service)
    _add_operations(app, service)
    for path in ASSETS:
        app.add_api_route(path, _asset_of(path), include_in_schema=False)
    return app


def _add_searches(app: FastAPI, service: Service) -> None:
    @app.post("/api/search", responses=PROBLEMS, openapi_extra=UPLOAD)
    async def search_by_image(request: Request) -> SearchAnswer:
        """Find the images that are most similar to an upload."""
        try:
            with service.uploads.one():
                image, k = await read_upload(request, service.settings)
            return answer_of(await service.by_image(image, hits_wanted(k, service.settings)))
        except RefusedError as problem:
            service.metrics.refused(problem.reason)
            raise

    @app.get("/api/search", responses=PROBLEMS)
    async def search_by_key(
        key: Annotated[str, Query(description="Of an image of the index.", max_length=4096)],
        k: Annotated[int, Query(ge=1, le=service.settings.max_k, description="Images to find.")] = min(
            10, service.settings.max_k
        ),
    ) -> SearchAnswer:
        """Find the images that are most similar to one of the index, without itself."""
        return answer_of(await service.by_key(key, k))

    @app.get("/images/{row}", responses={200: {"content": {"image/jpeg": {}}}, **PROBLEMS}, response_class=Response)
    async def thumbnail(row: int) -> Response:
        """A thumbnail of an image of the index, by its row."""
        headers = {"Cache-Control": "private, max-age=300"}
        return Response(await service.picture(row), media_type="image/jpeg", headers=headers)


def _add_operations(app: FastAPI, service: Service) -> None:
    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Whether the process is alive."""
        return {"status": "alive"}

    @app.get("/readyz", responses={503: PROBLEMS[503]})
    async def readyz() -> dict[str, str]:
        """Whether the index and the network are loaded, and the server is not about to stop."""
        if service.draining:
            raise RefusedError(503, "not_ready", "the server is stopping")
        if not service.ready:
            raise RefusedError(503, "not_ready", "the index is being loaded")
        return {"status": "ready"}

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_problems(app: FastAPI) -> None:
    """Have all errors told in one form."""

    @app.exception_handler(RefusedError)
    async def problem(request: Request, error: RefusedError) -> JSONResponse:
        return JSONResponse(error.content, error.status, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        wrong = [f"{each['loc'][-1]}: {each['msg']}" for each in error.errors()]
        return JSONResponse(RefusedError(422, "bad_request", "; ".join(wrong)).content, 422)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        reasons: dict[int, Reason] = {404: "not_found"}
        told = f"{error.detail}: {EXPECTED}" if error.status_code == 400 else str(error.detail)
        content = RefusedError(error.status_code, reasons.get(error.status_code, "bad_request"), told).content
        return JSONResponse(content, error.status_code, error.headers)


def _asset_of(path: str) -> Any:
    name, media_type = ASSETS[path]

    async def asset() -> Response:
        return Response(_asset(name), media_type=media_type, headers={"Cache-Control": "no-cache"})

    return asset


@cache
def _asset(name: str) -> bytes:
    return files("distap.apps.serve").joinpath("page", name).read_bytes()
