"""Cut tensors into bunches of bounded size, for messages and for updates."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def bunches(items: Iterable[T], bytes_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Cut items into lists, in order, of up to `limit` bytes or of one item; no items are one."""
    bunch = list[T]()
    size = 0
    for item in items:
        nbytes = bytes_of(item)
        if bunch and size + nbytes > limit:
            yield bunch
            bunch = []
            size = 0
        bunch.append(item)
        size += nbytes
    yield bunch
