"""How long work reports its progress without knowing who shows it."""

from collections.abc import Iterable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Track(Protocol):
    """Wraps a loop: yields the items unchanged and shows how far it is."""

    def __call__(self, items: Iterable[T], description: str, total: int, /) -> Iterable[T]: ...


def untracked(items: Iterable[T], description: str, total: int, /) -> Iterable[T]:
    """Show nothing: the default wherever a Track is taken."""
    return items
