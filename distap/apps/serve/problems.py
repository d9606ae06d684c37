"""What a client is told when it gets no answer."""

from collections.abc import Mapping
from typing import Literal

from PIL import UnidentifiedImageError

from distap.data.images.decoding import FORMATS, DamagedImageError

Reason = Literal[
    "bad_request",
    "busy",
    "damaged",
    "empty",
    "failed",
    "missing_field",
    "not_found",
    "not_multipart",
    "not_ready",
    "slow",
    "too_large",
    "too_many_pixels",
    "unknown_format",
]
UPLOAD_REASONS: tuple[Reason, ...] = (
    *("bad_request", "busy", "damaged", "empty", "failed", "missing_field", "not_multipart", "not_ready", "slow"),
    *("too_large", "too_many_pixels", "unknown_format"),
)
RETRY_AFTER = {"Retry-After": "1"}


class RefusedError(Exception):
    """A request that is not answered.

    Args:
        status: of HTTP.
        reason: for programs.
        message: for a person: what was wrong and what to do.
        headers: further ones of the answer.
    """

    def __init__(self, status: int, reason: Reason, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.reason, self.message, self.headers = status, reason, message, dict(headers or {})

    @property
    def content(self) -> dict[str, dict[str, str]]:
        """What the answer holds."""
        return {"error": {"reason": self.reason, "message": self.message}}


def busy(what: str) -> RefusedError:
    """There is more to do than may wait."""
    return RefusedError(503, "busy", f"{what}; try again in a second", RETRY_AFTER)


def of_image(error: DamagedImageError) -> RefusedError:
    """An upload that cannot be used."""
    if error.reason == "too_large":
        return RefusedError(413, "too_many_pixels", f"the image is too large ({error}): scale it down")
    if error.reason != "truncated" and isinstance(error.__cause__, UnidentifiedImageError):
        return RefusedError(
            415, "unknown_format", f"this is no image that can be read: send one of {', '.join(FORMATS)}"
        )
    return RefusedError(400, "damaged", f"the image is damaged ({error}): save it again and send it whole")
