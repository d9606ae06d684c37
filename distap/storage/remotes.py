"""Settings of remote file systems, their errors, and how to make one with fsspec."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, TypeVar

from distap.errors import FAILED, DistapError
from distap.storage.redact import find_secret

EXTRAS = {"http": "http", "https": "http", "s3": "s3", "gs": "gcs"}  # extra of distap that a scheme needs


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


def file_system(scheme: str, settings: RemoteSettings, key: str | None) -> Any:
    """Make an fsspec file system with connections of its own, which retries nothing itself.

    Raises:
        DistapError: its package is not installed, or an option is wrong; `key` names the settings in messages.
    """
    import fsspec  # slow

    options = {
        name: dict(value) if isinstance(value, dict) else value
        for name, value in settings.options.get(scheme, {}).items()
    }
    if scheme == "s3":
        # One attempt of boto's is one of ours; that of s3fs itself is set below.
        client = {"retries": {"total_max_attempts": 1}, "read_timeout": settings.timeout_seconds}
        options["config_kwargs"] = {**client, **options.get("config_kwargs", {})}
    if scheme == "gs":
        # gcsfs asks over gRPC for zonal buckets, which hangs in processes that were forked after its first use.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
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
        # gcsfs wraps six attempts with pauses around each request, and no option takes them away.
        files._request = MethodType(type(files)._request.__wrapped__, files)
    return files
