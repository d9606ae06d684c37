"""fsspec file systems with distap's retry policy and error classes."""

import errno
import logging
import os
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import wraps
from typing import Any, TypeVar, cast

from distap.errors import FAILED, AnswerError, DistapError

# Extra of distap that a scheme needs.
EXTRAS = {"http": "http", "https": "http", "s3": "s3", "gs": "gcs", "hf": "hf"}
PERMANENT = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
)
PERMANENT_NUMBERS = (errno.ENOSPC, errno.EROFS, errno.ENAMETOOLONG)  # of this host's own disk
# File systems check some options only when used.
OPTION_ERRORS = (TypeError, AttributeError, NotImplementedError)
LACKS_CREDENTIALS = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "DefaultCredentialsError",
    "ProfileNotFound",
)
WRONG_CHECKSUM = ("FlexibleChecksumError", "ChecksumError")  # of botocore and gcsfs
REFUSED = (401, 403, 404, 410, 416)  # HTTP statuses that no further attempt mends
# Requests of a `read_many` that are under way at once, and connections that a file system may keep
# for those of several threads: as many as aiohttp's, which is boto's ten otherwise.
CONNECTIONS = 64
POOL = 100
# Of a request, which reads 8 MiB at most, or a whole image.
ATTEMPTS = 5
TIMEOUT_SECONDS = 60.0
# Seconds between two attempts, doubled each time.
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 60.0
# gcsfs looks for zonal buckets over gRPC, which hangs in processes that were forked after its first
# use. It reads this when it is imported, by fsspec at any time.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
M = TypeVar("M", bound=Callable[..., Any])


class MissingFileError(DistapError):
    """Raised if a file does not exist."""


class UnreachableError(DistapError):
    """Raised after all attempts failed for reasons that may pass: a later start may succeed."""

    status = FAILED


class DamagedFileError(DistapError):
    """Raised if a store's bytes differ from the store's own checksum of them at every attempt."""


def file_system(scheme: str, is_configured: bool = True) -> Any:
    """Make an fsspec file system with connections of its own, as fsspec is configured if asked."""
    import fsspec  # slow

    try:
        # A cached listing would hide checkpoints that other hosts have written since.
        files = fsspec.filesystem(
            scheme,
            skip_instance_cache=True,
            use_listings_cache=False,
            **_options_of(scheme, is_configured),
        )
    except ImportError as error:
        remedy = f": pip install 'distap[{EXTRAS[scheme]}]'" if scheme in EXTRAS else ""
        raise DistapError(
            "package.missing",
            f"{scheme}:// needs a package that is not installed ({error}){remedy}",
        ) from error
    except Exception as error:
        raise DistapError(
            "storage.bad_options",
            f"{scheme}://: {error}; FSSPEC_{scheme.upper()} has options of fsspec's file system",
        ) from error
    if scheme == "s3":
        files.retries = 1  # see `retried`
    if scheme == "hf":
        from distap.storage.hub import HubFiles

        return HubFiles(files, file_system("https", is_configured=False))
    return files


def _options_of(scheme: str, is_configured: bool) -> dict[str, Any]:
    """Return the options of fsspec's configuration, with ours where it has none."""
    import fsspec.config

    options = deepcopy(fsspec.config.conf.get(scheme, {})) if is_configured else {}
    if scheme in ("http", "https"):
        from aiohttp import ClientTimeout

        client = {"timeout": ClientTimeout(TIMEOUT_SECONDS), **options.get("client_kwargs", {})}
        options["client_kwargs"] = with_bounds(client)
    elif scheme == "s3":
        from distap.storage.answers import bounded_s3_session

        options["config_kwargs"] = {
            "retries": {"total_max_attempts": 1},  # see `retried`
            "http_session_cls": bounded_s3_session(),
            "connect_timeout": TIMEOUT_SECONDS,
            "read_timeout": TIMEOUT_SECONDS,
            "max_pool_connections": POOL,
            **options.get("config_kwargs", {}),
        }
    elif scheme == "gs":
        options.setdefault("requests_timeout", TIMEOUT_SECONDS)
        options["session_kwargs"] = with_bounds(options.get("session_kwargs", {}))
    elif scheme == "file":
        options["auto_mkdir"] = True
    return options


def with_bounds(client: dict[str, Any]) -> dict[str, Any]:
    """Return an aiohttp session's settings, with bounds for the answers of a server."""
    from distap.storage.answers import bounded

    # Tars are not worth packing once more, and a packed part of a file cannot be unpacked.
    headers = {"Accept-Encoding": "identity", **client.get("headers", {})}
    middlewares = (bounded, *client.get("middlewares", ()))
    return {**client, "headers": headers, "auto_decompress": False, "middlewares": middlewares}


def retried(action: str) -> Callable[[M], M]:
    """Decorate a storage method, whose first argument names a file, to be tried several times.

    Its errors become MissingFileError if there is no such file, DistapError if another attempt
    cannot help, and UnreachableError if all attempts failed. `action` completes "cannot be ..." in
    their messages. An attempt of ours is a single one of boto and of s3fs.
    """
    import stamina

    # stamina's own log names neither file nor reason, so without a handler of the caller's it stays
    # silent.
    logging.getLogger("stamina").addHandler(logging.NullHandler())

    def decorated(method: M) -> M:
        @wraps(method)
        def call(self: Any, name: str, *args: Any, **options: Any) -> Any:
            attempts = stamina.retry_context(
                on=_may_pass,
                attempts=ATTEMPTS,
                timeout=None,
                wait_initial=FIRST_PAUSE,
                wait_jitter=FIRST_PAUSE,  # ranks that fail together must not come back together
                wait_max=LONGEST_PAUSE,
            )
            try:
                for attempt in attempts:
                    if attempt.num > 1:
                        self.count(retries=1)
                    with attempt:
                        return method(self, name, *args, **options)
            except Exception as error:  # each file system raises its own
                cause = _cause(error)
                if isinstance(cause, AnswerError):
                    raise AnswerError(cause.code, f"{self.where(name)}: {cause}") from error
                if isinstance(cause, DistapError):
                    raise cause from None
                raise _explained(error, cause, self.where(name), action) from error
            raise AssertionError("at least one attempt")

        return cast(M, call)

    return decorated


def _explained(error: Exception, cause: Exception, where: str, action: str) -> DistapError:
    """Return the error to raise after the last attempt failed with `error`, which has a `cause`."""
    if isinstance(cause, FileNotFoundError) or _status_of(cause) == 404:
        return MissingFileError("storage.missing", f"{where}: there is no such file")
    reason = _reason_of(cause)
    if any(type(link).__name__ in WRONG_CHECKSUM for link in _chain(error)):
        return DamagedFileError(
            "storage.damaged",
            f"{where}: damaged in the store, at each of {ATTEMPTS} attempts: {reason}",
        )
    if not _may_pass(error):
        return DistapError("storage.refused", f"{where}: cannot be {action}: {reason}")
    return UnreachableError(
        "storage.unreachable",
        f"{where}: cannot be {action}: {ATTEMPTS} attempts failed, the last with: {reason}",
    )


def _reason_of(cause: Exception) -> str:
    if type(cause).__name__ == "TooManyRedirects":  # of aiohttp, whose text names no reason
        return "the server redirects again and again"
    if isinstance(cause, TimeoutError):
        return f"no answer within {TIMEOUT_SECONDS:g} s"
    return str(cause) or str(cause.__cause__ or "") or type(cause).__name__


def _cause(error: Exception) -> Exception:
    """Return the error behind an error of fsspec or boto, or the error itself.

    A DistapError of our own middleware comes back as their cause or context. Over HTTP, fsspec
    reports all failures as a FileNotFoundError.
    """
    for link in _chain(error):
        if isinstance(link, DistapError):
            return link
    cause = error.__cause__
    is_of_http = isinstance(cause, OSError) or type(cause).__module__.startswith("aiohttp.")
    return cast(Exception, cause) if isinstance(error, FileNotFoundError) and is_of_http else error


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and those that it was raised from or in the handling of."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


def _may_pass(error: Exception) -> bool:
    error = _cause(error)
    if isinstance(error, (DistapError, *PERMANENT, *OPTION_ERRORS)):
        return False
    if type(error).__name__ in LACKS_CREDENTIALS:
        return False
    if isinstance(error, OSError) and error.errno in PERMANENT_NUMBERS:
        return False
    status = _status_of(error)
    # Google's text when a token has run out.
    if status == 401 and "Invalid Credentials" in str(error):
        return True
    return status not in REFUSED and not str(error).startswith("Forbidden")  # of gcsfs for 403


def _status_of(error: Exception) -> int | None:
    """Return the HTTP status behind an error of a file system; None without one."""
    status = getattr(error, "status", None) or getattr(error, "code", None)
    answer = getattr(error, "response", None)  # of the Hugging Face Hub
    return status or getattr(answer, "status_code", None) or _status_of_boto(error)


def _status_of_boto(error: Exception) -> int | None:
    """Return the HTTP status of an S3 answer behind an error of s3fs; None without one."""
    cause = error.__cause__
    if isinstance(cause, TimeoutError):  # fsspec wraps it once more
        cause = cause.__cause__
    answer = getattr(cause, "response", None)
    if not isinstance(answer, dict):
        return None
    return answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
