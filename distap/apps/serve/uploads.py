"""Read the image of a request, within limits, and refuse with an error that helps."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from tempfile import gettempdir

from fastapi import Request
from PIL import UnidentifiedImageError
from starlette.datastructures import UploadFile
from starlette.responses import JSONResponse
from starlette.types import Message

from distap.apps.serve.limits import ServeSettings
from distap.data.images.decoding import DamagedImageError, NoReaderError
from distap.data.images.formats import readable_formats
from distap.errors import logger

FIELDS, FIELD_BYTES = 4, 1_000  # next to the image
UPLOAD_HELP = "send multipart/form-data with the image's file in the field `image`"

UPLOAD_PROBLEMS = (  # the reasons of refused uploads
    *("bad_request", "busy", "damaged", "disk_full", "empty", "failed", "missing_field", "not_multipart"),
    *("slow", "too_large", "too_many_pixels", "unknown_format"),
)


class RefusedError(Exception):
    """Raised to refuse a request with an HTTP status, a reason for programs, and a message for a person."""

    def __init__(self, status: int, reason: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.reason, self.headers = status, reason, dict(headers or {})

    def answer(self) -> JSONResponse:
        return JSONResponse({"error": {"reason": self.reason, "message": str(self)}}, self.status, self.headers)


def busy(problem: str) -> RefusedError:
    return RefusedError(503, "busy", f"{problem}; try again in a second", {"Retry-After": "1"})


def refused_image(error: DamagedImageError) -> RefusedError:
    if error.reason == "too_large":
        return RefusedError(413, "too_many_pixels", f"the image is too large ({error}): scale it down")
    is_unknown = isinstance(error.__cause__, UnidentifiedImageError) and error.reason != "truncated"
    if is_unknown or isinstance(error, NoReaderError):
        expected = f"send one of {', '.join(readable_formats())}"
        return RefusedError(415, "unknown_format", f"this is no image that can be read: {expected}")
    return RefusedError(400, "damaged", f"the image is damaged ({error}): save it again and send it whole")


async def read_upload(request: Request, settings: ServeSettings) -> bytes:
    """Return the image file that a request uploads in its form field `image`."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "multipart/form-data":
        raise RefusedError(415, "not_multipart", f"the body is {content_type or 'of no type'}: {UPLOAD_HELP}")
    # The oldest FastAPI that we support has no such limits.
    limited = Request(request.scope, _limited(request, settings.max_upload_bytes))
    try:
        async with asyncio.timeout(settings.timeout_seconds):
            form = await limited.form(max_files=1, max_fields=FIELDS, max_part_size=FIELD_BYTES)
            try:
                image = form.get("image")
                if not isinstance(image, UploadFile):
                    raise RefusedError(422, "missing_field", f"there is no file in the field `image`: {UPLOAD_HELP}")
                if data := await image.read():
                    return data
                raise RefusedError(400, "empty", "the file is empty: choose an image")
            finally:
                await form.close()
    except UnicodeError as error:
        raise RefusedError(400, "bad_request", f"the form is in no charset that can be read: {error}") from error
    except TimeoutError as error:
        late = f"the upload did not arrive within {settings.timeout_seconds:g} s"
        raise RefusedError(408, "slow", f"{late}: send a smaller image") from error
    except OSError as error:
        logger.error("an upload cannot be kept while it arrives: %s: %s", gettempdir(), error.strerror or error)
        raise RefusedError(507, "disk_full", "the server's temporary disk cannot take the image") from error


def _limited(request: Request, limit: int) -> Callable[[], Awaitable[Message]]:
    """Return an ASGI receiver of the body that stops at the limit, whatever Content-Length says."""
    received = 0
    too_large = RefusedError(413, "too_large", f"the request has more than {limit:,} bytes: send a smaller file")
    if (length := request.headers.get("content-length", "")).isdecimal() and int(length) > limit:
        raise too_large

    async def receive() -> Message:
        nonlocal received
        message = await request.receive()
        received += len(message.get("body", b""))
        if received > limit:
            raise too_large
        return message

    return receive
