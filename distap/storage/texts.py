"""Names that strangers chose, as text for a terminal, a log line, a table or a page."""

import re

MAX_NAME = 4096  # bytes of a key, path or class's name, all of which an index holds as wide as the longest
# Control characters, line and paragraph ends, and surrogates, which stand for bytes that are no UTF-8.
_UNFIT = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # but tabs and line ends, which messages have


def is_line(name: str) -> bool:
    """Tell whether a name is one line of text without control characters, of at most MAX_NAME bytes in UTF-8."""
    return bool(name) and not _UNFIT.search(name) and len(name.encode()) <= MAX_NAME


def as_line(name: str) -> str:
    """Return the name as one line of text; escape everything else, and cut what is too long."""
    return name if is_line(name) else repr(name)[1:-1][: MAX_NAME // 4]


def printable(text: str) -> str:
    """Escape control characters in a message, so that it cannot command a terminal."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
