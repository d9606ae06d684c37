"""Parse paths and URLs of data sets and of checkpoint stores.

A data set is one of:

shards/train                      a folder, with index.npz in it shards/train-*.tar                a
glob shards/{000..009}.tar             a brace pattern, as webdataset writes them
https://host/{000..009}.tar       the same behind http(s)://, s3://, gs:// and file://
imagefolder:photos/               images that are not packed: a folder with a sub-folder per class
hf:photos, hf:user/name#train     a data set of Hugging Face: a folder that save_to_disk wrote, or a
name, and a split described:descriptors/train       descriptors in place of images: a folder that
`distap extract` wrote given:module:Class                one that was an object in Python, in the
record of a run

and a part of it: shards/train[:0.75] has three quarters of its classes, shards/train[0.75:] the
others.
"""

import hashlib
import re
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from distap.errors import DistapError

SHARDS_INDEX = "index.npz"
REMOTE = ("http", "https", "s3", "gs")
LISTABLE = ("", "s3", "gs")  # schemes whose folders can be listed; "" is the local file system
UNWRITABLE = {
    "http": "a web server",
    "https": "a web server",
    "memory": "the memory of one process",
}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_UNPACKED = ("imagefolder", "hf", "described", "given")
GLOB = "*?["
_PART = re.compile(r"(.+)\[(\d*\.?\d+)?:(\d*\.?\d+)?\]")
_EXPECTED = (
    "a folder, a glob or brace pattern of .tar files, the same behind http(s)://, s3://, gs:// or"
    " file://, or imagefolder:FOLDER, hf:NAME or described:FOLDER"
)


@dataclass(frozen=True)
class Source:
    """The shards of a data set, with their index next to them."""

    text: str  # as it was written
    base: str  # a folder, or the URL of one without the last slash
    pattern: str | None  # of the shards' names within the base; None means every .tar file in it
    kind: str = "shards"  # or imagefolder, hf, described, given
    rows: Any = field(default=None, compare=False, repr=False)  # the images of a data set in Python
    # of its classes in a fixed random order: begin and end, as shares
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


def joined(base: str, name: str) -> str:
    return f"{base.rstrip('/')}/{name}"


def from_folder(text: str, folder: str) -> str:
    """Resolve a data set's relative path against `folder`; return other paths, URLs and names
    unchanged.
    """
    kind = next((f"{kind}:" for kind in _UNPACKED if text.startswith(f"{kind}:")), "")
    path = text.removeprefix(kind)
    # A data set of Hugging Face may have a name instead, and one in Python has no place.
    whole = part[1] if (part := _PART.fullmatch(path)) else path
    is_name = kind == "given:" or (
        kind == "hf:" and not Path(folder, whole.partition("#")[0]).is_dir()
    )
    stays = is_name or path.startswith("/") or _URL.match(path)
    return text if stays else kind + joined(folder, path)


def scheme_of(base: str) -> str:
    """Return the scheme of a URL, "" for a local path."""
    url = _URL.match(base)
    return url[1] if url else ""


def parse_source(source: "str | Path | Source") -> Source:
    """Parse the path, glob, URL or name of a data set into a Source; return a Source unchanged."""
    if isinstance(source, Source):
        return source
    text = str(source)
    found = _PART.fullmatch(text)
    if found:
        whole, begin, end = found.groups()
        part = float(begin or 0), float(end or 1)
        if not 0 <= part[0] < part[1] <= 1 or whole.startswith("described:"):
            raise DistapError(
                f"{text}: expected images, and shares of their classes such as {whole}[:0.75]"
            )
        return replace(parse_source(whole), text=text, part=part)
    kind, colon, place = text.partition(":")
    is_packed = not colon or kind not in _UNPACKED
    if text == "" or "\0" in text or not (is_packed or place):
        raise DistapError(f"data set {text!r}: expected {_EXPECTED}")
    if not is_packed:
        return Source(text, place.rstrip("/") or "/", None, kind=kind)
    if _URL.match(text) is None:
        return _local_source(text, text)
    scheme, host, rest = _split_url(text)
    if scheme == "file":
        if host not in ("", "localhost") or not rest:
            raise DistapError(
                f"{text}: a file: URL has three slashes and a whole path, such as"
                " file:///data/train"
            )
        return _local_source(text, unquote(rest.removeprefix("localhost")))
    if scheme not in REMOTE:
        raise DistapError(f"{text}: {scheme}:// is unknown; expected {_EXPECTED}")
    is_web = scheme.startswith("http")
    if not host or any(sign in host for sign in "{*?["):
        raise DistapError(f"{text}: a {'host' if is_web else 'bucket'} has to stand after ://")
    if is_web and any(sign in rest for sign in "?#*["):
        raise DistapError(
            f"{text}: a web server cannot list its files, and what a query says belongs into"
            " FSSPEC_HTTPS; expected a folder with its index, or a brace pattern such as"
            " {000..009}.tar"
        )
    base, pattern = _split_pattern(rest)
    # The URL has the escapes of a browser; the names in the index have none.
    return Source(text, f"{scheme}://{base}", unquote(pattern) if pattern and is_web else pattern)


def part_of(text: str, begin: float, end: float) -> str:
    """Return the text that `parse_source` reads as a part of a data set's classes, by shares of
    them.
    """
    found = _PART.fullmatch(text)
    whole, low, high = (
        (found[1], float(found[2] or 0), float(found[3] or 1)) if found else (text, 0.0, 1.0)
    )
    ends = (f"{low + share * (high - low):.9f}".rstrip("0").rstrip(".") for share in (begin, end))
    return f"{whole}[{':'.join(ends)}]"


def parse_store(url: str) -> str:
    """Return the URL of a folder for checkpoints without its last slash."""
    if _URL.match(url) is None:
        raise DistapError(
            f"{url!r} is no URL; expected one such as s3://bucket/folder or file:///folder"
        )
    scheme, host, rest = _split_url(url)
    if scheme in UNWRITABLE:
        raise DistapError(
            f"{url}: {UNWRITABLE[scheme]} keeps no checkpoints; expected s3://, gs:// or file://"
        )
    if (scheme == "file") != (host == "") or not rest.strip("/"):
        raise DistapError(
            f"{url}: expected a bucket after ://, or of file:// a whole path, such as"
            " file:///mnt/runs"
        )
    return f"{scheme}://{rest.rstrip('/')}"


def _split_url(text: str) -> tuple[str, str, str]:
    """Return the scheme, the host and everything after `://`; refuse credentials without repeating
    them.
    """
    scheme, _, rest = text.partition("://")
    host = rest.partition("/")[0]
    if "@" in host:
        problem = (
            "credentials in a URL end up in logs and checkpoints; put them into the environment"
        )
        raise DistapError(f"{scheme}://...@{host.rpartition('@')[2]}: {problem}")
    return scheme.lower(), host, rest


def _local_source(text: str, path: str) -> Source:
    # folders that exist, whose names may hold the signs of a pattern
    whole = 0
    parts = path.split("/")
    with suppress(OSError):  # such as that of a pattern that is too long for a path
        while whole < len(parts) and Path("/".join(parts[: whole + 1]) or "/").is_dir():
            whole += 1
    base, pattern = _split_pattern(path, whole)
    return Source(text, base or ("/" if path.startswith("/") else "."), pattern)


def _split_pattern(path: str, whole: int = 0) -> tuple[str, str | None]:
    """Return the folder that holds all shards, and the pattern of their names or None; `whole`
    parts have none.
    """
    parts = path.split("/")
    last = max(len(parts) - parts[-1].endswith(".tar"), whole)
    first = next(
        (i for i in range(whole, len(parts)) if any(sign in parts[i] for sign in "{" + GLOB)), last
    )
    return "/".join(parts[:first]).rstrip("/"), "/".join(parts[first:]) or None


def safe_name(name: str, where: str) -> str:
    """Return a shard's name if it stays below its folder; otherwise a DistapError names its origin,
    `where`.
    """
    if {"", ".", ".."} & set(name.split("/")) or not name.isprintable() or "\\" in name:
        raise DistapError(
            f"{where}: {name!r} is no name of a shard in the data set's folder, such as part/00.tar"
        )
    return name
