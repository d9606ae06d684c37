"""Retry reads and writes, and tell errors that another attempt may mend from permanent ones."""

import errno
import random
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from distap.errors import DistapError
from distap.storage.remotes import MissingFileError, UnreachableError
from distap.storage.traffic import Traffic

PERMANENT = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
PERMANENT_NUMBERS = (errno.ENOSPC, errno.EROFS, errno.ENAMETOOLONG)
OPTION_ERRORS = (TypeError, AttributeError, NotImplementedError)  # file systems check some options only when used
LACKS_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError", "ProfileNotFound")
PASSING_STATUSES = (408, 425, 429)  # the HTTP statuses of 400 to 499 that another attempt may mend
PASSING_CODES = (  # error codes of S3 that another attempt may mend, whatever their HTTP status
    *("RequestTimeout", "RequestTimeoutException", "PriorRequestNotComplete", "OperationAborted"),
    *("BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch"),  # changed or cut short on the way
    *("SlowDown", "Throttling", "ThrottlingException", "RequestThrottled", "RequestLimitExceeded"),
)
M = TypeVar("M", bound=Callable[..., Any])


def retried(done: str) -> Callable[[M], M]:
    """Decorate a method of a storage whose first argument names a file: call it until it succeeds.

    Its errors become MissingFileError if there is no such file, DistapError if another attempt cannot help, and
    UnreachableError if all attempts failed. `done` completes "cannot be ..." in their messages.
    """

    def decorated(method: M) -> M:
        @wraps(method)
        def call(self: Any, name: str, *args: Any, **options: Any) -> Any:
            where, attempts = self.where(name), self.settings.attempts
            for attempt in range(1, attempts + 1):
                if time.monotonic() > self.deadline:
                    raise UnreachableError(
                        f"{where}: not {done} in time: timeout_seconds also limits a whole checkpoint"
                    )
                try:
                    return method(self, name, *args, **options)
                except DistapError:
                    raise
                except FileNotFoundError as error:
                    raise MissingFileError(f"{where}: there is no such file") from error
                except Exception as error:  # each file system raises its own
                    reason = str(error) or str(error.__cause__ or "") or type(error).__name__
                    if isinstance(error, TimeoutError) and not answer_to_boto(error)[0]:
                        reason = f"no answer within {self.settings.timeout_seconds:g} s"
                    if is_permanent(error):
                        raise DistapError(f"{where}: cannot be {done}: {reason}") from error
                    if attempt == attempts:
                        hint = f"; {self.key} has the number of attempts and their time-out" if self.key else ""
                        raise UnreachableError(
                            f"{where}: cannot be {done}: {attempts} attempts failed, the last with: {reason}{hint}"
                        ) from error
                self.meter.add(Traffic(retries=1))
                # A random part, since ranks that fail together must not come back together.
                time.sleep(self.settings.backoff_seconds * 2 ** (attempt - 1) * random.uniform(0.5, 1))
            raise AssertionError("at least one attempt")

        return cast(M, call)

    return decorated


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
