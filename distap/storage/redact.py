"""Find secrets in settings, and remove them from text that others will read."""

import re
from collections.abc import Mapping
from typing import Any

# The user of a URL, and a query with a value, which may be a signature.
_IN_URL = re.compile(r"(?<=://)[^\s/@`'\"]+@|(?<=\S)\?[^\s`'\"]*(?:=|%3D)[^\s`'\"]*")
# Names of options that hold secrets. The `key` of s3 is only the name of one.
_SECRET_NAME = re.compile(
    r"secret|pass(w|phrase)|token|auth(orization)?$|cookie|credential|private|(api|customer|encryption)[-_]?key",
    re.IGNORECASE,
)
_SECRET_TEXT = re.compile(
    r'"(private_key|refresh_token|client_secret)"\s*:|PRIVATE KEY-----|^ya29\.|^(Basic|Bearer)\s', re.IGNORECASE
)


def without_secrets(text: str) -> str:
    """Remove the users and signatures of all URLs in a text."""
    return _IN_URL.sub("", text)


def find_secret(value: Any, place: str, name: str = "") -> str | None:
    """Return the place of the first secret in nested options, or None.

    A telling `name` or value makes an option a secret; `place` is its dotted path, such as `options.s3`.
    """
    if not value or value is True:
        return None
    # The token of gcsfs may also be a method to obtain one, or the path of a file that holds it.
    is_method = place == "options.gs.token" and isinstance(value, str)
    if _SECRET_NAME.search(name) and not is_method:
        return place
    if isinstance(value, str):
        return place if _SECRET_TEXT.search(value) or without_secrets(value) != value else None
    within: list[tuple[str, str, Any]] = []  # name, place, value
    if isinstance(value, Mapping):
        within = [(str(key), f"{place}.{key}", inner) for key, inner in value.items()]
    elif isinstance(value, list | tuple):
        is_pair = len(value) == 2 and isinstance(value[0], str)  # a header may be given as a pair
        names = ["", value[0]] if is_pair else [""] * len(value)
        within = [(names[at], f"{place}.{at}", inner) for at, inner in enumerate(value)]
    return next((found for name, at, inner in within if (found := find_secret(inner, at, name)) is not None), None)
