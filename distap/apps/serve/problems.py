"""The errors that a client is told."""

from collections.abc import Mapping

from PIL import UnidentifiedImageError

from distap.data.images.decoding import FORMATS, DamagedImageError

UPLOAD_PROBLEMS = (  # the reasons of refused uploads
    *("bad_request", "busy", "damaged", "empty", "failed", "missing_field", "not_multipart", "not_ready", "slow"),
    *("too_large", "too_many_pixels", "unknown_format"),
)


class RefusedError(Exception):
    """Answers a request with an HTTP status, a reason for programs, and a message for a person."""

    def __init__(self, status: int, reason: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.reason, self.headers = status, reason, dict(headers or {})
        self.content = {"error": {"reason": reason, "message": message}}


def busy(problem: str) -> RefusedError:
    """The refusal of work for which there is no room at the moment."""
    return RefusedError(503, "busy", f"{problem}; try again in a second", {"Retry-After": "1"})


def refused_image(error: DamagedImageError) -> RefusedError:
    """The refusal of an upload that cannot be decoded."""
    if error.reason == "too_large":
        return RefusedError(413, "too_many_pixels", f"the image is too large ({error}): scale it down")
    if error.reason != "truncated" and isinstance(error.__cause__, UnidentifiedImageError):
        return RefusedError(
            415, "unknown_format", f"this is no image that can be read: send one of {', '.join(FORMATS)}"
        )
    return RefusedError(400, "damaged", f"the image is damaged ({error}): save it again and send it whole")
