"""Parse paths and URLs of data sets and of checkpoint stores.

A data set is one of:

    shards/train                    a folder, with index.npz in it
    shards/train-*.tar              a glob
    shards/{000..009}.tar           a brace pattern, as webdataset writes them
    https://host/{000..009}.tar     the same behind http(s)://, s3://, gs:// and file://
    hf://datasets/user/name@rev     the same on the Hugging Face Hub, at a revision or not
    imagefolder:photos/             images that are not packed: a folder with one folder per class
    hf:photos, hf:user/name#train   a data set of Hugging Face: a folder that save_to_disk wrote, or
                                    a name, and a split
    described:descriptors/train     descriptors in place of images: a folder of `distap extract`
    given:module:Class              an object in Python, in the record of a run

or a part of one: shards/train[:0.75] has three quarters of its classes, shards/train[0.75:] the
others.
"""

import hashlib
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from distap.errors import DistapError

SHARDS_INDEX = "index.npz"
REMOTE = ("http", "https", "s3", "gs", "hf")
LISTABLE = (
    "",
    "s3",
    "gs",
    "hf",
)  # schemes whose folders can be listed; "" is the local file system
UNWRITABLE = {
    "http": "a web server",
    "https": "a web server",
    "hf": "the Hugging Face Hub",
    "memory": "the memory of one process",
}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_OF_HUB = re.compile(r"datasets/[^/*?\[{]+/[^/*?\[{]+")
_UNPACKED = ("imagefolder", "hf", "described", "given")
GLOB = "*?["
_SIGNS = frozenset("{" + GLOB)  # of patterns
_PART = re.compile(r"(.+)\[(\d*\.?\d+)?:(\d*\.?\d+)?\]")
_EXPECTED = (
    "a folder, a glob or brace pattern of .tar files, the same behind http(s)://, s3://, gs://,"
    " hf:// or file://, or imagefolder:FOLDER, hf:NAME or described:FOLDER"
)


@dataclass(frozen=True)
class Source:
    """The shards of a data set, with their index next to them."""

    text: str  # as it was written
    base: str  # a folder, or the URL of one without the last slash
    pattern: str | None  # of the shards' names within the base; None means every .tar file in it
    kind: str = "shards"  # or imagefolder, hf, described, given
    rows: Any = field(default=None, compare=False, repr=False)  # the images of a data set in Python
    # Begin and end of its classes in a fixed random order, as shares.
    part: tuple[float, float] = (0.0, 1.0)

    def __str__(self) -> str:
        return self.text

    @property
    def is_part(self) -> bool:
        return self.part != (0.0, 1.0)

    @property
    def scheme(self) -> str:
        return scheme_of(self.base)

    @property
    def index_name(self) -> str:
        """Name of the index file; each pattern in a folder has its own."""
        if self.pattern is None:
            return SHARDS_INDEX
        # Two patterns may read alike without their signs, so a hash keeps their indexes apart.
        readable = re.sub(r"[^A-Za-z0-9]+", "-", self.pattern.removesuffix(".tar")).strip("-")[:60]
        return f"{readable}.{hashlib.sha256(self.pattern.encode()).hexdigest()[:8]}.{SHARDS_INDEX}"

    @property
    def index(self) -> str:
        return joined(self.base, self.index_name)


def sets_in_words(train: str | Mapping[str, Any]) -> str:
    """Return the data sets of a recorded `data.train` in words, sorted by name."""
    if isinstance(train, str):
        return train
    return ", ".join(f"{name}: {settings['data']}" for name, settings in sorted(train.items()))


def joined(base: str, name: str) -> str:
    return f"{base.rstrip('/')}/{name}"


def from_folder(text: str, folder: str) -> str:
    """Resolve a data set's relative path against `folder`; keep absolute paths, URLs and names."""
    kind = next((f"{kind}:" for kind in _UNPACKED if text.startswith(f"{kind}:")), "")
    path = text.removeprefix(kind)
    # A data set in Python has no place, and one of Hugging Face may have a name instead.
    if kind == "given:" or path.startswith("/") or _URL.match(path):
        return text
    if kind == "hf:" and not Path(folder, _split_part(path)[0].partition("#")[0]).is_dir():
        return text
    return kind + joined(folder, path)


def scheme_of(base: str) -> str:
    """Return the scheme of a URL, "" for a local path."""
    url = _URL.match(base)
    return url[1] if url else ""


def parse_source(source: "str | Path | Source") -> Source:
    """Parse the path, glob, URL or name of a data set into a Source; return a Source unchanged."""
    if isinstance(source, Source):
        return source
    text = str(source)
    whole, begin, end = _split_part(text)
    if whole != text:
        if not 0 <= begin < end <= 1 or whole.startswith("described:"):
            raise DistapError(
                "data.bad_source",
                f"{text}: expected images, and shares of their classes such as {whole}[:0.75]",
            )
        return replace(parse_source(whole), text=text, part=(begin, end))
    kind, colon, place = text.partition(":")
    is_packed = not colon or kind not in _UNPACKED or text.startswith("hf://")
    if text == "" or "\0" in text or not (is_packed or place):
        raise DistapError("data.bad_source", f"data set {text!r}: expected {_EXPECTED}")
    if not is_packed:
        return Source(text, place.rstrip("/") or "/", None, kind=kind)
    if _URL.match(text) is None:
        return _local_source(text, text)
    scheme, host, path = _split_url(text)
    if scheme == "file":
        return _file_source(text, host, path)
    return _remote_source(text, scheme, host, path)


def _file_source(text: str, host: str, path: str) -> Source:
    if host not in ("", "localhost") or not path:
        raise DistapError(
            "data.bad_source",
            f"{text}: a file: URL has three slashes and a whole path, such as file:///data/train",
        )
    return _local_source(text, unquote(path.removeprefix("localhost")))


def _remote_source(text: str, scheme: str, host: str, path: str) -> Source:
    if scheme not in REMOTE:
        raise DistapError(
            "data.bad_source", f"{text}: {scheme}:// is unknown; expected {_EXPECTED}"
        )
    is_web = scheme.startswith("http")
    if scheme == "hf" and not _OF_HUB.match(path):
        raise DistapError(
            "data.bad_source",
            f"{text}: expected hf://datasets/USER/NAME, with @REVISION behind it or not",
        )
    if not host or not _SIGNS.isdisjoint(host):
        raise DistapError(
            "data.bad_source",
            f"{text}: a {'host' if is_web else 'bucket'} has to stand after ://",
        )
    if is_web and not set("?#*[").isdisjoint(path):
        raise DistapError(
            "data.bad_source",
            f"{text}: a web server cannot list its files, and what a query says belongs into"
            " FSSPEC_HTTPS; expected a folder with its index, or a brace pattern such as"
            " {000..009}.tar",
        )
    base, pattern = _split_pattern(path)
    # The URL has the escapes of a browser; the names in the index have none.
    return Source(text, f"{scheme}://{base}", unquote(pattern) if pattern and is_web else pattern)


def _split_part(text: str) -> tuple[str, float, float]:
    """Return a data set without its part, and the part's begin and end as shares of classes."""
    part = _PART.fullmatch(text)
    if part is None:
        return text, 0.0, 1.0
    return part[1], float(part[2] or 0), float(part[3] or 1)


def part_of(text: str, begin: float, end: float) -> str:
    """Return the text of a part of a data set, or of a part of its part, by shares of classes."""
    whole, low, high = _split_part(text)
    ends = (f"{low + share * (high - low):.9f}".rstrip("0").rstrip(".") for share in (begin, end))
    return f"{whole}[{':'.join(ends)}]"


def parse_store(url: str) -> str:
    """Return the URL of a folder for checkpoints without its last slash."""
    if _URL.match(url) is None:
        raise DistapError(
            "checkpoint.bad_store",
            f"{url!r} is no URL; expected one such as s3://bucket/folder or file:///folder",
        )
    scheme, host, path = _split_url(url)
    if scheme in UNWRITABLE:
        raise DistapError(
            "checkpoint.bad_store",
            f"{url}: {UNWRITABLE[scheme]} keeps no checkpoints; expected s3://, gs:// or file://",
        )
    if (scheme == "file") != (host == "") or not path.strip("/"):
        raise DistapError(
            "checkpoint.bad_store",
            f"{url}: expected a bucket after ://, or of file:// a whole path, such as"
            " file:///mnt/runs",
        )
    return f"{scheme}://{path.rstrip('/')}"


def _split_url(text: str) -> tuple[str, str, str]:
    """Return the scheme, the host and everything after `://`.

    Raises:
        DistapError: the URL has credentials, which the message does not repeat.
    """
    scheme, _, path = text.partition("://")
    host = path.partition("/")[0]
    if "@" in host:
        raise DistapError(
            "storage.credentials_in_url",
            f"{scheme}://...@{host.rpartition('@')[2]}: credentials in a URL end up in logs and"
            " checkpoints; put them into the environment",
        )
    return scheme.lower(), host, path


def _local_source(text: str, path: str) -> Source:
    # Folders that exist, whose names may hold the signs of a pattern.
    plain = 0
    names = path.split("/")
    with suppress(OSError):  # such as that of a pattern that is too long for a path
        while plain < len(names) and Path("/".join(names[: plain + 1]) or "/").is_dir():
            plain += 1
    base, pattern = _split_pattern(path, plain)
    return Source(text, base or ("/" if path.startswith("/") else "."), pattern)


def _split_pattern(path: str, plain: int = 0) -> tuple[str, str | None]:
    """Return the folder that holds all shards, and the pattern of their names or None.

    The first `plain` names of the path belong to no pattern.
    """
    names = path.split("/")
    last = max(len(names) - names[-1].endswith(".tar"), plain)
    first = next((i for i in range(plain, len(names)) if not _SIGNS.isdisjoint(names[i])), last)
    return "/".join(names[:first]).rstrip("/"), "/".join(names[first:]) or None


def safe_name(name: str, where: str) -> str:
    """Return a shard's name if it stays below its folder.

    Otherwise a DistapError names its origin, `where`.
    """
    if {"", ".", ".."} & set(name.split("/")) or not name.isprintable() or "\\" in name:
        raise DistapError(
            "data.unsafe_name",
            f"{where}: {name!r} is no name of a shard in the data set's folder,"
            " such as part/00.tar",
        )
    return name
