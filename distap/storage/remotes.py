"""Settings for retries and remote file systems, and which errors another attempt may mend."""

import errno
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from distap.errors import FAILED, DistapError
from distap.storage.redact import find_secret

EXTRAS = {"http": "http", "https": "http", "s3": "s3", "gs": "gcs"}  # extra of distap that a scheme needs
PERMANENT = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
PERMANENT_NUMBERS = (errno.ENOSPC, errno.EROFS)
OPTION_ERRORS = (TypeError, AttributeError, NotImplementedError)  # file systems check some options only when used
LACKS_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError", "ProfileNotFound")
PASSING_STATUSES = (408, 425, 429)  # the HTTP statuses of 400 to 499 that another attempt may mend
PASSING_CODES = (  # error codes of S3 that another attempt may mend, whatever their HTTP status
    *("RequestTimeout", "RequestTimeoutException", "PriorRequestNotComplete", "OperationAborted"),
    *("BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch"),  # changed or cut short on the way
    *("SlowDown", "Throttling", "ThrottlingException", "RequestThrottled", "RequestLimitExceeded"),
)


@dataclass(frozen=True)
class RemoteSettings:
    """How often reads and writes are retried, and options of the remote file systems."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False}  # noqa: RUF012 - read by pydantic in a section

    attempts: int = 5  # tries before a read or write has failed
    timeout_seconds: float = 60.0  # of one attempt, which asks for 8 MiB at most apart from single images
    backoff_seconds: float = 0.5  # pause before the second attempt, doubled before each further one
    # By scheme, passed to its fsspec file system: {s3: {endpoint_url: ...}}; a recipe's may hold no secret.
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts: {self.attempts}: at least one is needed")
        if self.timeout_seconds <= 0 or self.backoff_seconds < 0:
            raise ValueError("timeout_seconds has to be above 0, and backoff_seconds not below it")
        unknown = sorted(set(self.options) - set(EXTRAS))
        if unknown:
            raise ValueError(f"options: {unknown[0]!r} is no scheme; expected http, https, s3 or gs")


Settings = TypeVar("Settings", bound=RemoteSettings | None)


def without_secret_options(settings: Settings) -> Settings:
    """Return a recipe's settings unchanged if anybody may read them.

    Raises:
        ValueError: an option is a secret.
    """
    secret = None if settings is None else find_secret(settings.options, "options")
    if secret is not None:
        raise ValueError(
            f"{secret} is a secret, and a recipe is written into the run's folder. Give it where the package looks "
            "for it by itself: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; "
            "GOOGLE_APPLICATION_CREDENTIALS; ~/.netrc for http, with {client_kwargs: {trust_env: true}}"
        )
    return settings


class MissingFileError(DistapError):
    """The file does not exist."""


class UnreachableError(DistapError):
    """All attempts failed for reasons that may pass, so starting again later may help."""

    status = FAILED


def is_permanent(error: Exception) -> bool:
    """Return whether another attempt would fail in the same way."""
    code, boto_status = answer_to_boto(error)
    if code in PASSING_CODES:
        return False
    if isinstance(error, (*PERMANENT, *OPTION_ERRORS)) or type(error).__name__ in LACKS_CREDENTIALS:
        return True
    if isinstance(error, OSError) and error.errno in PERMANENT_NUMBERS:  # of this host's own disk
        return True
    status = getattr(error, "status", None) or getattr(error, "code", None) or boto_status
    if status == 401 and "Invalid Credentials" in str(error):  # Google says so when a token has run out
        return False
    if isinstance(status, int) and 400 <= status < 500:
        return status not in PASSING_STATUSES
    return str(error).startswith("Forbidden")  # gcsfs says so for HTTP status 403


def answer_to_boto(error: Exception) -> tuple[str, int | None]:
    """Return error code and HTTP status of the S3 answer behind an error of s3fs; ("", None) if there was none."""
    cause = error.__cause__
    if isinstance(cause, TimeoutError):  # fsspec wraps it once more
        cause = cause.__cause__
    answer = getattr(cause, "response", None)
    if not isinstance(answer, dict):
        return "", None
    return str(answer.get("Error", {}).get("Code", "")), answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
