"""Where shards are: what a recipe may call a data set, on disk or behind a URL.

shards/train                      a folder, with index.npz in it
shards/train-*.tar                a glob
shards/{000..009}.tar             a brace pattern, as webdataset writes them
https://host/{000..009}.tar       the same behind http(s)://, s3://, gs:// and file://
pipe:command                      what a shell command writes; refused unless the caller allows it
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote

from braceexpand import braceexpand

from distap.errors import DistapError

INDEX_FILE = "index.npz"
REMOTE = ("http", "https", "s3", "gs")
LISTABLE = ("", "s3", "gs")  # schemes whose folders can be listed; "" is the local file system
MAX_SHARDS = 1_000_000
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_INNERMOST = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
_PIPE = "pipe:"
_GLOB = "*?["
_EXPECTED = "a folder, a glob or brace pattern of .tar files, or the same behind http(s)://, s3://, gs:// or file://"


class Lister(Protocol):
    """What can say which files match a glob: a storage."""

    def names(self, pattern: str) -> list[str]:
        """Names, relative to the storage's base, of the files that match."""
        ...


@dataclass(frozen=True)
class Source:
    """The shards of a data set, and where their index is."""

    text: str  # as it was written
    base: str  # a folder, or the URL of one without the last slash
    pattern: str | None  # of the shards' names within the base; none: every .tar file in it
    kept_index: Path | None = None  # a local file that takes the place of the index beside the shards

    def __str__(self) -> str:
        return self.text

    @property
    def scheme(self) -> str:
        """Of the URL: http, https, s3 or gs; "" for local files and "pipe" for commands."""
        return scheme_of(self.base)

    @property
    def index_name(self) -> str:
        """The index's name beside the shards; patterns in one folder have one each."""
        if self.pattern is None:
            return INDEX_FILE
        readable = re.sub(r"[^A-Za-z0-9]+", "-", self.pattern.removesuffix(".tar")).strip("-")[:60]
        return f"{readable}.{hashlib.sha256(self.pattern.encode()).hexdigest()[:8]}.{INDEX_FILE}"

    @property
    def index(self) -> str:
        """Path or URL of the index."""
        return str(self.kept_index) if self.kept_index else joined(self.base, self.index_name)


def parse_source(source: "str | Path | Source", index: Path | None = None, allow_pipes: bool = False) -> Source:
    """What a recipe means by the name of a data set.

    Args:
        source: see the top of this file.
        index: a local file for the index, where it cannot lie beside the shards.
        allow_pipes: admit `pipe:` commands, which can be streamed alone.
    Raises:
        DistapError: it is none of those kinds.
    """
    if isinstance(source, Source):
        return source
    text = str(source)
    if text.startswith(_PIPE):
        if not allow_pipes:
            raise DistapError(
                f"{text}: pipe: runs a shell command, and only streamed reading with pipes allowed does; "
                f"expected {_EXPECTED}"
            )
        return Source(text, _PIPE, text.removeprefix(_PIPE), index)
    if not text or "\0" in text:
        raise DistapError(f"data set {text!r}: expected {_EXPECTED}")
    url = _SCHEME.match(text)
    if url is None:
        return _of_path(text, text, index)
    scheme = url.group(1).lower()
    if scheme == "file":
        path = unquote(text[url.end() :].removeprefix("localhost"))
        if not path.startswith("/"):
            raise DistapError(f"{text}: a file: URL has three slashes and a whole path, such as file:///data/train")
        return _of_path(text, path, index)
    if scheme not in REMOTE:
        raise DistapError(f"{text}: {scheme}:// is unknown; expected {_EXPECTED}")
    return _of_url(text, scheme, text[url.end() :], index)


def _of_path(text: str, path: str, index: Path | None) -> Source:
    try:
        is_folder = Path(path).is_dir()
    except OSError:  # such as of a long pattern, which is no name of anything
        is_folder = False
    if is_folder:
        return Source(text, path.rstrip("/") or "/", None, index)
    base, pattern = _split(path)
    return Source(text, base or ("/" if path.startswith("/") else "."), pattern, index)


def _of_url(text: str, scheme: str, rest: str, index: Path | None) -> Source:
    host = rest.partition("/")[0]
    if not host or any(sign in host for sign in "{*?["):
        raise DistapError(f"{text}: a {'host' if scheme.startswith('http') else 'bucket'} has to stand after ://")
    if "@" in host:
        raise DistapError(
            f"{scheme}://...@{host.rpartition('@')[2]}: credentials in a URL end up in logs and checkpoints; "
            "put them into the environment, or into data.remote.options"
        )
    if scheme.startswith("http") and any(sign in rest for sign in "?#*["):
        raise DistapError(
            f"{text}: a web server cannot list its files, and a query belongs into data.remote.options; "
            "expected a folder with its index, or a brace pattern such as {000..009}.tar"
        )
    base, pattern = _split(rest)
    # A web server's names are written as in a browser; in the index they stand plain.
    plain = unquote(pattern) if pattern and scheme.startswith("http") else pattern
    return Source(text, f"{scheme}://{base}", plain, index)


def _split(path: str) -> tuple[str, str | None]:
    """The folder that all shards are in, and the pattern of their names; a path without a pattern is a folder."""
    parts = path.split("/")
    first = next((i for i, part in enumerate(parts) if any(sign in part for sign in "{" + _GLOB)), None)
    if first is None and parts[-1].endswith(".tar"):
        first = len(parts) - 1
    if first is None:
        return path.rstrip("/"), None
    return "/".join(parts[:first]).rstrip("/"), "/".join(parts[first:])


def joined(base: str, name: str) -> str:
    """Path or URL of a file in a folder."""
    return f"{base.rstrip('/')}/{name}"


def scheme_of(base: str) -> str:
    """http, https, s3 or gs; "" for local files and "pipe" for commands."""
    url = _SCHEME.match(base)
    return url.group(1) if url else ("pipe" if base == _PIPE else "")


def shard_names(source: Source, storage: Lister) -> list[str]:
    """Names of a source's shards, relative to its base, in the order of the index.

    Raises:
        DistapError: there are none, one is named twice or leaves the base, or the pattern is wrong.
    """
    if source.pattern is None:
        if source.scheme not in LISTABLE:
            raise DistapError(
                f"{source}: a web server cannot list its files; name the shards by a brace pattern such as "
                f"{source.base}/{{000..009}}.tar"
            )
        names = storage.names("*.tar")
        if not names:
            raise DistapError(f"{source}: the data set is empty: no .tar shards in it")
    else:
        names = []
        for pattern in _expanded(source):
            safe_name(pattern, str(source))
            names += storage.names(pattern) if any(sign in pattern for sign in _GLOB) else [pattern]
        if not names:
            raise DistapError(f"{source}: the data set is empty: no shards match the pattern")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DistapError(f"{source}: the pattern names the shard {twice} twice")
    return [safe_name(name, str(source)) for name in names]


def shard_urls(source: Source, storage: Lister | None = None) -> list[str]:
    """Paths, URLs or `pipe:` commands of a source's shards, for streamed reading.

    Args:
        source: pipes are admitted where they were to `parse_source`.
        storage: of the source; a pipe needs none.
    """
    if source.scheme == "pipe":
        return [f"{_PIPE}{command}" for command in _expanded(source)]
    assert storage is not None
    return [joined(source.base, name) for name in shard_names(source, storage)]


def _expanded(source: Source) -> Iterator[str]:
    pattern = source.pattern or ""
    try:
        # The library holds a range whole before it gives the first name.
        few = prod(_choices(group) for group in _INNERMOST.findall(pattern)) <= MAX_SHARDS
        patterns = list(islice(braceexpand(pattern), MAX_SHARDS + 1)) if few else []
    except (ValueError, RecursionError) as error:
        raise DistapError(f"{source}: not a brace pattern: {error}; expected one such as {{000..009}}.tar") from error
    if not few or len(patterns) > MAX_SHARDS:
        raise DistapError(f"{source}: the pattern names more than {MAX_SHARDS:,} shards")
    yield from patterns


def _choices(group: str) -> int:
    """How many texts the inside of a pair of braces stands for."""
    ends = _RANGE.match(group)
    return abs(int(ends.group(2)) - int(ends.group(1))) + 1 if ends else group.count(",") + 1


def safe_name(name: str, where: str) -> str:
    """The same name, when it stays below the folder that it is relative to.

    Raises:
        DistapError: it is absolute, has `..` in it, or is none; `where` says who gave it.
    """
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or not name.isprintable() or "\\" in name:
        raise DistapError(
            f"{where}: {name!r} is no name of a shard; expected one within the data set's folder, such as "
            "000000.tar or part/000000.tar"
        )
    return name
