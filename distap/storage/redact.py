"""Remove secrets from text that others will read."""

import re

# The user of a URL, and a query with a value, which may be a signature.
_IN_URL = re.compile(r"(?<=://)[^\s/@`'\"]+@|(?<=\S)\?[^\s`'\"]*(?:=|%3D)[^\s`'\"]*")


def without_secrets(text: str) -> str:
    """Remove the users and signatures of all URLs in a text."""
    return _IN_URL.sub("", text)
