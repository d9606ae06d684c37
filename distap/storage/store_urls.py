"""What the URL of a store may be. Apart from the store, so that a recipe is read without what reads checkpoints."""

import re
from pathlib import Path

from distap.errors import DistapError

UNWRITABLE = {"http": "a web server", "https": "a web server", "memory": "the memory of one process"}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


def is_url(where: str | Path) -> bool:
    """Whether it is a URL, and no path on disk."""
    return _URL.fullmatch(str(where)) is not None


def checked_url(url: str) -> str:
    """The URL of a folder in a store, without its last slash.

    Raises:
        DistapError: it is none, or nothing can be kept there.
    """
    match = _URL.fullmatch(url)
    if match is None:
        raise DistapError(
            f"{url!r} is no URL; expected one such as s3://bucket/folder, gs://bucket/folder or file:///x"
        )
    scheme, rest = match[1].lower(), match[2]
    if scheme in UNWRITABLE:
        raise DistapError(f"{url}: {UNWRITABLE[scheme]} keeps no checkpoints; expected s3://, gs:// or file://")
    host = rest.partition("/")[0]
    if "@" in host:
        raise DistapError(
            f"{scheme}://...@{host.rpartition('@')[2]}: credentials in a URL end up in logs and checkpoints; "
            "put them into the environment"
        )
    if (scheme == "file") != (host == "") or not rest.strip("/"):
        raise DistapError(f"{url}: expected a bucket after ://, or of file:// a whole path, such as file:///mnt/runs")
    return f"{scheme}://{rest.rstrip('/')}"
