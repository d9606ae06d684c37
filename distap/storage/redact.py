"""Text that anyone may read."""

import re

SECRET = re.compile(
    r"(?<=://)[^\s/@`'\"]+@|(?<=\S)\?[^\s`'\"]*(?:=|%3D)[^\s`'\"]*"
)  # of a URL: its user, its signature


def without_secrets(text: str) -> str:
    """The same, without the users and signatures of addresses in it."""
    return SECRET.sub("", text)
