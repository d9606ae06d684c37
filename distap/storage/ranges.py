"""Parts of files, and the requests that neighbouring parts share."""

from collections.abc import Sequence
from typing import NamedTuple


class Range(NamedTuple):
    """`size` bytes of a file, from `offset`."""

    name: str
    offset: int
    size: int

    @property
    def end(self) -> int:
        return self.offset + self.size


class Request(NamedTuple):
    """A range to ask for, and the numbers of the ranges within it."""

    range: Range
    numbers: list[int]


def coalesced(ranges: Sequence[Range], gap: int, longest: int) -> list[Request]:
    """Return the requests that cover ranges, sorted by file and offset; empty ranges need none.

    Ranges of a file that are at most `gap` bytes apart share a request of at most `longest` bytes.
    """
    requests = list[Request]()
    for number in sorted(range(len(ranges)), key=ranges.__getitem__):
        name, offset, size = ranges[number]
        if not size:
            continue
        if requests and requests[-1].range.name == name:
            shared, numbers = requests[-1]
            end = max(shared.end, ranges[number].end)
            is_near = offset - shared.end <= gap and end - shared.offset <= longest
            if is_near or end == shared.end:
                requests[-1] = Request(Range(name, shared.offset, end - shared.offset), numbers)
                numbers.append(number)
                continue
        requests.append(Request(ranges[number], [number]))
    return requests
