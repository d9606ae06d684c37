"""Handle untrusted text: escape names for terminals, logs and pages; read files within bounds."""

import json
import math
import os
import re
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

from pydantic_core import from_json

# Bytes of a key, path or class's name, all of which an index holds as wide as the longest.
MAX_NAME = 4096
MOST_TEXT = 2**26  # bytes of a text that is read whole
# Control characters, line and paragraph ends, and surrogates, which stand for bytes that are no
# UTF-8.
_UNFIT = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
# Control characters but tabs and line ends, which messages have.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def is_line(name: str) -> bool:
    """Return whether a name is one line of text, of at most MAX_NAME bytes in UTF-8.

    Control characters make it none.
    """
    return bool(name) and not _UNFIT.search(name) and len(name.encode()) <= MAX_NAME


def as_line(name: str) -> str:
    """Return the name as one line of text; escape everything else, and cut what is too long."""
    return name if is_line(name) else repr(name)[1:-1][: MAX_NAME // 4]


def printable(text: str) -> str:
    """Escape control characters in a message, so that it cannot command a terminal."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def open_regular(path: Path) -> BufferedReader:
    """Open a file to read; raise a ValueError if it is a device, a folder, or a pipe.

    A pipe could let its reader wait for ever.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe opens at once like this
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("no regular file")
    return os.fdopen(descriptor, "rb")


def read_text(path: Path, limit: int = MOST_TEXT) -> str:
    """Read a file of at most `limit` bytes as UTF-8 text.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is longer, no text, or no regular file.
    """
    with open_regular(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"more than {limit:,} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:  # which holds the whole text
        raise ValueError(f"no text in UTF-8: {error.reason} at byte {error.start}") from None


def parsed_json(text: str | bytes, kind: type = dict) -> Any:
    """Parse JSON whose outermost value is a `kind`.

    Raises:
        ValueError: it is another, has some 200 levels, or is no JSON.
    """
    value = from_json(text)
    if not isinstance(value, kind):
        raise ValueError(f"a {type(value).__name__}, expected a {kind.__name__}")
    return value


def read_json(path: Path, kind: type = dict) -> Any:
    """Read a JSON file; see `read_text` and `parsed_json` for the errors."""
    return parsed_json(read_text(path), kind)


def read_written_json(path: Path, kind: type = dict) -> Any:
    """Read a JSON file that a person wrote; refuse repeated keys and non-finite numbers."""
    text = read_text(path)
    parsed_json(text, kind)
    return json.loads(text, object_pairs_hook=_unique, parse_float=_finite, parse_constant=_finite)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entry = dict(pairs)
    if len(entry) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {as_line(repeated)!r} stands twice in an object")
    return entry


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:40]} is not finite")
    return number
