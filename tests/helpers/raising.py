"""Expect an error by its code and by the names that its message must contain."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from distap.errors import DistapError


@contextmanager
def raises(
    code: str, *names: object, kind: type[DistapError] = DistapError
) -> Iterator[pytest.ExceptionInfo[DistapError]]:
    """Check that the block raises a `kind` with this code, whose message has each name as a word.

    Names are the data of the message: files, keys, values, ranks. Its wording may change.
    """
    with pytest.raises(kind) as error:
        yield error
    message = str(error.value)
    assert error.value.code == code, f"code {error.value.code}, not {code}: {message}"
    missing = [str(name) for name in names if not has_name(message, str(name))]
    assert missing == [], f"{missing} are not in: {message}"


def has_name(message: str, name: str) -> bool:
    """Whether the name is in the message, and not only as a part of a longer word or number."""
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", message) is not None
