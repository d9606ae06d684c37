"""The image and the number of hits of a request, read within limits."""

import asyncio
import re
from typing import Any

from fastapi import Request
from starlette.datastructures import FormData, UploadFile
from starlette.types import Message

from distap.apps.serve.problems import RefusedError
from distap.apps.serve.settings import ServeSettings

FIELDS, FIELD_BYTES = 4, 1_000  # beside the image
K = re.compile(r"[0-9]{1,9}")
EXPECTED = "send multipart/form-data with the image's file in the field `image`"


async def read_upload(request: Request, settings: ServeSettings) -> tuple[bytes, str | None]:
    """The bytes of the field `image`, and the text of the field `k` where there is one.

    The name that the file had is not looked at. Nothing is kept of a body beyond the limit.

    Raises:
        RefusedError: it is too large or too slow, has no image, or is something else.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "multipart/form-data":
        raise RefusedError(415, "not_multipart", f"the body is {content_type or 'of no type'}: {EXPECTED}")
    # FastAPI's own limits are younger than the FastAPI that is asked for.
    limited = Request(request.scope, _limited(request, settings.max_upload_bytes))
    try:
        async with asyncio.timeout(settings.timeout_seconds):
            form = await limited.form(max_files=1, max_fields=FIELDS, max_part_size=FIELD_BYTES)
            try:
                return await _image(form), _text(form, "k")
            finally:
                await form.close()
    except TimeoutError as error:
        raise RefusedError(
            408, "slow", f"the upload did not arrive within {settings.timeout_seconds:g} s: send a smaller image"
        ) from error


def hits_wanted(text: str | None, settings: ServeSettings, default: int = 10) -> int:
    """The number that `k` asks for.

    Raises:
        RefusedError: it is none, or out of bounds.
    """
    if text is None:
        return min(default, settings.max_k)
    if not K.fullmatch(text) or not 1 <= int(text) <= settings.max_k:
        raise RefusedError(
            422, "bad_request", f"k is {text[:20]!r}: expected a whole number from 1 to {settings.max_k}"
        )
    return int(text)


def _limited(request: Request, limit: int) -> Any:
    """What receives the body, as long as it is within the limit, whatever its Content-Length says."""
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


async def _image(form: FormData) -> bytes:
    image = form.get("image")
    if not isinstance(image, UploadFile):
        raise RefusedError(422, "missing_field", f"there is no file in the field `image`: {EXPECTED}")
    data = await image.read()
    if not data:
        raise RefusedError(400, "empty", "the file is empty: choose an image")
    return data


def _text(form: FormData, name: str) -> str | None:
    value = form.get(name)
    if isinstance(value, UploadFile):
        raise RefusedError(422, "bad_request", f"the field `{name}` is a file: expected a number")
    return value
