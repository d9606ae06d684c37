"""What is behind a URL: fsspec's file systems, how often what fails is tried again, and what that is worth."""

import errno
import os
import random
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, TypeVar

from distap.errors import FAILED, DistapError
from distap.storage.redact import without_secrets

EXTRAS = {"http": "http", "https": "http", "s3": "s3", "gs": "gcs"}
PERMANENT = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
PASSING = (408, 425, 429)  # statuses of 400 to 499 that another attempt may mend
PASSING_CODES = (  # of S3's and its kin's, which come with other statuses of 400 to 499
    *("RequestTimeout", "RequestTimeoutException", "PriorRequestNotComplete", "OperationAborted"),
    *("BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch"),  # of what was changed or cut short on its way
    *("SlowDown", "Throttling", "ThrottlingException", "RequestThrottled", "RequestLimitExceeded"),
)
MISTAKES = (TypeError, AttributeError, NotImplementedError)  # of options: file systems look at some of them late
LACKS_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError", "ProfileNotFound")
SECRET_NAME = re.compile(  # of an option; the `key` of s3 is but the name of one
    r"secret|pass(w|phrase)|token|auth(orization)?$|cookie|credential|private|(api|customer|encryption)[-_]?key",
    re.IGNORECASE,
)
SECRET_TEXT = re.compile(
    r'"(private_key|refresh_token|client_secret)"\s*:|PRIVATE KEY-----|^ya29\.|^(Basic|Bearer)\s', re.IGNORECASE
)
T = TypeVar("T")


@dataclass(frozen=True)
class RemoteSettings:
    """How reading and writing are retried, and what each kind of remote needs to be reached."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False}  # noqa: RUF012 - read by pydantic in a section

    attempts: int = 5  # at the same bytes before it has failed
    timeout_seconds: float = 60.0  # of one attempt, which asks for 8 MiB at most beside single images
    backoff_seconds: float = 0.5  # before the second attempt, doubled before each further one
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


def of_recipe(settings: Settings) -> Settings:
    """The same settings, which anybody may read: a recipe is written into the run's folder.

    Raises:
        ValueError: an option is a secret.
    """
    secret = None if settings is None else _secret_in(settings.options, "options")
    if secret is not None:
        raise ValueError(
            f"{secret} is a secret, and a recipe is written into the run's folder. Give it where the package looks "
            "for it by itself: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; "
            "GOOGLE_APPLICATION_CREDENTIALS; ~/.netrc for http, with {client_kwargs: {trust_env: true}}"
        )
    return settings


def _secret_in(value: Any, place: str, name: str = "") -> str | None:
    """Where the first secret among options is, told by the name of an option or by how its value looks."""
    if not value or value is True:
        return None
    # The token of gcsfs may also be a way to find one, or a file that holds it.
    is_way = place == "options.gs.token" and isinstance(value, str)
    if SECRET_NAME.search(name) and not is_way:
        return place
    if isinstance(value, str):
        return place if SECRET_TEXT.search(value) or without_secrets(value) != value else None
    within: list[tuple[str, str, Any]] = []  # name, place, value
    if isinstance(value, Mapping):
        within = [(str(key), f"{place}.{key}", inner) for key, inner in value.items()]
    elif isinstance(value, list | tuple):
        is_pair = len(value) == 2 and isinstance(value[0], str)  # as headers may be given
        names = ["", value[0]] if is_pair else [""] * len(value)
        within = [(names[at], f"{place}.{at}", inner) for at, inner in enumerate(value)]
    return next((found for name, at, inner in within if (found := _secret_in(inner, at, name)) is not None), None)


class MissingFileError(DistapError):
    """There is no such file."""


class UnreachableError(DistapError):
    """Every attempt failed in a way that may pass: starting again may help."""

    status = FAILED


def retried(
    call: Callable[[], T],
    where: str,
    settings: RemoteSettings,
    *,
    on_retry: Callable[[], None] = lambda: None,
    is_permanent: Callable[[Exception], bool] = lambda error: isinstance(error, PERMANENT),
    done: str = "read",
    key: str | None = "data.remote",
) -> T:
    """The result of `call`, tried again after errors that may pass.

    Args:
        call: is made `settings.attempts` times at most.
        where: path or URL, for messages.
        settings: number of attempts and pauses between them.
        on_retry: called before each further attempt.
        is_permanent: whether another attempt would fail as this one did.
        done: what cannot be, for messages.
        key: of the recipe, that holds the settings; none where they are not a recipe's.
    Raises:
        MissingFileError: there is no such file.
        DistapError: each attempt failed, or one in a way that another will not mend.
    """
    for attempt in range(1, settings.attempts + 1):
        try:
            return call()
        except DistapError:
            raise
        except Exception as error:  # each file system raises its own
            reason = str(error) or str(error.__cause__ or "") or type(error).__name__
            if isinstance(error, TimeoutError) and not _answer_to_boto(error)[0]:
                reason = f"no answer within {settings.timeout_seconds:g} s"
            if isinstance(error, FileNotFoundError):
                raise MissingFileError(f"{where}: there is no such file") from error
            if is_permanent(error):
                raise DistapError(f"{where}: cannot be {done}: {reason}") from error
            if attempt == settings.attempts:
                hint = f"; {key} has the number of attempts and their time-out" if key else ""
                raise UnreachableError(
                    f"{where}: cannot be {done}: {attempt} attempts failed, the last with: {reason}{hint}"
                ) from error
        on_retry()
        # Ranks that fail together must not come back together.
        time.sleep(settings.backoff_seconds * 2 ** (attempt - 1) * random.uniform(0.5, 1))
    raise AssertionError("at least one attempt")


def file_system(scheme: str, settings: RemoteSettings, key: str | None = "data.remote") -> Any:
    """A file system of fsspec's with connections of its own, which retries nothing itself.

    Args:
        scheme: of its URLs.
        settings: time-out, and options of the file system.
        key: of the recipe, that holds the settings; for messages.
    Raises:
        DistapError: its package is not installed, or an option is wrong.
    """
    import fsspec  # heavy

    options = {
        name: dict(value) if isinstance(value, dict) else value
        for name, value in settings.options.get(scheme, {}).items()
    }
    if scheme == "s3":
        # One attempt of boto's is one of ours; that of s3fs itself is set below.
        client = {"retries": {"total_max_attempts": 1}, "read_timeout": settings.timeout_seconds}
        options["config_kwargs"] = {**client, **options.get("config_kwargs", {})}
    if scheme == "gs":
        # Its support of zonal buckets asks over gRPC, which hangs in processes that were forked after its first use.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    if scheme == "file":
        options["auto_mkdir"] = True  # as buckets do
    try:
        files = fsspec.filesystem(scheme, skip_instance_cache=True, use_listings_cache=False, **options)
    except ImportError as error:
        remedy = f": pip install 'distap[{EXTRAS[scheme]}]'" if scheme in EXTRAS else ""
        raise DistapError(f"{scheme}:// needs a package that is not installed ({error}){remedy}") from error
    except Exception as error:
        where = f"{key}.options.{scheme}" if key else f"{scheme}://"
        raise DistapError(f"{where}: {error}; see fsspec's file system for what it takes") from error
    if scheme == "s3":
        files.retries = 1
    if scheme == "gs":
        # Six attempts with pauses of their own are wrapped around it, and no option takes them away.
        files._request = MethodType(type(files)._request.__wrapped__, files)
    return files


def is_permanent(error: Exception) -> bool:
    """Whether another attempt at a remote would fail as this one did."""
    code, status_of_boto = _answer_to_boto(error)
    if code in PASSING_CODES:
        return False
    if isinstance(error, (*PERMANENT, *MISTAKES)) or type(error).__name__ in LACKS_CREDENTIALS:
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:  # of this host, where a file is downloaded to
        return True
    status = getattr(error, "status", None) or getattr(error, "code", None) or status_of_boto
    if status == 401 and "Invalid Credentials" in str(error):  # Google's word for a token that has run out
        return False
    if isinstance(status, int) and 400 <= status < 500:
        return status not in PASSING
    return str(error).startswith("Forbidden")  # what gcsfs makes of 403


def _answer_to_boto(error: Exception) -> tuple[str, int | None]:
    """Error code and HTTP status of the answer that s3fs made an error of; none where there was no answer."""
    cause = error.__cause__
    if isinstance(cause, TimeoutError):  # fsspec wraps it once more
        cause = cause.__cause__
    answer = getattr(cause, "response", None)
    if not isinstance(answer, dict):
        return "", None
    return str(answer.get("Error", {}).get("Code", "")), answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
